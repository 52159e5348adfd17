"""The same stack at sizes that it was not built for: what is silently wrong there counts, and a refusal does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Self

from optexp.comparison.case import Case
from optexp.errors import Failure, Unsupported
from optexp.records.verification import Verification
from optexp.support.stopwatch import Stopwatch
from optexp.verification.timed_arm import TimedArm
from optexp.verification.verify import verify
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import SetUp, WorkloadInfo
from optexp.workers.peer import Peer
from optexp.workers.pool import Starting
from optexp.workers.reference import Reference
from optexp.workload import Workload


@dataclass(frozen=True)
class OddArms:
    """Arms at odd sizes, which are being set up."""

    yardstick: Starting[Arm, SetUp]
    candidate: Starting[Arm, SetUp]
    reference: Starting[Reference, WorkloadInfo]

    @classmethod
    def start(cls, case: Case, workload: Workload) -> Self:
        pool, specs = case.session.pool, case.specs(workload)
        yardstick, candidate = pool.start({f"{name} at odd sizes": spec for name, spec in specs.items()}).values()
        return cls(yardstick, candidate, pool.start_reference(case.reference_spec(workload), "reference at odd sizes"))

    def verify(self, case: Case, watch: Stopwatch) -> Verification:
        """Raises Unsupported and Failure as the arms do."""
        with watch.phase("setup"):
            self.yardstick.setup.wait()
            self.candidate.setup.wait()
            self.reference.setup.wait()
        yardstick, candidate = TimedArm(self.yardstick.arm, watch), TimedArm(self.candidate.arm, watch)
        reference = TimedArm(self.reference.arm, watch)
        return verify(reference, yardstick, candidate, case.plan_at_odd_sizes(), case.promise)

    def close(self) -> None:
        arms: tuple[Client[Peer], ...] = (self.yardstick.arm, self.candidate.arm, self.reference.arm)
        for arm in arms:
            arm.close()


def check_odd_sizes(case: Case, workload: Workload, found: Verification, watch: Stopwatch) -> None:
    """Verify on all families of inputs, in arms of their own, and add what is found.

    workload: the same with other sizes
    """
    session, own = case.session, asdict(case.session.workload)
    sizes = ", ".join(_called(key, value) for key, value in asdict(workload).items() if value != own[key])
    with session.working("verification", f"at {sizes}"):
        arms = OddArms.start(case, workload)
        try:
            there = arms.verify(case, watch)
        except (Unsupported, Failure) as reason:
            by_candidate = isinstance(reason, Unsupported) or reason.worker == arms.candidate.arm.name
            if not by_candidate and getattr(reason, "type", "") != "NoReference":
                raise
            found.notes.append(f"not checked at {sizes}: {reason}")
            return
        finally:
            arms.close()
    found.families += [family for family in there.families if family not in found.families]
    found.notes += [note for note in there.notes if note not in found.notes]
    if there.ok:
        found.tails.append(sizes)
        many = "family" if len(there.families) == 1 else "families"
        found.headline += f"; {len(there.families)} {many} of inputs at {sizes}"
    else:
        found.ok, found.failures, found.worst, found.gates = False, there.failures, there.worst, there.gates
        found.headline = f"at {sizes}: {there.headline}"


def _called(key: str, value: object) -> str:
    """A size in words: tokens=7, odd batch."""
    return key.replace("_", " ") if value is True else f"{key}={value}"
