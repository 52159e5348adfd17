"""ARM: the object that a worker of the baseline or of the candidate holds. Every public method is a message."""

from __future__ import annotations

from optexp.workers.arm_batches import Batches
from optexp.workers.arm_bound import Bounded
from optexp.workers.arm_checks import Checks
from optexp.workers.arm_memory import Memory
from optexp.workers.arm_moved_parameters import MovedParameters
from optexp.workers.arm_novelty import Novelty
from optexp.workers.arm_placement import Placement
from optexp.workers.arm_profile import Profiling


class Arm(Checks, Batches, Novelty, MovedParameters, Placement, Profiling, Bounded, Memory):
    """One program on one device: built, restored, observed, timed and profiled."""
