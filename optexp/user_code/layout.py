"""Batches in the user's form and in a program's: which entries there are, and which only the loss sees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from optexp.errors import ConfigError
from optexp.program import Batch, tensors_of
from optexp.user_code.adapters import accepted, divide, entries, fits, odd_rows, remade, required
from optexp.user_code.script_batches import BatchForm


@dataclass
class Layout:
    """The parts of a batch, by name, or by position ("0", "1"): inputs first, then targets that only the loss sees.

    form:    of a batch whose entries hold tensors in lists, dicts and objects; names are dotted then
    of_loss: entries of such a batch that only the loss sees
    leaves:  entries that require gradients, as points of a differential equation
    """

    names: list[str]
    labels: list[str]
    constants: dict[str, Any]
    integer_labels: bool
    single: bool = False  # one tensor, given as it is
    made: Callable[[Any], Any] | None = None  # makes a batch of a type of its own from a tuple or a dict
    form: BatchForm | None = None
    of_loss: list[str] = field(default_factory=list)
    leaves: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: Any, tensors: Mapping[str, Tensor], labels: list[str], constants: dict[str, Any]) -> Layout:
        """The layout of a batch with these tensors, of which the labels come last."""
        inputs = [name for name in tensors if name not in labels]
        integer = bool(labels) and not tensors[labels[-1]].is_floating_point()
        single = not isinstance(given, (Mapping, list, tuple))
        leaves = frozenset(name for name, tensor in tensors.items() if tensor.requires_grad and tensor.is_leaf)
        return cls([*inputs, *labels], labels, constants, integer, single, remade(given), leaves=leaves)

    @classmethod
    def nested(cls, given: Any, model: nn.Module, count: int | None) -> Layout:
        """The layout of a batch with tensors inside its entries, or in an object.

        Args:
            count: Number of entries at its end that only the loss sees; None finds out.

        Raises:
            ConfigError: the model does not take an entry that comes before one that it takes.
        """
        form, every = BatchForm(given), list[str]()
        if isinstance(given, Mapping):
            every = [str(key) for key in given]
        elif isinstance(given, (list, tuple)):
            every = [str(index) for index in range(len(given))]
        of_loss = find_labels(every, model, learns=False) if count is None else every[max(0, len(every) - count) :]
        if of_loss != every[len(every) - len(of_loss) :]:
            raise ConfigError(f"{entries(of_loss)} of a batch, which the model does not take, must come last")
        tensors = tensors_of(form.pack(given))
        labels = [name for name in tensors if name.partition(".")[0] in of_loss]
        integer = bool(labels) and not tensors[labels[-1]].is_floating_point()
        return cls([*tensors], labels, {}, integer, form=form, of_loss=of_loss)

    @property
    def numbered(self) -> bool:
        """Whether batches are sequences."""
        return all(name.isdigit() for name in (*self.names, *self.constants))

    @property
    def plain(self) -> bool:
        """Whether a tuple describes a batch completely."""
        return not self.constants and self.numbered

    def pack(self, given: Any, odd: bool = False) -> Batch:
        """A user's batch as a program takes it.

        Args:
            odd: Leave out the last rows, so that an odd number stays.

        Raises:
            ConfigError: it has other entries than the first batch.
        """
        if self.form is not None:
            packed = dict(tensors_of(self.form.pack(given)))
            return odd_rows(packed) if odd else packed
        tensors, _ = divide(given)
        if tensors.keys() != set(self.names):
            expected = entries(self.names)
            raise ConfigError(f"batches differ: the first has {expected}, another {entries(tensors)}")
        batch = {name: tensors[name].detach() if name in self.leaves else tensors[name] for name in self.names}
        batch = odd_rows(batch) if odd else batch
        return tuple(batch.values()) if self.plain else batch

    def unpack(self, batch: Batch) -> Any:
        """A program's batch in the form of the user's code."""
        if self.form is not None:
            return self.form.unpack(batch)
        if self.leaves:
            tensors = tensors_of(batch)
            tensors |= {name: tensors[name].detach().requires_grad_() for name in self.leaves}
            batch = tuple(tensors.values()) if isinstance(batch, tuple) else tensors
        given: Any = batch if isinstance(batch, tuple) else {**batch, **self.constants}
        if isinstance(given, dict) and self.numbered:
            given = tuple(given[name] for name in sorted(given, key=int))
        return given if self.made is None else self.made(given)


def find_labels(names: list[str], model: nn.Module, learns: bool) -> list[str]:
    """Entries of a batch that the model's `forward` does not take.

    Args:
        names: Of the entries.
        learns: The code computes a loss, which may need an entry that the model could take too.
    """
    positions, keywords = accepted(model)
    found = [name for name in names if not fits(name, positions, keywords)]
    if not found and learns and len(names) > 1 and not required(names[-1], model):
        found = names[-1:]
    return found


def constants_of(constants: dict[str, Any], from_loader: bool, remarks: list[str]) -> dict[str, Any]:
    """Entries that are no tensors and stay the same: a loader's change from batch to batch, and are left out."""
    if not constants or not from_loader:
        return constants
    remarks.append(f"left out of the batches, because it is no tensor: {', '.join(constants)}")
    return {}
