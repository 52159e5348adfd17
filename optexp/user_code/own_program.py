"""A program of a user's code, whose model takes more than the tensors of a batch one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from optexp.errors import Unsupported
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
TRANSFORMED = (
    "the step calls its model inside torch.vmap or torch.func, where arguments have the shapes of one sample and no"
    " values: a strategy that runs the model by itself needs a step that calls it on a batch"
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
        """A step of the user's that calls parts of the model alone, as of a generator and its critic, runs whole; so
        does one that calls it inside torch.vmap."""
        if self.own_step and (self.called_with is None or is_transformed(self.called_with)):
            self.step(self, batch)
        else:
            self.predict(batch)

    def arguments(self, batch: Batch) -> Arguments:
        """Arguments of the model, the entries of a nested batch included.

        Raises:
            Unsupported: The step calls the model inside torch.vmap or torch.func.
        """
        if self.called_with is not None and is_transformed(self.called_with):
            raise Unsupported(TRANSFORMED)
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


def is_transformed(called_with: Arguments) -> bool:
    """Whether a model was called on tensors of torch.func's, which are none outside of its call."""
    leaves = (leaf for leaf in tree_leaves(called_with) if isinstance(leaf, Tensor))
    return any(map(is_functorch_wrapped_tensor, leaves))
