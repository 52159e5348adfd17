"""mode=ablate and mode=auto as commands, on a model whose second implementation is much faster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from optexp.comparison.adjudicate import Decision, adjudicate, facts_of
from optexp.comparison.laboratory import Bench
from optexp.comparison.search import Proposal
from optexp.errors import SPENT
from optexp.records.trials import Trial
from optexp.result import Problem, Result, Verdict
from optexp.support.units import ratio

NET = '''
import torch
from torch import nn


class Slow(nn.Module):
    """Sums rows one by one."""

    def forward(self, x):
        return torch.stack([row.sum() for row in x])


class Fast(nn.Module):
    def forward(self, x):
        return x.sum(-1)


class Wrong(nn.Module):
    def forward(self, x):
        return x[:, :-1].sum(-1)
'''
QUICK = [
    "workload=module", "workload.target=net.py:Slow", "workload.inputs=[{shape: [48, 16]}]", "device=cpu",
    "measurement=quick", "measurement.pairs=10", "measurement.process_s=0.5", "measurement.warmup_s=0.1",
    "measurement.verification_seeds=1", "profile.details=false", "hydra.run.dir=out",
]  # fmt: skip
FAST = "strategy.replace.target=net.py:Fast"


@pytest.fixture
def net(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)


def record() -> Result:
    return Result.read(Path("out/result.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_which_member_gives_what(command_line: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    off = "tracking.enabled=false"
    assert command_line(*QUICK, "mode=ablate", "strategy=[replace,inference_mode]", FAST, off) == 0
    found = record()
    assert found.verdict is Verdict.FASTER, found.headline
    assert [trial.label for trial in found.trials][1:] == ["replace[target=net.py:Fast]", "inference_mode"]
    ablation = found.ablation
    assert ablation is not None
    assert len(ablation.shapley) == len(ablation.cumulative) == len(ablation.leave_one_out) == 2
    new, mode = (entry.gain for entry in ablation.shapley)
    assert new is not None
    assert mode is not None
    assert new.estimate > 3 * mode.estimate
    assert new.low <= new.estimate <= (new.high or new.estimate)
    assert Result.read(Path("out/trials/2/result.json")).label == "inference_mode"
    assert Path("out/plots/waterfall.png").is_file()
    report = Path("out/report.html").read_text()
    assert "Which member gives what" in report
    assert 'href="trials/1/report.html"' in report
    assert "Shapley" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_a_search_keeps_what_is_faster_and_hands_it_over(
    command_line: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    search = ["mode=auto", "strategy=replace", FAST, "auto.trials=2", "auto.among=[inference_mode]"]
    store = "tracking.uri=sqlite:///mlflow.db"
    assert command_line(*QUICK, *search, store) == 0
    found = record()
    assert found.verdict is Verdict.FASTER, found.headline
    assert found.strategy[0].startswith("replace")
    first, second = found.trials
    assert first.kept
    assert (first.change, second.change) == ("replace[target=net.py:Fast]", "inference_mode")
    assert second.against == ["replace[target=net.py:Fast]"]
    beside = Result.read(Path("out/trials/2/result.json"))
    assert beside.profile.baseline is not None
    assert not Path("out/trials/2/traces/baseline.json.gz").exists(), "the first trial has verified it"
    assert found.measurement is not None
    assert found.measurement.comparisons == 1 + sum(trial.p_value is not None for trial in found.trials)
    assert found.measurement.p_holm is not None
    assert found.search is not None
    assert found.search.decision.startswith("Use replace")
    assert {entry.reason for entry in found.search.untried if entry.change == "amp"} == {
        "left out by auto.among or auto.without"
    }
    assert Path("out/repro.py").is_file()
    assert "target: net.py:Fast" in Path("out/strategy.yaml").read_text()
    assert "strategy=[replace]" in Path("out/trials/1/.hydra/overrides.yaml").read_text()
    shown = capsys.readouterr().out
    assert found.search.decision in shown
    assert "not tried" in shown
    assert nested() == {"trial"}


def nested() -> set[str]:
    """That the trials' runs lie below the job's."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri="sqlite:///mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("optexp").experiment_id])
    job = json.loads(Path("out/environment.json").read_text())["mlflow_run"]
    others = [run for run in runs if run.info.run_id != job]
    assert len(others) == 2
    return {"trial" if run.data.tags.get("mlflow.parentRunId") == job else "stray" for run in others}


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_a_winner_that_the_budget_leaves_no_time_for_is_named(
    command_line: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "last_s", lambda _: 1e6)
    search = ["mode=auto", "strategy=replace", FAST, "auto.among=[]", "tracking.enabled=false"]
    assert command_line(*QUICK, *search) == 0
    found, shown = record(), capsys.readouterr().out
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "not measured anew: the budget of 10 min was spent; its trials showed replace" in found.headline
    assert found.search is not None
    assert found.search.stack == found.trials[0].stack
    assert "is the best so far, and was not measured anew" in shown
    assert adjudicate(facts_of(found)) == Decision(Verdict.INCONCLUSIVE, found.search.not_anew)


