"""Advice names nothing that the program, its device or the stack would refuse."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle

from optexp.comparison.suggestions import answered, goes_with, installed, narrowed, typed
from optexp.profiling import diagnosis
from optexp.records.profile import Bottleneck
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.fusion import Fusion
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.streams import Streams
from optexp.strategy import Remedy, Strategy, named
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp
from tests.profiling.conftest import ChromeTrace

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
    return [not reason for reason in arm.refusals(cloudpickle.dumps(strategies))]


CAUSES = ("dispatch", "many_small_kernels", "many_small_ops", "memory_bound", "memory_passes", "compute_bound")
CAUSES += ("gpu_idle", "pageable_copy", "memory_copy", "data_loading")


def gemm() -> Trace:
    """A step whose only operator is a float32 GEMM."""
    chrome, shapes = ChromeTrace(), {"Input type": ["float"] * 2, "Input Dims": [[64, 64]] * 2}
    return chrome.steps(lambda: chrome.op("aten::mm", 2.0, 10.0, "gemm", **shapes))


def test_every_remedy_is_against_a_known_cause_and_each_cause_has_one() -> None:
    answers = {remedy.against for strategy in installed() for remedy in strategy.remedies}
    assert answers == {*CAUSES}
    source = inspect.getsource(diagnosis)
    assert all(f'"{cause}"' in source for cause in CAUSES)


def test_a_remedy_is_built_with_its_options() -> None:
    slow = Bottleneck("slow", 0.5, "it is", ("in words",), ("compute_bound", "data_loading"))
    (answer,), proposed = answered([slow], [Streams(), Fusion(), PinnedMemory(), Amp()], gemm())
    workers = "strategy=pinned_memory strategy.pinned_memory.workers="
    assert answer.try_[:2] == ("strategy=amp", "strategy=fusion strategy.fusion.mode=max-autotune")
    assert answer.try_[2].startswith(workers)
    assert answer.try_[3:] == ("in words",)
    assert proposed[answer.try_[1]] == Fusion(mode="max-autotune")
    assert proposed[answer.try_[2]] == PinnedMemory(workers=int(answer.try_[2].removeprefix(workers)))


def test_a_strategy_of_an_extension_is_proposed_by_its_declaration_alone() -> None:
    @dataclass
    class Theirs(Fusion):
        depth: int = 1

        @property
        def remedies(self) -> tuple[Remedy, ...]:
            return (Remedy("memory_bound", rank=0, options={"depth": 2}),)

    theirs = named(Theirs(), "theirs")
    (answer,), proposed = answered([Bottleneck("b", 1.0, "", (), ("memory_bound",))], [Fusion(), theirs], gemm())
    assert answer.try_ == ("strategy=theirs strategy.theirs.depth=2", "strategy=fusion")
    assert proposed[answer.try_[0]] == Theirs(depth=2)
    assert typed(theirs, Remedy("x")) == "strategy=theirs"


def test_the_program_is_asked() -> None:
    strategies = [CudaGraph(), FusedOptimizer(), Fusion(mode="max-autotune")]
    assert taken("train", strategies) == [False, True, True]
    assert taken("forward", strategies) == [False, False, True]


def test_the_stack_is_asked() -> None:
    assert goes_with(Fusion(), [CudaGraph()])
    assert not goes_with(Fusion(mode="reduce-overhead"), [CudaGraph()])


def test_plain_words_stay() -> None:
    causes = [Bottleneck("slow", 0.5, "it is", tuple(ADVICE))]
    assert narrowed(causes, {ADVICE[1]})[0].try_ == (ADVICE[1], ADVICE[5])
