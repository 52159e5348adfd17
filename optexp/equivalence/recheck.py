"""Was the result that was timed the right one? The last step of a timed block is repeated and judged.

The candidate repeats the block from its restored start, so that the state before its last step is known; the baseline
does the same and is the yardstick. What the block itself returned is judged beside what its repetition returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optexp.equivalence.families import NORMAL
from optexp.equivalence.protocol import Arm, Message, deliver
from optexp.equivalence.trajectory import TIMED


def recheck(reference: Arm, yardstick: Arm, candidate: Arm, trains: bool) -> tuple[list[Message], Mapping[str, Any]]:
    """Messages of the gates, and what was done.

    trains: steps change what later ones start from, so that a candidate that does not repeat itself has no second run
    """
    steps = candidate.call("timed_steps")
    if not steps:
        return [], {"steps": 0, "note": "no block was kept"}
    if trains and not candidate.call("repeats", times=1):
        return [], {"steps": steps, "note": "the candidate does not repeat itself bit for bit: not rechecked"}
    theirs = yardstick.call("replay", steps=steps)
    reference.call("recall", parcel=theirs)
    reference.call("yardstick", step=TIMED, parcel=theirs)
    deliver(reference, [yardstick], 1, NORMAL)
    for noise in range(reference.call("reference_info")["noisy_steps"]):
        seen = yardstick.call("observe", step=TIMED, restore=True, noise=noise + 1)
        reference.call("yardstick", step=TIMED, parcel=seen)
    ours = candidate.call("replay", steps=steps)
    messages = [
        *reference.call("judge", step=TIMED, parcel=ours),
        *reference.call("judge_timed", step=TIMED, parcel=ours),
    ]
    return messages, {"steps": steps, "ok": all(message["ok"] for message in messages)}
