"""Stacks are put in order, and members that cannot work together are refused before anything starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from optexp.comparison.case import Case
from optexp.comparison.referee import Referee
from optexp.comparison.session import Session
from optexp.config import Experiment
from optexp.errors import Unsupported
from optexp.measurement.settings import MeasurementSettings
from optexp.program import Program
from optexp.reporting.terminal import Progress
from optexp.strategies.amp import Amp
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.inplace import Inplace
from optexp.strategies.replace import Replace
from optexp.strategy import (
    REASSOCIATES,
    Contract,
    Evidence,
    Notes,
    Stage,
    Strategy,
    compose,
    contract,
    environment,
    label,
    precision,
)
from optexp.support.stopwatch import Stopwatch
from optexp.workers.pool import ArmPool
from optexp.workloads.gelu import Gelu


@dataclass
class Allocates(Strategy):
    """Needs a variable of its arm."""

    stage = Stage.MEMORY

    called: str = "allocates"
    value: str = "a"
    needs: str | None = None
    bars: str | None = None

    @property
    def name(self) -> str:
        return self.called

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.needs} if self.needs else ())

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({self.bars} if self.bars else ())

    def environment(self) -> Mapping[str, str]:
        return {"ALLOCATOR": self.value}

    def apply(self, program: Program) -> tuple[Program, Notes]:
        return program, {}

    def evidence(self, *_: object) -> Evidence:
        return Evidence(True, "")


OTHER = Allocates(called="other")


def test_any_order_on_the_command_line_folds_by_stage():
    stack = [FusedOptimizer(), Amp(), Inplace(), Replace("a:b")]
    assert [s.name for s in compose(stack)] == ["replace", "inplace", "amp", "fused_optimizer"]
    assert compose(stack[::-1]) == compose(stack)


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ([Allocates(value="b"), OTHER], "needs ALLOCATOR=a and allocates needs ALLOCATOR=b: leave one out"),
        ([Allocates(needs="capture")], "allocates needs capture in the stack: add it"),
        ([Allocates(bars="other"), OTHER], r"does not work with other(\[.*\])?: leave one out"),
        ([Allocates(bars="memory"), OTHER], r"does not work with other(\[.*\])?: leave one out"),
    ],
)
def test_members_that_disagree_are_refused(stack: list[Strategy], words: str):
    for order in (stack, stack[::-1]):
        with pytest.raises(Unsupported, match=words):
            compose(order)


def test_members_that_agree_share_their_variables():
    assert environment(compose([Allocates(), OTHER])) == {"ALLOCATOR": "a"}
    assert compose([Allocates(needs="memory"), OTHER])


@dataclass
class TwoFaced(Allocates):
    """Another promise and another name whenever it is asked."""

    asked: ClassVar[int] = 0

    def environment(self) -> Mapping[str, str]:
        return {}

    @property
    def contract(self) -> Contract:
        TwoFaced.asked += 1
        return precision("bfloat16") if TwoFaced.asked % 2 else REASSOCIATES

    @property
    def label(self) -> str:
        TwoFaced.asked += 2
        return f"two-faced-{TwoFaced.asked}"


def test_members_are_asked_once_what_they_promise_and_are_called(
    tmp_path: Path, experiment: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
):
    """The limits of the judge, the record and the headline are of one promise."""
    monkeypatch.setattr("optexp.strategies.inplace.Inplace", TwoFaced)
    asked = experiment("workload=gelu", "strategy=inplace", "device=cpu", "isolation=none")
    with Progress() as progress:
        session = Session(asked, "cpu", tmp_path, Stopwatch(), progress)
        try:
            judged = Referee(Case.of(session, session.stack, "candidate"))
            assert session.result.strategy == [label(session.stack)] == [session.result.config["strategy"]]
            assert judged.case.promise == session.contract == contract(session.stack)
            assert judged.found.contract == str(session.contract)
        finally:
            session.close()


def test_whoever_is_judged_by_a_precision_promises_it():
    @dataclass
    class Rough(Allocates):
        @property
        def contract(self) -> Contract:
            return Contract(1, "REASSOCIATES", "bfloat16")

    assert contract([Rough()]) == precision("bfloat16")


def test_nothing_starts_for_a_stack_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from optexp.comparison.adjudicate import Facts
    from optexp.comparison.modes import compare

    started: list[object] = []
    monkeypatch.setattr(ArmPool, "start", lambda self, specs: started.append(specs))
    experiment = Experiment(
        workload=Gelu(size=4),
        strategies=[Allocates(value="b"), OTHER],
        baseline=[],
        measurement=MeasurementSettings(),
        notes=[],
        resolved={},
    )
    with Progress() as progress:
        session = Session(experiment, "cpu", tmp_path, Stopwatch(), progress)
        try:
            with pytest.raises(Unsupported, match="leave one out"):
                compare.run(session, Facts(), lambda: None)
        finally:
            session.close()
    assert started == []


def test_a_precision_without_a_yardstick_is_refused_in_a_sentence() -> None:
    with pytest.raises(Unsupported, match=r"PRECISION\(float8_e4m3fn\) .* one of bfloat16, float16, tf32, int8$"):
        precision("float8_e4m3fn")


@dataclass
class Preloads(Allocates):
    preload: ClassVar = ("torch._dynamo", "torch_of_mine", "slows_all_others", "optexp.strategies.mine")

    def environment(self) -> Mapping[str, str]:
        """None: its arm and the baseline's are forked from one launcher."""
        return {}


def test_what_only_a_strategy_imports_is_not_imported_where_the_baseline_is_forked_from(
    tmp_path: Path, experiment: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake:
        imported: ClassVar[list[str]] = []

        def preload(self, modules: list[str], device_type: str) -> None:
            self.imported += modules

        def end_workers(self) -> None:
            pass

    monkeypatch.setattr("optexp.workers.pool.launcher", Fake)
    monkeypatch.setattr("optexp.strategies.inplace.Inplace", Preloads)
    asked = experiment("workload=gelu", "strategy=inplace", "device=cpu")
    with Progress() as progress:
        session = Session(asked, "cpu", tmp_path, Stopwatch(), progress)
        session.pool.launcher(())
        assert Fake.imported == []
        session.pool.launcher(session.stack)
        session.close()
    assert Fake.imported == ["torch._dynamo"]
