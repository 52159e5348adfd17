"""Forms of a user's code: models, losses and batches; and the errors for any other form."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from optexp.errors import ConfigError, NoReference, first_line
from optexp.program import Batch, flatten, tensors_of
from optexp.program.outputs import loss_in
from optexp.support.random_state import seed_all as seed_all
from optexp.support.sparse import is_sparse
from optexp.user_code.objects import made

LOSSES = {name: loss for name, loss in vars(F).items() if name.endswith(("_loss", "entropy", "_logits", "kl_div"))}
LOSSES |= {name: loss for name, loss in vars(nn).items() if name.endswith("Loss")}
UNSUITED = ("Optimizer", "LBFGS", "SparseAdam")  # no optimizer; calls the model itself; wants sparse gradients
OPTIMIZERS = {
    name: value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in UNSUITED
}


# --- models ------------------------------------------------------------------------------------------------------


def maker(given: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, key: str = "model") -> Maker:
    """The `Maker` of a model from a class, a factory, a function to time, or an instance.

    Args:
        given: Any of these.
        args: Positional arguments of a class or factory.
        kwargs: Keyword arguments of the same.
        key: Subject of messages.

    Raises:
        ConfigError: `given` is no module and not callable.
    """
    if isinstance(given, nn.Module):
        return Copies(given)
    if not callable(given):
        raise ConfigError(f"{key} is {kind(given)}: it must be an nn.Module, its class, a factory or a function")
    return Maker(given, tuple(args), dict(kwargs or {}), key)


@dataclass
class Maker:
    """A new model per call: `given(*args, **kwargs)`, or `given` itself as a function to time."""

    given: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str

    @property
    def makes(self) -> bool:
        """Whether `given` makes a model, and is no model itself."""
        if isinstance(self.given, type):
            return True
        try:
            signature = inspect.signature(self.given)
            signature.bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # it wants more: that is what inputs are for; or it is no Python function
            return False
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        return bool(self.args) or inspect.Parameter.VAR_POSITIONAL not in kinds  # *tensors, as of an autograd.Function

    def __call__(self) -> nn.Module:
        args, kwargs = made(self.args), made(self.kwargs)
        if not self.makes:
            return Function(partial(self.given, *args, **kwargs) if args or kwargs else self.given)
        self.check_arguments()
        model = self.given(*args, **kwargs)
        if not callable(model):
            raise ConfigError(
                f"{self.key}, called without inputs, returned {kind(model)}: a factory must return an nn.Module"
            )
        return model if isinstance(model, nn.Module) else Function(model)

    def check_arguments(self) -> None:
        """Check arguments against the signature of `given`, so that a mistake has no traceback.

        Raises:
            ConfigError: `given` takes other arguments.
        """
        try:
            signature = inspect.signature(self.given)
        except (TypeError, ValueError):  # no Python function: it will say so itself
            return
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as error:
            takes = signature.replace(return_annotation=inspect.Signature.empty)
            raise ConfigError(f"{self.key} takes {takes}: {error}") from None


class Copies(Maker):
    """A new copy of one model per call; pickled, it also reaches another process."""

    def __init__(self, model: nn.Module) -> None:
        self.args, self.kwargs = (), {}
        self.packed = travelling("model", model)

    def __call__(self) -> nn.Module:
        model = cloudpickle.loads(self.packed)
        assert isinstance(model, nn.Module)
        return model


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def travelling(what: str, value: Any) -> bytes:
    """A pickled value, classes of a notebook included.

    Args:
        what: Subject of the message.

    Raises:
        ConfigError: the value cannot be pickled; the message says what to do.
    """
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ConfigError(
            f"{what} cannot be copied to another process ({type(error).__name__}: {reason}):"
            " give a function that makes it instead"
        ) from error
    return packed


def accepted(model: nn.Module) -> tuple[float, set[str] | None]:
    """Number of positional arguments of `forward`, and names of its keyword arguments (None: any)."""
    try:
        function = model.function if isinstance(model, Function) else model.forward
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return float("inf"), None
    kinds = [p.kind for p in parameters]
    positional = sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)
    unlimited = inspect.Parameter.VAR_POSITIONAL in kinds
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    return float("inf") if unlimited else positional, None if any_name else {p.name for p in parameters}


def fits(name: str, positions: float, keywords: set[str] | None) -> bool:
    """Whether a model takes an entry of a batch.

    Args:
        name: Of the entry, or its position as text.
        positions: As `accepted` returns it.
        keywords: Likewise.
    """
    return int(name) < positions if name.isdigit() else keywords is None or name in keywords


def required(name: str, model: nn.Module) -> bool:
    """Whether `forward` needs this entry of a batch."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    single = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in single]
    if name.isdigit():
        return any(p.default is p.empty for p in positional[int(name) :])
    return any(p.name == name and p.default is p.empty for p in parameters)


