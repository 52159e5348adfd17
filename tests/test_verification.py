"""What a stack is refused for before anything is timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optexp.insight.trace import Copy, Span, Trace
from optexp.strategy import BITWISE, Contract, precision
from optexp.verification import Referee

MIB = 2**20


def copying(*mib: float, kind: str = "HtoD") -> Trace:
    """Two steps, each with these copies."""
    copies = tuple(Copy("Memcpy", 0.0, 1.0, kind=kind, bytes=int(size * MIB)) for size in mib)
    return Trace((Span("step", 0.0, 9.0),) * 2, copies=copies * 2)


def referee(promise: Contract, dtype: str = "float32") -> Referee:
    session: Any = SimpleNamespace(experiment=SimpleNamespace(dtype=dtype))
    found = Referee(session, (), "candidate")
    found.promise = promise
    return found


@pytest.mark.parametrize(
    ("promise", "theirs", "ours", "refused"),
    [
        (BITWISE, copying(4), copying(4), False),
        (BITWISE, copying(4), copying(1, 1, 1, 1), False),
        (BITWISE, copying(4), copying(4, 1), False),
        (BITWISE, copying(4), copying(), True),
        (BITWISE, copying(4), copying(2), True),
        (BITWISE, copying(4), copying(4, kind="DtoD"), True),
        (precision("tf32"), copying(4), copying(2), True),
        (precision("bfloat16"), copying(4), copying(2), False),
        (precision("bfloat16"), copying(4), copying(1), True),
        (BITWISE, copying(0.1), copying(), False),  # batches lie on the device: what is copied is something else
        (BITWISE, copying(), copying(), False),
    ],
)
def test_batches_that_reach_the_device_untimed_are_refused(
    promise: Contract, theirs: Trace, ours: Trace, refused: bool
) -> None:
    reason = referee(promise).uncopied(theirs, ours, 4 * MIB)
    assert (reason is not None) is refused
    if reason:
        assert reason.startswith("the candidate copies ")
        assert "the bare program 4:" in reason
