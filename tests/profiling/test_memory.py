"""Memory by category: what a step on a CPU keeps is known exactly."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optexp.comparison import runner
from optexp.config import search_path
from optexp.profiling.memory import memory_profile
from optexp.profiling.memory_difference import COMPLETE, difference
from optexp.records.memory import CacheState, MemoryProfile
from optexp.records.profile import ArmProfile, ProfileRecord
from optexp.result import Verdict
from optexp.strategies.amp import Amp
from optexp.trace import Trace
from optexp.workers import wire
from optexp.workers.arm import Arm
from optexp.workers.arm_memory import Memory
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp

DIM, BATCH, LAYERS = 64, 32, 3
ACTIVATION = BATCH * DIM * 4  # bytes
PARAMETERS = LAYERS * (DIM * DIM + DIM) * 4


def small(**changes: Any) -> Mlp:
    return Mlp(**{"mode": "train", "dim": DIM, "layers": LAYERS, "batch_size": BATCH} | changes)


def arm_of(workload: Mlp, *stack: Any) -> Arm:
    arm = Arm()
    arm.setup(Spec(workload, stack, "cpu", "float32", 0).pack())
    return arm


def recorded(workload: Mlp, *stack: Any) -> MemoryProfile:
    found = arm_of(workload, *stack).memory_by_category("")
    assert found is not None
    return found


def test_activations_of_an_mlp_are_inputs_of_its_layers_and_their_results() -> None:
    found = recorded(small())
    kept = [(row.name, row.module, row.shape, row.dtype, row.count) for row in found.saved]
    linear_and_gelu = [(("addmm", str(2 * layer + 1)), ("gelu", str(2 * layer + 2))) for layer in range(LAYERS)]
    expected = [pair for both in linear_and_gelu for pair in both]
    expected[-1] = ("gelu", "")  # by the loss, outside any module
    assert sorted(kept) == sorted((*pair, f"{BATCH}×{DIM}", "float32", 1) for pair in expected)
    assert found.saved_bytes == 2 * LAYERS * ACTIVATION
    assert found.steps == 2


def test_the_peak_is_composed_of_what_the_program_has() -> None:
    found = recorded(small())
    assert sum(found.peak.values()) == found.peak_bytes
    assert found.peak["parameters"] == PARAMETERS
    assert 2 * PARAMETERS <= found.peak["optimizer_state"] <= 2 * PARAMETERS + 2 * LAYERS * 4  # with a step of each
    assert found.peak["inputs"] == 2 * ACTIVATION  # and targets
    assert "unknown" not in found.peak, found.peak


def test_its_timeline_reaches_the_peak_and_shows_what_each_step_releases() -> None:
    timeline = (found := recorded(small())).timeline
    totals = [sum(column) for column in zip(*timeline.bytes.values(), strict=True)]
    assert max(totals) == found.peak_bytes
    assert max(timeline.bytes["activations"]) == 2 * LAYERS * ACTIVATION
    assert timeline.bytes["activations"][-1] == 0
    assert max(timeline.bytes["gradients"]) == PARAMETERS == timeline.bytes["gradients"][-1]
    assert min(timeline.bytes["gradients"]) == 0, "each step begins with cleared gradients"
    assert timeline.steps[0] == 0 < timeline.steps[1] < timeline.at[-1]


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
def test_it_agrees_with_the_measured_peak(mode: str, tmp_path: Path) -> None:
    arm = arm_of(small(mode=mode))
    resident = (arm.peak_memory(1).resident_mib or 0) * 2**20
    arm.profile(str(tmp_path / "trace.json.gz"), 5)
    measured = resident + (Trace.read(tmp_path / "trace.json.gz").peak_cpu_bytes or 0)
    found = arm.memory_by_category("")
    assert found is not None
    assert found.peak_bytes == pytest.approx(measured, rel=0.01)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(LAYERS)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@dataclass
class CheckpointedMlp(Mlp):
    def model(self) -> nn.Module:
        return Checkpointed()


def test_checkpointing_keeps_the_inputs_of_blocks_alone() -> None:
    found = recorded(CheckpointedMlp(mode="train", dim=DIM, layers=LAYERS, batch_size=BATCH))
    assert found.saved_bytes == LAYERS * ACTIVATION, found.saved  # results of all blocks: the loss needs the last
    assert max(found.timeline.bytes["activations"]) == LAYERS * ACTIVATION


@dataclass
class WithDropout(Mlp):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5), nn.Linear(DIM, DIM))


def test_dropout_keeps_its_mask() -> None:
    found = recorded(WithDropout(mode="train", dim=DIM, layers=2, batch_size=BATCH))
    by_module = {row.module: row for row in found.saved}
    assert {name: row.bytes for name, row in by_module.items()} == {"1": ACTIVATION, "2": ACTIVATION, "": ACTIVATION}
    assert by_module["1"].name == "", "a mask has no gradient"
    assert by_module["2"].name == "mul"


class Hoarding(nn.Linear):
    """Keeps a tensor of each call."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.hoard: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hoard.append(torch.ones(100, 100))
        return super().forward(x)


