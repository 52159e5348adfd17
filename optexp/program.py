"""What one step is made of: the thing that strategies transform and arms run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from numbers import Number
from types import NoneType
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn

from optexp import sparse
from optexp.offered import Place, offered
from optexp.reading import read
from optexp.usermodel.modelstate import ModelState
from optexp.usermodel.records import Table

Batch = tuple[Tensor, ...] | Mapping[str, Tensor]
Source = Sequence[Batch]
Outputs = dict[str, Tensor]
Remembered = Mapping[str, Any]
Packed = Mapping[str, bytes]


class Feed(Protocol):
    """How the next batch reaches the device. The core owns the source; a feed only brings it.

    Inherit from it: what it defines here fits feeds that do nothing in the background.
    """

    device: torch.device

    def next(self) -> Batch:
        """The batch of the step that asks: the n-th since `reset` is `source[n % len(source)]`."""
        ...

    def reset(self, source: Source) -> None:
        """Start again from `source[0]`; drop whatever was prefetched.

        Keep the source and take nothing from it here: a batch is taken when a step asks for it, or so many before as
        `queue` says. Earlier is INVALID: results could be computed before the clock runs.
        """
        ...

    @property
    def place(self) -> Place:
        """Where the core is to lay out the source before the clock runs; as `self.feed` wants it, where that is one."""
        inner: Feed | None = getattr(self, "feed", None)
        return Place(self.device) if inner is None else getattr(inner, "place", Place(self.device))

    def bring(self, batch: Batch) -> Batch:
        """A copy of the caller's batch, delivered as `next` delivers its own: what equivalence is checked on."""
        return map_batch(lambda tensor: tensor.to(self.device, copy=True), batch)

    @property
    def queue(self) -> int:
        """How many batches may lie ready, made in the background. Timing must outlast them by far."""
        return 0

    @property
    def period(self) -> int | None:
        """After how many batches they come again, or their sizes do, where that is known."""
        return None

    def pause(self) -> None:
        """Leave nothing to do in the background, where it would disturb what is timed elsewhere."""
        return


class ResidentFeed(Feed):
    """Batches live on the device before the clock starts and are cycled: no transfer is part of the step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batches: Source = []
        self.position = 0

    def next(self) -> Batch:
        batch = self.batches[self.position]
        self.position = (self.position + 1) % len(self.batches)
        return batch

    @property
    def period(self) -> int | None:
        return len(self.batches)

    def reset(self, source: Source) -> None:
        self.batches, self.position = offered(source, self.place), 0


class Memory(Protocol):
    """What a step keeps beside the tensors of model and optimizer, by name."""

    @property
    def first(self) -> Remembered:
        """As it was when the program was built."""
        ...

    def read(self) -> Remembered:
        """A copy of all of it."""
        ...

    def write(self, remembered: Remembered) -> None:
        """Put it back, in place."""
        ...

    def news(self, now: Remembered) -> Packed:
        """What is no longer as it was at first, to be put back in another process."""
        ...

    def changed(self, then: Remembered, now: Remembered) -> Packed:
        """What is no longer as it was then, to be compared in another process."""
        ...

    def unpack(self, packed: Packed) -> Remembered: ...

    def apart(self, ours: bytes, theirs: bytes) -> list[float]:
        """How far two runs are from having changed each number likewise; infinitely, where they must be equal."""
        ...

    def alike(self, ours: bytes, theirs: bytes, unit: float = 0.0, noise: Sequence[float] | None = None) -> bool:
        """Whether two arms changed something likewise, however each of them rounds (u of the arithmetic).

        noise: what `apart` says of runs with a little noise; None: coarsely
        """
        ...


@dataclass(frozen=True)
class Alias:
    """What the baseline calls a tensor of another model, which may hold its transpose."""

    name: str
    transposed: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """A view with the baseline's shape."""
        return tensor.t() if self.transposed else tensor


