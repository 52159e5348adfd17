"""Every workload and every strategy of `conf/` reaches a verdict that says something true. A new file is tested too."""

import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from optexp.commands import audit
from optexp.comparison import runner
from optexp.config import search_path
from optexp.result import Result, Verdict
from optexp.support.tf32 import tf32_allowed
from tests.reached import measured

SMALL_MLP = ["workload.dim=16", "workload.layers=2", "workload.batch_size=8"]
TINY = {
    "add": ["workload.size=4096"],
    "bert": [
        "workload.sequence=8",
        "workload.hidden=32",
        "workload.layers=1",
        "workload.vocabulary=64",
    ],
    "branches": SMALL_MLP,
    "causal_lm": ["workload.sequence=8", "workload.hidden=32", "workload.layers=1", "workload.vocabulary=64"],
    "cdist": ["workload.points=32", "workload.dim=8"],
    "changing_shapes": [*SMALL_MLP, "workload.shortest=3", "workload.longest=6"],
    "elementwise": ["workload.rows=64", "workload.columns=64"],
    "gelu": ["workload.size=64"],
    "graph_break": SMALL_MLP,
    "layernorm_linear": ["workload.rows=32", "workload.features=16", "workload.out=16"],
    "lenet5": ["workload.batch_size=4"],
    "linear_gelu": ["workload.rows=32", "workload.features=16", "workload.out=16"],
    "matmul": ["workload.size=32"],
    "mlp": SMALL_MLP,
    "module": ["workload.target=torch.nn:GELU", "workload.inputs=[{shape: [32, 16]}]"],
    "pipeline": ["workload.rows=64", "workload.dim=16"],
    "script": [f"workload.path={Path(__file__).parent / 'scripts' / 'classifier.py'}"],
    "sleep": ["workload.ms=2"],
    "softmax": ["workload.rows=32", "workload.columns=64"],
    "training": ["workload.batch_size=4"],
    "vision": ["workload.architecture=resnet18", "workload.image=32", "workload.classes=10"],
}
COMPILED = {"elementwise", "gelu", "mlp", "softmax"}  # the others' compilation takes too long for every day
FEW = {"mlp"}  # every day with all strategies; the others with one that takes turns
OUTSIDE = Path(__file__).parent / "outside"
SHARED = Path("/dev/shm")
WRONG = {Verdict.ERROR, Verdict.NOT_EQUIVALENT, Verdict.UNVERIFIED, Verdict.INVALID}

STRATEGIES = sorted(path.stem for path in (search_path.CONF / "strategy").glob("*.yaml"))
WORKLOADS = sorted(path.stem for path in (search_path.CONF / "workload").glob("*.yaml"))


def run(folder: Path, *overrides: str) -> Result:
    """One job in this process, on the CPU, as small as a job gets."""
    settings = ["isolation=none", "device=cpu", "measurement=quick", "tracking.enabled=false"]
    quicker = [
        "measurement.warmup_s=0.2",
        "measurement.block_ms=10",
        "measurement.pairs=10",
        "measurement.process_s=0.5",
    ]
    quicker += ["measurement.verification_seeds=1", "measurement.profile_steps=2"]
    quicker += ["profile.details=false"]
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*settings, *quicker, *overrides])
    return runner.run(config, folder)


def combination(workload: str, strategy: str) -> Any:
    slow = strategy in ("fusion", "compiled_optimizer") and workload not in COMPILED
    turn = STRATEGIES[WORKLOADS.index(workload) % len(STRATEGIES)]
    slow |= workload not in FEW and strategy != turn
    return pytest.param(workload, strategy, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("workload", "strategy"), [combination(w, s) for w, s in product(WORKLOADS, STRATEGIES)])
def test_reaches_a_verdict(workload: str, strategy: str, tmp_path: Path) -> None:
    sizes, before = TINY.get(workload, []), tf32_allowed()
    result = run(tmp_path, f"workload={workload}", f"strategy={strategy}", *sizes)
    assert tf32_allowed() == before  # the process is the caller's
    assert result.verdict not in WRONG or measured(result), result.headline
    assert Result.read(tmp_path / "result.json").verdict is result.verdict
    assert audit.main([str(tmp_path / "result.json")]) == 0
    if result.verdict.measured:
        assert result.equivalence.ok
        assert all(evidence.engaged for evidence in result.evidence)
    else:
        assert result.speedup is None


