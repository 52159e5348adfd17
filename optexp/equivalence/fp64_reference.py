"""One workload in fp64: it draws every batch, and computes a step from any state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from optexp.equivalence import input_families
from optexp.equivalence.cancellation import LEFT, Terms
from optexp.equivalence.checksums import LARGE, compact
from optexp.equivalence.drawn_set import DrawnSet, UpdateInputs
from optexp.equivalence.dropout import NoDropout, silence
from optexp.equivalence.float64 import InFloat64
from optexp.equivalence.mutants import leading
from optexp.equivalence.noise import noisy
from optexp.equivalence.observation import Observation, unpacked
from optexp.equivalence.perturbation import turn_parameters, vary
from optexp.equivalence.tensor_math import alike, chunks, identical, name_of, rms
from optexp.equivalence.trajectory import Rates
from optexp.errors import NoReference
from optexp.program import Batch, Program, gradients, keeping, map_batch, tensors_of
from optexp.support.memory_plan import give_back
from optexp.support.sparse import is_sparse, parts
from optexp.support.stopwatch import Stopwatch
from optexp.workload import Workload

WIDEST = {"float64", "complex128"}
TRIED_S = 8.0  # seconds of steps on the host: when so many have passed there are no more
ZERO = 2.0**-40  # of its terms: a sum in float64 of which no more is left is zero in exact arithmetic
SUSPECT = 1e-9  # of the largest gradient: one that may be
ROUNDED = 1e-4  # how far rates may be apart that only differ in how they were rounded


class Fp64Reference:
    """The workload in fp64. Where the arms' dropout drops nothing, it drops nothing here (`silence`).

    drawn_on:      the arms' device;  device: where fp64 runs: there too, or on the CPU where it does not fit
    initial:       the state that all arms start from, in the arms' dtype
    drawn:         the set that was drawn last
    update_inputs: of the steps that were taken last
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        generic: bool = False,
        on_host: bool = False,
    ) -> None:
        self.workload, self.dtype, self.seed, self.drawn_on, self.silent = workload, dtype, seed, device, False
        start = workload.build(device, dtype, seed)
        if generic:
            vary(start.model, seed)
        self.trains, self.targets = start.trains, start.targets
        self.initial = {name: tensor.clone() for name, tensor in start.state().items()}
        self.drawn = DrawnSet()
        self.named = False  # a batch is tensors by name
        self.on_host: Program | None = None  # for what may end a process that uses the card
        self.watch = Stopwatch()
        self.met: dict[str, Tensor] = {}  # of the first batch of the seed before, some elements
        self.anew = True  # this seed's is another one
        self.moving: set[str] = set()  # parameters that steps change without an optimizer
        self.varied: set[str] = set()  # inputs that have held several values so far
        try:
            self.settle(torch.device("cpu") if on_host else device)
        except torch.OutOfMemoryError:
            self.settle(torch.device("cpu"))

    def settle(self, device: torch.device) -> None:
        """Build the fp64 program on `device`."""
        self.device = device
        self.drawn.results.clear()
        give_back(self.drawn_on)  # where fp64 was, and does not fit, the arms need the room
        self.program = self.workload.build(device, torch.float64, self.seed)
        if self.silent:
            silence(self.program.model)
        self.program = keeping(self.program)
        self.rates = Rates(self.program)
        self.update_inputs = UpdateInputs()

    def silence(self) -> None:
        """As the arms do where steps draw random numbers; a deterministic model keeps its rates, whatever they mean."""
        self.silent = True
        silence(self.program.model)
        self.program = keeping(self.program)

    @property
    def batches(self) -> list[Batch]:
        return self.drawn.batches

    @property
    def family(self) -> str:
        """Family of the inputs that were drawn last."""
        return self.drawn.family

    # --- batches ------------------------------------------------------------------------------------------------

    def draw(self, seed: int, count: int, family: str) -> None:
        """Draw `count` batches of a family; ONE_BY_ONE draws two, and exchanges their inputs one by one.

        Raises NoReference where the family changes no input, or the model does not take its values.
        """
        if any(tensor.nbytes > LARGE for batch in self.batches for tensor in tensors_of(batch).values()):
            self._take([], family)  # both sets at a time may not fit
        generator = torch.Generator(self.drawn_on).manual_seed(seed)
        if family == input_families.ONE_BY_ONE:
            first, *_, second = self.workload.batches(generator, self.workload.variety + 1)  # of the same kind
            drawn = input_families.exchanged(first, second)
        else:
            usual = self.workload.batches(generator, count)
            drawn = [input_families.of(family, batch, self.targets, self.workload.bounded) for batch in usual]
            if family in input_families.FAMILIES and drawn[0] is usual[0]:
                raise NoReference("no input takes such values")
            if family in input_families.FAMILIES and self.drawn_on.type == "cuda":
                self._try_on_host(drawn[0])
        self._take([map_batch(lambda t: t.to(self.dtype) if t.is_floating_point() else t, b) for b in drawn], family)
        if family in (input_families.NORMAL, input_families.ONE_BY_ONE):
            before, self.met = self.met, _some(self.batches[0])
            self.anew = not _alike(before, self.met)
            first, *others = [tensors_of(batch) for batch in self.batches]
            self.varied |= before.keys() - alike(before, self.met) if before else set()
            self.varied |= {name for other in others for name in first.keys() - alike(first, other)}

    def _try_on_host(self, batch: Batch) -> None:
        """Raise on the host first: an assertion of a kernel, as of a cross entropy of what lies beyond 0 and 1, ends a
        process that uses the card."""
        if self.watch.seconds.get("host", 0.0) > TRIED_S:
            return
        host = torch.device("cpu")
        try:
            with self.watch.phase("host"), InFloat64(self.dtype), NoDropout():
                self.on_host = self.on_host or self.workload.build(host, torch.float64, self.seed)
                self.on_host.step(self.on_host, map_batch(lambda t: _widened(t, host), batch))
        except (RuntimeError, ValueError, IndexError) as problem:
            text = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            raise NoReference(f"the model does not take such values: {text}") from problem

    def turn_parameters(self) -> None:
        """Turn the parameters that all arms begin with."""
        turn_parameters(self.initial)
        self.drawn.results.clear()

    def recall(self, observation: Mapping[str, Tensor]) -> None:
        """Take the batch of a timed step, from the baseline's replay, instead of drawn ones."""
        given = {n.removeprefix("batch/"): t for n, t in observation.items() if n.startswith("batch/")}
        batch: Batch = given if self.named else tuple(given.values())
        self._take([map_batch(lambda t: t.to(self.drawn_on, copy=True), batch)], input_families.NORMAL)

    def _take(self, batches: list[Batch], family: str) -> None:
        self.drawn = DrawnSet(batches, family)
        self.named = isinstance(batches[0], Mapping) if batches else self.named

    def rest(self) -> None:
        """Keep neither batches nor results."""
        self._take([], input_families.NORMAL)
        give_back(self.drawn_on)

    # --- what fp64 gets -----------------------------------------------------------------------------------------

    def step(self, index: int, state: Mapping[str, Tensor]) -> Observation:
        """Tensors out/, input/, grad/, buffer/ and param/ of a step from `state`, where fp64 runs.

        Results from the initial state, which all arms share, are cached.
        index: of the batch
        Raises NoReference where the step does not run in float64, or computes a result in a narrower dtype.
        """
        shared = state is self.initial
        if shared and index in self.drawn.results:
            return self.drawn.results[index]
        self.drawn.forget_large()  # one of them at a time is all that fits
        self.load(state)
        given = self.batches[index % len(self.batches)]
        batch = map_batch(self._widened, given)
        try:
            with InFloat64(self.dtype), NoDropout(), self._noting(index):
                outputs = self.program.step(self.program, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            text = str(problem) or type(problem).__name__
            raise NoReference(
                f"the step does not run in float64: {text} (let it take dtypes from its inputs)"
            ) from problem
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
        for name, tensor in golden.items():
            if name_of(tensor.dtype) not in WIDEST and (tensor.is_floating_point() or tensor.is_complex()):
                kept = f"the model computes {name[4:]} in {name_of(tensor.dtype)} even in float64"
                raise NoReference(f"{kept}: let it take dtypes from its inputs, where it casts")
        golden |= written
        if self.trains:
            golden |= self._gradients(index)
        golden |= {f"buffer/{name}": b.detach().clone() for name, b in self.program.buffers().items()}
        state = self.program.state() if self.moving else {}
        golden |= {name: state[name].detach().clone() for name in self.moving}
        if self.program.optimizer is not None:
            self.update_inputs.left[index] = [float(group["lr"]) for group in self.program.optimizer.param_groups]
        if shared:
            self.drawn.results[index] = golden
        return golden

    def _gradients(self, index: int) -> Observation:
        """Dense copies of every gradient."""
        found = gradients(self.program)
        self.update_inputs.sparse[index] = {name: t.coalesce() for name, t in found.items() if t.is_sparse}
        dense = {name: tensor.to_dense() for name, tensor in found.items() if is_sparse(tensor)}
        return {name: tensor.clone() for name, tensor in (found | dense).items()}

    def adopt(self, baseline: Mapping[str, Tensor]) -> None:
        """Begin the next steps with the Python state that the baseline's step began with."""
        self.drawn.memory, self.drawn.kept = unpacked("memory", baseline), unpacked("keeps", baseline)

    def follow(self, parameters: Iterable[str]) -> None:
        """Return these parameters after each step, too."""
        if more := {*parameters} - self.moving:
            self.moving |= more
            self.drawn.results.clear()

    def zeros(self) -> Mapping[str, float]:
        """RMS over elements of Σ|terms| of each gradient of the first step that is zero in exact arithmetic."""
        if self.drawn.zeros is None:
            golden = self.step(0, self.initial)
            found = {name: rms(tensor) for name, tensor in golden.items() if name.startswith("grad/")}
            least = SUSPECT * max(found.values(), default=0.0)
            suspects = [name for name, size in found.items() if size < least]
            self.drawn.zeros = {}
            for name, size in self.terms().items() if suspects else ():
                if name in suspects and size * ZERO > found[name]:
                    self.drawn.zeros[name] = size
        return self.drawn.zeros

    @property
    def all_terms(self) -> Mapping[str, float]:
        """RMS over elements of Σ|terms| of every gradient of the first step, by name."""
        if self.drawn.terms is None:
            self.drawn.terms = self.terms(least=1.0)
        return self.drawn.terms

    def terms(self, least: float = LEFT) -> dict[str, float]:
        """RMS over elements of Σ|terms| of each gradient of the first step that is smaller than a share of its terms.

        least: the share
        """
        kept, self.update_inputs = self.update_inputs, self.update_inputs.copy()
        try:
            with Terms(least) as terms:
                self.step(0, dict(self.initial))
            return {
                f"grad/{alias.name}": terms.of(parameter.grad)
                for alias, parameter in self.program.parameters()
                if parameter.grad is not None and terms.of(parameter.grad)
            }
        except (NoReference, RuntimeError):  # code that does not run inside a dispatch mode
            return {}
        finally:
            self.update_inputs = kept

    def nearby(self, index: int, state: Mapping[str, Tensor], seed: int, share: float) -> Observation:
        """The results of a step with noise inside the model; empty where it does not run.

        share: of the usual noise
        """
        kept, self.update_inputs = self.update_inputs, self.update_inputs.copy()
        try:
            with noisy(self.program.model, seed, self.dtype, share):
                return self.step(index, dict(state))
        except NoReference:
            return {}
        finally:
            self.update_inputs = kept

    def _widened(self, tensor: Tensor) -> Tensor:
        """A copy, where fp64 runs."""
        return _widened(tensor, self.device)

    def start_of(self, index: int, seen: Observation) -> Mapping[str, Tensor]:
        """The state that an arm started a step from."""
        own = before(seen)
        return self.initial if index == 0 or not own else self.initial | own

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Bring the fp64 program to `state`, and to the Python state that was adopted last."""
        memory, optimizer = self.program.step_state, self.program.optimizer
        if memory is not None:
            memory.write({**memory.first, **memory.unpack(self.drawn.memory)})
        if self.program.keeps is not None:
            self.program.keeps.adopt(self.drawn.kept)
        self.program.put(state)
        for index, group in enumerate(optimizer.param_groups if memory is not None and optimizer is not None else ()):
            rate, own = group["lr"], state.get(f"optimizer/group{index}/lr")
            if own is not None and not isinstance(rate, Tensor) and isclose(float(own), rate, rel_tol=ROUNDED):
                group["lr"] = float(own)  # an arm's float32, after many steps

    @contextmanager
    def _noting(self, index: int) -> Iterator[None]:
        """What the optimizer is called with, where a user's step may have changed it just before."""
        optimizer = self.program.optimizer
        if optimizer is None or self.program.step_state is None:
            yield
            return

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            numbers = [[(k, v) for k, v in g.items() if isinstance(v, (float, tuple))] for g in optimizer.param_groups]
            self.update_inputs.called[index] = [dict(group) for group in numbers]

        handle = optimizer.register_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def dead(self) -> list[str]:
        """After a draw of ONE_BY_ONE: names of inputs that the results do not depend on.

        Raises NoReference where every draw is the same, or no varied input matters.
        """
        first, *others = self.batches
        fits = all(input_families.fitting(first, other) for other in others)
        groups = input_families.together(first) if fits else [list(tensors_of(first))]
        lives, start = {}, compact(self.step(0, self.initial))
        for index, (names, other) in enumerate(zip(groups, others, strict=True), start=1):
            lives.update(dict.fromkeys(names, self._reacts(start, self.step(index, self.initial))))
            for name in names if fits and len(names) > 1 else ():
                lives[name] = self._reacts_to(start, input_families.swapped(first, other, [name]))
        self.drawn.forget_large()
        if all(_alike(tensors_of(self.batches[0]), tensors_of(other)) for other in self.batches[1:]):
            raise NoReference(
                "inputs hold the same values whatever the seed, so that a result that ignores them passes for a right"
                " one: let what makes them draw random numbers, as torch.randn does"
            )
        if not any(lives.values()):
            still = f" (the same in every draw: input {', '.join(self.constant())})" if self.constant() else ""
            raise NoReference(
                f"the result depends on no input that was varied{still}, so that a wrong one could not be told from a"
                " right one: draw those that matter at random"
            )
        return [name for name in tensors_of(first) if not lives[name] and name in self.varied]

    def constant(self) -> list[str]:
        """Names of inputs that had the same values in every draw so far."""
        return [name for name in tensors_of(self.batches[0]) if name not in self.varied]

    def _reacts(self, first: Observation, golden: Observation) -> bool:
        """Whether the results are others than those of the first batch."""
        results = [name for name in first if not name.startswith(("buffer/", "param/"))]
        return not alike(first, compact(golden)).issuperset(results)

    def _reacts_to(self, first: Observation, batch: Batch) -> bool:
        """The same of a batch that is no other arm's."""
        self.batches.append(batch)
        try:
            return self._reacts(first, self.step(len(self.batches) - 1, dict(self.initial)))  # not to be remembered
        finally:
            self.batches.pop()

    def without_eps(self, index: int, state: Mapping[str, Tensor]) -> Observation:
        """The difference that the model's eps makes to each result of a step; of large tensors, to their first rows."""
        modules: list[Any] = [m for m in self.program.model.modules() if isinstance(getattr(m, "eps", None), float)]
        if not modules:
            return {}
        kept, program = [module.eps for module in modules], self.program
        golden = {name: leading(tensor).clone() for name, tensor in self.step(index, state).items()}
        try:
            self.load(state)
            self.program = replace(program, keeps=None)  # which would put back what is left out here
            for module in modules:
                module.eps = 1e-100  # batch norm insists on more than 0
            mutated = self.step(index, dict(state))  # a state of its own: not to be remembered
        finally:
            self.program = program
            for module, eps in zip(modules, kept, strict=True):
                module.eps = eps
        return {
            name: leading(tensor) - golden[name]
            for name, tensor in mutated.items()
            if tensor.is_floating_point() and name in golden
        }


def _widened(tensor: Tensor, device: torch.device) -> Tensor:
    wide = torch.float64 if tensor.is_floating_point() else torch.complex128 if tensor.is_complex() else tensor.dtype
    return tensor.to(device, wide, copy=True)


def before(observation: Mapping[str, Tensor]) -> Observation:
    """The state that an arm started from."""
    return {name.removeprefix("before/"): t for name, t in observation.items() if name.startswith("before/")}


def _alike(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """The same bits in every entry."""
    return ours.keys() == theirs.keys() == alike(ours, theirs)


def _alike_but_for_width(given: Tensor, wide: Tensor) -> bool:
    """Whether a copy in a wider dtype still holds what it was made of, piece by piece."""
    if is_sparse(given) or is_sparse(wide):
        return identical(given.to(wide.device, wide.dtype), wide)
    pieces = chunks(given, wide) if given.shape == wide.shape else ()
    return bool(pieces) and all(identical(narrow.to(part), part) for _, (narrow, part) in pieces)


def _some(batch: Batch) -> dict[str, Tensor]:
    """Up to 4096 elements of each tensor, far apart: a batch may be large, and two are told apart by few."""
    every = (parts(tensor, name) for name, tensor in tensors_of(batch).items())
    flat = {name: part.detach().reshape(-1) for each in every for name, part in each.items()}
    return {name: tensor[:: -(-len(tensor) // 4096) or 1].cpu() for name, tensor in flat.items()}