@pytest.mark.usefixtures("net")
def test_a_search_that_keeps_nothing(command_line: Callable[..., int]) -> None:
    assert command_line(*QUICK, "mode=auto", "auto.among=[tf32,cuda_graph]", "tracking.enabled=false") == 4
    found = record()
    assert found.verdict is Verdict.UNSUPPORTED
    assert found.search is not None
    assert found.search.decision == "Keep the baseline: no change could be tried."
    reasons = {entry.change: entry.reason for entry in found.search.untried}
    assert reasons["cuda_graph"].startswith("UNSUPPORTED: CUDA Graphs need a CUDA device")
    assert not Path("out/strategy.yaml").exists()


@pytest.mark.usefixtures("net")
def test_a_wrong_result_is_cut_with_its_reason(command_line: Callable[..., int]) -> None:
    wrong = ["strategy=replace", "strategy.replace.target=net.py:Wrong", "auto.among=[]"]
    assert command_line(*QUICK, "mode=auto", *wrong, "tracking.enabled=false") == 3
    found = record()
    (trial,) = found.trials
    assert trial.verdict is Verdict.NOT_EQUIVALENT
    assert trial.gain is None
    assert trial.outcome.startswith("cut: ")
    assert "output" in trial.outcome, "the tensor that is wrong"
    assert found.search is not None
    assert found.search.decision == "Keep the baseline: no change is shown to be faster, of the one tried."


