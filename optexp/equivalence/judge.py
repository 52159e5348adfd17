"""The reference process's judge of the other arms: it holds fp64 and one set of inputs at a time, and asks the gates.

The candidate is measured against fp64, by the measure of the baseline's own distance from fp64:

    draw ──▶ yardstick, for each run of the baseline ──▶ judge, for each step of the candidate ──▶ power
             (`baseline_runs`)                           (`candidate_step`)                        (`power`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from optexp.equivalence import reassociation
from optexp.equivalence.arithmetic import Arithmetic, is_low
from optexp.equivalence.baseline_runs import add_baseline_run, add_drift
from optexp.equivalence.baseline_traits import BaselineTraits
from optexp.equivalence.candidate_step import CandidateStep
from optexp.equivalence.fp64_quantities import error_histogram
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.gradient_terms import zeros
from optexp.equivalence.input_families import NORMAL
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.live_inputs import dead_inputs
from optexp.equivalence.mutants import Tried
from optexp.equivalence.noise import RUNS
from optexp.equivalence.observation import Observation
from optexp.equivalence.parting import Passed, first_apart, watched
from optexp.equivalence.power import Power
from optexp.equivalence.quantities import is_exact
from optexp.equivalence.yardsticks import SetYardsticks, moved
from optexp.errors import NoReference
from optexp.program import Batch, tensors_of
from optexp.records.verification import Distribution, Finding
from optexp.strategy import Contract
from optexp.support.memory_plan import PLANS, Sizes, capacity, choose_on, give_back
from optexp.support.sparse import nbytes
from optexp.support.tolerances import SMALL
from optexp.workload import Workload

TIES = 32  # noisy runs of a step with integers: of near ties in 12 bfloat16 argmaxes six runs missed 20, these none
KEPT = 2**31  # bytes of the candidate's runs that are kept, to be judged again by wider yardsticks

T = TypeVar("T")


@dataclass(frozen=True)
class SetInfo:
    """One set of inputs, as the reference has drawn it.

    reference:         device of fp64, in words
    steps:             number of batches
    reassociated_runs: runs of the baseline in other orders that the gates need;  noisy_steps: the same with noise
    unit:              u of the promised arithmetic;  unit_used: u of the coarsest arithmetic that the baseline uses
    in_turns:          only the arm that takes a step holds batches and results
    anew:              the seed gives other batches than the seed before
    others_learn:      gradients are for a caller who changes parameters
    smaller:           the last batch is as small as the last one of an epoch, which a program may refuse
    keeps:             there is room for the candidate's runs of all steps
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
    smaller: bool = False
    keeps: bool = True