@dataclass(frozen=True)
class Program:
    """All that a strategy may change. `dataclasses.replace` makes the next one.

    model:     holds parameters and buffers; their names identify them in every arm.
    forward:   how the model is called; the model itself unless a strategy wrapped it (compiled, autocast).
    loss:      `loss(output, batch) -> scalar`; None for pure inference.
    targets:   how many trailing tensors of a batch go to the loss and not to the model.
    constants: arguments of the model that are no tensors, by name or, as "0" or "1", by position.
    step:      one unit of work; keeps no state that is not a field here.
    pullback:  gradients start from the output itself and not from a loss (see the step of that name).
    captured:  a later stage records calls of the model in a CUDA Graph: there, launches cost the host nothing.
    pool:      a torch.cuda.MemPool that later stages use.
    aliases:   of parameters and buffers, where the model is another one than the baseline's (what has none is its own
               affair); None: they are called what the baseline calls them.
    made_with: positional and keyword arguments of the model's class, where it was given some.
    memory:    what a step keeps elsewhere, where it is a user's own.
    keeps:     what the model keeps in Python, as it was when the program was built.
    """

    model: nn.Module
    step: Step
    feed: Feed
    forward: Callable[..., Any] | None = None
    loss: Callable[[Any, Batch], Tensor] | None = None
    targets: int = 0
    constants: Mapping[str, Any] = field(default_factory=dict)
    pullback: bool = False
    captured: bool = False
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    pool: Any = field(default=None, compare=False)
    aliases: Mapping[str, Alias] | None = None
    made_with: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
    memory: Memory | None = None
    keeps: ModelState | None = field(default=None, compare=False)

    @property
    def own_step(self) -> bool:
        """Whether a step is a user's own, which may change whatever it likes."""
        return self.memory is not None

    @property
    def device(self) -> torch.device:
        """Where the work happens: the device of the parameters, else of the feed."""
        for parameter in self.model.parameters():
            return parameter.device
        return getattr(self.feed, "device", torch.device("cpu"))

    @property
    def trains(self) -> bool:
        """Whether a step computes gradients."""
        return self.loss is not None or self.pullback or self.optimizer is not None

    @property
    def call(self) -> Callable[..., Any]:
        """What turns a batch into an output."""
        return self.model if self.forward is None else self.forward  # `or` would ask a module for its length

    def predict(self, batch: Batch) -> Any:
        """Call the model on the part of the batch that is meant for it."""
        args, kwargs = self.arguments(batch)
        return self.call(*args, **kwargs)

    def arguments(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with; a batch's keys that are numbers are positions."""
        if not self.constants and not isinstance(batch, Mapping):
            return batch[: len(batch) - self.targets], {}
        tensors = list(tensors_of(batch).items())
        given: dict[str, Any] = {**dict(tensors[: len(tensors) - self.targets]), **self.constants}
        positions = sorted((key for key in given if key.isdigit()), key=int)
        return tuple(given.pop(key) for key in positions), given

    def run(self) -> Outputs:
        """One step on the next batch of the feed: the unit that is timed."""
        return self.step(self, self.feed.next())

    def parameters(self) -> Iterator[tuple[Alias, nn.Parameter]]:
        """Those of the model, with what the baseline calls them."""
        for name, parameter in self.model.named_parameters():
            if alias := self.alias(name):
                yield alias, parameter

    def buffers(self) -> dict[str, Tensor]:
        """Those of the model, as the baseline calls and shapes them; sparse ones in their dense parts."""
        named = ((self.alias(name), buffer) for name, buffer in self.model.named_buffers())
        found = (sparse.parts(alias(read(buffer)), alias.name) for alias, buffer in named if alias)
        return {name: part for parts in found for name, part in parts.items()}

    def alias(self, name: str) -> Alias | None:
        """What the baseline calls a tensor of the model; None where it has none like it."""
        return Alias(name) if self.aliases is None else self.aliases.get(name)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a step may change, by stable name, and copies of numbers that an optimizer keeps in Python,
        as a count of its steps; `put` restores both in place."""
        tensors: dict[str, Tensor] = {}
        for alias, p in self.parameters():
            tensors |= sparse.parts(alias(p.data), f"param/{alias.name}")
        tensors |= {f"buffer/{name}": buffer for name, buffer in self.buffers().items()}
        if self.optimizer is not None:
            for alias, key, values in self._kept():
                if isinstance(value := values[key], Tensor):
                    tensors[f"optimizer/{alias.name}/{key}"] = alias(read(value))
                elif isinstance(value, (int, float)):
                    kind = torch.float64 if isinstance(value, float) else None
                    tensors[f"optimizer/{alias.name}/{key}"] = torch.tensor(value, dtype=kind, device="cpu")
            for index, group in enumerate(self.optimizer.param_groups):
                if isinstance(group["lr"], Tensor):
                    tensors[f"optimizer/group{index}/lr"] = read(group["lr"])
        if self.scaler is not None:
            for key in ("_scale", "_growth_tracker"):
                value = getattr(self.scaler, key, None)
                if isinstance(value, Tensor):
                    tensors[f"scaler/{key[1:]}"] = read(value)
        return tensors

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Make this the state: tensors stay where they are, but for buffers that a step assigned anew with another
        shape, and numbers of Python become such again."""
        for name, tensor in self.state().items():
            if name.startswith("buffer/") and tensor.shape != values[name].shape:
                self._assign(name.removeprefix("buffer/"), values[name].to(tensor))
            else:
                tensor.copy_(values[name])
        for alias, key, kept in self._kept():
            if isinstance(kept[key], (int, float)):
                kept[key] = values[f"optimizer/{alias.name}/{key}"].item()

    def _assign(self, buffer: str, value: Tensor) -> None:
        for path, module in self.model.named_modules():
            for name in module._buffers:
                alias = self.alias(f"{path}.{name}" if path else name)
                if alias is not None and alias.name == buffer:
                    module._buffers[name] = alias(value.clone())

    def _kept(self) -> Iterator[tuple[Alias, str, dict[str, Any]]]:
        """What an optimizer keeps: of which parameter, under which key of which dict."""
        aliases: dict[Tensor, Alias] = {p: alias for alias, p in self.parameters()}
        for parameter, values in self.optimizer.state.items() if self.optimizer is not None else ():
            for key in values:
                yield aliases[parameter], key, values


Step = Callable[[Program, Batch], Outputs]


# --- the steps most programs are made of -----------------------------------------------------------------------


def forward(program: Program, batch: Batch) -> Outputs:
    """Inference: the model's output, flattened by name."""
    with torch.no_grad():
        output = program.predict(batch)
        tensors = flatten(output)
        return tensors | others(output) if tensors and not isinstance(output, Tensor) else tensors


def forward_backward(program: Program, batch: Batch) -> Outputs:
    """Loss and gradients, no update; gradients are left in `p.grad` (scaled where there is a scaler)."""
    clear_gradients(program.model)
    return {"loss": _backward(program, batch)}


def train(program: Program, batch: Batch) -> Outputs:
    """A whole training step: gradients cleared, forward, loss, backward, optimizer."""
    assert program.optimizer is not None
    clear_gradients(program.model)
    loss = _backward(program, batch)
    if program.scaler is None:
        program.optimizer.step()
    else:
        program.scaler.step(program.optimizer)
        program.scaler.update()
    return {"loss": loss}


def pullback(program: Program, batch: Batch) -> Outputs:
    """Forward and backward of an operation as it stands inside a network, where a loss would be work of its own.

    The batch's last tensor is the gradient that arrives at the output, which is one tensor. The gradients of real
    inputs are outputs, `input_grad.0` and so on; those of parameters are left in `p.grad`.
    """
    clear_gradients(program.model)
    tensors = tuple(tensors_of(batch).values())
    inputs = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors[:-1])
    output: Tensor = program.predict((*inputs, tensors[-1]))
    output.backward(tensors[-1].to(output.dtype))  # type: ignore[no-untyped-call]
    grads = {f"input_grad.{i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
    return {"output": output.detach(), **grads}


def _backward(program: Program, batch: Batch) -> Tensor:
    assert program.loss is not None
    loss = program.loss(program.predict(batch), batch)
    (loss if program.scaler is None else program.scaler.scale(loss)).backward()
    return loss.detach()


STEPS: dict[str, Step] = {"forward": forward, "forward_backward": forward_backward, "train": train}


# --- state, gradients, batches ---------------------------------------------------------------------------------


TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad)  # gradients, and dense ones too
BEGIN_AS_ONE, BEGIN_AS_RATE = {"mu_product", "mu"}, {"eta", "step_size"}  # of an optimizer's state


