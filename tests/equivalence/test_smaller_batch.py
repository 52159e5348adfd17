"""A batch as small as an epoch's last: a wrong result fails, a refusal is a note."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from optexp.program import Batch, Program
from tests.equivalence.conftest import Net

USUAL = 8


class Uneven(Net):
    def remainder(self, generator: torch.Generator) -> Batch:
        return tuple(tensor[:3] for tensor in self.batch(generator))


def wrong(program: Program) -> Program:
    """The mean is taken over as many rows as there usually are."""
    loss = program.loss
    return replace(program, loss=lambda output, batch: loss(output, batch) * len(output) / USUAL)


def picky(program: Program) -> Program:
    step = program.step

    def checked(program: Program, batch: Any) -> Any:
        if len(batch[0]) != USUAL:
            raise ValueError("8 rows")
        return step(program, batch)

    return replace(program, step=checked)


def test_what_is_right_at_the_usual_size_alone_is_wrong(check: Any) -> None:
    found = check(Uneven(mode="forward_backward"), wrong, seeds=1)
    assert not found.ok
    assert any(failure.tensor == "loss" for failure in found.failures)


def test_a_refusal_is_a_note(check: Any) -> None:
    found = check(Uneven(mode="train"), picky, seeds=1)
    assert found.ok, found.headline
    assert any("as small as an epoch's last is not checked" in note and "8 rows" in note for note in found.notes)
