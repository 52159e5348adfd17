"""A user's first draft of a strategy: what is missing is one sentence, and other comparisons go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optexp.comparison.evaluation import engagements
from optexp.comparison.suggestions import installed
from optexp.errors import ConfigError
from optexp.program import STEPS, Program, ResidentFeed
from optexp.strategy import Evidence, Stage, Strategy
from optexp.trace import Trace
from optexp.workers.arm_setup import pair_of


class Draft(Strategy):
    """Gives what it is told to give."""

    stage = Stage.REWRITE

    def __init__(self, given: Any) -> None:
        self.given = given

    def apply(self, program: Program) -> Any:
        return self.given

    def evidence(self, before: Trace, after: Trace, notes: Any, counters: Mapping[str, float]) -> Any:
        return self.given

    name = "draft"


PROGRAM = Program(nn.Identity(), STEPS["forward"], ResidentFeed(torch.device("cpu")))


@pytest.mark.parametrize(
    ("given", "words"),
    [(PROGRAM, "returned Program"), (None, "returned NoneType"), ((PROGRAM, None), r"returned \(Program, NoneType\)")],
)
def test_apply_must_return_a_program_and_notes(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"draft: apply {words}: return the program and its notes"):
        pair_of(Draft(given), given)


def test_what_apply_must_return() -> None:
    assert pair_of(Draft(None), (PROGRAM, {"a": 1})) == (PROGRAM, {"a": 1})


def test_evidence_must_be_evidence() -> None:
    profile: Any = SimpleNamespace(trace=None, counters={})
    with pytest.raises(ConfigError, match=r"draft: evidence returned true: return Evidence\(engaged, text\)"):
        engagements([Draft(True)], profile, profile, {})
    assert engagements([Draft(Evidence(True, "seen"))], profile, profile, {})[0].text == "seen"


def test_a_draft_is_no_advice_and_ends_no_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    group = tmp_path / "conf" / "strategy"
    group.mkdir(parents=True)
    (tmp_path / "a_draft_that_fails.py").write_text("1 / 0\n")
    (group / "without_a_first_line.yaml").write_text("_target_: a_draft_that_fails.Draft\ncount: 1\n")
    (group / "fails.yaml").write_text("# @package strategy.fails\n_target_: a_draft_that_fails.Draft\n")
    (group / "no_yaml.yaml").write_text("# @package strategy.no_yaml\n_target_: [\n")
    names = {strategy.name for strategy in installed()}
    assert "amp" in names
    assert not names & {"without_a_first_line", "fails", "no_yaml"}