@dataclass
class HoardingMlp(Mlp):
    def model(self) -> nn.Module:
        return Hoarding()


def test_memory_that_lives_across_steps_is_unknown_with_its_size_and_line() -> None:
    found = recorded(HoardingMlp(mode="train", dim=DIM, layers=1, batch_size=BATCH))
    hoarded = [row for row in found.allocations if row.name == "100×100 float32"]
    assert [(row.category, row.where) for row in hoarded] == [("unknown", hoarded[0].where)]
    assert hoarded[0].where.startswith("profiling/test_memory.py:")
    assert hoarded[0].bytes == 100 * 100 * 4 * hoarded[0].count
    assert found.peak["unknown"] == hoarded[0].bytes
    assert found.timeline.bytes["unknown"][-1] > found.timeline.bytes["unknown"][0]


class Transformed(nn.Linear):
    """Uses a function transform, which allows no hooks of saved tensors."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.func.grad(lambda y: y.sin().sum())(x))


@dataclass
class TransformedMlp(Mlp):
    def model(self) -> nn.Module:
        return Transformed()


def test_a_program_without_hooks_has_the_rest() -> None:
    found = recorded(TransformedMlp(mode="train", dim=DIM, layers=1, batch_size=BATCH))
    assert not found.saved_known
    assert found.saved == []
    assert found.peak["parameters"] == (DIM * DIM + DIM) * 4
    assert found.peak["gradients"]


def test_autocast_keeps_casts_of_parameters() -> None:
    found = recorded(small(), Amp("bfloat16"))
    casts = {row.name: row for row in found.saved if row.name.startswith("cast of ")}
    assert set(casts) >= {"cast of 2.weight", "cast of 4.weight"}, found.saved
    assert {(row.dtype, row.bytes) for name, row in casts.items() if "weight" in name} == {("bfloat16", DIM * DIM * 2)}


def test_compiled_code_is_not_compiled_anew_and_known_as_such() -> None:
    arm, counters = arm_of(small()), torch._dynamo.utils.counters
    arm.program = replace(arm.program, forward=torch.compile(arm.program.model, backend="aot_eager"))
    for _ in range(2):
        arm.run()
    assert counters["stats"]["unique_graphs"] == 1
    found = arm.memory_by_category("")
    assert counters["stats"]["unique_graphs"] == 1
    assert found is not None
    by_loss = [row for row in found.saved if not row.compiled]
    assert len(by_loss) <= 1 < len(found.saved), found.saved


def test_a_difference_of_two_programs_is_explained_to_the_byte() -> None:
    before, after = recorded(small(batch_size=256)), recorded(CheckpointedMlp("train", 256, dim=DIM, layers=LAYERS))
    found = difference(before, after)
    assert found is not None
    assert found.unexplained_bytes == 0
    assert found.after_bytes - found.before_bytes == sum(term.after - term.before for term in found.terms)
    assert found.terms[0].category == "activations"
    assert found.sentences[0].startswith("Peak memory fell")
    assert "no longer kept: results of addmm (3×, 192 KiB)" in found.sentences[1], found.sentences


@pytest.mark.slow
def test_a_comparison_explains_peak_memory(tmp_path: Path) -> None:
    search_path.register()
    overrides = ["workload=mlp", "workload.mode=train", "workload.dim=64", "workload.batch_size=1024", "strategy=amp"]
    overrides += ["device=cpu", "verify=only", "isolation=none", "measurement=quick", "tracking.enabled=false"]
    overrides += ["profile.details=true"]
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        result = runner.run(compose("config", overrides=overrides), tmp_path, show=lambda *_: None)
    assert result.verdict is Verdict.VERIFIED, result.headline
    found = result.profile.memory
    assert found is not None
    assert result.baseline.peak_mib == pytest.approx(found.before_bytes / 2**20, rel=0.01)
    assert result.candidate.peak_mib == pytest.approx(found.after_bytes / 2**20, rel=0.01)
    assert found.explained >= COMPLETE, found
    assert any("in bfloat16 in place of" in sentence for sentence in found.sentences), found.sentences


def test_a_gpus_allocator_is_asked_for_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's functions stand in; their snapshot has blocks where parameters and the restored state really lie."""
    arm = arm_of(small())
    arm.restore()
    weights, tools = list(arm.program.model.parameters()), list(arm.initial.values.values())
    blocks = [
        {"address": t.untyped_storage().data_ptr(), "size": 32768, "requested_size": t.nbytes, "frames": []}
        | {"state": "active_allocated"}
        for t in (*weights, *tools)
    ]
    step = [
        {"action": action, "addr": 8, "size": 5000, "stream": 0, "time_us": 1, "frames": []}
        for action in ("alloc", "free_requested", "free_completed")
    ]
    room = {"address": 16, "size": 7000, "requested_size": 0, "state": "inactive", "frames": []}
    segments = [
        {"device": 0, "address": 1, "segment_pool_id": (0, 0), "blocks": [*blocks, room], "total_size": 0}
        | {"allocated_size": 0},
        {"device": 0, "address": 2, "segment_pool_id": (0, 1), "blocks": [], "total_size": 900, "allocated_size": 300},
    ]
    stats = {
        "allocated_bytes.all.peak": 32768 * len(blocks) + 5120,
        "requested_bytes.all.peak": sum(int(block["requested_size"]) for block in blocks) + 5000,
        "reserved_bytes.all.current": 10**6,
        "allocated_bytes.all.current": 32768 * len(blocks),
        "inactive_split_bytes.all.current": 7000,
        "num_device_alloc": 4,
    }
    recording = []
    nested = {"allocation": {"all": {"allocated": 3, "freed": 2}}}
    for name, stand_in in {
        "current_device": lambda: 0,
        "reset_peak_memory_stats": lambda device: None,
        "memory_stats": lambda device: stats,
        "memory_stats_as_nested_dict": lambda device: nested,
        "memory_snapshot": lambda: segments,
        "get_allocator_backend": lambda: "native",
        "memory._record_memory_history": lambda enabled, **options: recording.append(enabled),
        "memory._snapshot": lambda: {"segments": segments, "device_traces": [step]},
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", stand_in)
    recorded = arm._on_gpu(2, True, tmp_path / "memory" / "arm.pickle")
    assert recorded is not None
    found = memory_profile(recorded)
    assert recording == ["all", None]
    assert found.peak == {"parameters": 32768 * len(weights), "graph_pools": 600, "temporaries": 5120}
    assert found.cache == CacheState(10**6, 32768 * len(blocks), 7000, 7000, 0.0)
    assert pickle.loads((tmp_path / "memory" / "arm.pickle").read_bytes())["device_traces"] == [step]


def test_an_arm_is_left_without_hooks() -> None:
    model = (arm := arm_of(small())).program.model
    assert arm.memory_by_category("")
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_it_travels_and_stays_readable() -> None:
    found = recorded(small())
    assert wire.decode(wire.encode(found), wire.returned_by(Memory.memory_by_category)) == found
    record = ProfileRecord(baseline=ArmProfile(memory=found.shortened()))
    assert ProfileRecord.of(asdict(record)) == record
    assert ProfileRecord.of({"baseline": {"metrics": {}}}).baseline == ArmProfile(), "older records have none"
