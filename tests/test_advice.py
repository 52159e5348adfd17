"""Advice names nothing that the program, its device or the stack would refuse."""

from collections.abc import Sequence

import cloudpickle

from optexp.comparison.suggestions import built, goes_with
from optexp.profiling.diagnosis import narrowed
from optexp.records.profile import Bottleneck
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.streams import Streams
from optexp.strategy import Strategy
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp

ADVICE = [
    "strategy=cuda_graph",
    "strategy=fused_optimizer",
    "strategy=fusion strategy.fusion.mode=max-autotune",
    "strategy=streams strategy.streams.mode=chunks",
    "strategy=somebody_elses",
    "buy a larger machine",
]


def taken(mode: str, strategies: Sequence[Strategy]) -> list[bool]:
    arm = Arm()
    arm.setup(Spec(Mlp(mode=mode, dim=8, layers=1, batch_size=4), (), "cpu", "float32", 0).pack())
    return arm.takes(cloudpickle.dumps(strategies))


def test_it_is_built_with_its_options() -> None:
    found = built(ADVICE)
    assert list(found) == ADVICE[:4]
    assert found[ADVICE[2]] == Fusion(mode="max-autotune")
    assert found[ADVICE[3]] == Streams(mode="chunks")
    workers = "strategy=pinned_memory strategy.pinned_memory.workers=4"
    assert built([workers])[workers] == PinnedMemory(workers=4)


def test_the_program_is_asked() -> None:
    strategies = [built(ADVICE)[text] for text in ADVICE[:3]]
    assert taken("train", strategies) == [False, True, True]
    assert taken("forward", strategies) == [False, False, True]


def test_the_stack_is_asked() -> None:
    assert goes_with(Fusion(), [CudaGraph()])
    assert not goes_with(Fusion(mode="reduce-overhead"), [CudaGraph()])


def test_plain_words_stay() -> None:
    causes = [Bottleneck("slow", 0.5, "it is", tuple(ADVICE))]
    assert narrowed(causes, {ADVICE[1]})[0].try_ == (ADVICE[1], ADVICE[5])