class Judge:
    """Coordinator of one verification: yardsticks of a step come first, then the candidate's observation of it.

    device: of the arms; fp64 moves to the CPU where it does not fit there, and `info` says so
    dtype:  of the arms' parameters and batches
    plan:   index in `memory_plan.PLANS` of the first that has not been tried
    sharing: comparisons that share the device's memory
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
        sharing: int = 1,
    ) -> None:
        self.fp64 = Fp64Reference(
            workload, device, dtype, seed, generic, on_host=PLANS[plan].on_host, may_move=sharing == 1
        )
        self.plan, self.in_turns, self.sharing = plan, PLANS[plan].in_turns, sharing
        self.inputs = InputSet(self.fp64, Arithmetic.of(contract, dtype), BaselineTraits())

    # --- inputs -------------------------------------------------------------------------------------------------

    def draw(self, seed: int, count: int, family: str = NORMAL) -> None:
        """Begin a new set of inputs: `count` batches of a family."""
        self._begin_set(earlier=self.inputs.yardsticks.earlier)
        self.fp64.draw(seed, count, family)
        self._give_back()

    def recall(self, observation: Mapping[str, Tensor]) -> None:
        """Begin a set of inputs with the batch of a replayed step."""
        self.fp64.recall(observation)
        self._begin_set(earlier=self.inputs.yardsticks.earlier)

    def rest(self) -> None:
        """Give back batches, yardsticks and results."""
        self._begin_set()
        self.fp64.rest()

    @property
    def batches(self) -> list[Batch]:
        return self.fp64.batches

    def batch(self, index: int) -> Batch:
        """A drawn batch, for another step than the one that was judged: the candidate's results make room for it."""
        self.inputs = replace(self.inputs, candidate={})
        return self.batches[index]

    def silence(self) -> None:
        """Set every dropout's rate to 0."""
        self.fp64.silence()

    def turn_parameters(self) -> None:
        """Change parameters as the arms do (see `optexp.equivalence.perturbation.turn_parameters`)."""
        self.fp64.turn_parameters()

    def info(self) -> SetInfo:
        """The set that was drawn last."""
        golden = self._guarded(self.inputs.golden, 0, {})
        sizes, device = self._sizes(golden), self.fp64.drawn_on
        self.in_turns = PLANS[choose_on(device, sizes, self.sharing, self.plan)].in_turns
        runs = len(self.batches) * (sizes.result + 2 * sizes.state)  # with the state before and after each step
        self._give_back()
        arithmetic = self.inputs.arithmetic
        return SetInfo(
            reference=f"fp64 on {self.fp64.device.type}",
            steps=len(self.batches),
            reassociated_runs=reassociation.RUNS,
            noisy_steps=self._noisy_steps(golden),
            unit=arithmetic.row.unit,
            unit_used=max(arithmetic.row.unit, self.inputs.traits.coarsest / 2),  # TF32's, where torch allows it
            in_turns=self.in_turns,
            anew=self.fp64.source.anew,
            others_learn=self.fp64.trains and self.fp64.program.optimizer is None,
            smaller=self.fp64.drawn.smaller,
            keeps=not self.in_turns and runs <= min(KEPT, capacity(device, self.sharing) / 16),
        )

    def _noisy_steps(self, golden: Observation) -> int:
        """Number of noisy runs that the yardsticks need, by fp64's results."""
        outputs = [tensor for name, tensor in golden.items() if name.startswith("out/")]
        if any(map(is_exact, outputs)):
            return TIES * len(self.batches)
        jumps = any(name.startswith("grad/") for name in golden)
        small = any(tensor.numel() < SMALL for tensor in outputs if tensor.is_floating_point())
        return RUNS if jumps or small or self.inputs.arithmetic.as_exact_as_fp64 else 0

    # --- runs of the arms ---------------------------------------------------------------------------------------

    def yardstick(self, step: int, observation: Mapping[str, Tensor]) -> None:
        """Measure a run of the baseline (of plain autocast, for a PRECISION contract): its error is the yardstick.

        Raises NoReference where the run is no measure.
        """
        self._guarded(self._yardstick, step, observation)

    def _yardstick(self, step: int, observation: Mapping[str, Tensor]) -> None:
        add_baseline_run(self.inputs, step, self._here(observation))

    def drift(self, observation: Mapping[str, Tensor]) -> None:
        """Take a run of the baseline whose first parameters had noise (see `add_drift`)."""
        add_drift(self.inputs, self._here(observation))

    def judge(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        """Findings of the gates about the candidate's run of a step whose yardsticks are complete.

        Raises NoReference where the gates cannot decide.
        """
        return self._guarded(self._judge, step, observation)

    def _judge(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        assert step == self.inputs.step, "the yardstick of this step comes first"
        self.inputs = replace(self.inputs, candidate=self._here(observation))
        return CandidateStep(self.inputs, step, self.inputs.candidate).findings()

    def judge_timed(self, step: int, observation: Mapping[str, Tensor]) -> list[Finding]:
        """Findings about the outputs of a timed block, beside the prior state that its replay had."""
        timed = {name.removeprefix("timed/"): t for name, t in observation.items() if name.startswith("timed/")}
        seen = dict(observation) | {f"out/{name}": tensor for name, tensor in timed.items()}
        return [finding for finding in self.judge(step, seen) if finding.tensor in timed or not finding.ok]

    # --- what the checks prove ----------------------------------------------------------------------------------

    def power(self) -> list[Tried]:
        """Mutants of the baseline's last step, and whether the gates see them.

        Raises NoReference where a large mutant passes.
        """
        return self._guarded(Power(self.inputs).tried)

    def distribution(self, tensor: str) -> Distribution | None:
        """Errors of one output of the step that was judged last, in both arms; None where that step has no such."""
        names, baseline_run = self.inputs.optimizer_names, self.inputs.baseline
        if f"out/{tensor}" not in baseline_run:
            return None
        arms = baseline_run, names.translated(self.inputs.candidate, baseline_run)[0]  # as the gates saw it
        baseline, candidate = (self._guarded(self._histogram, seen, f"out/{tensor}") for seen in arms)
        return Distribution(baseline, candidate, tensor)

    def _histogram(self, seen: Observation, name: str) -> list[float]:
        return error_histogram(self.inputs, self._here(seen), name)

    def dead(self) -> list[str]:
        """After a draw of ONE_BY_ONE: inputs that fp64's results do not depend on."""
        return self._guarded(dead_inputs, self.fp64)

    def constant(self) -> list[str]:
        """Inputs that had the same values in every draw so far."""
        return self.fp64.source.constant(self.fp64.drawn)

    def zeros(self) -> Mapping[str, float]:
        """Gradients of the set's first batch that are zero in exact arithmetic: RMS over elements of Σ|terms|."""
        return self._guarded(zeros, self.fp64)

    def first_apart(self, passed: Sequence[Passed]) -> str:
        """The first module where the baseline's first step and float64's differ; empty where none does."""
        with watched(self.fp64.program.model) as theirs:
            self.fp64.step(0, dict(self.fp64.initial))
        return first_apart(passed, theirs, low=is_low(self.inputs.arithmetic.row.unit))

    # --- where it runs ------------------------------------------------------------------------------------------

    def _begin_set(self, earlier: Observation | None = None) -> None:
        self.inputs = replace(self.inputs, yardsticks=SetYardsticks(earlier=earlier or {}), candidate={})

    def _guarded(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work`; once more with fp64 on the CPU, where it does not fit beside the arms.

        Raises NoReference where memory does not suffice there either, and OutOfMemoryError where other comparisons
        have the device's memory: on the CPU this one would take minutes.
        """
        try:
            answer = work(*args)
            self._give_back()
            return answer
        except torch.OutOfMemoryError as problem:
            if self.fp64.device.type == "cpu":
                raise NoReference(f"fp64 does not fit: use a smaller batch or model ({problem})") from problem
            if self.sharing > 1:
                raise
        self.fp64.settle(torch.device("cpu"))  # after the handler, whose traceback keeps tensors alive
        self.inputs.yardsticks.to(self.fp64.device)
        answer = work(*args)
        self._give_back()
        return answer

    def _give_back(self) -> None:
        """Give cached memory to the arm whose turn comes next, and to other comparisons."""
        if self.in_turns or self.sharing > 1:
            give_back(self.fp64.drawn_on)

    def _sizes(self, golden: Observation) -> Sizes:
        """Bytes of batch, results and state in the arms."""
        width = self.fp64.dtype.itemsize
        batch = max(sum(map(nbytes, tensors_of(batch).values())) for batch in self.batches)
        result = sum(tensor.numel() * width for name, tensor in golden.items() if name.startswith(("out/", "grad/")))
        return Sizes(batch, result, sum(map(nbytes, self.fp64.initial.values())))

    def _here(self, observation: Mapping[str, Tensor]) -> Observation:
        """The observation on fp64's device."""
        return moved(observation, self.fp64.device)
