"""The reference arm's part: it judges what other arms did by what fp64 gets.

Each observation is compared with an fp64 step from that arm's *own* prior state, and each update with an fp64 optimizer
step on that arm's *own* gradients: near zero Adam takes the gradient's sign, so that comparing updates with the
baseline's would reject honest candidates, and would hide a learning rate that is 1 % off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from optexp.equivalence import mutants, reassociation
from optexp.equivalence.effects import broken_effects, optional, title
from optexp.equivalence.far_off import far_off
from optexp.equivalence.fp64_reference import Fp64Reference, before
from optexp.equivalence.gates import (
    PRECISION_CAP,
    Limits,
    Yardstick,
    alike,
    errors,
    exact,
    finite,
    histogram,
    identical,
    largest,
    measure,
    name_of,
    rms,
    structure,
)
from optexp.equivalence.hyperparameters import bias_correction_error, in_float32
from optexp.equivalence.input_families import FAMILIES, NORMAL, integers, nonfinite
from optexp.equivalence.known import Known
from optexp.equivalence.nature import explained
from optexp.equivalence.noise import RUNS, alone, amplitude
from optexp.equivalence.observation import Observation, unpacked
from optexp.equivalence.parting import Passed, first_apart, watched
from optexp.equivalence.quantities import Quantity, is_exact, is_noise, is_part, measured, parts, source
from optexp.equivalence.sight import unseen
from optexp.equivalence.trajectory import RATES
from optexp.errors import NoReference
from optexp.program import Batch, clear_gradients, tensors_of
from optexp.records.verification import Distribution, Element, Finding, broken
from optexp.strategy import Contract
from optexp.support.memory_plan import PLANS, Sizes, capacity, choose, give_back
from optexp.support.sparse import nbytes
from optexp.support.tolerances import SMALL, TOLERANCES, Tolerance
from optexp.workload import Workload

SUBJECTS = 4  # tensors of a kind that mutants are made of, the largest ones
TIES = 32  # noisy runs of a step with integers: of near ties in 12 bfloat16 argmaxes six runs missed 20, these none
NEAR, AT_ONCE = 16, 4  # runs that look for near ties
LITTLE = 0.25  # of the usual noise, in those: some five times what honest arithmetic has
PART = 0.2  # of a gradient: more of it hangs on no tie
FEW = 1024.0  # u: the share of a lone module's integers that may be near ties
GENERATORS = "generators"
TIED = "a gradient is off by no more than inputs of a ReLU or a max-pool that are alike but for rounding move it"
RESEEDED = "a step draws random numbers or sets their seed, which the baseline's leaves alone"

T = TypeVar("T")


@dataclass(frozen=True)
class SetInfo:
    """One set of inputs, as the reference has drawn it.

    reference:         device of fp64, in words
    steps:             batches
    reassociated_runs: runs of the baseline in other orders that the gates need;  noisy_steps: the same with noise
    unit:              u of the promised arithmetic;  unit_used: u of the coarsest arithmetic that the baseline uses
    in_turns:          only the arm that takes a step holds batches and results
    anew:              the seed gives other batches than the seed before
    others_learn:      gradients are for somebody else, who changes parameters
    """

    reference: str
    steps: int
    reassociated_runs: int
    noisy_steps: int
    unit: float
    unit_used: float
    in_turns: bool
    anew: bool
    others_learn: bool


class Judge:
    """Yardsticks of a step come first, then the candidate's observation of it.

    device: of the arms; fp64 moves to the CPU where it does not fit there, and `info` says so
    dtype:  of the arms' parameters and batches
    plan:   index in `memory_plan.PLANS` of the first that has not been tried
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        contract: Contract,
        generic: bool = False,
        plan: int = 0,
    ) -> None:
        self.fp64 = Fp64Reference(workload, device, dtype, seed, generic, PLANS[plan].on_host)
        self.plan, self.in_turns = plan, PLANS[plan].in_turns
        self.precise = contract.name != "PRECISION"
        self.arithmetic = contract.dtype or name_of(dtype)
        self.row = TOLERANCES[self.arithmetic]
        self.rough = dtype is torch.float64  # the reference is no more exact than the arms
        self.known = Known()
        self.unsteady: set[str] = set()
        self.restless: set[str] = set()
        self.eps, self.finer = torch.finfo(dtype).eps, False  # modules that compute in more than the arms' dtype
        self.writes = False  # the baseline, to its own inputs
        self.infinite: set[str] = set()  # results that the baseline gives no finite numbers for on normal inputs
        self.earlier: Observation = {}  # outputs and gradients of the baseline's step before
        self.coarsest = 0.0  # the largest eps of an arithmetic that the baseline uses

    # --- what the arm answers -----------------------------------------------------------------------------------

    def draw(self, seed: int, count: int, family: str = NORMAL) -> None:
        """New batches; what was known of others is forgotten."""
        self._forget()
        self.fp64.draw(seed, count, family)
        self._give_back()

    def recall(self, observation: Mapping[str, Tensor]) -> None:
        """The batch of a replayed step, instead."""
        self.fp64.recall(observation)
        self._forget()

    @property
    def batches(self) -> list[Batch]:
        return self.fp64.batches

    def info(self) -> SetInfo:
        """The set that was drawn last."""
        golden = self._guarded(self._golden, 0, {})
        real = [t for name, t in golden.items() if name.startswith("out/") and t.is_floating_point()]
        small = any(t.numel() < SMALL for t in real)
        jumps = any(name.startswith("grad/") for name in golden)
        ties = any(name.startswith("out/") and is_exact(t) for name, t in golden.items())
        noisy = jumps or small or self.rough
        self.in_turns = PLANS[choose(self._sizes(golden), capacity(self.fp64.drawn_on), self.plan)].in_turns
        self._give_back()
        return SetInfo(
            reference=f"fp64 on {self.fp64.device.type}",
            steps=len(self.batches),
            reassociated_runs=reassociation.RUNS,
            noisy_steps=TIES * len(self.batches) if ties else RUNS if noisy else 0,
            unit=self.row.unit,
            unit_used=max(self.row.unit, self.coarsest / 2),  # TF32's, where torch allows it
            in_turns=self.in_turns,
            anew=self.fp64.anew,
            others_learn=self.fp64.trains and self.fp64.program.optimizer is None,
        )

    def silence(self) -> None:
        """Every dropout has rate 0 from now on."""
        self.fp64.silence()

    def turn_parameters(self) -> None:
        """As the arms do (see `optexp.equivalence.perturbation.turn_parameters`)."""
        self.fp64.turn_parameters()

    def yardstick(self, step: int, observation: Mapping[str, Tensor]) -> None:
        """A run of the baseline (of plain autocast, for a PRECISION contract): what it errs by is the measure."""
        self._guarded(self._yardstick, step, observation)

    def judge(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        """What the gates say about the candidate's run of a step whose yardstick is known."""
        return self._guarded(self._judge, step, observation)

    def judge_timed(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        """What the gates say of the outputs of a timed block, beside the state that its replay found before them."""
        timed = {name.removeprefix("timed/"): t for name, t in observation.items() if name.startswith("timed/")}
        seen = dict(observation) | {f"out/{name}": tensor for name, tensor in timed.items()}
        return [finding for finding in self.judge(step, seen) if finding.tensor in timed or not finding.ok]

    def rest(self) -> None:
        """Keep nothing of what was judged."""
        self._forget()
        self.earlier = {}
        self.fp64.rest()

    def dead(self) -> list[str]:
        """After a draw of ONE_BY_ONE: inputs that fp64's results do not depend on."""
        return self._guarded(self.fp64.dead)

    def constant(self) -> list[str]:
        """Inputs that every draw so far has given the same values."""
        return self.fp64.constant()

    def zeros(self) -> Mapping[str, float]:
        """Gradients of the batch drawn last that are zero in exact arithmetic, with the size of their terms."""
        return self._guarded(self.fp64.zeros)

    def first_apart(self, passed: Sequence[Passed]) -> str:
        """The first module where the baseline's first step and float64's part; empty where that is behind them all."""
        with watched(self.fp64.program.model) as theirs:
            self.fp64.step(0, dict(self.fp64.initial))
        return first_apart(passed, theirs, low=self.row.unit > TOLERANCES["float32"].unit)

    def power(self) -> list[mutants.Tried]:
        """Which mutants of the baseline's last step the gates see."""
        return self._guarded(self._power)

    def distribution(self, tensor: str) -> Distribution:
        """Errors of one output of the step judged last."""
        arms = self.known.baseline, self.known.candidate
        baseline, candidate = (self._guarded(self._histogram, seen, f"out/{tensor}") for seen in arms)
        return Distribution(baseline, candidate, tensor)

    # --- yardsticks ---------------------------------------------------------------------------------------------

    def _yardstick(self, step: int, observation: Mapping[str, Tensor]) -> None:
        seen = self._here(observation)
        if seen["flag/random"]:
            raise NoReference(
                "a step draws random numbers even with every dropout at p = 0, so no two implementations need agree:"
                " switch that off for the comparison"
            )
        self.fp64.memory, self.fp64.kept = unpacked("memory", seen), unpacked("keeps", seen)
        self.known.attributes.meet(step, seen)
        self.fp64.follow(name for name in seen if name.startswith("param/"))
        self.writes |= not seen["flag/inputs_intact"]
        noisy, reordered = bool(seen["flag/noisy"]), int(seen["flag/reassociated"])
        reassociated = reordered > 0
        if reordered == 0:
            return  # there was nothing to take in another order
        moved = noisy or reassociated
        self._require_finite(seen)
        self._find_restless(step, seen)
        self.coarsest = max(self.coarsest, float(seen["flag/coarsest"]))
        if not moved:
            if step != self.known.step:  # cloned, so that they do not keep all that arrived with them
                mutated = ((n, t) for n, t in self.known.baseline.items() if n.startswith(("out/", "grad/")))
                returned = {name: mutants.leading(tensor).clone() for name, tensor in mutated}
                self.earlier = returned or self.earlier
            self._find_unsteady(step, seen)
            self.known.step, self.known.baseline = step, seen
        elif step == self.known.step:
            self._find_spread(seen)
        for name in (name for name in seen if moved and name.startswith("out/") and is_exact(seen[name])):
            self.known.swayed.setdefault((step, name), []).append(seen[name].clone())
        self.known.noisy_runs += noisy
        self.finer |= noisy and float(seen["flag/finest"]) < self.eps
        if noisy and self.known.noisy_runs > RUNS:
            return  # more of them are for integers, and would make the yardsticks of others larger
        unjudged = {
            name for name in seen if name.startswith(("out/", "input/", "grad/", "buffer/", "param/", "after/"))
        }
        unjudged = {name for name in unjudged if not name.startswith("after/scaler/") and not optional(name)}
        kept, at = (
            (self.known.noise, None) if noisy else (self.known.measured, step)
        )  # noisy runs of all steps count for each
        kept, at = (self.known.reassociated, None) if reassociated else (kept, at)
        first = step not in self.known.rounded and any(name.startswith("after/") for name in seen)
        updates = dict[str, Quantity]()
        for quantity in self._quantities(step, seen):
            found, key = quantity.found, (at, quantity.name)
            if first and not quantity.name.startswith(("out/", "input/", "grad/", "buffer/", "param/")):
                updates[quantity.name] = quantity
            kept[key] = kept.get(key, Yardstick()) | Yardstick.of(found)
            unjudged.discard(source(quantity.name))
            if not moved:
                self._require_numbers(quantity)
        if first:
            self._rounded_hyperparameters(step, seen, updates)
            self.known.rounded.add(step)  # what its other runs would add is nothing but their scatter
        if unjudged and not _skipped(seen):
            raise NoReference(f"float64 gives nothing to compare {', '.join(sorted(unjudged))} with")

    def _find_spread(self, seen: Observation) -> None:
        """How far another order and rounding, or noise, take the baseline from what it gave for the same step."""
        names = [n for n in seen if n in self.known.baseline and n.startswith(("out/", "grad/", "buffer/", "param/"))]
        names = [n for n in names if seen[n].is_floating_point() and seen[n].shape == self.known.baseline[n].shape]
        found = errors([(seen[n].to(torch.float64), self.known.baseline[n].to(torch.float64), 0.0) for n in names])
        for name, error in zip(names, found, strict=True):
            self.known.spread[name] = max(self.known.spread.get(name, 0.0), error.rms)

    def _find_unsteady(self, step: int, seen: Observation) -> None:
        """Integers that the baseline does not repeat, as a count of all calls so far, have no value to be equal to."""
        for name, tensor in seen.items():
            if name.startswith("out/") and is_exact(tensor):
                first = self.known.integers.setdefault((step, name), tensor.clone())
                if not identical(first.to(tensor.device), tensor):
                    self.unsteady.add(name)

    def _find_restless(self, step: int, seen: Observation) -> None:
        """What a user's step keeps in Python and is another one in every run, as a time: nothing to compare with."""
        if (memory := self.fp64.program.memory) is None:
            return
        noisy = bool(seen["flag/noisy"]) or int(seen["flag/reassociated"]) > 0
        for name, packed in unpacked("remembers", seen).items():
            first, disturbed = self.known.remembered.setdefault((step, name), (packed, noisy))
            apart = memory.apart(packed, first)
            if inf in apart or not (noisy or disturbed or memory.alike(packed, first, self.row.unit)):
                self.restless.add(f"remembers/{name}")
            self.known.blurred[name] = list(
                map(max, zip_longest(apart, self.known.blurred.get(name, ()), fillvalue=0.0))
            )
            if disturbed and not noisy:
                self.known.remembered[step, name] = packed, noisy

    def _require_finite(self, seen: Observation) -> None:
        """Where only a family of inputs makes the baseline overflow, how it does so is no implementation's duty."""
        scaled = () if self.precise or _skipped(seen) else ("grad/",)
        results = {name: t for name, t in seen.items() if name.startswith(("out/", *scaled))}
        found = results.keys() - finite(results)
        if self.fp64.family not in FAMILIES:
            self.infinite |= found
        elif self.fp64.family != nonfinite.__name__ and (lost := found - self.infinite):
            raise NoReference(f"the baseline gives NaN or Inf in {', '.join(sorted(map(title, lost)))}")

    def _rounded_hyperparameters(self, step: int, seen: Observation, exact: Mapping[str, Quantity]) -> None:
        """What float32 hyperparameters move is allowed to any candidate (see `optexp.equivalence.hyperparameters`)."""
        program = self.fp64.program
        assert program.optimizer is not None
        corrections = bias_correction_error(program.optimizer)
        moved = [(exact[rounded.name], rounded.reference) for rounded in self._updates(step, seen, rounded=True)]
        for name, parameter in program.model.named_parameters():
            change, moved_by = exact.get(f"change/{name}"), corrections.get(parameter, 0.0)
            if change is not None and moved_by:
                moved.append((change, change.reference * (1 + moved_by)))
        for quantity in measured(replace(quantity, value=value) for quantity, value in moved):
            self._allow(step, quantity)

    def _allow_near_ties(self, step: int, seen: Observation, seeds: Iterable[int]) -> None:
        """What is zero for a ReLU, or alike for a max-pool, but for rounding falls either way in honest arithmetic, and
        gradients jump with it. After a first step the candidate meets other such ties than the baseline's noisy runs
        do: so fp64 goes where the candidate was, with a little noise."""
        exact, start = self._golden(step, seen), self.fp64.start_of(step, seen)
        for seed in seeds:
            moved = self.fp64.nearby(step, start, seed, LITTLE)
            if not self._stays(moved, exact):
                continue
            gradients = [name for name in exact if name.startswith("grad/") and name in moved]
            for quantity in measured(Quantity(n, moved[n], exact[n], Limits(self.row)) for n in gradients):
                if quantity.found.rms < PART * quantity.scale:
                    self._allow(step, quantity)

    def _stays(self, moved: Observation, exact: Observation) -> bool:
        """Whether results are where they were, but for noise, as a tie leaves them: else another thing was computed."""
        names = [name for name in exact if name.startswith("out/") and exact[name].is_floating_point()]
        if any(name not in moved or moved[name].shape != exact[name].shape for name in names):
            return False
        every = measured(Quantity(name, moved[name], exact[name], Limits(self.row)) for name in names)
        usual = amplitude(self.arithmetic)
        limits = [(q, max(self.known.noise.get((None, q.name), Yardstick()).rms, usual * q.scale)) for q in every]
        return bool(limits) and all(q.found.rms <= limit and not q.found.lost for q, limit in limits)

    def _allow(self, step: int, moved: Quantity) -> None:
        """As far from fp64 as this is any candidate may be, in each block too."""
        key = (step, moved.name)
        known, _ = self.known.allowed.get(key, (Yardstick(), 0.0))
        self.known.allowed[key] = known | Yardstick.of(moved.found), moved.scale

    def _require_numbers(self, quantity: Quantity) -> None:
        """NaN looks like any other NaN, and so does what overflows."""
        if not (self.precise and quantity.found.lost and self.fp64.family not in FAMILIES):
            return
        value = quantity.value
        lost = int((value.isnan() | (~value.isfinite() & quantity.reference.isfinite())).sum())
        if 2 * lost > value.numel():
            raise NoReference(
                f"{lost} of {value.numel()} elements of the baseline's own {title(quantity.name)} are NaN, or overflow"
                " where fp64 has numbers, so that a wrong result could not be told from a right one"
            )

    def _of(self, quantity: Quantity) -> Yardstick:
        """E: the plain and the reassociated runs, and the noisy ones too where those say little."""
        plain = self._plain(quantity)
        few = quantity.reference.numel() < SMALL or self.rough
        plain |= self._allowed(quantity)
        plain |= self.known.reassociated.get((None, quantity.name), plain)
        return plain | self.known.noise.get((None, quantity.name), plain) if few or quantity.limits.gradient else plain

    def _allowed(self, quantity: Quantity) -> Yardstick:
        """What rounded hyperparameters move: a share of the tensor, which is the candidate's own where a gradient is
        nothing but rounding."""
        found, scale = self.known.allowed.get((self.known.step, quantity.name), (Yardstick(), 0.0))
        larger = quantity.scale / scale if scale and quantity.scale > scale else 1.0
        blocks = None if found.blocks is None else larger * found.blocks
        return Yardstick(larger * found.rms, larger * found.peak, blocks)

    def _plain(self, quantity: Quantity) -> Yardstick:
        return self.known.measured.get((self.known.step, quantity.name), Yardstick())

    # --- the gates ----------------------------------------------------------------------------------------------

    def _judge(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        assert step == self.known.step, "the yardstick of this step comes first"
        seen = self.known.candidate = self._here(observation)
        yard = self.known.baseline
        self.fp64.memory, self.fp64.kept = unpacked("memory", yard), unpacked("keeps", yard)
        skips, expected = _skipped(seen), _skipped(yard)
        if skips != expected:
            if expected and self.fp64.family in FAMILIES:
                raise NoReference(
                    "the gradients of plain autocast overflow, so that there is no update to compare with"
                )
            who, other = ("candidate", "plain autocast") if skips else ("plain autocast", "candidate")
            return [broken("scaler", f"{who} skips this step because its gradients overflow, {other} does not")]
        initial = self.fp64.initial if step == 0 else None
        ours, theirs = ({n: t for n, t in arm.items() if n not in self.restless} for arm in (seen, yard))
        theirs["flag/inputs_intact"] = torch.tensor(not self.writes)  # repeated on a batch, it may find it written
        if failures := list(broken_effects(ours, theirs, initial, not self.precise, skips, self._same)):
            return failures
        findings = list(self.known.attributes.compare(seen, yard, self.row.unit))
        if skips:
            self.known.skipped.add(step)
            if len(self.known.skipped) == len(self.fp64.batches):
                raise NoReference("gradients overflow in every step, so that no update can be compared: use bfloat16")
            findings.append(Finding("scaler", "SKIPPED", message="a step was skipped in both: its gradients overflow"))
        if seen["flag/random"]:  # the baseline's step draws none (see `_yardstick`)
            findings.append(Finding(GENERATORS, bitwise=True, message=RESEEDED))
        found, tied = self._findings(step, seen), set[str]()
        for seed in range(0, NEAR, AT_ONCE):
            wrong = {finding.tensor for finding in found if not finding.ok}
            if not wrong or self.finer or not self.precise or not all(name.startswith("grad/") for name in wrong):
                break
            tied |= wrong
            self._allow_near_ties(step, seen, range(seed, seed + AT_ONCE))
            found = self._findings(step, seen)
        found = [replace(f, message=f.message or TIED) if f.tensor in tied else f for f in found]
        findings += found
        for name in seen:
            if name.startswith("after/scaler/"):
                findings.append(
                    exact(name.removeprefix("after/"), _grown(seen, name), _grown(self.known.baseline, name), None)
                )
        return findings

    def _findings(self, step: int, seen: Observation) -> list[Finding]:
        """Of everything that fp64 has an opinion on."""
        findings, beside = list[Finding](), list[tuple[Element, Tensor]]()
        equal = alike(seen, self.known.baseline)
        for quantity in self._quantities(step, seen):
            if is_noise(quantity, self._plain(quantity).rms):
                continue
            finding = explained(self._compare(quantity), quantity)
            finding = replace(finding, bitwise=source(quantity.name) in equal, far_off=self._far_off(quantity))
            element = finding.element
            if (
                element
                and element.index
                and (value := self._baseline_at(quantity.name, tuple(element.index))) is not None
            ):
                beside.append((element, value))
            unseen_for, parted = self._unseen(quantity, finding)
            findings.append(replace(finding, unseen=unseen_for, parted=parted))
        values = torch.stack([value for _, value in beside]).tolist() if beside else []
        for (element, _), number in zip(beside, values, strict=True):
            element.baseline = number
        return findings

    def _unseen(self, quantity: Quantity, finding: Finding) -> tuple[str, bool]:
        """Why a wrong value could not be told from a right one. Equal bits need no telling, and parts of a tensor are
        seen with the whole."""
        if not finding.ok or finding.bitwise or "G1" not in finding.allowed or is_part(quantity):
            return "", False
        limit = finding.allowed["G1"][1] - quantity.resolution[0]
        spread = self.known.spread.get(quantity.name) if self.precise else None
        kind, _, name = quantity.name.partition("/")
        if kind in ("change", "optimizer") and f"grad/{name.rpartition('/')[0] or name}" in self.fp64.zeros():
            return "", False  # of a gradient that is nothing but rounding
        terms = self.fp64.all_terms.get(quantity.name, 0.0) if kind == "grad" and self._is_low(quantity) else 0.0
        plain = self._plain(quantity).rms
        found = finding.allowed["G1"][0]
        return unseen(found, plain, limit, spread, quantity.scale, terms, quantity.limits.row.unit, self.coarsest)

    def _is_low(self, quantity: Quantity) -> bool:
        """Whether something was computed in less than float32."""
        return max(quantity.limits.row.unit, self.coarsest / 2) > TOLERANCES["float32"].unit

    def _same(self, name: str, ours: bytes, theirs: bytes) -> bool:
        """Whether both arms remember alike."""
        memory = self.fp64.program.memory
        return ours == theirs or (
            memory is not None and memory.alike(ours, theirs, self.row.unit, self.known.blurred.get(name, ()))
        )

    def _compare(self, quantity: Quantity) -> Finding:
        name = quantity.name.removeprefix("out/")
        if not quantity.value.numel():
            return Finding(name, "EXACT", message=f"{name} has no element to compare")
        if quantity.name in self.unsteady:
            return Finding(name, "EXACT", message=f"{name} is another one in every run of the baseline: not compared")
        if is_exact(quantity.value):
            runs, shape = self.known.swayed.get((self.known.step, quantity.name), []), quantity.value.shape
            swayed = [run for run in runs if run.shape == shape]  # how many integers there are may hang on rounding
            theirs = self.known.baseline[source(quantity.name)]
            if alone(self.fp64.program.model) and self._many(quantity.value, theirs):
                swayed = []  # its parameters were moved, and with them what lies on a grid
            return exact(name, quantity.value, theirs, quantity.reference, swayed)
        found = quantity.found
        if found.lost and not self.precise and (count := self._overflows(quantity)):
            everything = f"{count} of {quantity.value.numel()} elements"
            return broken(name, f"{everything} are NaN or Inf, and finite in float64: {self.arithmetic} overflows here")
        if quantity.columns is not None and found.index:
            index = list(found.index)
            index[quantity.axis] = int(quantity.columns[index[quantity.axis]])
            found = replace(found, index=tuple(index))
        yardstick, plain = self._of(quantity), self._plain(quantity)
        limits = replace(quantity.limits, resolution=quantity.resolution)
        if limits.cap is not None and self.fp64.family in FAMILIES:
            limits = replace(limits, cap=self._cap(limits.cap, plain, quantity))
        finding = measure(name, found, quantity.scale, yardstick, plain, limits)
        exactly = self.fp64.family == integers.__name__ and quantity.reference.numel() >= SMALL
        if exactly and not plain.peak and found.peak:
            text = f"sums of small integers are exact in the baseline, and off by up to {found.peak:.3g} here"
            finding = replace(finding, gate="EXACT", ok=False, failed=("EXACT",), used=inf, message=text)
        kept = self.known.baseline.get(source(quantity.name))
        as_returned = quantity.name.startswith(("out/", "grad/"))
        if kept is not None and as_returned and not self.precise and kept.dtype != quantity.value.dtype:
            note = f"dtype {name_of(quantity.value.dtype)} where plain autocast has {name_of(kept.dtype)}"
            finding = replace(finding, message="; ".join(filter(None, (finding.message, note))))
        return finding

    def _far_off(self, quantity: Quantity) -> tuple[int, int, int] | None:
        found = None if self.precise else far_off(quantity, self.known.baseline.get(quantity.name))
        return None if found is None else found.to_tuple()

    def _many(self, ours: Tensor, theirs: Tensor) -> bool:
        """Whether more integers differ than a few operations can leave near ties."""
        return int((ours != theirs).sum()) > max(1.0, FEW * self.row.unit * ours.numel())

    def _cap(self, cap: float, plain: Yardstick, quantity: Quantity) -> float | None:
        """None where plain autocast itself has more error on unusual inputs, which nobody promised it for."""
        return None if plain.rms > cap * quantity.limits.row.unit * quantity.scale else cap

    def _overflows(self, quantity: Quantity) -> int:
        """Elements that float32 can hold and lower precision cannot, whatever plain autocast makes of them. What only
        a family of inputs does to gradients a loss scale that falls would mend."""
        if self.fp64.family in FAMILIES:
            return 0
        held = quantity.reference.abs() < torch.finfo(torch.float32).max
        return int((held & ~quantity.value.isfinite()).sum())

    def _histogram(self, seen: Observation, name: str) -> list[float]:
        quantity = next(q for q in self._quantities(self.known.step, self._here(seen)) if q.name == name)
        return histogram(quantity.value, quantity.reference, quantity.scale)

    def _baseline_at(self, quantity: str, index: tuple[int, ...]) -> Tensor | None:
        """What the baseline has where a candidate errs most; still where fp64 runs."""
        after, start = self.known.baseline.get(source(quantity)), self.known.baseline.get(source(quantity, "before"))
        if after is None or after.is_complex():
            return None
        value = after[index].to(torch.float64)
        return value - start[index] if quantity.startswith("change/") and start is not None else value

    # --- what fp64 gets -----------------------------------------------------------------------------------------

    def _quantities(self, step: int, seen: Observation) -> Iterator[Quantity]:
        """Everything in an observation that fp64 has an opinion on."""
        return measured(self._compared(step, seen))

    def _compared(self, step: int, seen: Observation) -> Iterator[Quantity]:
        golden, skips = self._golden(step, seen), _skipped(seen)
        for name, reference in golden.items():
            gradient, forward = name.startswith("grad/"), name.startswith(("out/", "input/"))
            if name in seen and not (gradient and skips):
                small = reference.numel() < SMALL
                cap = PRECISION_CAP if forward and not self.precise and not small else None
                if forward and reference.shape != seen[name].shape:
                    if reference.is_floating_point():
                        there = f"{title(name)} has the shape {list(reference.shape)} in float64"
                        raise NoReference(f"{there}: return one whose shape does not depend on rounding")
                    known = self.known.baseline.get(name, seen[name])  # how long a text is may depend on rounding,
                    reference = known if known.shape == seen[name].shape else seen[name]  # or on noise
                limits = Limits(self._row(seen[name]), gradient, small, cap=cap)
                spread = golden.get(name.replace("running_mean", "running_var")) if "running_mean" in name else None
                value, real = seen[name], forward and reference.is_floating_point()
                if real and largest(reference) > (most := torch.finfo(value.dtype).max):
                    reference = reference.clamp(-most, most)  # the least float64 where the arms have their own
                terms = self.fp64.zeros().get(name, 0.0) if gradient else 0.0
                quantity = Quantity(name, value, reference, limits, spread, value if small else None, terms)
                yield from (quantity, *parts(quantity))
        if any(name.startswith("after/") for name in seen):
            yield from self._updates(step, seen)

    def _golden(self, step: int, seen: Observation) -> Observation:
        return self.fp64.step(step, self.fp64.start_of(step, seen))

    def _updates(self, step: int, seen: Observation, rounded: bool = False) -> Iterator[Quantity]:
        """Parameter changes and optimizer state after an fp64 step on the arm's own gradients and prior state."""
        fp64, own = self.fp64, before(seen)
        program, optimizer = fp64.program, fp64.program.optimizer
        assert optimizer is not None
        fp64.load(fp64.initial | own)
        if not _skipped(seen):
            clear_gradients(program.model)
            for name, parameter in program.model.named_parameters():
                if (gradient := seen.get(f"grad/{name}")) is not None:
                    sparse, wide = fp64.sparse[step].get(f"grad/{name}"), gradient.to(parameter)
                    parameter.grad = wide if sparse is None else wide.sparse_mask(sparse)
            if not program.own_step:
                fp64.rates.set(RATES[self.known.step % len(RATES)])
            else:  # a user's step may change them
                for group, called in zip(optimizer.param_groups, fp64.called[step], strict=True):
                    group.update(called)
            with in_float32(optimizer) if rounded else nullcontext():
                optimizer.step()
        for name, reference in program.state().items():
            if (after := seen.get(f"after/{name}")) is None or name.startswith("buffer/"):
                continue
            # In fp64 by value: a capturable `step` may be float32 where the baseline's is an integer.
            kept = self.known.baseline.get(f"after/{name}", after)  # whoever stores less finely is not judged by that
            real = kept.is_floating_point() and after.is_floating_point()
            finer = real and torch.finfo(kept.dtype).eps < torch.finfo(after.dtype).eps
            stored = after.to(kept.dtype) if finer else after
            if stored.dtype is torch.float64:  # a number of Python's is as exact as what it was computed from
                stored = stored.to(fp64.dtype)
            row = TOLERANCES.get(name_of(stored.dtype), self.row)
            wide = after.to(torch.float64)
            reference = reference.detach().to(fp64.device, torch.float64)  # plain optimizers keep `step` on the CPU
            if name.startswith("param/"):  # however small the change is beside what is stored
                start, change = own[name].to(torch.float64), name.replace("param/", "change/", 1)
                yield Quantity(change, wide - start, reference - start, Limits(row), stored=stored)
            else:
                yield Quantity(name, wide, reference.clone(), Limits(row), stored=stored)
        for index, group in enumerate(optimizer.param_groups):
            if (rate := seen.get(f"after/optimizer/group{index}/lr")) is not None:
                left = fp64.left[step][index] if program.own_step else group["lr"]
                reference = torch.as_tensor(left, dtype=torch.float64, device=fp64.device)
                limits = Limits(TOLERANCES[name_of(rate.dtype)])
                yield Quantity(f"optimizer/group{index}/lr", rate.to(torch.float64), reference, limits)

    def _row(self, tensor: Tensor) -> Tolerance:
        """The coarser of the arithmetic's and the tensor's own."""
        own = TOLERANCES.get(name_of(tensor.dtype), self.row)
        return max(self.row, own, key=lambda row: row.unit)

    # --- power --------------------------------------------------------------------------------------------------

    def _power(self) -> list[mutants.Tried]:
        trials = list[mutants.Tried]()
        moved = self.fp64.without_eps(self.known.step, self.fp64.start_of(self.known.step, self.known.baseline))
        for quantity in self._subjects():
            earlier, by_eps = self.earlier.get(quantity.name), moved.get(quantity.name)
            same = earlier is not None and earlier.shape == quantity.value.shape
            subject = mutants.Subject(
                quantity.name.partition("/")[0],
                quantity.value.to(torch.float64).contiguous(),
                quantity.scale,
                self._of(quantity),
                quantity.limits.row,
                earlier.to(torch.float64) if same else None,  # type: ignore[union-attr]
                by_eps,
            )
            for name, value in mutants.of(subject):
                trials.append(self._try(quantity, subject, name, value))
        unmoved = [trial.caught for trial in trials if trial.mutant == mutants.NO_UPDATE]
        if unmoved and not any(unmoved):
            raise NoReference(
                "the gates have no power: an optimizer that moves no parameter passes them, as what it changes is lost"
                " in the parameters' own rounding: keep them in float32, or use a larger learning rate"
            )
        return trials

    def _try(self, quantity: Quantity, subject: mutants.Subject, mutant: str, value: Tensor) -> mutants.Tried:
        (mutated,) = measured([replace(quantity, value=value)])
        finding = self._compare(mutated)
        visible = finding.visible
        for part in measured(parts(mutated)) if finding.ok else ():
            if not is_noise(part, self._plain(part).rms) and not (there := self._compare(part)).ok:
                finding = there
        shows = structure(value, subject.value)
        off = rms(value - subject.value)
        if finding.ok and not shows and off > mutants.LARGE * subject.smallest:
            passes = f"the gates have no power: {title(quantity.name)} passes them with the mutant '{mutant}'"
            raise NoReference(f"{passes}: compare at a larger size, or in a wider dtype")
        return mutants.Tried(
            tensor=title(quantity.name),
            mutant=mutant,
            caught=bool(shows) or not finding.ok,
            gate="G0" if shows else finding.gate,
            off=off / quantity.scale if quantity.scale else None,
            visible=visible,
        )

    def _subjects(self) -> Iterator[Quantity]:
        """Of every kind of real tensor the largest ones."""
        every = self._quantities(self.known.step, self.known.baseline)
        every = (quantity for quantity in every if quantity.value.numel())
        real = [q for q in every if q.value.is_floating_point() and not is_noise(q, self._plain(q).rms)]
        for kind in mutants.MUTANTS:
            of_kind = [q for q in real if q.name.startswith(f"{kind}/")]
            yield from map(_leading, sorted(of_kind, key=lambda q: -q.value.numel())[:SUBJECTS])

    # --- where it runs ------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[..., T], *args: Any) -> T:
        """Once more with fp64 on the CPU, where it does not fit beside the arms."""
        try:
            answer = work(*args)
            self._give_back()
            return answer
        except torch.OutOfMemoryError as problem:
            if self.fp64.device.type == "cpu":
                raise NoReference(f"fp64 does not fit: use a smaller batch or model ({problem})") from problem
        self.fp64.settle(torch.device("cpu"))  # after the handler, whose traceback keeps tensors alive
        self.known.baseline, self.earlier = self._here(self.known.baseline), self._here(self.earlier)
        answer = work(*args)
        self._give_back()
        return answer

    def _give_back(self) -> None:
        """The arm whose turn comes next needs what is only cached here."""
        if self.in_turns:
            give_back(self.fp64.drawn_on)

    def _sizes(self, golden: Observation) -> Sizes:
        """As the arms have them."""
        width = self.fp64.dtype.itemsize
        batch = max(sum(map(nbytes, tensors_of(batch).values())) for batch in self.batches)
        result = sum(tensor.numel() * width for name, tensor in golden.items() if name.startswith(("out/", "grad/")))
        return Sizes(batch, result, sum(map(nbytes, self.fp64.initial.values())))

    def _here(self, observation: Mapping[str, Tensor]) -> Observation:
        """Where fp64 runs."""
        return {name: tensor.detach().to(self.fp64.device) for name, tensor in observation.items()}

    def _forget(self) -> None:
        self.known = Known()


def _leading(quantity: Quantity) -> Quantity:
    """Its first rows, where it is too large for mutants of all of it."""
    if quantity.value.numel() <= mutants.FIRST:
        return quantity
    stored = None if quantity.stored is None else mutants.leading(quantity.stored)
    value, reference = mutants.leading(quantity.value), mutants.leading(quantity.reference)
    return replace(quantity, value=value, reference=reference, stored=stored, spread=None)


def _grown(observation: Mapping[str, Tensor], name: str) -> Tensor:
    """By what factor a loss scale is another than before the step: each arm's own is where nothing overflowed."""
    after, before = observation[name], observation[name.replace("after/", "before/", 1)]
    return after / before if name.endswith("/scale") else after


def _skipped(observation: Mapping[str, Tensor]) -> bool:
    """Whether a GradScaler left this step out."""
    scaled = any(name.startswith("before/scaler/") for name in observation)
    gradients = {name: t for name, t in observation.items() if name.startswith("grad/")}
    return scaled and finite(gradients) != gradients.keys()
