"""The reference arm's part: it draws the batches, computes every step in fp64, and judges what other arms did.

Each observation is compared with an fp64 step from that arm's *own* prior state, and each update with an fp64 optimizer
step on that arm's *own* gradients: near zero Adam takes the gradient's sign, so that comparing updates with the
baseline's would reject honest candidates, and would hide a learning rate that is 1 % off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from optexp.equivalence.float64 import InFloat64
from optexp.equivalence.gates import (
    PRECISION_CAP,
    TOLERANCES,
    Finding,
    Limits,
    Tolerance,
    Yardstick,
    broken,
    error,
    exact,
    identical,
    measure,
    name_of,
    rms,
    structure,
)
from optexp.equivalence.hyperparameters import bias_correction_error, in_float32
from optexp.equivalence.noise import RUNS
from optexp.equivalence.observation import Observation
from optexp.program import Batch, clear_gradients, gradients, map_batch
from optexp.strategy import Contract
from optexp.workload import Workload

SMALL = 16  # elements; fewer say too little about an error's size, and one run may be right by luck
POWERLESS = 0.1  # a baseline this far from fp64 (in units of s) leaves the gates nothing to see

T = TypeVar("T")


class NoReference(Exception):
    """Equivalence cannot be decided; the message says why. The comparison ends UNVERIFIED."""


@dataclass(frozen=True)
class Quantity:
    """One tensor to judge: what an arm got, what fp64 gets, and how much they may differ."""

    name: str
    value: Tensor
    reference: Tensor
    limits: Limits

    @cached_property
    def scale(self) -> float:
        return rms(self.reference)


class Judge:
    """Holds one workload in fp64. Yardsticks of a step come first, then the candidate's observation of it.

    device: of the arms; fp64 moves to the CPU where it does not fit there, and `reference` says so
    dtype:  of the arms' parameters and batches
    """

    def __init__(
        self, workload: Workload, device: torch.device, dtype: torch.dtype, seed: int, contract: Contract
    ) -> None:
        self.workload, self.dtype, self.seed, self.contract = workload, dtype, seed, contract
        self.drawn_on = device
        self.precise = contract.name != "PRECISION"
        self.row = TOLERANCES[contract.dtype or name_of(dtype)]
        start = workload.build(device, dtype, seed)
        self.trains = start.trains
        self.initial = {name: tensor.clone() for name, tensor in start.state().items()}
        self.batches: list[Batch] = []
        self.step = -1  # the one whose yardstick is known
        self.skipped: set[int] = set()
        self.baseline: Observation = {}
        self.goldens: dict[int, Observation] = {}
        self.measured: dict[tuple[int | None, str], Yardstick] = {}  # plain runs, by step and quantity
        self.noise: dict[tuple[int | None, str], Yardstick] = {}
        self.allowed: dict[tuple[int | None, str], Yardstick] = {}  # what rounded hyperparameters move
        try:
            self._settle(device)
        except torch.OutOfMemoryError:
            self._settle(torch.device("cpu"))

    # --- what the arm answers -----------------------------------------------------------------------------------

    def draw(self, seed: int, count: int) -> list[Batch]:
        """`count` new batches, in the arms' dtype where real; what was known of earlier ones is forgotten."""
        generator = torch.Generator(self.drawn_on).manual_seed(seed)
        real = self.dtype
        self.batches = [
            map_batch(lambda t: t.to(real) if t.is_floating_point() else t, batch)
            for batch in self.workload.batches(generator, count)
        ]
        self._forget()
        return self.batches

    def info(self) -> dict[str, Any]:
        """After a draw: where fp64 runs, and how many noisy steps of the baseline the gates need."""
        golden = self._guarded(self._golden, 0, self.initial)
        small = any(t.numel() < SMALL for name, t in golden.items() if name.startswith("out/"))
        jumps = any(name.startswith("grad/") for name in golden)
        noisy = jumps or small or self.dtype is torch.float64
        return {"reference": f"fp64 on {self.device.type}", "noisy_steps": RUNS if noisy else 0}

    def yardstick(self, step: int, observation: Mapping[str, Tensor]) -> None:
        """A run of the baseline (of plain autocast, for a PRECISION contract): what it errs by is the measure."""
        self._guarded(self._yardstick, step, observation)

    def judge(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        """What the gates say about the candidate's run of a step whose yardstick is known."""
        return self._guarded(self._judge, step, observation)

    # --- yardsticks ---------------------------------------------------------------------------------------------

    def _yardstick(self, step: int, observation: Mapping[str, Tensor]) -> None:
        seen = self._here(observation)
        if seen["flag/random"]:
            raise NoReference("a step draws random numbers (dropout?), so no two implementations need agree on it")
        noisy = bool(seen["flag/noisy"])
        if not noisy:
            self.step, self.baseline = step, seen
        unjudged = {name for name in seen if name.startswith(("out/", "grad/", "buffer/", "after/"))}
        unjudged = {name for name in unjudged if not name.startswith("after/scaler/") and not _optional(name)}
        kept, at = (self.noise, None) if noisy else (self.measured, step)  # noisy runs of all steps count for each
        for quantity in self._quantities(step, seen):
            found = error(quantity.value, quantity.reference, quantity.scale)
            key = (at, quantity.name)
            kept[key] = kept.get(key, Yardstick()) | Yardstick(found.rms, found.peak)
            unjudged.discard(_source(quantity.name))
            if not noisy:
                self._require_power(quantity, found.rms)
        if not noisy and self.program.optimizer is not None:
            self._rounded_hyperparameters(step, seen)
        if unjudged and not _skipped(seen):
            raise NoReference(f"float64 gives nothing to compare {', '.join(sorted(unjudged))} with")

    def _rounded_hyperparameters(self, step: int, seen: Observation) -> None:
        """What float32 hyperparameters move is allowed to any candidate (see `optexp.equivalence.hyperparameters`)."""
        own = {name.removeprefix("before/"): t for name, t in seen.items() if name.startswith("before/")}
        skips = _skipped(seen)
        exact = {q.name: q for q in self._updates(seen, own, skips)}
        assert self.program.optimizer is not None
        corrections = bias_correction_error(self.program.optimizer)
        for rounded in self._updates(seen, own, skips, rounded=True):
            quantity = exact[rounded.name]
            moved = error(rounded.reference, quantity.reference, quantity.scale)
            self._allow(step, rounded.name, moved.rms, moved.peak)
        for name, parameter in self.program.model.named_parameters():
            change, moved_by = exact.get(f"change/{name}"), corrections.get(parameter, 0.0)
            if change is not None:
                self._allow(step, change.name, moved_by * change.scale, moved_by)

    def _allow(self, step: int, quantity: str, rms: float, peak: float) -> None:
        key = (step, quantity)
        self.allowed[key] = self.allowed.get(key, Yardstick()) | Yardstick(rms, peak)

    def _require_power(self, quantity: Quantity, spread: float) -> None:
        enough = quantity.reference.numel() >= SMALL and quantity.name.startswith("out/")
        if enough and self.precise and spread > POWERLESS * quantity.scale:
            raise NoReference(
                f"the baseline's own {quantity.name[4:]} is off by {spread:.2g} where fp64 has a size of"
                f" {quantity.scale:.2g}, so that a wrong result could not be told from a right one"
            )

    def _of(self, quantity: Quantity) -> Yardstick:
        """E: the plain runs, and the noisy ones too where a single run says little."""
        plain = self._plain(quantity)
        few = quantity.reference.numel() < SMALL or self.dtype is torch.float64
        plain |= self.allowed.get((self.step, quantity.name), plain)
        return plain | self.noise.get((None, quantity.name), plain) if few or quantity.limits.gradient else plain

    def _plain(self, quantity: Quantity) -> Yardstick:
        return self.measured.get((self.step, quantity.name), Yardstick())

    # --- the gates ----------------------------------------------------------------------------------------------

    def _judge(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        assert step == self.step, "the yardstick of this step comes first"
        seen = self._here(observation)
        skips, expected = _skipped(seen), _skipped(self.baseline)
        if skips != expected:
            who, other = ("candidate", "plain autocast") if skips else ("plain autocast", "candidate")
            return [broken("scaler", f"{who} skips this step because its gradients overflow, {other} does not")]
        if failures := [*self._flags(seen), *self._structure(step, seen, skips)]:
            return failures
        findings = []
        if skips:
            self.skipped.add(step)
            if len(self.skipped) == len(self.batches):
                raise NoReference("gradients overflow in every step, so that no update can be compared")
            findings.append(Finding("scaler", "SKIPPED", message="a step was skipped in both: its gradients overflow"))
        for quantity in self._quantities(step, seen):
            source = _source(quantity.name)
            same = identical(seen[source], self.baseline[source]) if source in self.baseline else False
            findings.append(replace(self._compare(quantity), bitwise=same))
        for name in seen:
            if name.startswith("after/scaler/"):
                findings.append(exact(name.removeprefix("after/"), seen[name], self.baseline[name], None))
        return findings

    def _compare(self, quantity: Quantity) -> Finding:
        name = quantity.name.removeprefix("out/")
        if not quantity.value.is_floating_point() and not quantity.value.is_complex():
            return exact(name, quantity.value, self.baseline[_source(quantity.name)], quantity.reference)
        found = error(quantity.value, quantity.reference, quantity.scale)
        yardstick, plain = self._of(quantity), self._plain(quantity)
        finding = measure(name, found, quantity.scale, yardstick, plain, quantity.limits)
        kept = self.baseline.get(_source(quantity.name))
        if kept is not None and not self.precise and kept.dtype != quantity.value.dtype:
            note = f"dtype {name_of(quantity.value.dtype)} where plain autocast has {name_of(kept.dtype)}"
            finding = replace(finding, message="; ".join(filter(None, (finding.message, note))))
        return finding

    def _flags(self, seen: Observation) -> Iterator[Finding]:
        """What a step did besides computing."""
        if not seen["flag/inputs_intact"] and self.baseline["flag/inputs_intact"]:
            yield broken("inputs", "the step changes the caller's batch; the baseline leaves it as it is")
        if not seen["flag/plain"]:
            yield broken("outputs", "an output is not a plain torch.Tensor")
        ours, theirs = seen["flag/device"].tolist(), self.baseline["flag/device"].tolist()
        if len(ours) == len(theirs) and ours != theirs:  # where lengths differ names do, which `_structure` says
            yield broken("outputs", "an output is not on the device where the baseline leaves it")
        ours, theirs = seen["flag/aliases"].tolist(), self.baseline["flag/aliases"].tolist()
        if len(ours) == len(theirs):
            for position, (shared, expected) in enumerate(zip(ours, theirs, strict=True)):
                if shared not in (position, expected):
                    other = "an input" if shared < 0 else f"output {shared}"
                    yield broken("outputs", f"output {position} shares memory with {other}; the baseline's does not")

    def _structure(self, step: int, seen: Observation, skips: bool) -> Iterator[Finding]:
        """G0 over all tensors, and the state that training starts from."""
        names = {name for name in seen if not _optional(name)}
        expected = {name for name in self.baseline if not _optional(name)}
        for name in sorted(expected - names):
            yield broken(_title(name), "missing")
        for name in sorted(names - expected):
            yield broken(_title(name), "the baseline has no such tensor")
        for name in sorted(names & expected):
            if name.startswith("flag/") or (skips and name.startswith("grad/")):
                continue
            by_value = not self.precise or "/optimizer/" in name
            if difference := structure(seen[name], self.baseline[name], any_dtype=by_value):
                yield broken(_title(name), difference)
            elif step == 0 and name.startswith("before/") and not self._starts_right(name, seen[name]):
                yield broken(_title(name), "training does not start from the baseline's state")

    def _starts_right(self, name: str, before: Tensor) -> bool:
        start = self.initial.get(name.removeprefix("before/"), self.baseline[name])
        return identical(before, start.to(before.device, before.dtype))

    # --- what fp64 gets -----------------------------------------------------------------------------------------

    def _quantities(self, step: int, seen: Observation) -> Iterator[Quantity]:
        """Everything in an observation that fp64 has an opinion on."""
        own = {name.removeprefix("before/"): t for name, t in seen.items() if name.startswith("before/")}
        golden = self._golden(step, self.initial if step == 0 or not own else self.initial | own)
        skips = _skipped(seen)
        for name, reference in golden.items():
            gradient, forward = name.startswith("grad/"), name.startswith("out/")
            if name in seen and not (gradient and skips):
                small = reference.numel() < SMALL
                cap = PRECISION_CAP if forward and not self.precise and not small else None
                stored = _resolution(seen[name]) if small else (0.0, 0.0)
                yield Quantity(name, seen[name], reference, Limits(self._row(seen[name]), gradient, stored, cap))
        if any(name.startswith("after/") for name in seen):
            yield from self._updates(seen, own, skips)

    def _updates(
        self, seen: Observation, own: Observation, skips: bool, rounded: bool = False
    ) -> Iterator[Quantity]:
        """Parameter changes and optimizer state after an fp64 step on the arm's own gradients and prior state."""
        program, optimizer = self.program, self.program.optimizer
        assert optimizer is not None
        self._load(self.initial | own)
        if not skips:
            clear_gradients(program.model)
            for name, parameter in program.model.named_parameters():
                if (gradient := seen.get(f"grad/{name}")) is not None:
                    parameter.grad = gradient.to(parameter)
            with in_float32(optimizer) if rounded else nullcontext():
                optimizer.step()
        for name, reference in program.state().items():
            if (after := seen.get(f"after/{name}")) is None or name.startswith("buffer/"):
                continue
            # In fp64 by value: a capturable `step` may be float32 where the baseline's is an integer.
            row = TOLERANCES.get(name_of(after.dtype), self.row)
            wide = after.to(torch.float64)
            reference = reference.detach().to(self.device, torch.float64)  # plain optimizers keep `step` on the CPU
            limits = Limits(row, resolution=_resolution(after))  # however small the change is beside what is stored
            if name.startswith("param/"):
                before = own[name].to(torch.float64)
                yield Quantity(name.replace("param/", "change/", 1), wide - before, reference - before, limits)
            else:
                yield Quantity(name, wide, reference.clone(), limits)
        for index, group in enumerate(optimizer.param_groups):
            if (rate := seen.get(f"after/optimizer/group{index}/lr")) is not None:
                reference = torch.as_tensor(group["lr"], dtype=torch.float64, device=self.device)
                limits = Limits(TOLERANCES[name_of(rate.dtype)])
                yield Quantity(f"optimizer/group{index}/lr", rate.to(torch.float64), reference, limits)

    def _row(self, tensor: Tensor) -> Tolerance:
        """The coarser of the arithmetic's and the tensor's own."""
        own = TOLERANCES.get(name_of(tensor.dtype), self.row)
        return max(self.row, own, key=lambda row: row.unit)

    def _golden(self, step: int, state: Mapping[str, Tensor]) -> Observation:
        """out/, grad/ and buffer/ of an fp64 step from `state`; kept for the initial one, which all arms share."""
        shared = state is self.initial
        if shared and step in self.goldens:
            return self.goldens[step]
        self._load(state)
        batch = map_batch(
            lambda t: t.to(self.device, torch.float64 if t.is_floating_point() else t.dtype, copy=True),
            self.batches[step],
        )
        try:
            with InFloat64():
                outputs = self.program.step(self.program, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            raise NoReference(f"the model does not run in float64: {problem}") from problem
        golden = {f"out/{name}": t.detach().to(self.device, copy=True) for name, t in outputs.items()}
        for name, tensor in golden.items():
            if tensor.is_floating_point() and tensor.dtype is not torch.float64:
                raise NoReference(f"the model computes {name[4:]} in {name_of(tensor.dtype)} even in float64")
        if self.trains:
            golden |= {name: tensor.clone() for name, tensor in gradients(self.program).items()}
        golden |= {f"buffer/{name}": b.detach().clone() for name, b in self.program.model.named_buffers()}
        if shared:
            self.goldens[step] = golden
        return golden

    @torch.no_grad()
    def _load(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.program.state().items():
            tensor.copy_(state[name])

    # --- where it runs ------------------------------------------------------------------------------------------

    def _settle(self, device: torch.device) -> None:
        self.device = device
        self.goldens.clear()
        self.program = self.workload.build(device, torch.float64, self.seed)
        self.baseline = self._here(self.baseline)

    def _guarded(self, work: Callable[..., T], *args: Any) -> T:
        """Once more with fp64 on the CPU, where it does not fit beside the arms."""
        try:
            return work(*args)
        except torch.OutOfMemoryError as problem:
            if self.device.type == "cpu":
                raise NoReference(f"fp64 does not fit: {problem}") from problem
        self._settle(torch.device("cpu"))  # after the handler, whose traceback keeps tensors alive
        return work(*args)

    def _here(self, observation: Mapping[str, Tensor]) -> Observation:
        """A copy: what an arm sent lies in shared memory that its next message overwrites."""
        return {name: tensor.detach().to(self.device, copy=True) for name, tensor in observation.items()}

    def _forget(self) -> None:
        self.step = -1
        for memory in (self.skipped, self.baseline, self.goldens, self.measured, self.noise, self.allowed):
            memory.clear()


def _resolution(stored: Tensor) -> tuple[float, float]:
    """How finely a tensor can say what it says (RMS, largest): two roundings of its dtype, as of decay and update."""
    row = TOLERANCES.get(name_of(stored.dtype))
    if row is None or not stored.numel():
        return 0.0, 0.0
    return 2 * row.unit * rms(stored), 2 * row.unit * float(stored.abs().nan_to_num(0, 0, 0).max())


def _source(quantity: str) -> str:
    """The observation's name of a quantity."""
    if quantity.startswith("change/"):
        return quantity.replace("change/", "after/param/", 1)
    return f"after/{quantity}" if quantity.startswith("optimizer/") else quantity


def _title(name: str) -> str:
    return name.removeprefix("out/")


def _optional(name: str) -> bool:
    """A learning rate is state only where it is a tensor, which is the container's business."""
    return "/optimizer/group" in name and name.endswith("/lr")


def _skipped(observation: Mapping[str, Tensor]) -> bool:
    """Whether a GradScaler left this step out."""
    scaled = any(name.startswith("before/scaler/") for name in observation)
    return scaled and not all(bool(t.isfinite().all()) for n, t in observation.items() if n.startswith("grad/"))