def keeping(program: Program) -> Program:
    """The same, which knows what its model keeps in Python from now on."""
    if program.keeps is None or program.keeps.model is not program.model:
        before, keeps = program.keeps, ModelState(program.model, program.loss)
        keeps.another = before is not None and not {*before.model.modules()} & {*program.model.modules()}
        return replace(program, keeps=keeps)
    program.keeps.begin()
    return program


class Snapshot:
    """A copy of a program's state that can be put back in place, so that captured addresses stay valid."""

    def __init__(self, program: Program) -> None:
        self.values = {name: tensor.clone() for name, tensor in program.state().items()}
        self.elsewhere = program.memory.read() if program.memory is not None else {}
        self.model, self.kept = program.model, Table()
        self.remember(program)

    def remember(self, program: Program) -> None:
        """What its model keeps in Python now is what is put back."""
        self.model = program.model
        known = program.keeps is not None and program.keeps.model is program.model
        self.kept = (program.keeps if known and program.keeps else ModelState(program.model, program.loss)).read()

    @torch.no_grad()
    def restore(self, program: Program) -> None:
        """Copy back.

        Optimizer state that was created since is restored to what it began as; what a strategy added since (a loss
        scale, a learning rate on the device) to what it is at the first call.
        """
        if program.model is self.model:
            self.kept.restore()  # first: a buffer that was assigned anew has another shape, perhaps
        for name, tensor in program.state().items():
            if name not in self.values:
                lazy = name.startswith("optimizer/") and not name.endswith("/lr")
                self.values[name] = _at_first(program, name, tensor) if lazy else tensor.clone()
        program.put(self.values)
        if program.memory is not None:
            program.memory.write(self.elsewhere)


