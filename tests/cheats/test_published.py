"""Published kinds of cheats are caught in both presets, and what is wrong with the judge itself would show."""

from __future__ import annotations

import os
import secrets
import site
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from optexp.comparison import edits
from optexp.comparison.sampling import Ready
from optexp.errors import Failure
from optexp.measurement.clock import Timing
from optexp.result import Result, Verdict
from optexp.workers.pool import ArmPool, one_card
from tests.cheats import published
from tests.cheats.test_cheats import (
    FAMILIES,
    GELU,
    IN_ONE_PROCESS,
    INFER,
    LEARN,
    MATMUL,
    MLP,
    NORM,
    PRESETS,
    QUICK,
    compare,
    own,
)
from tests.reached import measured

CATALOGUE = "tests.cheats.published"
OLDER = "tests.cheats.catalogue"
SOFTMAX = ["workload=softmax", "workload.rows=64", "workload.columns=4096"]
WRONG, UNTRUSTED, UNDECIDED = Verdict.NOT_EQUIVALENT, Verdict.INVALID, Verdict.UNVERIFIED
TEACHER = ["workload=module", f"workload.path={Path(__file__).with_name('teacher.py')}", "workload.mode=train"]
GRADIENTS = [*MLP, "workload.mode=forward_backward"]
ONE_CORE = f"measurement.cpus={min(os.sched_getaffinity(0))}"
# What each is tried on, what it must end in, and what the sentence must say.
IN_PROCESS: dict[str, tuple[list[str], Verdict, str]] = {
    "SpoilsTheExpectation": (GELU, WRONG, "output"),
    "PatchesAllclose": (GELU, UNTRUSTED, "torch.allclose"),
    "PatchesEquality": (GELU, UNTRUSTED, "Tensor.__eq__"),
    "PatchesTheObservation": ([*GELU, "verify=only"], UNTRUSTED, "arm_checks.observed"),
    "NormIsIdentity": (NORM, WRONG, "output"),
    "SoftmaxIsZero": (SOFTMAX, WRONG, "output"),
    "SoftmaxWithoutItsMaximum": (SOFTMAX, WRONG, "large inputs"),
    "SwallowsAFailedCall": (GELU, WRONG, "output"),
    "LoadsWhatFits": (INFER, WRONG, "output"),
    "LoadsNothing": (INFER, WRONG, "output"),
    "CastsTheForwardOnce": (LEARN, WRONG, ""),
    "FoldsWeightsOnce of a model that changes them": (own("Averaged"), WRONG, "output"),
    "FoldsWeightsOnce of a model that exchanges them now and then": (own("Exchanged"), WRONG, "after 48 steps: output"),
    "FoldsWeightsOnce of a teacher": (TEACHER, WRONG, "student"),
    "CastsItsWeightsOnce": (GRADIENTS, WRONG, "with other values of the parameters"),
}
# Those that look into other processes, or at the clock of one.
IN_PROCESSES: dict[str, tuple[list[str], Verdict, str]] = {
    "ScansObjects": (GELU, WRONG, "output"),
    "ScansSharedMemory": (GELU, WRONG, "output"),
    "ForgesItsTiming": (GELU, UNTRUSTED, "wrote to the connection of its answers"),
    "PatchesRandn": (MATMUL, UNTRUSTED, "torch.randn"),
    "PatchesSeeds": (GELU, UNTRUSTED, "torch.manual_seed"),
    "SharesWithAProcess": ([*MATMUL, ONE_CORE], UNTRUSTED, "other processes work"),
    "ReturnsBeforeItsHelper": ([*MATMUL, ONE_CORE], WRONG, "output"),
    "TakesPriorityFromOtherArms": (GELU, UNTRUSTED, "its cores or its priority changed"),
    "StopsOtherArms": (GELU, UNTRUSTED, "(SIGSTOP"),
}


@pytest.fixture(autouse=True)
def _as_they_were() -> Iterator[None]:
    put_back = published.as_they_were()
    yield
    put_back()


def caught(folder: Path, cheat: str, preset: list[str], how: list[str]) -> Result:
    table = IN_PROCESS | IN_PROCESSES
    overrides, verdict, words = table[cheat]
    name = cheat.partition(" ")[0]
    module = CATALOGUE if hasattr(published, name) else OLDER
    result = compare(folder, [*preset, *how, *overrides], f"{module}.{name}")
    published.as_they_were()
    assert result.verdict is verdict, result.headline
    assert words in result.headline
    assert result.speedup is None
    return result


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cheat", IN_PROCESS)
def test_cheats_are_caught(cheat: str, preset: list[str], tmp_path: Path, count: list[tuple[str, Result]]) -> None:
    count.append(("cheat", caught(tmp_path, cheat, preset, ["device=cpu", "isolation=none"])))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cheat", IN_PROCESSES)
