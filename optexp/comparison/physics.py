"""The physical lower bound of the workload's step, and each profiled arm beside the device's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optexp.comparison.session import Session
from optexp.profiling.beaten import by_step
from optexp.profiling.bounds import physical
from optexp.profiling.points import ahead, points
from optexp.records.profile import ArmProfile, Calibration, ProfileRecord
from optexp.records.roofline import Phase, PhysicalBound, Roofline
from optexp.strategy import Contract
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client


def find_work(session: Session, bare: Client[Arm]) -> None:
    """Let the plain program's arm tell the work of a step, once in a comparison; nothing is timed in it afterwards.

    On a GPU a watchdog asks for it; on a CPU it is a detail.
    """
    wanted = bool(session.experiment.profile.details) or session.machine.gpu is not None
    if session.work is None and wanted:
        session.work = bare.call(Arm.step_work)


def bound(session: Session, contract: Contract) -> PhysicalBound | None:
    """Of a step under a promise; None before the work and the ceilings are known."""
    if session.work is None or session.calibration is None:
        return None
    if doubt := session.calibration.doubt:
        return PhysicalBound(reason=doubt)
    return physical(session.work, session.calibration, session.experiment.dtype, contract.dtype)


def drop_beaten(session: Session) -> None:
    """Take a CPU's bounds away where a measured step beats one: what it follows from is no ceiling.

    On a GPU the watchdog "physical floor" refuses the step instead.
    """
    profile, ceilings = session.result.profile, session.calibration
    if ceilings is None or ceilings.device != "cpu":
        return
    for name, arm in profile.arms().items():
        found, step_us = arm.roofline.bound if arm.roofline else None, getattr(session.result, name).step_us
        if found and found.us and step_us:
            ceilings = replace(ceilings, doubt=ceilings.doubt or by_step(name, step_us, found.us))
    session.calibrated(ceilings)
    for name, arm in profile.arms().items():
        if ceilings.doubt and arm.roofline and arm.roofline.bound and arm.roofline.bound.us:
            _show(profile, name, PhysicalBound(reason=ceilings.doubt))


def recalibrate(session: Session, calibration: Calibration) -> None:
    """Use these ceilings from now on, in the bounds of profiled arms too: they were shown by the earlier ones."""
    session.calibrated(calibration)
    profile, stacks = session.result.profile, {"baseline": session.baseline, "candidate": session.stack}
    for name, arm in profile.arms().items():
        if arm.roofline and arm.roofline.bound:
            _show(profile, name, bound(session, stacks[name].contract))


def _show(profile: ProfileRecord, name: str, found: PhysicalBound | None) -> None:
    """Show this bound of a profiled arm."""
    arm = profile.arms()[name]
    setattr(profile, name, replace(arm, roofline=replace(arm.roofline or Roofline(), bound=found)))


def least_us(session: Session, contract: Contract) -> float:
    """The bound's µs; 0 where none is known."""
    found = bound(session, contract)
    return (found.us or 0.0) if found is not None else 0.0


def roofline(session: Session, contract: Contract, trace: Trace, calibration: Calibration | None) -> Roofline:
    """Everything that a trace shows of physics, and the bound."""
    return Roofline(bound(session, contract), points(trace, calibration), ahead(trace))


def started(found: ArmProfile | None, phases: Sequence[Phase]) -> ArmProfile:
    """The same with the phases of the start."""
    found = found or ArmProfile()
    return replace(found, roofline=replace(found.roofline or Roofline(), startup=list(phases)))
