"""What the README tells people to type, typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from optexp.result import Result, Verdict

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def block(language: str, after: str) -> str:
    """The first code block of a language after some words."""
    found = re.search(rf"```{language}\n(.*?)```", README.read_text().partition(after)[2], re.DOTALL)
    assert found
    return found[1]


QUICK = "device=cpu measurement=quick measurement.warmup_s=0.1 measurement.pairs=10 measurement.process_s=1"
HERE = "tracking.enabled=false hydra.run.dir=out"


def run(folder: Path, command: list[str], *more: str) -> tuple[Result, str]:
    """A command of the README as it is typed in a folder, with the least measuring; its record and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    typed = [sys.executable, *command, *QUICK.split(), *HERE.split(), *more]
    done = subprocess.run(typed, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return Result.read(folder / "out" / "result.json"), done.stdout + done.stderr


def test_the_model_of_the_readme_reaches_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(block("python", "`net.py`"))
    command = shlex.split(block("console", "`net.py`"))
    assert command[0] == "python"
    result, printed = run(tmp_path, command[1:], "verify=only")
    assert result.verdict is Verdict.VERIFIED, printed
    assert result.strategy == ["amp"]


# Files and packages that a page leaves to its reader; studies, which take minutes.
ELSEWHERE = ("problem.py", "before.py", "port.py", "hand.py", "int8.py", "transformers", "experiments=")


def typed() -> list[str]:
    """Commands of the pages for users that run on a CPU, in a folder with the README's `net.py`."""
    pages = README, ROOT / "docs" / "own_models.md", ROOT / "docs" / "strategies.md"
    text = "".join(page.read_text() for page in pages).replace("\\\n", " ")
    lines = re.findall(r"^python -m optexp .*=.*$", text, re.MULTILINE)
    plain = (
        shlex.join(shlex.split(line, comments=True)) for line in lines if not any(word in line for word in ELSEWHERE)
    )
    return list(dict.fromkeys(plain))


@pytest.mark.slow
@pytest.mark.parametrize("command", typed())
def test_commands_of_the_pages_for_users_end_in_a_verdict(command: str, tmp_path: Path) -> None:
    """With the least measuring. On a CPU a CUDA graph is UNSUPPORTED, with a reason: a verdict as any other."""
    (tmp_path / "net.py").write_text(block("python", "`net.py`"))
    more = [*QUICK.split(), "tracking.enabled=false", "hydra.run.dir=out", "hydra.sweep.dir=out"]
    several = {"mode=auto": ["auto.trials=1"], "mode=profile": [], "mode=ablate": []}
    more += next((words for mode, words in several.items() if mode in command), ["verify=only"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *shlex.split(command)[1:], *more]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    assert list((tmp_path / "out").rglob("result.json"))


def test_the_strategy_of_the_readme_reaches_a_verdict(tmp_path: Path) -> None:
    """In a folder of one's own: the working folder's modules and its conf/ are found."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "threads.py").write_text(block("python", "`strategies/threads.py`"))
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    target = block("yaml", "`conf/strategy/threads.yaml`").replace("optexp.strategies.threads", "mine.threads")
    (tmp_path / "conf" / "strategy" / "threads.yaml").write_text(target)
    small = "workload.dim=16 workload.batch_size=8"
    result, printed = run(tmp_path, f"-m optexp workload=mlp strategy=threads {small}".split())
    alone = "1 threads became 1" in result.headline  # a machine with one core
    assert result.verdict.measured or alone, printed
    assert alone or re.fullmatch(r"\d+ threads became 1", result.evidence[0].text)
