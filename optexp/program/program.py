"""One step as data: all that a strategy may change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optexp.errors import NoReference
from optexp.program import counters
from optexp.program.batches import Batch, Outputs, Packed, Remembered, tensors_of
from optexp.program.counters import is_counted
from optexp.program.feed import Feed
from optexp.program.not_called import NotCalled
from optexp.python_state.model_state import ModelState
from optexp.support import wrapped
from optexp.support.reading import read


class StepState(Protocol):
    """State of a user's own step beyond the tensors of model and optimizer, by name.

    handed: the model and optimizer objects that the user's function is called with, by the names of its arguments
    """

    handed: Mapping[str, Any]

    @property
    def first(self) -> Remembered:
        """The state when the program was built."""
        ...

    def read(self) -> Remembered:
        """A copy of the state."""
        ...

    def tensors(self) -> list[Tensor]:
        """Tensors that the state holds now, no copies."""
        ...

    def kept_tensors(self) -> list[Tensor]:
        """The same, and those of modules and of variables that calls have made."""
        ...

    def write(self, remembered: Remembered) -> None:
        """Restore the state in place."""
        ...

    def news(self, now: Remembered) -> Packed:
        """Entries of `now` that differ from `first`, for another process to restore."""
        ...

    def changed(self, then: Remembered, now: Remembered) -> Packed:
        """Entries of `now` that differ from `then`, for another process to compare."""
        ...

    def move_on(self, seen: Sequence[Remembered], steps: int) -> tuple[set[int], bool]:
        """Move counts on by so many steps; `seen` after consecutive steps.

        Returns:
            How far a step moves them, and whether schedules or other objects stay where they are.
        """
        ...

    def rules(self) -> Mapping[str, tuple[str, Sequence[Mapping[str, Any]]]]:
        """Class and initial hyperparameters, by group, of further optimizers and of schedules; by name."""
        ...

    def unpack(self, packed: Packed) -> Remembered:
        """Entries that `news` packed, at this program's precision."""
        ...

    def apart(self, ours: bytes, theirs: bytes) -> list[float]:
        """Distance between the changes of two runs, by number; infinite where they must be equal."""
        ...

    def drift(self, ours: bytes, theirs: bytes) -> list[float]:
        """The same for noise of earlier steps; 0 where it is no little beside the change."""
        ...

    def same_start(self, ours: bytes, theirs: bytes) -> bool:
        """Whether two runs changed an entry that held the same counts and texts before."""
        ...

    def alike(
        self,
        ours: bytes,
        theirs: bytes,
        unit: float = 0.0,
        noise: Sequence[float] | None = None,
        drifted: bool = False,
    ) -> bool:
        """Whether two arms changed an entry alike, up to rounding.

        Args:
            ours: Entry of one arm, as `changed` packs it.
            theirs: The same entry of the other arm.
            unit: Unit roundoff u of the arithmetic.
            noise: Distances by `apart` between runs with slightly perturbed inputs; None for a coarse comparison.
            drifted: Each arm made many steps before.
        """
        ...

    def unseen(self, ours: bytes, theirs: bytes, unit: float, noise: Sequence[float]) -> bool:
        """Whether all that is not alike are numbers that noise moves by too much for anything wrong to show.

        Args:
            ours, theirs, unit, noise: As `alike` takes them.
        """
        ...

    def alike_in_kind(self, ours: bytes, theirs: bytes) -> bool:
        """Whether an entry of two arms holds as many values, in the same places."""
        ...

    def same_form(self, ours: bytes, theirs: bytes) -> bool:
        """The same, in tensors of equal shapes."""
        ...

    def lacking(
        self, ours: Sequence[bytes], theirs: bytes, unit: float, noise: Sequence[float], drifted: bool
    ) -> list[bool]:
        """Values that an entry of the other arm changes, and none of ours changes alike: whether each is a real number.

        Args:
            ours: Entries of one arm, as `changed` packs them.
            theirs: An entry of the other arm, whatever its name.
            unit, noise, drifted: As `alike` takes them.
        """
        ...

    def rearranged(self, ours: Sequence[bytes], theirs: bytes, unit: float, noise: Sequence[float]) -> bool | None:
        """Whether all rows that an entry of the other arm writes are among those that ours hold then; None
        of none.

        Args:
            ours, theirs, unit, noise: As `lacking` takes them.
        """
        ...

    def values(self, packed: Sequence[bytes]) -> list[tuple[Any, Any]]:
        """Before and after, of each value in entries that `changed` packs."""
        ...

    def pack(self, value: Any) -> bytes:
        """A value, or one before and after, as `changed` packs it."""
        ...

    def write_only(self, names: Collection[str]) -> set[str]:
        """Names of state that steps read only to update or print it."""
        ...


@dataclass(frozen=True)
class Alias:
    """The baseline's name of a replaced model's tensor, which may be the transpose of the baseline's tensor."""

    name: str
    transposed: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """A view with the baseline's shape."""
        return tensor.t() if self.transposed else tensor


