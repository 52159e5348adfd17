"""What a stack is refused for before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from optexp.comparison.case import Case, StepTraits
from optexp.comparison.distrust import (
    guesses_results,
    keeps_what_parameters_give,
    leaves_out_copies,
    remembers_results,
    works_in_reset,
)
from optexp.strategy import BITWISE, Contract, precision
from optexp.support.draws import Draws
from optexp.trace import Copy, Span, Trace
from optexp.workloads.mlp import Mlp
from tests.measurement.samples import constant, made

MIB = 2**20


def copying(*mib: float, kind: str = "HtoD") -> Trace:
    """Two steps, each with these copies."""
    copies = tuple(Copy("Memcpy", 0.0, 1.0, kind=kind, bytes=int(size * MIB)) for size in mib)
    return Trace((Span("step", 0.0, 9.0),) * 2, copies=copies * 2)


class Told:
    """An arm that answers what it is told."""

    def __init__(self, name: str = "", calls: list[tuple[str, str]] | None = None, **answers: Any) -> None:
        self.name, self.answers = name, answers
        self.calls = [] if calls is None else calls

    def call(self, method: Callable[..., Any], **arguments: Any) -> Any:
        self.calls.append((self.name, method.__name__))
        return {"met": [], "rest": None, **self.answers}[method.__name__]


@pytest.mark.parametrize(
    ("faster", "ours", "theirs", "accused"),
    [
        (1.45, 1.4, (1.0, 1.05), "remembers"),  # all of its gain
        (1.45, 1.2, (1.0, 1.05), None),
        (1.45, 1.4, (1.3, 1.05), None),  # fresh batches are far away for everybody
        (1.01, 1.15, (1.0, 1.05), None),  # a few steps are never exact
        (4.0, 1.4, (1.0, 1.05), None),
        (4.0, 1.6, (1.0, 1.05), "remembers"),
        (1.01, 1.26, (1.0, 1.4), None),  # a busy machine
        (4.0, 3.9, (1.0, 1.4), "remembers"),  # there, too
    ],
)
def test_a_gain_that_fresh_batches_do_not_have_is_refused(
    faster: float, ours: float, theirs: tuple[float, float], accused: str | None
) -> None:
    samples = made(constant(1e-3 * faster), constant(1e-3), processes=2)
    arms: Any = {"candidate": Told(novelty=(ours, 9.0)), "baseline": Told(novelty=theirs)}
    reason = remembers_results(case(BITWISE), arms, samples)
    assert reason is None if accused is None else accused in (reason or "")


def test_where_memory_is_short_one_arm_holds_other_batches_and_the_other_none() -> None:
    calls = list[tuple[str, str]]()
    arms: Any = {name: Told(name, calls, novelty=(1.0, 1.0)) for name in ("candidate", "baseline")}
    remembers_results(case(BITWISE, in_turns=True), arms, made(constant(1e-3), constant(1e-3), processes=2))
    assert calls[:4] == [("baseline", "rest"), ("candidate", "novelty"), ("candidate", "rest"), ("baseline", "novelty")]


@pytest.mark.parametrize(("ours", "accused"), [(1.4, False), (1.6, True)])
def test_batches_of_a_loader_are_others_in_another_order(ours: float, accused: bool) -> None:
    samples = made(constant(4e-3), constant(1e-3), processes=2)
    quiet = (1.0, 1.05)
    for usual in ({"reordered": (ours, 1.05), "permuted": quiet}, {"reordered": quiet, "permuted": (ours, 1.05)}):
        baseline = Told(novelty=None, reordered=quiet, permuted=quiet)
        arms: Any = {"candidate": Told(novelty=None, **usual), "baseline": baseline}
        assert (remembers_results(case(BITWISE), arms, samples) is not None) is accused


@pytest.mark.parametrize(
    ("ours", "theirs", "accused"),
    [
        ((1.4, 0.0), (0.0, 0.0), True),  # another batch's result
        ((0.01, 0.0), (0.0, 0.0), False),
        ((1.4, 0.3), (0.0, 0.0), False),  # no two runs are alike
        ((1.4, 0.0), (1.4, 0.0), False),  # nor are those of the baseline
    ],
)
def test_a_result_that_depends_on_haste_is_refused(
    ours: tuple[float, float], theirs: tuple[float, float], accused: bool
) -> None:
    arms: Any = {"candidate": Told(hurried=ours), "baseline": Told(hurried=theirs)}
    session: Any = SimpleNamespace(workload=Mlp(mode="forward"))
    plain, random, moving = (Case(session, [], "c", BITWISE, steps) for steps in (StepTraits(), *OTHER_STEPS))
    assert (guesses_results(plain, arms) is not None) is accused
    assert guesses_results(random, arms) is guesses_results(moving, arms) is None


OTHER_STEPS = StepTraits(random=True), StepTraits(carries=True)


@pytest.mark.parametrize(
    ("mode", "ours", "theirs", "accused"),
    [
        ("forward_backward", 1.6, (1.0, 1.1), True),
        ("forward_backward", 1.6, (1.5, 1.1), False),  # slower for everybody
        ("forward_backward", 1.6, (1.0, 1.7), False),  # the same steps differ as much
        ("forward_backward", 1.1, (1.0, 1.1), False),
        ("forward", 1.6, (1.0, 1.1), False),
    ],
)
def test_a_gain_that_ends_when_parameters_change_is_refused(
    mode: str, ours: float, theirs: tuple[float, float], accused: bool
) -> None:
    arms: Any = {"candidate": Told(moved_parameters=(ours, 1.0)), "baseline": Told(moved_parameters=theirs)}
    samples = made(constant(4e-3), constant(1e-3), processes=2)
    session: Any = SimpleNamespace(workload=Mlp(mode=mode))
    reason = keeps_what_parameters_give(Case(session, [], "c", BITWISE), arms, samples)
    assert (reason is not None) is accused


class Shared:
    """An arm on a card that other programs use.

    busy:  the share of steps of 60 µs that wait for other programs
    keeps: by how much moved parameters lengthen a step, in steps
    """

    def __init__(self, noise: Random, busy: float, keeps: float) -> None:
        self.noise, self.busy, self.keeps = noise, busy, keeps
        self.batches, feed = range(4), SimpleNamespace(pause=lambda: None)
        self.program = SimpleNamespace(feed=feed)

    def call(self, method: Callable[..., Any]) -> Any:
        return method(self)

    def restore(self) -> None:
        """No state."""

    def runner(self) -> Callable[[], None]:
        return self.restore

    def _step_s(self, run: Callable[[], None], moves: bool) -> float:
        waits = self.noise.random() < self.busy
        return 60e-6 * (1 + moves * self.keeps) + waits * self.noise.random() * 2e-3


@pytest.mark.parametrize(("busy", "keeps", "least", "most"), [(0.8, 0.0, 0, 0), (0.2, 2.0, 390, 400)])
def test_a_shared_card_accuses_no_honest_program_of_keeping_results(
    busy: float, keeps: float, least: int, most: int
) -> None:
    noise, session = Random(1), SimpleNamespace(workload=Mlp(mode="forward_backward"))
    arms: Any = {"candidate": Shared(noise, busy, keeps), "baseline": Shared(noise, busy, 0.0)}
    samples = made(constant(4e-3), constant(1e-3), processes=2)
    case = Case(session, [], "c", BITWISE)  # type: ignore[arg-type]
    found = sum(keeps_what_parameters_give(case, arms, samples) is not None for _ in range(400))
    assert least <= found <= most


@pytest.mark.parametrize(("ours", "quickest", "refused"), [(4e-4, 1e-3, False), (7e-4, 2e-3, True), (3e-4, 4e-4, True)])
def test_a_feed_does_not_compute_before_the_clock_starts(ours: float, quickest: float, refused: bool) -> None:
    """Held against what a step takes at least: on a busy machine none of the blocks was as quick as a single one."""
    samples = made(constant(1e-3), constant(1e-5), processes=2)
    samples[1].alone = {"baseline": [9e-3, quickest]}
    arms: Any = {"candidate": Told(restart_s=ours), "baseline": Told(restart_s=1e-6)}
    assert (works_in_reset(case(BITWISE), arms, samples) is not None) is refused


@pytest.mark.parametrize(
    ("mode", "carries", "steps"), [("forward", False, 1), ("forward", True, 3), ("train", False, 3)]
)
def test_steps_that_change_what_the_next_one_starts_from_are_followed(mode: str, carries: bool, steps: int) -> None:
    settings = SimpleNamespace(verification_seeds=2, thorough=False)
    experiment = SimpleNamespace(seed=0, dtype="float32")
    session: Any = SimpleNamespace(
        workload=Mlp(mode), settings=settings, experiment=experiment, in_turns=False, draws=Draws("key")
    )
    assert Case(session, (), "candidate", BITWISE, StepTraits(carries=carries)).plan().steps == steps


def case(promise: Contract, dtype: str = "float32", in_turns: bool = False) -> Case:
    experiment = SimpleNamespace(dtype=dtype)
    session: Any = SimpleNamespace(experiment=experiment, draws=Draws("key"), in_turns=in_turns)
    return Case(session, (), "candidate", promise)


@pytest.mark.parametrize(
    ("promise", "theirs", "ours", "refused"),
    [
        (BITWISE, copying(4), copying(4), False),
        (BITWISE, copying(4), copying(1, 1, 1, 1), False),
        (BITWISE, copying(4), copying(4, 1), False),
        (BITWISE, copying(4), copying(), True),
        (BITWISE, copying(4), copying(2), True),
        (BITWISE, copying(4), copying(4, kind="DtoD"), True),
        (precision("tf32"), copying(4), copying(2), True),
        (precision("bfloat16"), copying(4), copying(2), False),
        (precision("bfloat16"), copying(4), copying(1), True),
        (BITWISE, copying(0.1), copying(), False),  # batches lie on the device: what is copied is something else
        (BITWISE, copying(), copying(), False),
    ],
)
def test_batches_that_reach_the_device_untimed_are_refused(
    promise: Contract, theirs: Trace, ours: Trace, refused: bool
) -> None:
    reason = leaves_out_copies(case(promise), theirs, ours, 4 * MIB)
    assert (reason is not None) is refused
    if reason:
        assert reason.startswith("the candidate copies ")
        assert "the bare program 4:" in reason
