"""The command line: what it accepts, what it says about mistakes, and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from optexp.comparison import runner
from optexp.config import overrides, resolve, search_path
from optexp.config.experiment import _build_all, _strategy_nodes
from optexp.errors import ConfigError, TrackingError
from optexp.reporting import tracking
from optexp.reporting.tracking import Run
from optexp.result import Result, Verdict
from optexp.sweeps import exit_status
from optexp.workers.pool import ArmPool

ROOT = Path(exit_status.__file__).resolve().parents[2]
Cli = Callable[..., int]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("strategy=amp", "strategy=amp"),
        ("strategy=amp+cuda_graph", "strategy=[amp,cuda_graph]"),
        ("strategy=amp,amp+fusion,[amp,inplace]", "strategy=amp,[amp,fusion],[amp,inplace]"),
        ("strategy=[amp+fusion]", "strategy=[amp,fusion]"),
        ("baseline=amp+fusion", "baseline=[amp,fusion]"),
        ("strategy.fusion.mode=default,reduce-overhead", "++strategy.fusion.mode=default,reduce-overhead"),
        ("workload.dim=3", "++workload.dim=3"),
        ("++workload.dim=3", "++workload.dim=3"),
        ("~tracking.uri", "~tracking.uri"),
        ("hydra.run.dir=x", "hydra.run.dir=x"),
        ("hydra/launcher=joblib", "hydra/launcher=joblib"),
        ("workload=mlp", "workload=mlp"),
        ("--help", "--help"),
    ],
)
def test_what_people_type_is_made_what_hydra_reads(typed: str, read: str) -> None:
    assert overrides.rewrite([typed]) == [read]


@pytest.mark.parametrize("command", ["env | grep A > b.txt", 'echo "${X}" >> it\'s.txt', "a\\'b\\"])
def test_a_command_of_a_shell_needs_no_quotes_of_hydra(command: str) -> None:
    (read,) = overrides.rewrite([f"regression.on_alert={command}"])
    assert search_path.compose([read]).regression.on_alert == command
    assert overrides.rewrite(["regression.on_alert='a b'"]) == ["++regression.on_alert='a b'"]


# --- in this process, with a runner that measures nothing --------------------------------------------------------


@pytest.fixture
def ran() -> list[str]:
    """The label of every job that ran."""
    return []


@pytest.fixture
def cli(ran: list[str], command_line: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `optexp <arguments>` in an empty folder; a job's verdict is its only strategy's, from `verdicts`."""
    verdicts = {"cuda_graph": Verdict.UNSUPPORTED, "amp": Verdict.NOT_EQUIVALENT, "inplace": Verdict.NOT_ENGAGED}

    def run(config: DictConfig, output: Path, **_: Any) -> Result:
        try:
            job = resolve(config)
        except ConfigError as error:
            label, verdict, text = "error", Verdict.ERROR, str(error)
        else:
            label = "+".join(s.label for s in job.strategies) or "baseline"
            verdict, text = verdicts.get(label, Verdict.SAME), "; ".join(job.notes)
        ran.append(f"{label} ({text})" if text else label)
        result = Result(verdict, text, str(config.workload), [label], "cpu", 0)
        output.mkdir(parents=True, exist_ok=True)
        result.write(output / "result.json")
        return result

    monkeypatch.setattr(runner, "run", run)
    return lambda *arguments: command_line(*arguments, "tracking.enabled=false")


@pytest.mark.parametrize(
    ("strategy", "status"), [("baseline", 0), ("amp", 3), ("inplace", 4), ("cuda_graph", 4), ("fusion", 0)]
)
def test_the_exit_status_of_a_run_is_its_verdicts(cli: Cli, strategy: str, status: int) -> None:
    assert cli("workload=mlp", f"strategy={strategy}") == status


@pytest.mark.parametrize(
    ("strategies", "status"),
    [("baseline,cuda_graph", 0), ("baseline,inplace", 4), ("amp,inplace,cuda_graph", 3)],
)
def test_the_exit_status_of_a_sweep_is_its_worst_jobs(cli: Cli, ran: list[str], strategies: str, status: int) -> None:
    assert cli("-m", "workload=mlp", f"strategy={strategies}") == status
    assert ran == strategies.split(",")


