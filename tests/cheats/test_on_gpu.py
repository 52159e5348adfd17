"""The same on a GPU: cheats of its own, the catalogue's that a GPU makes different, and honest controls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optexp.result import Result, Verdict
from tests.cheats.test_cheats import (
    CATALOGUE,
    DROP,
    FAMILIES,
    GELU,
    INFER,
    LEARN,
    MLP,
    PRESETS,
    QUICK,
    TEXT,
    VISION,
    compare,
)
from tests.cheats.test_cheats import CHEATS as ANYWHERE
from tests.cheats.test_cheats import HONEST as HONEST_ANYWHERE
from tests.reached import measured

pytestmark = pytest.mark.gpu

ON_GPU = "tests.cheats.on_gpu"
ON_DEVICE = ["device=cuda", "isolation=none", "environment.allow_foreign=true"]
HERE = [*QUICK, *ON_DEVICE]
WIDE = ["workload=gelu", "workload.size=2048"]
SGD = [*LEARN, "workload.optim=sgd"]
FROM_HOST = ["workload=mlp", "workload.dim=256", "workload.layers=2", "workload.batch_size=512", "workload.source=host"]
LARGE = ["workload=matmul", "workload.size=4096"]
COLD = ["workload=gelu", "workload.size=2048", "measurement.l2=cold"]

WRONG, UNTRUSTED = Verdict.NOT_EQUIVALENT, Verdict.INVALID
CHEATS: dict[str, tuple[str, list[str], Verdict, str]] = {
    "NobodyWaits": (ON_GPU, WIDE, WRONG, "output"),
    "SwitchesTf32On": (ON_GPU, ["workload=mlp", "workload.mode=forward"], WRONG, "output"),
    "ReplacesTheSynchronization": (ON_GPU, GELU, UNTRUSTED, "_cuda_synchronize"),
    "StaleGraphInput": (ON_GPU, INFER, WRONG, "output"),
    "LabelsAreForgotten": (ON_GPU, MLP, WRONG, "G1"),
    "FrozenRateInAGraph": (ON_GPU, SGD, WRONG, "change"),
    "FrozenMaskInAGraph": (ON_GPU, DROP, WRONG, "frozen"),
    "HalfOfTheGraph": (ON_GPU, SGD, WRONG, ""),
    "ReturnsEmptyMemory": (CATALOGUE, WIDE, WRONG, "output"),
    "ReturnsAResultThatWasFreed": (CATALOGUE, WIDE, WRONG, "output"),
    "RemembersByIdentity": (CATALOGUE, ["workload=matmul", "workload.size=4096"], UNTRUSTED, "has not seen"),
    "RightForAWhile": (CATALOGUE, WIDE, WRONG, "after timing"),
    "WorksOnlyWhenWatched": (CATALOGUE, WIDE, WRONG, "timed block"),
    "HiddenAutocast": (CATALOGUE, MLP, WRONG, "G1"),
    "PatchesElapsedTime": (CATALOGUE, GELU, UNTRUSTED, "elapsed_time"),
    "FrozenRandomNumbers": (CATALOGUE, DROP, WRONG, "frozen"),
    "AFasterRate": (CATALOGUE, LEARN, WRONG, "change"),
    "ReadsWhatNothingWrote": (ON_GPU, WIDE, WRONG, "output"),
    "FailsToLaunch": (ON_GPU, WIDE, WRONG, "output"),
    "KeepsBatchesOnTheDevice": (ON_GPU, FROM_HOST, UNTRUSTED, "copies 0 MiB to the device"),
    "CopiesOnTheDevice": (ON_GPU, FROM_HOST, UNTRUSTED, "copies 0 MiB to the device"),
    "WorksAside": (ON_GPU, [*COLD, "workload.size=8192"], UNTRUSTED, "its own stream"),
    "WorksOnlyWhenWatched in cold blocks": (CATALOGUE, COLD, WRONG, "timed block"),
    "ForgetsGradientsWhenTimed": (CATALOGUE, MLP, WRONG, "timed block"),
    "LearnsNothingWhenTimed": (CATALOGUE, LEARN, WRONG, "timed block"),
    "DropsOnlyWhenWatched": (CATALOGUE, DROP, WRONG, "timed block"),
    "RandomForAWhile": (CATALOGUE, DROP, WRONG, "after timing"),
    "KeepsItsFirstResults": (CATALOGUE, ["workload=matmul", "workload.size=4096"], UNTRUSTED, "its results were kept"),
    "LeavesWorkBehind": (ON_GPU, GELU, UNTRUSTED, "keeps its caller waiting"),
    "WorksInReset": (CATALOGUE, LARGE, UNTRUSTED, "before a step asks"),
    "RestsInTheMiddle": (CATALOGUE, WIDE, WRONG, "timed block"),
    "ReturnsALazyDict": (CATALOGUE, WIDE, UNTRUSTED, "the dict of outputs"),
}
HONEST: list[tuple[list[str], str]] = [
    (MLP, ""),
    (MLP, "cuda_graph"),
    (INFER, "cuda_graph"),
    (LEARN, "cuda_graph"),
    (SGD, "cuda_graph"),
    (LEARN, "amp+cuda_graph"),
    (LEARN, "fused_optimizer+cuda_graph"),
    (INFER, "amp+cuda_graph"),
    (MLP, "fusion"),
    (WIDE, "fusion"),
    (WIDE, "inplace+cuda_graph"),
    (DROP, "cuda_graph"),
    (DROP, "fusion"),
    (VISION, "channels_last+cuda_graph"),
    (VISION, "amp"),
    ([*TEXT, "workload.dropout=0.1"], "cuda_graph"),
    (TEXT, "amp"),
    (COLD, ""),
    (COLD, "fusion"),
    (FROM_HOST, "pinned_memory+prefetch"),
    (FROM_HOST, "amp+pinned_memory"),
    (["workload=training", "workload.batch_size=64", "workload.workers=2"], "pinned_memory+prefetch"),
    (["workload=pipeline", "workload.rows=4096", "workload.dim=64"], "pinned_memory+streams"),
    (DROP, ""),
]


@pytest.fixture(autouse=True)
def _the_card_as_it_was() -> Iterator[None]:
    kept = torch._C._cuda_synchronize, torch.cuda.Event.elapsed_time
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch._C._cuda_synchronize, torch.cuda.Event.elapsed_time = kept  # type: ignore[method-assign]
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_are_caught(cheat: str, preset: list[str], tmp_path: Path, count: list[tuple[str, Result]]) -> None:
    module, overrides, verdict, words = CHEATS[cheat]
    result = compare(tmp_path, [*preset, *ON_DEVICE, *overrides], f"{module}.{cheat.partition(' ')[0]}")
    count.append(("cheat", result))
    assert result.verdict is verdict, result.headline
    assert words in result.headline
    assert result.speedup is None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cheat", [cheat for cheat in ANYWHERE if cheat not in CHEATS])
def test_cheats_of_any_device_are_caught(
    cheat: str, preset: list[str], tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    """As on a CPU; which check comes first may differ, and what takes longer than it saves gains nothing.

    Where tests share the card, nobody knows whether steps were slow on purpose while blocks were planned.
    """
    overrides, _, _ = ANYWHERE[cheat]
    result = compare(tmp_path, [*preset, *ON_DEVICE, *overrides], f"{CATALOGUE}.{cheat.partition(' ')[0]}")
    count.append(("cheat", result))
    slower = result.speedup is not None and result.speedup.high < 1  # where blocks scatter, too
    disturbed = result.verdict is Verdict.INCONCLUSIVE and "due to other programs on its GPU" in result.headline
    if not slower and not disturbed:
        assert result.verdict in (WRONG, UNTRUSTED, Verdict.NOT_ENGAGED), result.headline
        assert result.speedup is None


@pytest.mark.parametrize(
    ("overrides", "stack"), [*HONEST, *(control for control in HONEST_ANYWHERE if control not in HONEST)]
)
def test_honest_controls_pass(
    overrides: list[str], stack: str, tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    result = compare(tmp_path, [*HERE, *overrides, *FAMILIES], stack=stack)
    count.append(("honest", result))
    assert measured(result), result.headline
