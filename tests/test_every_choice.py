"""Every workload and every strategy of `conf/` reaches a verdict that says something true. A new file is tested too."""

from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from optexp import discovery, runner
from optexp.result import Result, Verdict

TINY = {"mlp": ["workload.dim=16", "workload.layers=2", "workload.batch_size=8"], "gelu": ["workload.size=64"]}
WRONG = {Verdict.ERROR, Verdict.NOT_EQUIVALENT, Verdict.UNVERIFIED, Verdict.INVALID}

STRATEGIES = sorted(path.stem for path in (discovery.CONF / "strategy").glob("*.yaml"))
WORKLOADS = sorted(path.stem for path in (discovery.CONF / "workload").glob("*.yaml"))


def run(folder: Path, *overrides: str) -> Result:
    """One job in this process, on the CPU, as small as a job gets."""
    GlobalHydra.instance().clear()
    settings = ["isolation=none", "device=cpu", "measurement=quick", "tracking.enabled=false"]
    quicker = ["measurement.warmup_s=0.3", "measurement.block_ms=2", "measurement.pairs=10"]
    return runner.run(discovery.compose([*settings, *quicker, *overrides]), folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_reaches_a_verdict(workload: str, strategy: str, tmp_path: Path) -> None:
    sizes = TINY.get(workload, [])
    result = run(tmp_path, f"workload={workload}", f"strategy={strategy}", *sizes)
    assert result.verdict not in WRONG, result.headline
    assert Result.read(tmp_path / "result.json").verdict is result.verdict
    if result.verdict.measured:
        assert result.equivalence["ok"]
        assert all(evidence["engaged"] for evidence in result.evidence)
    else:
        assert result.speedup is None


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
def test_every_mode_of_the_mlp_against_itself(mode: str, tmp_path: Path) -> None:
    result = run(tmp_path, "workload=mlp", f"workload.mode={mode}", *TINY["mlp"])
    assert result.verdict.measured, result.headline
    assert result.equivalence["bitwise"]


def test_profile_names_where_the_time_goes(tmp_path: Path) -> None:
    result = run(tmp_path, "workload=mlp", "mode=profile", *TINY["mlp"])
    assert result.verdict is Verdict.PROFILED
    assert result.profile["baseline"]["top_ops"]
    assert (tmp_path / "traces" / "baseline.json.gz").exists()


def test_a_stack_as_baseline(tmp_path: Path) -> None:
    result = run(tmp_path, "workload=mlp", "baseline=[amp]", "strategy=amp", *TINY["mlp"])
    assert result.verdict.measured, result.headline
    assert result.evidence == []  # what both arms have proves nothing about the difference
