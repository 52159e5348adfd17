"""What stacks must gain on a GPU, through the command.

Training is measured on all cores, as a script runs that nobody has bound to one: the host-bound eager step is slower
there, and the ratios are larger, than on the one core that arms get otherwise.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from optexp.commands import audit
from optexp.result import Result, Verdict

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FREE = "measurement.cpus=all"
LENET = ["workload=lenet5", "workload.batch_size=128", "workload.source=host", FREE]
WIDE = [
    "workload=mlp", "workload.mode=train", "workload.batch_size=128", "workload.source=host", "workload.style=linear",
    "workload.in_features=3072", "workload.dim=1024", "workload.layers=3", "workload.out_features=10", FREE,
]  # fmt: skip
RESNET = ["workload=vision", "workload.mode=train", "workload.batch_size=32", "workload.source=host"]
BERT = ["workload=bert", "workload.batch_size=1", "workload.sequence=128", "dtype=bfloat16"]
LOOP = ["workload=training", "workload.batch_size=128", "++strategy.pinned_memory.workers=8", FREE]
TOWERS = ["workload=branches", "workload.batch_size=64", "workload.layers=8"]

# Of one sweep each: what it runs, and the ratio that every stack must reach there.
GAINS: dict[str, tuple[list[str], dict[str, float]]] = {
    "lenet5": (
        LENET,
        {
            "pinned_memory+cuda_graph": 4.7,
            "pinned_memory+prefetch+cuda_graph": 4.9,
            "pinned_memory+prefetch+fusion+cuda_graph": 6.0,
        },
    ),
    "wide mlp": (WIDE, {"amp+pinned_memory+cuda_graph": 4.7}),
    "wide mlp, fused optimizers": (
        [*WIDE, "strategy.amp.dtype=float16"],  # whose gradient scaler has the optimizer fused where it is captured
        {"amp+pinned_memory+cuda_graph": 4.7, "amp+pinned_memory+fusion+cuda_graph": 6.5},
    ),
    "resnet50": (RESNET, {"amp+fusion+cuda_graph+pinned_memory": 2.7}),
    "bert": (BERT, {"cuda_graph": 2.7, "fusion+cuda_graph": 4.3}),
    "training loop": (LOOP, {"amp+pinned_memory+prefetch+cuda_graph": 4.0}),
    "branches": ([*TOWERS, "baseline=[cuda_graph]"], {"streams+cuda_graph": 1.5}),
    "pipeline": (["workload=pipeline"], {"streams+pinned_memory": 2.0}),
    "matmul": (["workload=matmul"], {"tf32": 3.0}),
    "a cache": (["workload=mlp", "baseline=[{memory_pool:{kind:none}}]"], {"baseline": 1.2}),
}


def optexp(folder: Path, *arguments: str, jobs: int = 1) -> list[Result]:
    """What the command says of each job, in their order."""
    place = f"hydra.sweep.dir={folder}" if jobs > 1 else f"hydra.run.dir={folder / '0'}"
    command = [sys.executable, "-m", "optexp", *arguments, "measurement=quick", place]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    files = [folder / str(job) / "result.json" for job in range(jobs)]
    assert all(file.exists() for file in files), done.stdout + done.stderr
    assert audit.main(list(map(str, files))) == 0
    results = [Result.read(file) for file in files]
    for result in results:
        print(result.headline, *(evidence.text for evidence in result.evidence), sep="\n  ")
    return results


def one(folder: Path, *arguments: str) -> Result:
    (result,) = optexp(folder, *arguments)
    return result


@pytest.mark.parametrize("name", GAINS)
def test_it_is_faster(name: str, tmp_path: Path) -> None:
    overrides, gains = GAINS[name]
    sweep = ["-m"] if len(gains) > 1 else []
    results = optexp(tmp_path, *sweep, *overrides, f"strategy={','.join(gains)}", jobs=len(gains))
    assert all(result.verdict is Verdict.FASTER for result in results), [result.headline for result in results]
    reached = {stack: result.speedup.estimate for stack, result in zip(gains, results, strict=True) if result.speedup}
    assert all(reached[stack] >= at_least for stack, at_least in gains.items()), reached


def test_one_core_is_quicker_than_all(tmp_path: Path) -> None:
    result = one(tmp_path, "workload=mlp", FREE, "strategy=cpu_affinity")
    assert result.verdict in (Verdict.FASTER, Verdict.INCONCLUSIVE), result.headline  # a step on all cores scatters
    assert result.speedup is not None
    assert result.speedup.estimate > 1.2


def test_chunks_come_near_the_longest_of_copying_and_computing(tmp_path: Path) -> None:
    """Of 1 GiB: the first one's way in, the last one's way out and the host, 1 ms or so, are hidden by nothing."""
    pinned = ["workload=pipeline", "workload.rows=262144", "workload.pin_memory=true", "workload.non_blocking=true"]
    result = one(tmp_path, *pinned, "strategy=streams", "measurement.verification_seeds=1")
    assert result.verdict is Verdict.FASTER, result.headline
    metrics = result.profile.baseline.metrics  # where nothing overlaps
    computing_us = (metrics["gpu_busy"] - metrics["share_exposed_copies"]) * metrics["step_us"]  # longer than copies
    assert result.candidate.step_us is not None
    assert computing_us / result.candidate.step_us >= 0.9, (computing_us, result.candidate.step_us)


def test_a_shared_workspace_saves_the_others(tmp_path: Path) -> None:
    result = one(tmp_path, "workload=workspace", "strategy=memory_pool", "strategy.memory_pool.kind=workspace")
    assert result.verdict in (Verdict.SAME, Verdict.FASTER), result.headline
    assert result.baseline.peak_mib is not None
    assert result.candidate.peak_mib is not None
    assert result.candidate.peak_mib < 0.6 * result.baseline.peak_mib


@pytest.mark.parametrize("kind", ["private", "expandable", "async"])
def test_a_pool_where_nothing_is_to_gain_is_measured_all_the_same(kind: str, tmp_path: Path) -> None:
    result = one(tmp_path, "workload=mlp", "strategy=memory_pool", f"strategy.memory_pool.kind={kind}")
    assert result.verdict.measured, result.headline
    assert result.speedup is not None
    assert 0.5 < result.speedup.estimate < 1.2


@pytest.mark.parametrize(("kind", "workload"), [("none", "mlp"), ("emptied", "elementwise")])
def test_no_cache_is_slower(kind: str, workload: str, tmp_path: Path) -> None:
    result = one(tmp_path, f"workload={workload}", "strategy=memory_pool", f"strategy.memory_pool.kind={kind}")
    assert result.verdict is Verdict.SLOWER, result.headline


@pytest.mark.parametrize(
    ("arguments", "verdict", "words"),
    [
        (["workload=mlp", "strategy=pinned_memory"], Verdict.UNSUPPORTED, "lie on the device"),
        (["workload=training", "strategy=prefetch"], Verdict.UNSUPPORTED, "add pinned_memory"),
        (["workload=pipeline", "strategy=cuda_graph"], Verdict.UNSUPPORTED, "host memory"),
        (["workload=mlp", "strategy=cpu_affinity"], Verdict.UNSUPPORTED, "measurement.cpus=all"),
        (["workload=mlp", "strategy=streams"], Verdict.UNSUPPORTED, "no branches"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_says_why(arguments: list[str], verdict: Verdict, words: str, tmp_path: Path) -> None:
    result = one(tmp_path, *arguments)
    assert result.verdict is verdict, result.headline
    assert words in result.headline


@pytest.mark.parametrize("stack", ["pinned_memory", "pinned_memory+prefetch", "amp+pinned_memory+prefetch+cuda_graph"])
def test_a_users_own_loader_is_pinned_and_prefetched(stack: str, tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text(PORT)
    arguments = ["workload=module", "workload.path=port.py", "workload.mode=train", f"strategy={stack}"]
    result = one(tmp_path, *arguments)
    assert result.verdict.measured or result.verdict is Verdict.NOT_ENGAGED, result.headline
    (pinned,) = (evidence for evidence in result.evidence if evidence.strategy == "pinned_memory")
    assert pinned.engaged, pinned.text


PORT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

def Model():
    return torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10))

def get_loader():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 1024), torch.randint(10, (4096,)))
    return DataLoader(data, batch_size=256, shuffle=True, num_workers=2, drop_last=True)
"""
