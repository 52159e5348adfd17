"""One workload in fp64: a step from any state, on batches that all arms take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import isclose
from typing import Any

import torch
from torch import Tensor

from optexp.equivalence.checksums import LARGE
from optexp.equivalence.drawn_at import drawn_at
from optexp.equivalence.drawn_set import DrawnSet, Fp64Results, PythonState
from optexp.equivalence.dropout import NoDropout, silence
from optexp.equivalence.input_source import InputSource
from optexp.equivalence.observation import Observation, unpacked
from optexp.equivalence.other_changes import OtherChanges
from optexp.equivalence.perturbation import turn_parameters, vary
from optexp.equivalence.tensor_math import chunks, identical, name_of
from optexp.equivalence.trajectory import Rates
from optexp.errors import NoReference
from optexp.program import Batch, Outputs, gradients, keeping, map_batch, rate_of, tensors_of
from optexp.support.float64 import InFloat64, widened
from optexp.support.memory_plan import give_back
from optexp.support.sparse import is_sparse
from optexp.workload import Workload

WIDEST = {"float64", "complex128"}
TRIED = 2**20  # bytes of a batch's tensor: a trial of smaller ones on the host takes little time
ROUNDED = 1e-4  # how far rates may be apart that only differ in how they were rounded


class Fp64Reference:
    """The workload in fp64. Where the arms' dropout drops nothing, it drops nothing here (`silence`).

    drawn_on:    the arms' device;  device: where fp64 runs: there too, or on the CPU where it does not fit
    initial:     the state that all arms start from, in the arms' dtype
    source:      draws the batches;  feed: that of the arms' program
    drawn:       the set that was drawn last;  begins_with: Python state of the next step
    registered:  buffers that it begins with, and that the initial state lacks
    results:     of that set; replaced by an empty object as soon as they hold no longer
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        generic: bool = False,
        on_host: bool = False,
        may_move: bool = True,
    ) -> None:
        self.workload, self.dtype, self.seed, self.drawn_on, self.silent = workload, dtype, seed, device, False
        start = workload.build(device, dtype, seed)
        if generic:
            vary(start.model, seed)
        self.trains, self.feed = start.trains, start.feed
        self.initial = {name: tensor.clone() for name, tensor in start.state().items()}
        self.source = InputSource(workload, device, dtype, seed, start.targets, start.own_step)
        self.moving: set[str] = set()  # parameters that steps change without an optimizer
        self._begin(DrawnSet())
        try:
            self.settle(torch.device("cpu") if on_host else device)
        except torch.OutOfMemoryError:
            if not may_move:
                raise
            self.settle(torch.device("cpu"))

    def settle(self, device: torch.device) -> None:
        """Build the fp64 program on `device`."""
        self.device, self.results = device, Fp64Results()
        give_back(self.drawn_on)  # where fp64 was, and does not fit, the arms need the room
        self.program = self.workload.anew().build(device, torch.float64, self.seed)
        if self.silent:
            silence(self.program.model)
        self.program = keeping(self.program)
        self.rates = Rates(self.program)

    def silence(self) -> None:
        """As the arms do where steps draw random numbers; a deterministic model keeps its rates, whatever they mean."""
        self.silent = True
        silence(self.program.model)
        self.program = keeping(self.program)

    # --- one set of inputs --------------------------------------------------------------------------------------

    @property
    def batches(self) -> list[Batch]:
        return self.drawn.batches

    @property
    def family(self) -> str:
        """Family of the inputs that were drawn last."""
        return self.drawn.family

    def draw(self, seed: int, count: int, family: str) -> None:
        """Begin a set of drawn inputs (see `InputSource.draw`).

        Raises NoReference where the family changes no input, or the model does not take its values.
        """
        if self.drawn.larger_than(LARGE):
            self._begin(DrawnSet(family=family))  # both sets at a time may not fit
        self._begin(self.source.draw(seed, count, family))

    def recall(self, observation: Mapping[str, Tensor]) -> None:
        """Begin a set with the batch of a timed step, from the baseline's replay."""
        self._begin(self.source.recall(observation))
        self.recalled = True

    def rest(self) -> None:
        """Keep neither batches nor results."""
        self._begin(DrawnSet())
        give_back(self.drawn_on)

    def _begin(self, drawn: DrawnSet) -> None:
        self.drawn, self.results, self.begins_with = drawn, Fp64Results(), PythonState()
        self.registered: Observation = {}
        self.recalled = False

    def turn_parameters(self) -> None:
        """Turn the parameters that all arms begin with."""
        turn_parameters(self.initial)
        self.results = Fp64Results()

    def adopt(self, baseline: Mapping[str, Tensor]) -> None:
        """Begin the next steps with the Python state that the baseline's step began with, and with its new buffers.

        An arm that registers a buffer before its first step, as a capture does, tells of no change.
        """
        self.begins_with = PythonState(unpacked("memory", baseline), unpacked("keeps", baseline))
        new = before(baseline).keys() - self.initial.keys()
        self.registered = {name: baseline[f"before/{name}"] for name in new if name.startswith("buffer/")}

    def follow(self, parameters: Iterable[str]) -> None:
        """Return these parameters after each step, too."""
        if more := {*parameters} - self.moving:
            self.moving |= more
            self.results = Fp64Results()

    @contextmanager
    def unremembered(self) -> Iterator[None]:
        """A context whose steps leave no results; they do leave the program in another state."""
        self.results.forget_large()
        kept, self.results = self.results, Fp64Results()
        try:
            yield
        finally:
            self.results = kept

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context whose steps leave neither results nor, where there is an optimizer, another state.

        A comparison that is under way needs it: it reads the state after the optimizer's step tensor by tensor. It
        copies the state.
        """
        with self.unremembered():
            program = self.program
            state = {name: tensor.clone() for name, tensor in program.state().items()} if program.optimizer else {}
            try:
                yield
            finally:
                if state:
                    program.put(state)

    def draws_at(self) -> str:
        """The user's line, and its module, at which a step draws random numbers beside dropout; empty if none does."""
        batch = map_batch(lambda t: widened(t, self.device), self.batches[0])
        with self.aside():
            return drawn_at(self.program.model, lambda: self._outputs(0, batch))

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self, index: int, state: Mapping[str, Tensor]) -> Observation:
        """Tensors out/, input/, grad/, buffer/ and param/ of a step from `state`, where fp64 runs.

        Results from the initial state, which all arms share, are cached. Of a recalled step with the Python state that
        it begins with: runs that widen its limits begin with the first one.
        index: of the batch
        Raises NoReference where the step does not run in float64, or computes a result in a narrower dtype.
        """
        shared = state is self.initial
        begins = self.recalled and self.results.begins_with != self.begins_with
        if shared and index in self.results.golden and not begins:
            return self.results.golden[index]
        self.results.forget_large()  # one of them at a time is all that fits
        golden = self.step_on(self.batches[index % len(self.batches)], index, state)
        if shared:
            self.results.golden[index], self.results.begins_with = golden, self.begins_with
        return golden

    def step_on(self, given: Batch, index: int, state: Mapping[str, Tensor] | None) -> Observation:
        """The same of any batch, without a cache.

        index: of the step that its `update_inputs` are kept for
        state: None goes on from where the last step ended
        """
        if state is None:
            state = {name: tensor.detach().clone() for name, tensor in self.program.state().items()}
        else:
            self.load(state)
        batch = map_batch(lambda t: widened(t, self.device), given)
        changes = OtherChanges(self.program, state)
        asserts = self.source.asserts
        looks = not asserts.looked and self.drawn_on.type == "cuda" and self.drawn.larger_than(TRIED)
        try:
            with changes.followed(), asserts.looking() if looks else nullcontext():
                outputs = self._outputs(index, batch)
        except NoReference:
            if not looks:
                raise
            return self.step_on(given, index, state)  # it may run off the current stream
        self.results.update_inputs.others[index] = changes.found()
        self.results.update_inputs.earlier[index] = changes.earlier()
        left = tensors_of(batch)
        written = {
            f"input/{name}": left[name].detach().clone()
            for name, tensor in tensors_of(given).items()
            if not _alike_but_for_width(tensor, left[name])
        }
        del batch, left  # before results are copied: each may take half of a card
        golden = {}
        for name in list(outputs):
            golden[f"out/{name}"] = outputs.pop(name).detach().to(self.device, copy=True)
        _require_widest(golden)
        golden |= written
        if self.trains:
            golden |= self._gradients(index)
        golden |= {f"buffer/{name}": b.detach().clone() for name, b in self.program.buffers().items()}
        after = self.program.state() if self.moving else {}
        golden |= {name: after[name].detach().clone() for name in self.moving}
        if self.program.optimizer is not None:
            rates = [*map(rate_of, self.program.optimizer.param_groups)]
            self.results.update_inputs.left[index] = rates
        return golden

    def _outputs(self, index: int, batch: Batch) -> Outputs:
        """Outputs of the program's step."""
        try:
            with InFloat64(self.dtype), NoDropout(), self._noting(index):
                return self.program.step(self.program, batch)
        except (torch.OutOfMemoryError, NoReference):
            raise
        except Exception as problem:
            text = str(problem) or type(problem).__name__
            raise NoReference(
                f"the step does not run in float64: {text} (let it take dtypes from its inputs)"
            ) from problem

    def _gradients(self, index: int) -> Observation:
        """Dense copies of every gradient."""
        found = gradients(self.program)
        self.results.update_inputs.sparse[index] = {name: t.coalesce() for name, t in found.items() if t.is_sparse}
        dense = {name: tensor.to_dense() for name, tensor in found.items() if is_sparse(tensor)}
        return {name: tensor.clone() for name, tensor in (found | dense).items()}

    def start_of(self, index: int, seen: Observation) -> Mapping[str, Tensor]:
        """The state that an arm started a step from."""
        own = self.registered | before(seen)
        return self.initial if index == 0 or not own else self.initial | own

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Bring the fp64 program to `state`, and to the Python state that was adopted last."""
        step_state, optimizer = self.program.step_state, self.program.optimizer
        if self.program.keeps is not None:
            self.program.keeps.adopt(self.begins_with.model)
        if step_state is not None:  # afterwards: it may hold handles of the model's hooks
            step_state.write({**step_state.first, **step_state.unpack(self.begins_with.step)})
        self.program.register(state)
        self.program.put(state)
        groups = optimizer.param_groups if step_state is not None and optimizer is not None else ()
        for index, group in enumerate(groups):
            rate, own = group.get("lr"), state.get(f"optimizer/group{index}/lr")
            if own is not None and isinstance(rate, (int, float)) and isclose(float(own), rate, rel_tol=ROUNDED):
                group["lr"] = float(own)  # an arm's float32, after many steps

    @contextmanager
    def _noting(self, index: int) -> Iterator[None]:
        """Hyperparameters of the optimizer at this call, where a user's step may have changed them just before."""
        optimizer = self.program.optimizer
        if optimizer is None or self.program.step_state is None:
            yield
            return

        called = self.results.update_inputs.called

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            numbers = [[(k, v) for k, v in g.items() if isinstance(v, (float, tuple))] for g in optimizer.param_groups]
            called[index] = [dict(group) for group in numbers]

        handle = optimizer.register_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()


def _require_widest(golden: Observation) -> None:
    """Raises NoReference where a result is in a narrower dtype than float64's."""
    for name, tensor in golden.items():
        if name_of(tensor.dtype) not in WIDEST and (tensor.is_floating_point() or tensor.is_complex()):
            kept = f"the model computes {name[4:]} in {name_of(tensor.dtype)} even in float64"
            raise NoReference(f"{kept}: let it take dtypes from its inputs, where it casts")


def before(observation: Mapping[str, Tensor]) -> Observation:
    """The state that an arm started from."""
    return {name.removeprefix("before/"): t for name, t in observation.items() if name.startswith("before/")}


def _alike_but_for_width(given: Tensor, wide: Tensor) -> bool:
    """Whether a copy in a wider dtype still holds what it was made of, piece by piece."""
    if is_sparse(given) or is_sparse(wide):
        return identical(given.to(wide.device, wide.dtype), wide)
    pieces = chunks(given, wide) if given.shape == wide.shape else ()
    return bool(pieces) and all(identical(narrow.to(part), part) for _, (narrow, part) in pieces)
