"""Files that a search leaves for its user beside the record, written once the winner is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from optexp.comparison.session import Session
from optexp.records import filenames
from optexp.strategy import Strategy, label


def hand_over(session: Session) -> str:
    """Write the winner's files into the job's folder; the name of the one with its stack.

    `repro.py` is there already, as of any comparison.
    """
    (session.output / filenames.STACK).write_text(stack_yaml(session.stack))
    return filenames.STACK


def stack_yaml(stack: Sequence[Strategy]) -> str:
    """A stack as one choice of the group `strategy`, for a configuration folder."""
    members = [strategy.name for strategy in stack]
    options = {strategy.name: dict(strategy.changed_options) for strategy in stack if strategy.changed_options}
    body: dict[str, Any] = {"defaults": [*members, *(["_self_"] if options else [])], **options}
    return (
        f"# @package strategy\n# {label(stack)}: as conf/strategy/tuned.yaml in the working folder it is"
        f" strategy=tuned\n{OmegaConf.to_yaml(OmegaConf.create(body))}"
    )
