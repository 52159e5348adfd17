"""Two commands: a run and its steps are timed, equal ones are not called different, and a failed control refuses."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from random import Random

import pytest

from optexp.commands import ab
from optexp.duets import commands
from optexp.duets.commands import concluded
from optexp.duets.outcome import Outcome
from optexp.duets.program import Program, Steps
from optexp.errors import ConfigError, Failure
from optexp.measurement.clock import Timing
from optexp.measurement.samples import MAIN, SAME, Pair, Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.result import Result, Verdict

SETTINGS = MeasurementSettings(processes_min=3, processes_max=3)


def samples(head_s: float, again_s: float = 1.0, noise: float = 0.003, processes: int = 8) -> list[Sample]:
    """Processes of a command that takes 1 s, of another one, and of the first again."""
    random, found = Random(0), []
    for _ in range(processes):
        times = [seconds * random.lognormvariate(0, noise) for seconds in (1.0, head_s, again_s)]
        base, head, again = (Timing(1, seconds, None) for seconds in times)
        found.append(Sample([Pair(base, head, True, MAIN), Pair(base, again, True, SAME)]))
    return found


def program(code: str, steps: Steps | None = None, timeout_s: float = 20.0) -> Program:
    return Program("A", (sys.executable, "-c", code), steps, timeout_s)


@pytest.mark.parametrize(
    ("head_s", "again_s", "noise", "verdict"),
    [
        (1.1, 1.0, 0.003, Verdict.SLOWER),
        (0.9, 1.0, 0.003, Verdict.FASTER),
        (1.0, 1.0, 0.003, Verdict.SAME),
        (1.02, 1.0, 0.1, Verdict.INCONCLUSIVE),
        (0.9, 1.05, 0.003, Verdict.INVALID),
    ],
)
def test_verdicts(head_s: float, again_s: float, noise: float, verdict: Verdict) -> None:
    result = concluded(samples(head_s, again_s, noise), SETTINGS, "cpu", allow_foreign=False)
    assert result.verdict is verdict
    assert result.headline.startswith(verdict)
    outcome = Outcome("A", "B", "run", "commands", result)
    record = outcome.to_dict()
    assert outcome.line.startswith(f"A → B: {verdict}")
    assert (record["speedup"] is None) is (record["base_us"] is None) is (verdict is Verdict.INVALID)
    assert ("results not compared" in outcome.line) is verdict.measured
    assert ("; a run takes 1 s in A, " in re.sub(r"(99\d|100\d) ms|1\.0\d* s", "1 s", outcome.line)) is verdict.measured
    if verdict is Verdict.INVALID:
        assert "A/A: a second process of the baseline takes" in result.headline
    else:
        assert record["measurement"]["controls"]["A/A"]["ok"]


def test_another_program_on_the_card_refuses_unless_it_is_allowed() -> None:
    disturbed = samples(0.9)
    disturbed[0].foreign = ("process 7 (other)",)
    assert concluded(disturbed, SETTINGS, "cpu", allow_foreign=False).verdict is Verdict.INVALID
    assert concluded(disturbed, SETTINGS, "cpu", allow_foreign=True).verdict is Verdict.FASTER


def test_commands_with_different_numbers_of_steps_have_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(steps: dict[str, list[int]]) -> Result:
        monkeypatch.setattr(Program, "run", lambda self: Timing(steps[self.name].pop(0), 1.0, None))
        base, head = (Program(name, ("true",), None, 1.0) for name in "AB")
        return commands.duet(base, head, SETTINGS, "cpu", False, lambda text: None)

    unlike = counted({"A": [90] * 7, "B": [80] * 4})
    assert unlike.verdict is Verdict.INVALID
    assert "different numbers of steps: 90 of A and 80 of B" in unlike.headline
    assert unlike.speedup is None
    assert counted({"A": [90] * 7, "B": [90] * 4}).verdict.measured
    assert counted({"A": [90, 91, 89, 90, 92, 90, 91], "B": [80] * 4}).verdict.measured  # it runs for a time


def test_a_run_and_its_steps() -> None:
    code = "import time\nfor i in range(9): print('step', i); time.sleep(0.1 if i < 3 else 0.02)"
    whole = program(code).run()
    assert whole.steps == 1
    assert 0.4 < whole.wall_s < 5
    stepped = program(code, Steps(re.compile("^step"))).run()
    assert stepped.steps == 5
    assert 0.01 < stepped.wall_s < 0.09  # a line is read later than it is printed
    with pytest.raises(ConfigError, match=r"printed 9 lines .* at least 12"):
        program(code, Steps(re.compile("^step"), skip=10)).run()


def test_commands_that_fail() -> None:
    with pytest.raises(Failure, match=r"command A: exit status 1: [\s\S]*ValueError: wrong"):
        program("raise ValueError('wrong')").run()
    with pytest.raises(Failure, match="command A: exit status 3: it printed nothing"):
        program("raise SystemExit(3)").run()
    begin = time.monotonic()
    for first in ("pass", "os.close(1)"):
        with pytest.raises(Failure, match=r"no end within 0.2 s"):
            program(f"import os, time; {first}; time.sleep(60)", timeout_s=0.2).run()
    assert time.monotonic() - begin < 20
    with pytest.raises(ConfigError, match="no-such-program: No such file"):
        Program.of("B", "no-such-program x", None, 1.0).run()
    for command in ("", "python 'open"):
        with pytest.raises(ConfigError, match="command A"):
            Program.of("A", command, None, 1.0)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every round has a run of each and a second one of the first; one of each before does not count."""
    runs = list[str]()

    def run(self: Program) -> Timing:
        runs.append(self.words[1])
        return Timing(1, 0.5 if self.words[1] == "old" else 0.4, None)

    monkeypatch.setattr(Program, "run", run)
    monkeypatch.chdir(tmp_path)
    assert ab.main(["echo old", "echo new", "measurement.processes_max=6", "device=cpu", "--json", "found.json"]) == 0
    assert capsys.readouterr().out.startswith("A → B: FASTER, at least 1.25× (best estimate 1.25×")
    assert (tmp_path / "found.json").is_file()
    assert (runs[:2], runs.count("old"), runs.count("new")) == (["old", "new"], 11, 6)
    runs.clear()
    assert ab.main(["echo old", "echo new", "measurement=quick", "device=cpu"]) == 0
    assert capsys.readouterr().out.startswith("A → B: FASTER"), "one run of each would tell nothing"
    assert runs.count("new") == 1 + 5
    for mistake in (["echo old"], ["workload=mlp", "echo new"], [], ["echo old", "echo new", "no.such.key=1"]):
        assert ab.main(mistake) == 1
    assert capsys.readouterr().err.count("optexp.ab: ") == 4


def test_measuring_stops_by_the_rule_of_every_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(0)
    monkeypatch.setattr(Program, "run", lambda self: Timing(1, random.lognormvariate(0, 0.05), None))
    base, head = (Program(name, ("true",), None, 1.0) for name in "AB")
    settings = MeasurementSettings(processes_min=3, processes_max=7)
    result = commands.duet(base, head, settings, "cpu", False, lambda text: None)
    assert len(result.measurement.processes) == 7  # too noisy to stop before
    hurried = MeasurementSettings(processes_min=3, processes_max=7, budget_s=0.0)
    assert len(commands.duet(base, head, hurried, "cpu", False, lambda text: None).measurement.processes) == 3