def test_cheats_beyond_their_process_are_caught(
    cheat: str, preset: list[str], tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    count.append(("cheat", caught(tmp_path, cheat, preset, ["device=cpu"])))


@pytest.mark.parametrize("overrides", [INFER, own("Linear")], ids=["mlp", "linear"])
def test_weights_that_nobody_changes_may_be_folded_once(
    overrides: list[str], tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    result = compare(tmp_path, [*IN_ONE_PROCESS, *overrides, *FAMILIES], f"{CATALOGUE}.FoldsWeightsOnce")
    count.append(("honest", result))
    assert measured(result), result.headline


@pytest.mark.parametrize(
    "overrides",
    [own("Normed", "[4, 3, 8, 8]", "folded"), own("Linear", instead="packed")],
    ids=["convolution and norm", "packed"],
)
def test_models_made_of_others_for_inference_are_no_cheats(
    overrides: list[str], tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    result = compare(tmp_path, [*IN_ONE_PROCESS, *overrides], stack="replace")
    count.append(("honest", result))
    assert measured(result), result.headline


@pytest.mark.parametrize("stack", ["inference_mode", pytest.param("amp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["Averaged", pytest.param("Exchanged", marks=pytest.mark.slow)])
def test_weights_that_steps_change_are_no_cheats(
    model: str, stack: str, tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    result = compare(tmp_path, [*IN_ONE_PROCESS, *own(model)], stack=stack)
    count.append(("honest", result))
    assert measured(result), result.headline


@pytest.mark.slow
def test_a_native_clock_that_was_replaced_makes_nothing_faster(tmp_path: Path) -> None:
    """Beyond the threat model: the clock's object is the same. The caller's own clock tells, on a machine so quiet that
    it can; on a busy one nothing is decided."""
    overrides = [*QUICK, "device=cpu", *MATMUL]
    result = compare(tmp_path, overrides, f"{CATALOGUE}.PatchesTheNativeClock")
    assert result.verdict in (UNTRUSTED, Verdict.INCONCLUSIVE), result.headline


@pytest.mark.parametrize("preset", PRESETS)
def test_a_shorter_way_for_inputs_with_structure_is_wrong(
    preset: list[str], tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    """Where families of inputs are asked for; in a run without them nothing is said of such inputs, nor timed."""
    overrides = [*preset, "device=cpu", "isolation=none", *MATMUL, *FAMILIES]
    result = compare(tmp_path, overrides, f"{CATALOGUE}.ExactForRandomInputs")
    count.append(("cheat", result))
    assert result.verdict is WRONG
    assert "structured inputs" in result.headline


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.slow
def test_results_of_an_earlier_run_are_of_no_use(
    preset: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optexp.support.draws.token_hex", secrets.token_hex)
    monkeypatch.setattr(published.KeepsResultsOnDisk, "folder", tmp_path)
    monkeypatch.setattr(published.KeepsResultsOnDisk, "hits", 0)
    runs = []
    for name, replayed in (("first", ""), ("second", ""), ("again", "replay")):
        (tmp_path / name).mkdir()
        key = [f"replay={runs[-1].draws.key}"] if replayed else []
        overrides = [*preset, "device=cpu", "isolation=none", *GELU, *key]
        runs.append(compare(tmp_path / name, overrides, f"{CATALOGUE}.KeepsResultsOnDisk"))
        hits, published.KeepsResultsOnDisk.hits = published.KeepsResultsOnDisk.hits, 0
        assert bool(hits) is bool(replayed)
    assert "a replay, on inputs of an earlier run" in runs[-1].headline
    assert not any("a replay" in run.headline for run in runs[:-1])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["own", "library", "start"])
def test_a_file_that_decides_the_verdict_changes_while_it_runs(
    kind: str, preset: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: list[tuple[str, Result]]
) -> None:
    """A source of the judge, a function of a library's statistics, a file that new processes run."""
    file = tmp_path / {"own": "gates.py", "library": "stats.py", "start": "quicker.pth"}[kind]
    file.write_text("" if kind == "start" else "LIMIT = 2\n")
    if kind == "own":
        real = edits.own_files
        monkeypatch.setattr(edits, "own_files", lambda: real() | {"gates.py": file.read_text()})
    elif kind == "library":
        library = ModuleType("scipy.stats")
        library.__file__ = str(file)
        monkeypatch.setitem(sys.modules, "scipy.stats", library)
    else:
        file.unlink()
        monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr(published.EditsAFile, "file", file)
    (tmp_path / "run").mkdir()
    overrides = [*preset, "device=cpu", "isolation=none", *GELU]
    result = compare(tmp_path / "run", overrides, f"{CATALOGUE}.EditsAFile")
    count.append(("cheat", result))
    assert result.verdict is UNTRUSTED
    assert f"{file.name} " in result.headline
    assert "changed while" in result.headline


MODEL = """\
import torch
from torch import nn
from {name} import slope

class Model(nn.Module):
    def forward(self, x):
        return x * slope(x)

def get_inputs():
    return [torch.randn(16, 64)]
"""
PART = """\
import torch

def slope(x):
        return torch.sigmoid(x)
"""


@pytest.mark.parametrize("which", [pytest.param("model", marks=pytest.mark.slow), "part"])
def test_another_text_of_a_file_is_not_timed(which: str, tmp_path: Path, count: list[tuple[str, Result]]) -> None:
    model, part = tmp_path / "edited_model.py", tmp_path / f"edited_part_{secrets.token_hex(4)}.py"
    part.write_text(PART)
    model.write_text(MODEL.format(name=part.stem))
    file = model if which == "model" else part
    cheat = tmp_path / "cheating.py"
    cheat.write_text(
        f"""\
from pathlib import Path
from tests.cheats.published import SlowsTheBaselinesFile

class Edits(SlowsTheBaselinesFile):
    file = Path({str(file)!r})
"""
    )
    sys.path.insert(0, str(tmp_path))
    try:
        overrides = [*QUICK, "device=cpu", "workload=module", f"workload.path={model}"]
        result = compare(tmp_path / "run", overrides, "cheating.Edits")
    finally:
        sys.path.remove(str(tmp_path))
    count.append(("cheat", result))
    assert "# slow" in file.read_text()
    assert result.verdict is UNTRUSTED, result.headline
    assert f"{file.name} changed while optexp ran" in result.headline


# --- faults of the judge ----------------------------------------------------------------------------------------------


def test_arms_that_were_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = ArmPool.start

    def swapped(self: ArmPool, specs: Any) -> Any:
        arms = real(self, specs)
        if arms.keys() == {"baseline", "candidate"}:
            return {"baseline": arms["candidate"], "candidate": arms["baseline"]}
        return arms

    monkeypatch.setattr(ArmPool, "start", swapped)
    result = compare(tmp_path, [*IN_ONE_PROCESS, *GELU], stack="inference_mode")
    assert result.verdict is UNTRUSTED
    assert "arms were swapped: the baseline says that it is the candidate (inference_mode)" in result.headline


@pytest.mark.parametrize("seconds", [0.0, -1e-3, float("nan"), float("inf")])
def test_a_block_that_takes_no_time_enters_no_mean(seconds: float) -> None:
    class Instant:
        name, pid = "baseline", None

        def call(self, method: Callable[..., Any], **arguments: Any) -> Timing:
            return Timing(arguments["steps"], seconds, None)

    with pytest.raises(Failure, match="none takes no time"):
        Ready(Instant(), steps=20, lead_in=2).block(20)


def test_which_card_an_arm_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [one_card(device) for device in ("cuda:0", "cuda:1", "cuda")] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5e1f")
    assert [one_card(device) for device in ("cuda:0", "cuda:1")] == ["3", "GPU-5e1f"]


def test_the_miss_rate_of_ends_that_are_looked_at() -> None:
    from random import Random

    from optexp.equivalence.missed import LOOKS, MISSED, SHARE, looks_for, miss_rate

    assert miss_rate(SHARE, LOOKS) <= MISSED < miss_rate(SHARE, LOOKS - 1)
    assert looks_for(0.75, 1e-3) == 5
    generator = Random(1)
    missed = sum(all(generator.random() >= 0.25 for _ in range(10)) for _ in range(20_000)) / 20_000
    assert missed == pytest.approx(miss_rate(0.25, 10), abs=0.005)