# --- losses ------------------------------------------------------------------------------------------------------


def bound(loss: Any, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """A loss with its options bound: a function's, or those of a class's constructor.

    Raises:
        ConfigError: the loss does not take the options.
    """
    try:
        if not isinstance(loss, type):
            inspect.signature(loss).bind_partial(**options)
        made: Callable[..., Tensor] = loss(**options) if isinstance(loss, type) else partial(loss, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss_args of {loss.__name__}: {first_line(error)}") from None
    return made if options or isinstance(loss, type) else loss


def by_label(loss: Callable[..., Any]) -> bool:
    """Whether a loss is torch's, which takes (output, target) where a user's takes (outputs, batch)."""
    return isinstance(loss, nn.modules.loss._Loss) or loss in LOSSES.values()


def against(loss: Callable[..., Tensor], labels: int) -> Callable[[Any, Batch], Tensor]:
    """loss(output, *labels) as loss(output, batch); the first of several outputs counts.

    Args:
        labels: Number of a batch's trailing entries that the loss takes.
    """

    def compared(output: Any, batch: Batch) -> Tensor:
        predicted = output if isinstance(output, Tensor) else next(iter(flatten(output).values()))
        return loss(predicted, *list(tensors_of(batch).values())[-labels:])

    return compared


def own_loss(output: Any, batch: Batch) -> Tensor:
    """The loss of a model's output, else a weighted mean of the squares of its numbers, and a part of their mean;
    of complex ones by real and imaginary parts.

    Raises:
        ConfigError: the output holds no real or complex numbers.
    """
    if (own := loss_in(output)) is not None:
        return own
    tensors = [in_real_numbers(tensor) for tensor in flatten(output).values()]
    real = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    means = [mean_of_squares(tensor.float()) for tensor in real]  # of none it is NaN
    if not means:
        raise ConfigError("the model returns no real numbers, so that there is nothing to learn from: give a loss")
    return torch.stack(means).sum()


def in_real_numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def mean_of_squares(tensor: Tensor) -> Tensor:
    """Weighted, plus a part of the mean at the same scale: squares alone have no gradient where an output is zero, so a
    ReLU at the end that passes all gradients on would show in no parameter."""
    squares = weighted_squares(tensor).mean()
    return squares + squares.detach().sqrt() * tensor.mean() / 4


def weighted_squares(tensor: Tensor) -> Tensor:
    """Squares under weights of place and sign: another order or another sign gives another mean."""
    squares = tensor * (tensor + tensor.abs() / 2)
    for dim, size in enumerate(tensor.shape):
        places = torch.arange(size, device=tensor.device) * (2 * dim + 5) % 31
        squares = squares * (0.5 + places.to(tensor.dtype) / 32).view(-1, *[1] * (tensor.dim() - dim - 1))
    return squares


def scalar(loss: Callable[[Any, Batch], Any]) -> Callable[[Any, Batch], Tensor]:
    """The same loss with a check of its result.

    Raises:
        ConfigError: at a call, the result is no tensor of one element, or depends on no parameter.
    """

    def checked(output: Any, batch: Batch) -> Tensor:
        value = loss(output, batch)
        if not isinstance(value, Tensor):
            raise ConfigError(f"the loss is {kind(value)}: it must be a tensor with one element (without .item())")
        if value.numel() != 1:
            shape = list(value.shape)
            raise ConfigError(f"the loss has shape {shape}: it must be a tensor with one element, as .mean() gives it")
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ConfigError(
                "the loss depends on no parameter: is it computed without gradients, or from a detached tensor?"
            )
        return value

    return checked


# --- batches -----------------------------------------------------------------------------------------------------


def divide(given: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of a user's batch, and its other entries, by name or position.

    Raises:
        ConfigError: an entry other than a tensor holds tensors.
    """
    if not isinstance(given, (Mapping, list, tuple)):
        given = (given,)
    every = dict(given) if isinstance(given, Mapping) else {str(i): entry for i, entry in enumerate(given)}
    arrays = {name: torch.as_tensor(e) for name, e in every.items() if isinstance(e, (Tensor, numpy.ndarray))}
    others = {name: entry for name, entry in every.items() if name not in arrays}
    for name, other in others.items():
        if any(isinstance(leaf, (Tensor, numpy.ndarray)) for leaf in tree_leaves(other)):
            raise ConfigError(
                f"{entries([name])} of a batch is {kind(other)} with tensors in it: make them entries of their own"
            )
    return arrays, others


def remade(given: Any) -> Callable[[Any], Any] | None:
    """The function that makes a batch of the same type: lists, named tuples, and mappings other than dict."""
    cls = type(given)
    if cls is list:
        return list
    if hasattr(cls, "_make"):
        made: Callable[[Any], Any] = cls._make
        return made
    if isinstance(given, Mapping) and cls is not dict:
        try:
            if set(cls(dict(given))) == set(given):  # type: ignore[call-arg]
                return cls
        except Exception:  # it is made of something else: the dict must do
            return None
    return None


def at_home(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of a batch on the device; a copy of one that was made in inference mode, which may not be written to."""
    with torch.inference_mode(False):
        return (tensor.clone() if tensor.is_inference() else tensor).to(device)


def leading_size(tensors: Mapping[str, Tensor]) -> int:
    """The batch size: the leading size of the first tensor; 1 for a scalar."""
    first = next(iter(tensors.values()))
    return len(first) if first.ndim else 1


def odd_rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch without its last rows, so that an odd number stays.

    Raises:
        NoReference: the batch's entries have no rows in common.
    """
    count = {len(tensor) if tensor.ndim else 0 for tensor in batch.values()}
    rows = min(count)
    if len(count) > 1 or rows < 2 or any(map(is_sparse, batch.values())):
        raise NoReference("a batch has no rows that its entries share, so that none can be left out")
    return {name: tensor[: rows - 1 - rows % 2] for name, tensor in batch.items()}


class Then:
    """One function after another, in any process."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
        self.first, self.second = first, second

    def __call__(self, value: Any) -> Any:
        return self.second(self.first(value))


class Iterated(IterableDataset[Any]):
    """Batches of any iterable, made anew for every epoch."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def drawn_from(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader without worker processes and in random order, so that another seed gives other batches.

    An iterable data set keeps its own order.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:  # the order is the data set's affair
        loader = copy.copy(loader)
        loader.num_workers = loader.timeout = 0
        return loader
    return DataLoader(
        loader.dataset, loader.batch_size, shuffle=True, collate_fn=loader.collate_fn, drop_last=loader.drop_last
    )


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """A loader's batches, epoch after epoch.

    Raises:
        ConfigError: the loader gives no batch.
    """
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError("the loader gives no batch: is the data set smaller than one?")


# --- words -------------------------------------------------------------------------------------------------------


def kind(value: Any) -> str:
    """A value's type in words: "a dict with a, b", "a list of Tensor, str", "an int"."""
    name = type(value).__name__
    name = f"an {name}" if name[0] in "aeiouAEIO" else f"a {name}"
    if isinstance(value, Mapping):
        return f"{name} with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, (list, tuple)):
        return f"{name} of {', '.join(type(entry).__name__ for entry in value) or 'nothing'}"
    return name


def entries(names: Iterable[str]) -> str:
    """Entries of a batch in words."""
    return ", ".join(f"entry {name}" if name.isdigit() else name for name in names)


def shapes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors) or "none"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