def test_a_sweep_over_stacks_with_an_option_of_one_member(cli: Cli, ran: list[str]) -> None:
    assert cli("-m", "strategy=fusion,[amp,fusion],cuda_graph", "strategy.fusion.fullgraph=true") == 0
    option = "strategy.fusion.fullgraph=true does not apply, because fusion is not in the stack: ignored"
    assert ran == ["fusion[fullgraph=True]", "amp+fusion[fullgraph=True]", f"cuda_graph ({option})"]


def test_a_sweep_over_an_option(cli: Cli, ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("-m", "strategy=fusion", "strategy.fusion.mode=default,reduce-overhead") == 0
    assert ran == ["fusion", "fusion[mode=reduce-overhead]"]
    assert "optexp: 2 jobs, about " in capsys.readouterr().err


def test_a_key_that_only_some_workloads_have_is_applied_where_it_fits(
    cli: Cli, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("-m", "workload=gelu,mlp", "workload.layers=2") == 0
    note = "workload.layers=2 does not apply to gelu: ignored"
    assert ran == [f"baseline ({note})", "baseline"]
    assert capsys.readouterr().err.startswith(f"optexp: {note}\noptexp: 2 jobs, about ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["workload=mlp,gelu", "workload.layrs=2"], ["layrs=2: there is no such key", "did you mean layers?"]),
        (["dtype=float32,flaot16"], ["dtype=flaot16 is not allowed", "in the job dtype=flaot16; none was started"]),
    ],
)
def test_a_mistake_in_any_job_is_found_before_the_first_runs(
    cli: Cli, ran: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert cli("-m", *arguments) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words), message
    assert ran == []
    assert not Path("multirun").exists()


def test_runs_of_the_same_second_have_folders_of_their_own(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra.core.utils.datetime", At)
    for arguments, folder in ((["workload=mlp"], "outputs"), (["-m", "workload=mlp"], "multirun")):
        for place in ("12-00-00", "12-00-00-2"):
            assert cli(*arguments) == 0
            assert list(Path(folder, "2026-01-01", place).rglob("result.json"))


class At(datetime):
    """Time stands still."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> At:
        return cls(2026, 1, 1, 12, tzinfo=tz)


@pytest.mark.parametrize("arguments", [["workload=mlp"], ["-m", "workload=mlp,gelu"]])
def test_where_no_folder_can_be_made_a_sentence_says_so(
    cli: Cli, ran: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    for name in ("outputs", "multirun"):
        Path(name).write_text("a file")
    assert cli(*arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("optexp: cannot write ")
    assert message.count("\n") == 1
    assert ran == []


def test_a_job_that_left_nothing_is_an_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", lambda config, output, **_: None)
    assert cli("workload=mlp") == 1


def test_a_study(cli: Cli, ran: list[str]) -> None:
    assert cli("experiments=mlp_stacks", "strategy=fusion,amp+fusion") == 0
    assert ran == ["fusion", "amp+fusion"]


def test_strategies_from_a_folder_named_on_the_command_line(cli: Cli, ran: list[str], tmp_path: Path) -> None:
    group = tmp_path / "else where" / "strategy"
    group.mkdir(parents=True)
    node = "# @package strategy.half\n_target_: optexp.strategies.amp.Amp\ndtype: float16\n"
    (group / "half.yaml").write_text(node)
    arguments = ["baseline=[half]", "strategy.half.dtype=bfloat16", f"hydra.searchpath=['file://{group.parent}']"]
    assert cli("-m", "strategy=half,baseline", *arguments) == 0
    note = "strategy.half.dtype=bfloat16 does not apply, because half is not in the stack: ignored"
    assert ran == ["half", f"baseline ({note})"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, signal.SIGTERM])
def test_an_interrupted_run(cli: Cli, monkeypatch: pytest.MonkeyPatch, raised: type | signal.Signals) -> None:
    def run(config: DictConfig, output: Path, **_: Any) -> None:
        if isinstance(raised, signal.Signals):
            os.kill(os.getpid(), raised)
            time.sleep(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", run)
    assert cli("workload=mlp") == 130


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["workload=nope"], ["workload=nope is not a choice", "gelu", "mlp"]),
        (["workload=mpl"], ["did you mean mlp?"]),
        (["strategy=[amp,fusoin]"], ["strategy=fusoin is not a choice", "did you mean fusion?", "cuda_graph"]),
        (["measurement=fast"], ["measurement=fast is not a choice", "default, quick"]),
        (["experiments=nope"], ["experiments=nope is not a choice", "mlp_stacks"]),
        (["workloads=mlp"], ["workloads: there is no such key", "did you mean workload?"]),
        (["hydra.jobb=1"], ["hydra.jobb", "--cfg hydra"]),
        (["strategy=amp,fusion"], ["strategy=[amp,fusion]", "-m"]),
        (["-m", "strategy=amp,nope"], ["strategy=nope is not a choice"]),
        (["strategy=null"], ["strategy=[]"]),
        (["strategy"], ["cannot read 'strategy'", "key=value"]),
        (["strategy=[amp"], ["cannot read 'strategy=[amp'"]),
        (["workload.inputs=[{shape:"], ["cannot read 'workload.inputs=[{shape:'", "quote"]),
        (["workload=module", "workload.inputs={shape: [2]}"], ["as in workload.inputs=[{shape: [2]}]"]),
        (["dtype=flaot32"], ["dtype=flaot32", "did you mean float32?"]),
        (["workload.batch_size=-3"], ["workload.batch_size=-3 must be at least 1"]),
        (["mode=trian"], ["mode=trian", "workload.mode=train"]),
        (["mode=profle"], ["did you mean profile?"]),
        (["workload=module", "workload.path=none.py"], ["workload.path=none.py: there is no such file"]),
        (["workload=module", "workload.target=nett:Net", "workload.inputs=[{shape:[2]}]"], ["no module 'nett' here"]),
        (["strategy=half"], ["strategy.half: Half has no evidence", "evidence(self, before, after, notes, counters)"]),
        (
            ["workload=module", "workload.target=drafts_of_strategies.py:Haf", "workload.inputs=[{shape:[2]}]"],
            ["workload.target=drafts_of_strategies.py:Haf: drafts_of_strategies.py has no 'Haf' (did you mean Half?"],
        ),
        (["workload=module", "workload.path=drafts_of_strategies.py"], ["has no Model", "workload.names.model=Half"]),
        (["workload=module", "workload.path=broken.py"], ["optexp: broken.py:2: SyntaxError: ", ", in `class Net(:`"]),
        (["workload=script", "workload.path=broken.py"], ["optexp: broken.py:2: SyntaxError: "]),
        (["workload=module", "workload.target=broken:Net"], ["broken.py:2: SyntaxError: "]),
        (["baseline=[{replace: {target: broken.py:Net}}]"], ["optexp: broken.py:2: SyntaxError: "]),
        (["-m", "strategy=replace", "strategy.replace.target=broken.py"], ["broken.py:2: SyntaxError: ", "in the job"]),
        (["strategy=replace"], ["replace: name your second implementation, as in strategy.replace.target=file.py:"]),
        (["strategy.replace.target=drafts_of_strategies:Now", "strategy=replace"], ["strategies has no 'Now'"]),
        (
            ["strategy=replace", "strategy.replace.target=no.py:New"],
            ["strategy.replace.target=no.py: there is no such"],
        ),
        (["baseline=[{replace: {target: no.py}}]"], ["strategy.replace.target=no.py: there is no such file"]),
        (["strategy=amp", "strategy.amp._target_=optexp.strategies.amp.Ampp"], ["has no 'Ampp'"]),
        (["strategy=nowhere"], ["strategy.nowhere: Nowhere has no stage"]),
        (["strategy=bare"], ["strategy=bare: the first line", "`# @package strategy.bare`"]),
        (["baseline=bare"], ["strategy=bare: the first line", "`# @package strategy.bare`"]),
    ],
)
def test_a_mistake_gets_one_line(
    cli: Cli, ran: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    first_drafts()
    assert cli(*arguments) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("optexp: ")
    assert not Path("outputs").exists()
    assert all(word in message for word in words), message
    assert ran == []


def test_a_strategy_that_needs_another_device_starts_no_arm(
    command_line: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArmPool, "start", lambda *_: pytest.fail("an arm was started"))
    words = {"cuda_graph": "CUDA Graphs need", "streams": "work runs", "tf32": "TF32 is", "prefetch": "batches are"}
    words |= {"memory_pool": "pools are of", "pinned_memory": "batches are", "cpu_affinity": "on a CPU, cores"}
    strategies = {name: _build_all(_strategy_nodes([name], "strategy"), "strategy")[0] for name in words}
    for name, strategy in strategies.items():
        reason = strategy.unsupported_on(torch.device("cpu")) or ""
        assert reason.startswith(words[name])
        assert not reason.startswith(name)  # which stands before it already
        assert strategy.unsupported_on(torch.device("cuda")) is None

    def away(*_: object) -> Run:
        raise TrackingError("away")

    monkeypatch.setattr(tracking, "start", away)
    settings = ["workload=gelu", "strategy=cuda_graph", "device=cpu", "isolation=none", "hydra.run.dir=out"]
    assert command_line(*settings) == 4
    found = Result.read(Path("out/result.json"))
    assert found.headline.startswith("UNSUPPORTED: cuda_graph: CUDA Graphs need a CUDA device")
    assert any(note.startswith("not in MLflow: away") for note in found.notes)
    assert "UNSUPPORTED" in capsys.readouterr().out


DRAFTS = """
from dataclasses import dataclass
from optexp.strategy import Evidence, Stage, Strategy

@dataclass
class Half(Strategy):
    stage = Stage.REWRITE
    def apply(self, program):
        return program, {}

@dataclass
class Nowhere(Strategy):
    def apply(self, program):
        return program, {}
    def evidence(self, before, after, notes, counters):
        return Evidence(True, "")
"""


def first_drafts() -> None:
    """Strategies in the working folder as people first write them."""
    Path("conf/strategy").mkdir(parents=True)
    Path("drafts_of_strategies.py").write_text(DRAFTS)
    Path("broken.py").write_text("import torch\nclass Net(:\n    pass\n")
    for name, first in (("half", True), ("nowhere", True), ("bare", False)):
        head = f"# @package strategy.{name}\n" if first else ""
        target = "Nowhere" if name == "nowhere" else "Half"
        Path(f"conf/strategy/{name}.yaml").write_text(f"{head}_target_: drafts_of_strategies.{target}\n")


# --- as a user does ----------------------------------------------------------------------------------------------


def optexp(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "optexp", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_help_is_quick_and_lists_the_choices(tmp_path: Path) -> None:
    before = os.times()
    shown = optexp("--help", folder=tmp_path)
    after = os.times()  # of processors: other tests run beside this one
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert shown.returncode == 0, shown.stderr
    assert "mlp" in shown.stdout.split("workload=")[-1]
    for group in ("workload", "strategy", "measurement", "experiments"):
        line = next(line for line in shown.stdout.splitlines() if line.split()[:1] == [f"{group}="])
        for path in (ROOT / ("experiments" if group == "experiments" else f"conf/{group}")).glob("*.yaml"):
            assert path.stem in line
    assert seconds < 1.5


def test_help_waits_for_no_slow_import(tmp_path: Path) -> None:
    code = (
        "import atexit, json, runpy, sys\n"
        "slow = ('torch', 'mlflow', 'scipy', 'matplotlib', 'triton')\n"
        "atexit.register(lambda: print(json.dumps([m for m in slow if m in sys.modules]), file=sys.stderr))\n"
        "sys.argv = ['optexp', '--help']\n"
        "runpy.run_module('optexp', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert json.loads(ended.stderr.splitlines()[-1]) == []


def test_a_misspelt_key_ends_with_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    ended = optexp("workload=mlp", "workload.layrs=3", "tracking.enabled=false", folder=tmp_path)
    assert ended.returncode == 1
    said = ended.stdout + ended.stderr
    assert "workload.layrs=3" in said
    assert "layers" in said
    assert "Traceback" not in said
