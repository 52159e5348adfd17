"""`python -m optexp.ab --base`: the arms of both versions, on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from optexp.commands import ab
from tests.duets.conftest import git

WORKLOAD = ["workload=module", "workload.path=net.py", "device=cpu"]
SHORT = ["measurement=quick", "measurement.pairs=10", "measurement.warmup_s=0.2", "measurement.load_s=0"]


@pytest.mark.slow
def test_two_commits_beside_each_other(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The base is a worktree, and so is the head, which waits twenty times as long."""
    asked = ["--base", "HEAD~2", "--head", "HEAD~1", "--no-verify", "--json", "found.json", *WORKLOAD, *SHORT]
    assert ab.main(asked) == 0
    line = capsys.readouterr().out
    assert ": SLOWER, at least" in line
    assert "results not compared (--no-verify)" in line
    record = json.loads((repository / "found.json").read_text())
    assert 5 < record["head_us"] / record["base_us"] < 30
    assert record["measurement"]["controls"]["A/A"]["ok"]
    assert record["base"] == git(repository, "rev-parse", "HEAD~2")[:9]
    assert git(repository, "worktree", "list").count("\n") == 0


@pytest.mark.slow
def test_other_results_are_not_timed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The working tree computes something else than the commit before."""
    assert ab.main(["--base", "HEAD~1", *WORKLOAD, *SHORT]) == 3
    line = capsys.readouterr().out
    assert "→ working tree: NOT_EQUIVALENT" in line
    assert "--no-verify compares times alone" in line
    assert ab.main(["--base", "nowhere", *WORKLOAD]) == 1


@pytest.mark.slow
def test_equal_results_and_another_environment(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head's wait is shorter again; and this very environment, as if it were another one."""
    git(repository, "checkout", "-q", "HEAD~1")
    assert ab.main(["--base", "HEAD~1", *WORKLOAD, *SHORT]) == 0
    line = capsys.readouterr().out
    assert ": SLOWER, at least" in line
    assert "; results compared; a step takes " in line
    assert ab.main(["--base-env", sys.prefix, *WORKLOAD, *SHORT]) == 0
    assert "results not compared (another environment)" in capsys.readouterr().out
