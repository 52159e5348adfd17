"""The third process of a comparison: it draws the batches, computes in fp64, and judges the other two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import cloudpickle
import torch
from torch import Tensor

from optexp.equivalence import randomness, scatter
from optexp.equivalence.judge import Judge, SetInfo
from optexp.equivalence.mutants import Tried
from optexp.equivalence.observation import Observation
from optexp.equivalence.parting import Passed
from optexp.program.offered import Offered
from optexp.records.verification import Distribution, Finding, Scatter
from optexp.support import random_state
from optexp.support.memory_plan import give_back
from optexp.workers.arm_program import draw, workload_info
from optexp.workers.first_batches import first_batches
from optexp.workers.messages import Fed, WorkloadInfo
from optexp.workers.peer import Peer
from optexp.workers.spec import Spec
from optexp.workers.transfer import Transfer


class Reference(Peer):
    """The fp64 arm: draws every batch and judges what the others return. Its fp64 results never leave it."""

    def setup(self, packed: bytes) -> WorkloadInfo:
        """Build the workload in float64."""
        return self.hold(cloudpickle.loads(packed))

    def hold(self, spec: Spec) -> WorkloadInfo:
        """The same of a specification that is here already."""
        self.settle(spec.torch_device, spec.cores, spec.folders)
        self.judgement = Judge(
            spec.workload,
            spec.torch_device,
            spec.torch_dtype,
            spec.seed,
            spec.contract,
            spec.generic,
            spec.plan,
            spec.sharing,
        )
        self.draws = spec.seed if spec.draws is None else spec.draws
        self.thrown: Mapping[str, Tensor] = {}
        self.kept: dict[int, Observation] = {}  # of the candidate, by step, for other yardsticks
        if not spec.dropout:
            self.judgement.silence()
        give_back(self.device)
        return workload_info(spec.workload, self.judgement.fp64.initial)

    def expect(self, transfer: Transfer) -> None:
        """Where fp64 runs; in the place of its results where that is full, which are computed again; else on the CPU:
        judging then moves there too. Beside other comparisons it would take minutes there.

        Raises:
            OutOfMemoryError: Other comparisons have the device's memory.
        """
        fp64 = self.judgement.fp64
        with suppress(torch.OutOfMemoryError):
            return self.inbox.expect(transfer, fp64.device)
        fp64.results.forget_large()
        give_back(fp64.device)
        with suppress(torch.OutOfMemoryError):
            return self.inbox.expect(transfer, fp64.device)
        crowded = self.judgement.sharing > 1
        return self.inbox.expect(transfer, fp64.device if crowded else torch.device("cpu"))

    def take(self, piece: int) -> None:
        """The memory that the baseline's results passed through is empty by the time the candidate's step runs."""
        super().take(piece)
        if self.inbox.complete:
            self.inbox.wipe()

    def recall(self) -> None:
        """The batch of a replayed step takes the place of drawn ones."""
        self.kept = {}
        self.judgement.recall(self.inbox.contents)

    def judge_timed(self, step: int, again: bool = False) -> list[Finding]:
        return self.judgement.judge_timed(step, self.kept[step] if again else self.inbox.contents)

    def silence(self) -> None:
        self.judgement.silence()

    def turn_parameters(self) -> None:
        self.judgement.turn_parameters()

    def rest(self) -> None:
        """Give back what is not needed until it is set up again."""
        self.kept = {}
        self.inbox.clear()
        if self.outbox is not None:
            self.outbox.empty()
        self.judgement.rest()

    def draw(self, seed: int, count: int, family: str) -> None:
        self.kept = {}
        self.inbox.clear()
        self.judgement.draw(seed, count, family)

    def fed(self, own: int) -> Fed:
        """The first batches that the baseline's arm is timed on, as this process makes them.

        Args:
            own: Number of the core's batches, where there is no loader.
        """
        fp64 = self.judgement.fp64
        drawn = draw(fp64.workload, self.device, fp64.dtype, self.draws, own)
        random_state.seed(self.draws)
        fp64.feed.reset(Offered(drawn, fp64.feed.place))
        found = first_batches(fp64.feed, fp64.feed.next, own)
        fp64.feed.pause()
        return found

    def batch(self, index: int) -> Transfer:
        """One of those drawn, for another step than the one that was judged."""
        batch = self.judgement.batch(index)
        self.inbox.clear()
        return self.send(batch)

    def yardstick(self, step: int) -> None:
        self.judgement.yardstick(step, self.inbox.contents)

    def drift(self) -> None:
        self.judgement.drift(self.inbox.contents)

    def judge(self, step: int, keep: bool = False) -> list[Finding]:
        """Findings about the candidate's run that was conveyed last.

        keep: It may be judged again, once the yardsticks are others.
        """
        if keep:
            self.kept[step] = self.inbox.contents
        return self.judgement.judge(step, self.inbox.contents)

    def judge_again(self, step: int) -> list[Finding]:
        """Findings about the run that was kept, by the yardsticks of now."""
        return self.judgement.judge(step, self.kept[step])

    def info(self) -> SetInfo:
        return self.judgement.info()

    def dead(self) -> list[str]:
        return self.judgement.dead()

    def constant(self) -> list[str]:
        return self.judgement.constant()

    def zeros(self) -> Mapping[str, float]:
        return self.judgement.zeros()

    def keep_thrown(self) -> None:
        """Elements of the baseline's random results, which were conveyed last."""
        self.thrown = self.inbox.contents

    def scatter(
        self, shapes: Mapping[str, Sequence[int]], unit: float, zeros: Sequence[str]
    ) -> tuple[list[Finding], Scatter]:
        """How the candidate's, which were conveyed last, scatter beside the baseline's (see
        `optexp.equivalence.scatter.compare`)."""
        baseline, self.thrown = self.thrown, {}
        return scatter.compare(self.inbox.contents, baseline, shapes, randomness.GATE, unit, zeros)

    def first_apart(self, passed: Sequence[Passed]) -> str:
        return self.judgement.first_apart(passed)

    def power(self) -> list[Tried]:
        return self.judgement.power()

    def distribution(self, tensor: str) -> Distribution | None:
        return self.judgement.distribution(tensor)