@pytest.mark.parametrize("workload", ["cdist", "elementwise", "layernorm_linear"])
def test_gradients_of_the_inputs_are_compared(workload: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"workload={workload}", "workload.mode=forward_backward", "verify=only", *TINY[workload])
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert result.equivalence.bitwise
    assert "input_grad.0" in result.equivalence.headline


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
def test_every_mode_of_the_mlp_against_itself(mode: str, tmp_path: Path) -> None:
    result = run(tmp_path, "workload=mlp", f"workload.mode={mode}", "verify=only", *TINY["mlp"])
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert result.equivalence.bitwise


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload=elementwise", "workload.variant=relu_bias_dropout", "strategy=inplace", *TINY["elementwise"]],
        ["workload=bert", "workload.mode=train", "workload.dropout=0.1", "strategy=amp", *TINY["bert"]],
    ],
    ids=["elementwise", "bert"],
)
def test_dropout_is_verified_at_0_and_at_its_rate(overrides: list[str], tmp_path: Path) -> None:
    result = run(tmp_path, *overrides)
    assert measured(result), result.headline
    assert "with every dropout at p = 0" in result.equivalence.headline
    assert "64 seeds" in result.equivalence.headline
    assert result.equivalence.gates["RANDOMNESS"].passed
    assert result.equivalence.randomness.tests >= 6


def test_profile_names_where_the_time_goes(tmp_path: Path) -> None:
    result = run(tmp_path, "workload=mlp", "mode=profile", *TINY["mlp"])
    assert result.verdict is Verdict.PROFILED
    assert result.profile.baseline.top_ops
    assert (tmp_path / "traces" / "baseline.json.gz").exists()


class Mixed(nn.Module):
    """Autocast lowers the layer, and knows nothing of what takes its result and weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.both = nn.Linear(8, 8), nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.both(y, y)  # type: ignore[no-any-return]


def test_what_does_not_run_under_autocast_is_unsupported_and_no_error(tmp_path: Path) -> None:
    own = ["workload=module", "workload.target=tests.test_every_choice:Mixed", "workload.inputs=[{shape: [4, 8]}]"]
    result = run(tmp_path, *own, "strategy=amp")
    assert result.verdict is Verdict.UNSUPPORTED, result.headline
    assert "under autocast" in result.headline


def test_a_stack_as_baseline(tmp_path: Path) -> None:
    result = run(tmp_path, "workload=mlp", "baseline=[amp]", "strategy=amp", "verify=only", *TINY["mlp"])
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert "bfloat16" in result.equivalence.contract


def test_a_baseline_that_did_not_happen_is_no_baseline(tmp_path: Path) -> None:
    """Backward needs what could be overwritten, so that `inplace` changes nothing here."""
    result = run(tmp_path, "workload=mlp", "baseline=[inplace]", "strategy=baseline", *TINY["mlp"])
    assert result.verdict is Verdict.NOT_ENGAGED
    assert "the baseline's inplace" in result.headline


def test_a_low_precision_baseline_does_not_excuse_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(OUTSIDE))
    overrides = ["workload=mlp", "baseline=[amp]", "strategy=inexact", f"hydra.searchpath=[file://{OUTSIDE / 'conf'}]"]
    result = run(tmp_path, *overrides, *TINY["mlp"])
    assert result.verdict is Verdict.NOT_EQUIVALENT
    assert result.speedup is None
    assert result.candidate.step_us is None


def test_profiling_a_stack_that_is_not_the_baseline_is_a_mistake(tmp_path: Path) -> None:
    result = run(tmp_path, "workload=mlp", "mode=profile", "strategy=inplace", *TINY["mlp"])
    assert result.verdict is Verdict.ERROR
    assert "baseline=[inplace]" in result.headline


def test_nothing_stays_in_shared_memory_and_the_process_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def noted(*args: Any, **kwargs: Any) -> str:
        made.append(Path(make(*args, **kwargs)))
        return str(made[-1])

    make, cores = tempfile.mkdtemp, os.sched_getaffinity(0)
    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    run(tmp_path, "workload=mlp", f"measurement.cpus='{min(cores)}'", *TINY["mlp"])
    assert any(SHARED in folder.parents for folder in made)
    assert not any(folder.exists() for folder in made)
    assert os.sched_getaffinity(0) == cores
