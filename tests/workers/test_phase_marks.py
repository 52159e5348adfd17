"""Phases of built-in and of users' own steps: each is a range while a profile is made, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexp.profiling.regions import phases as rows
from optexp.program import Program, ResidentFeed
from optexp.program.steps import STEPS
from optexp.trace import Trace, record
from optexp.user_code.train_step import TrainStep
from optexp.workers.phase_marks import phases

CPU = torch.device("cpu")


def program(step: Any, scaler: torch.amp.GradScaler | None = None) -> Program:
    torch.manual_seed(0)
    model, feed = nn.Linear(8, 2), ResidentFeed(CPU)
    feed.reset([(torch.randn(16, 8), torch.randint(2, (16,)))])
    optimizer = torch.optim.Adam(model.parameters())
    loss = lambda output, batch: nn.functional.cross_entropy(output, batch[-1])  # noqa: E731
    return Program(model, step, feed, loss=loss, targets=1, optimizer=optimizer, scaler=scaler)


def loop(model: Any, batch: Any, optimizer: Any) -> Any:
    """A training step as a user writes it: two parts of a batch, and clipping."""
    for images, labels in zip(*(part.chunk(2) for part in batch), strict=True):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def traced(held: Program, folder: Path) -> dict[str, float]:
    """Calls of each phase in a step."""
    held.run()
    with phases(held) as marked:
        record(lambda: held.step(marked, held.feed.next()), 2, folder / "trace.json.gz", CPU)
    return {row.name: row.calls for row in rows(Trace.read(folder / "trace.json.gz"))}


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (STEPS["forward"], {"forward": 1}),
        (STEPS["forward_backward"], {"forward": 1, "loss": 1, "backward": 1}),
        (STEPS["train"], {"forward": 1, "loss": 1, "backward": 1, "optimizer": 1}),
        (TrainStep(loop, unpack=lambda batch: batch), {"forward": 2, "backward": 2, "optimizer": 1}),
    ],
)
def test_each_phase_of_a_step_is_a_range(step: Any, calls: dict[str, float], tmp_path: Path) -> None:
    assert traced(program(step), tmp_path) == calls | {"rest": 1}


def test_a_scalers_step_and_update_are_the_optimizers(tmp_path: Path) -> None:
    scaled = program(STEPS["train"], torch.amp.GradScaler("cpu"))
    assert traced(scaled, tmp_path)["optimizer"] == 2  # the step inside the scaler's counts once


def test_the_step_computes_what_it_did_and_nothing_stays_behind() -> None:
    plain, held = program(STEPS["train"]), program(STEPS["train"])
    functions = torch.autograd.backward, torch.autograd.grad
    with phases(held) as marked:
        assert torch.autograd.backward is not functions[0]
        for _ in range(3):
            ours, theirs = held.step(marked, held.feed.next()), plain.run()
            assert torch.equal(ours["loss"], theirs["loss"])
    assert (torch.autograd.backward, torch.autograd.grad) == functions
    assert "step" not in vars(held.optimizer)


def test_a_step_of_an_optimizer_that_is_its_own_attribute_is_put_back() -> None:
    held = program(STEPS["train"])
    assert held.optimizer is not None
    own: Callable[..., Any] = held.optimizer.step
    held.optimizer.step = own  # type: ignore[method-assign]  # as torch.compile(optimizer.step) is
    with pytest.raises(ValueError, match="mine"), phases(held):
        raise ValueError("mine")
    assert vars(held.optimizer)["step"] is own