@pytest.mark.usefixtures("net")
def test_what_is_clearly_slower_is_not_verified(
    command_line: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    slower = ["workload.target=net.py:Fast", "strategy=replace", "strategy.replace.target=net.py:Slow"]
    assert command_line(*QUICK, "mode=auto", *slower, "auto.among=[]", "tracking.enabled=false") == 0
    found = record()
    assert found.headline == "SAME: the search kept nothing: 1 change tried, and nothing gained"
    (trial,) = found.trials
    assert trial.looked is not None
    assert trial.looked < 0.9
    assert trial.gain is None
    assert trial.outcome == f"rejected: {ratio(trial.looked)} in a first look at its time, and therefore not verified"
    beside = Result.read(Path("out/trials/1/result.json"))
    assert beside.equivalence is None
    assert "verification" not in beside.seconds
    assert adjudicate(facts_of(beside)) == Decision(beside.verdict, trial.reason)
    assert "in a first look" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mode=ablate", "strategy=inplace"], "name at least two strategies"),
        (["mode=auto", "auto.objective=energy"], "reads the meter of an NVIDIA GPU"),
        (["mode=auto", "auto.without=[ampp]"], "ampp is no strategy (did you mean amp?"),
        (["mode=auto", "measurement=textbook"], "leave measurement=textbook out"),
    ],
)
def test_mistakes_end_in_one_sentence(
    command_line: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert command_line(*QUICK, *arguments, "tracking.enabled=false") == 1
    assert words in "".join(capsys.readouterr())


def test_a_stack_that_cannot_be_composed_is_still_taken_apart(command_line: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    both = ["strategy=[replace,cuda_graph]", FAST]
    assert command_line(*QUICK, "mode=ablate", *both, "tracking.enabled=false") == 4
    found = record()
    assert found.verdict is Verdict.UNSUPPORTED
    assert {trial.label: trial.verdict for trial in found.trials[1:]} == {
        "replace[target=net.py:Fast]": Verdict.FASTER,
        "cuda_graph": Verdict.UNSUPPORTED,
    }
    assert found.ablation is not None
    assert found.ablation.cumulative[0].gain is not None
    assert "UNSUPPORTED" in found.ablation.cumulative[1].reason


def test_a_trial_gets_no_more_than_the_rest_of_the_budget(experiment) -> None:
    """And the longest one that was measured tells what the last measurement needs, for which time is left over."""
    limits, full = list[float](), experiment("mode=auto", "auto.budget=300").measurement
    cut = Problem(SPENT, "the time that was left for it is over", "", "candidate")
    ended = [
        (Trial(1, ["amp"], [], Verdict.SAME, seconds=80), None),
        (Trial(2, ["fusion"], [], Verdict.INCONCLUSIVE, seconds=170), cut),
    ]

    def compare(*_: object, until_s: float, **__: object) -> tuple[Trial, SimpleNamespace]:
        limits.append(until_s)
        trial, error = ended[len(limits) - 1]
        return trial, SimpleNamespace(error=error, profile=SimpleNamespace(bottlenecks=[]))

    watch = SimpleNamespace(begin=1000.0, seconds={"import": 3.0, "wait": 7.0})
    asked, pool = experiment("mode=auto", "auto.budget=300"), SimpleNamespace(until_s=float("inf"), preload=())
    session = SimpleNamespace(experiment=asked, settings=full, watch=watch, pool=pool)
    bench = Bench(cast(Any, session), [], lambda: None)
    bench.trials = cast(Any, SimpleNamespace(compare=compare))
    first = bench._trial(Proposal("x", []), [], full)
    bench.rounds = 2  # a stack was kept
    second = bench._trial(Proposal("x", []), [], full)
    assert pool.until_s == 1307.0
    assert limits == [1307.0, 1212.0]
    assert bench.last_s() == 80
    assert (first.reason, second.reason) == ("", "auto.budget was spent but for the last measurement")


WAITING = '''
import time
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from optexp.strategy import BITWISE, Evidence, Stage, Strategy


class Waits(nn.Module):
    """Waits twice, and longer while it waits once."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.waits = frozenset({"one", "two"})

    def forward(self, x):
        for _ in self.waits:
            time.sleep(0.004)
        if self.waits == {"one"}:
            time.sleep(0.012)
        return self.line(x)


@dataclass
class Less(Strategy):
    """Leaves one wait out."""

    stage: ClassVar[Stage] = Stage.REWRITE
    contract = BITWISE

    def apply(self, program):
        program.model.waits = program.model.waits - {self.name}
        return program, {}

    def evidence(self, before, after, notes, counters):
        return Evidence(True, "waits less")
'''


@pytest.mark.slow
def test_what_gains_in_a_combination_alone_is_found_by_first_looks(
    command_line: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    for name in ("one", "two"):
        node = f"# @package strategy.{name}\n_target_: waiting.Less\n"
        (tmp_path / "conf" / "strategy" / f"{name}.yaml").write_text(node)
    model = ["workload.target=waiting.py:Waits", "workload.inputs=[{shape: [4, 8]}]"]
    search = ["mode=auto", "auto.among=[one,two]", "auto.trials=1", "tracking.enabled=false"]
    assert command_line(*QUICK, *model, *search) == 0
    found = record()
    assert found.verdict is Verdict.FASTER, found.headline
    assert found.strategy == ["one", "two"]
    (trial,) = found.trials
    assert trial.change == "one+two"
    assert trial.why.startswith("first looks: one ")
    assert found.search is not None
    alone = {look.change: look.speedup or 0.0 for look in found.search.looks}
    assert alone["two"] < 1 < alone["one"] < alone["one+two"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "first looks 3, which verify nothing; the best: one+two" in shown
    assert "First looks: 3" in Path("out/report.html").read_text()
