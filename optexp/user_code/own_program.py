"""A program of a user's code, whose model takes more than the tensors of a batch one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optexp.program import Batch, Program
from optexp.user_code.layout import Layout

UNCALLED = (
    "the step calls parts or methods of its model, and never model(...): strategies that change the model's call do not"
    " reach them; call them inside its forward"
)
INSIDE = (
    "the step calls its model inside another module, or by torch.func.functional_call, and never as model(...) by a"
    " variable that holds it: strategies that change the model's call do not reach it; where another module calls it,"
    " let that one be the model"
)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class OwnProgram(Program):
    """layout:      of its batches; None where a batch's tensors are the arguments
    called_with: arguments of the first call of the model, on the first batch, of a step that calls it as it likes
    """

    layout: Layout | None = field(default=None, compare=False)
    called_with: Arguments | None = field(default=None, compare=False)

    def rehearse(self, batch: Batch) -> None:
        """A step of the user's that calls parts of the model alone, as of a generator and its critic, runs whole."""
        if self.own_step and self.called_with is None:
            self.step(self, batch)
        else:
            self.predict(batch)

    def arguments(self, batch: Batch) -> Arguments:
        """Arguments of the model, the entries of a nested batch included."""
        if self.called_with is not None:
            return self.called_with
        if self.layout is None or self.layout.form is None:
            return super().arguments(batch)
        given, of_loss = self.layout.unpack(batch), self.layout.of_loss
        if isinstance(given, Mapping):
            return (), {key: value for key, value in given.items() if key not in of_loss}
        if not isinstance(given, (list, tuple)):
            return (given,), {}
        return tuple(given[: len(given) - len(of_loss)]), {}