@dataclass(frozen=True)
class Program:
    """Everything that a strategy may change. `dataclasses.replace` makes the next one.

    model:      holds parameters and buffers; their names identify them in every arm
    forward:    callable that runs the model; the model itself unless a strategy wrapped it (compiled, autocast)
    loss:       `loss(output, batch) -> scalar`; None for pure inference
    targets:    number of a batch's trailing tensors that only the loss reads
    shows:      a step of both passes returns each of several outputs beside the loss, which is a default: of their sum
                a small output is lost, and integers are no part
    constants:  arguments of the model that are no tensors, by name or, as "0" or "1", by position
    step:       one unit of work; all of its state is in fields of the program
    pullback:   gradients start from the output itself instead of a loss (see `steps.pullback`)
    captured:   a later stage records calls of the model in a CUDA graph, where launches cost no host time
    pool:       a torch.cuda.MemPool that later stages use
    aliases:    of a replaced model: the baseline's names of its parameters and buffers, without those that the baseline
                lacks. None: the names are the same
    lacking:    names of a replaced model's tensors that the baseline lacks; what a step registers since has its own
    made_with:  positional and keyword arguments of the model's class, if known
    step_state: state of a user's own step outside model and optimizer
    keeps:      the model's Python state when the program was built
    apart:      written apart from the baseline's: what its step keeps has names of its own
    """

    model: nn.Module
    step: Step
    feed: Feed
    forward: Callable[..., Any] | None = None
    loss: Callable[[Any, Batch], Tensor] | None = None
    targets: int = 0
    shows: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    pullback: bool = False
    captured: bool = False
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    pool: Any = field(default=None, compare=False)
    aliases: Mapping[str, Alias] | None = None
    lacking: frozenset[str] = frozenset()
    made_with: tuple[Sequence[Any], Mapping[str, Any]] = ((), {})
    step_state: StepState | None = None
    keeps: ModelState | None = field(default=None, compare=False)
    apart: bool = False

    @property
    def own_step(self) -> bool:
        """Whether the step is a user's own, which may change anything."""
        return self.step_state is not None

    @property
    def own_optimizer(self) -> bool:
        """Whether the optimizer's class is a user's, whose update may hold products and factorizations."""
        of_torch = type(self.optimizer).__module__.startswith("torch.")
        return not (self.optimizer is None or isinstance(self.optimizer, NotCalled) or of_torch)

    @property
    def device(self) -> torch.device:
        """Device of the parameters, else of the feed."""
        for parameter in self.model.parameters():
            return parameter.device
        return getattr(self.feed, "device", torch.device("cpu"))

    @property
    def trains(self) -> bool:
        """Whether a step computes gradients."""
        return self.loss is not None or self.pullback or self.optimizer is not None

    @property
    def call(self) -> Callable[..., Any]:
        """The callable from a batch's arguments to the output."""
        return self.model if self.forward is None else self.forward  # `or` would ask a module for its length

    def predict(self, batch: Batch) -> Any:
        """The model's output for a batch, without the batch's `targets`."""
        args, kwargs = self.arguments(batch)
        return self.call(*args, **kwargs)

    def rehearse(self, batch: Batch) -> None:
        """Run the model once, as a step does, for a strategy to see its operators."""
        self.predict(batch)

    def arguments(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model; a batch's keys that are numbers are positions."""
        if not self.constants and not isinstance(batch, Mapping):
            return batch[: len(batch) - self.targets], {}
        tensors = list(tensors_of(batch).items())
        by_name: dict[str, Any] = {**dict(tensors[: len(tensors) - self.targets]), **self.constants}
        positions = sorted((key for key in by_name if key.isdigit()), key=int)
        return tuple(by_name.pop(key) for key in positions), by_name

    def run(self) -> Outputs:
        """One step on the next batch of the feed: the unit that is timed."""
        return self.step(self, self.feed.next())

    def parameters(self) -> Iterator[tuple[Alias, nn.Parameter]]:
        """The model's parameters with the baseline's names."""
        for name, parameter in self.model.named_parameters():
            if alias := self.alias(name):
                yield alias, parameter

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers in the baseline's names and shapes; sparse and wrapped ones as their dense parts."""
        named = ((self.alias(name), buffer) for name, buffer in self.model.named_buffers())
        found = (wrapped.parts(alias(read(buffer)), alias.name) for alias, buffer in named if alias)
        return {name: part for parts in found for name, part in parts.items()}

    def unnamed_buffers(self) -> dict[str, Tensor]:
        """The model's buffers that the baseline lacks, by their own names: restored, and compared with nothing."""
        return {name: buffer for name, buffer in self.model.named_buffers() if self.alias(name) is None}

    def alias(self, name: str) -> Alias | None:
        """The baseline's name of a tensor of the model; None where the baseline has no such tensor."""
        if self.aliases is None or name in self.aliases:
            return Alias(name) if self.aliases is None else self.aliases[name]
        return None if name in self.lacking else Alias(name)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a step may change, by stable name, and copies of an optimizer's Python numbers.

        `put` restores both in place.
        """
        tensors: dict[str, Tensor] = {}
        for alias, p in self.parameters():
            tensors |= wrapped.parts(alias(p.data), f"param/{alias.name}")
        tensors |= {f"buffer/{name}": buffer for name, buffer in self.buffers().items()}
        if self.optimizer is not None:
            for alias, name, values, key in self._kept():
                if isinstance(value := values[key], Tensor):
                    tensors[f"optimizer/{alias.name}/{name}"] = alias(read(value))
                elif isinstance(value, (int, float)):
                    kind = torch.float64 if isinstance(value, float) else None
                    tensors[f"optimizer/{alias.name}/{name}"] = torch.tensor(value, dtype=kind, device="cpu")
            for name, value in self.counted().items():
                kind = torch.float64 if isinstance(value, float) else None
                held = read(value) if isinstance(value, Tensor) else torch.tensor(value, dtype=kind, device="cpu")
                tensors[name] = held
            for index, group in enumerate(self.optimizer.param_groups):
                if isinstance(group.get("lr"), Tensor):
                    tensors[f"optimizer/group{index}/lr"] = read(group["lr"])
        if self.scaler is not None:
            for key in ("_scale", "_growth_tracker"):
                value = getattr(self.scaler, key, None)
                if isinstance(value, Tensor):
                    tensors[f"scaler/{key[1:]}"] = read(value)
        return tensors

    def python_tensors(self) -> list[Tensor]:
        """Tensors that Python state holds now: a hidden state of a step's own, a cache in a model's attribute."""
        held = self.step_state.tensors() if self.step_state is not None else []
        return [*held, *(self.keeps.held() if self.keeps is not None else ())]

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Restore a state in place. Buffers that a step assigned anew with another shape are replaced.

        Buffers that a step registered since stay: they come and go with the model's Python state (`keeps`), as an
        attribute does that a step makes.

        Args:
            values: As `state` returned them.

        Raises:
            NoReference: A step registered a parameter since.
        """
        for name, tensor in self.state().items():
            if is_counted(name) or (name not in values and name.startswith("buffer/")):
                continue
            if name not in values and name.startswith("param/"):
                raise NoReference(
                    f"a step registers {name.partition('/')[2]} in the model, which no optimizer holds: register it in"
                    " __init__"
                )
            if name.startswith("buffer/") and tensor.shape != values[name].shape:
                self._assign(name.removeprefix("buffer/"), values[name].to(tensor))
            else:
                tensor.copy_(values[name])
        for alias, label, kept, key in self._kept():
            if isinstance(kept[key], (int, float)):
                kept[key] = values[f"optimizer/{alias.name}/{label}"].item()
        if self.optimizer is not None:
            kept = {name: value for name, value in values.items() if is_counted(name)}
            counters.put(self.optimizer, kept, followed=self.own_step)

    def register(self, values: Mapping[str, Tensor]) -> None:
        """Register the buffers of a state that a step of another process registered, at this program's precision.

        Args:
            values: As `state` returned them there.
        """
        modules, known = dict(self.model.named_modules()), self.buffers()
        real = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)
        for name, value in values.items():
            kind, _, path = name.partition("/")
            owner, _, short = path.rpartition(".")
            if kind == "buffer" and path not in known and owner in modules:
                made = value.to(self.device, real if value.is_floating_point() else None, copy=True)
                modules[owner].register_buffer(short, made, persistent=False)

    def _assign(self, buffer: str, value: Tensor) -> None:
        for path, module in self.model.named_modules():
            for name in module._buffers:
                alias = self.alias(f"{path}.{name}" if path else name)
                if alias is not None and alias.name == buffer:
                    module._buffers[name] = alias(value.clone())

    def counted(self) -> dict[str, counters.Value]:
        """State of the optimizer beside its parameters' state, by name in `state`.

        `step_state` of a user's own step has the numbers of its groups.
        """
        return {} if self.optimizer is None else counters.counted(self.optimizer, followed=self.own_step)

    def _kept(self) -> Iterator[tuple[Alias, str, dict[str, Any], str]]:
        """The optimizer's state of the model's parameters: parameter's alias, name, the dict that holds it, its key.

        That of other tensors, such as those of a second network, belongs to `step_state`. An optimizer around another
        one keeps that one's state, too.
        """
        aliases: dict[Tensor, Alias] = {p: alias for alias, p in self.parameters()}
        for prefix, state in counters.states(self.optimizer) if self.optimizer is not None else ():
            for parameter, values in state.items():
                for key in values if parameter in aliases else ():
                    yield aliases[parameter], f"{prefix}{key}", values, key


Step = Callable[[Program, Batch], Outputs]