def _at_first(program: Program, name: str, tensor: Tensor) -> Tensor:
    """What torch's optimizers create state as: zeros, but for NAdam's, ASGD's and Rprop's factors and step sizes."""
    assert program.optimizer is not None
    _, _, path = name.partition("/")
    owner, _, key = path.rpartition("/")
    if key in BEGIN_AS_ONE:
        return torch.ones_like(tensor)
    if key not in BEGIN_AS_RATE:
        return torch.zeros_like(tensor)
    rates = {p: group["lr"] for group in program.optimizer.param_groups for p in group["params"]}
    return torch.full_like(tensor, float(next(rates[p] for alias, p in program.parameters() if alias.name == owner)))


@contextmanager
def preserved(program: Program) -> Iterator[None]:
    """Undo, in place, what warm-up steps inside the block do to the program's state."""
    snapshot = Snapshot(program)
    try:
        yield
    finally:
        snapshot.restore(program)


def placed(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """`model.to(device, dtype)`, which would leave nothing of complex numbers but their real part."""
    _place_sparse(model, device, dtype)
    if not any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        return model.to(device=device, dtype=dtype)
    wide = {None: None, torch.float64: torch.complex128}.get(dtype, torch.complex64)

    def moved(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else wide if tensor.is_complex() else None
        return tensor.to(device, kind or tensor.dtype)

    made: nn.Module = model._apply(moved)  # as `to` does it
    return made


def _place_sparse(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Its compressed parameters, into which `to` puts nothing: `data` of such a tensor keeps its old values."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.layout in sparse.COMPRESSED:
                kind = dtype if parameter.is_floating_point() else None
                moved = parameter.detach().to(device, kind or parameter.dtype)
                module._parameters[name] = made.setdefault(parameter, nn.Parameter(moved, parameter.requires_grad))


def prime(program: Program) -> None:
    """Create lazily made optimizer state now, so that it can be captured, snapshotted and restored."""
    if program.optimizer is None:
        return
    rows = _with_sparse_gradients(program.model, program.optimizer)
    with preserved(program):
        for parameter in program.model.parameters():
            if parameter.requires_grad:
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if id(parameter) in rows else zeros
        program.optimizer.step()
    clear_gradients(program.model)


def _with_sparse_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
    """Identities of parameters that get sparse gradients, where the optimizer may take no others."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return set(map(id, model.parameters()))
    modules = (module for module in model.modules() if getattr(module, "sparse", False) is True)
    return {id(getattr(module, "weight", None)) for module in modules if not isinstance(optimizer, TAKE_SPARSE)}


def clear_gradients(model: nn.Module) -> None:
    """What `zero_grad(set_to_none=True)` does, for programs without an optimizer too."""
    for parameter in model.parameters():
        parameter.grad = None


def gradients(program: Program) -> dict[str, Tensor]:
    """Unscaled gradients by parameter name, outside the clock. `optimizer.step` leaves them unscaled already."""
    scaled = program.scaler is not None and program.optimizer is None
    scale = program.scaler.get_scale() if scaled and program.scaler is not None else 1.0
    return {
        f"grad/{alias.name}": alias(read(p.grad) / scale if scale != 1.0 else read(p.grad))
        for alias, p in program.parameters()
        if p.grad is not None
    }


UNREADABLE = "(unread "


def flatten(value: Any, name: str = "output") -> Outputs:
    """Tensors of a nested output (tuples, mappings, dataclasses, any object that holds some) by dotted name."""
    if isinstance(value, Tensor):  # soon: this is timed
        return {name: value}
    return {key: leaf for key, leaf in _leaves(value, name) if isinstance(leaf, Tensor)}


def others(value: Any, name: str = "output") -> Outputs:
    """What else is in a nested output, as tensors on the CPU: numbers, lists of numbers and text.

    What cannot be read is there by name and type, and empty.
    """
    return dict(_read(key, leaf) for key, leaf in _leaves(value, name) if not isinstance(leaf, (Tensor, NoneType)))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """A list of numbers is one."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)) and not (value and all(isinstance(item, Number) for item in value)):
        items = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        items = ((key, getattr(value, key)) for key in value.__dataclass_fields__)
    elif held := _held(value):
        items = held.items()
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}")


def _held(value: Any, depth: int = 4) -> dict[str, Any]:
    """Attributes of an object that hold tensors, as a cache of keys and values has them; no module is a result."""
    if depth == 0 or isinstance(value, (Tensor, type, nn.Module)) or not hasattr(value, "__dict__"):
        return {}
    return {name: item for name, item in vars(value).items() if _holds(item, depth - 1)}


def _holds(item: Any, depth: int) -> bool:
    if isinstance(item, Tensor):
        return True
    if isinstance(item, Mapping):
        return any(_holds(each, depth) for each in item.values())
    if isinstance(item, (list, tuple)):
        return any(_holds(each, depth) for each in item)
    return bool(_held(item, depth))


def _read(name: str, leaf: Any) -> tuple[str, Tensor]:
    if isinstance(leaf, str):
        return name, torch.tensor(list(leaf.encode()), dtype=torch.uint8)
    if isinstance(leaf, (Number, list, tuple, numpy.ndarray, numpy.generic)):
        with suppress(TypeError, OverflowError):  # larger than torch's integers, or an array of objects
            return name, torch.as_tensor(numpy.asarray(leaf))  # 64 bits, as Python's own
    return f"{name} {UNREADABLE}{type(leaf).__name__})", torch.empty(0, dtype=torch.uint8)


def unreadable(name: str) -> bool:
    """Whether a result's name is that of something that could not be read."""
    return UNREADABLE in name


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """A batch's tensors by name: a mapping's keys, or positions."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return {str(index): tensor for index, tensor in enumerate(batch)}


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """The same batch with every tensor replaced."""
    if isinstance(batch, Mapping):
        return {name: function(tensor) for name, tensor in batch.items()}
    return tuple(function(tensor) for tensor in batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device` (the same tensors where they are there already)."""
    return map_batch(lambda tensor: tensor.to(device), batch)
