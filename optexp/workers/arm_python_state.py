"""ARM: which Python state of a model every step changes, and which of it no later step begins with."""

from __future__ import annotations

from optexp.python_state import likeness
from optexp.python_state.model_state import same
from optexp.support import random_state
from optexp.workers.arm_program import Holder


def moving_state(holder: Holder) -> list[str]:
    """Names of what the model keeps in Python and changes in a step, and again in the next one, a cache of keys that a
    step joins to its own included. What becomes another thing each time, as a time does, is left out from now on."""
    keeps = holder.program.keeps
    assert keeps is not None
    if not keeps.changes(holder.initial.kept, keeps.read()):
        return []
    runs = []
    for _ in range(2):
        holder.restore()
        holder.run()
        before = keeps.read()
        holder.run()
        runs.append(keeps.changes(before, keeps.read()))
    holder.restore()
    holder.program.feed.pause()
    keeps.forgetful = _forgetful(holder)
    one, other = runs
    both = one.keys() & other.keys()
    keeps.unsteady = {*one, *other} - {name for name in both if likeness.alike(one[name].pair, other[name].pair)}
    return sorted(name for name in both - keeps.unsteady - keeps.forgetful if one[name].state or one[name].made)


def note_forgetful(holder: Holder) -> None:
    """Look again, with other parameters: a weight that each step derives from these (`weight_norm`) is no longer as it
    was when the program was built."""
    keeps = holder.program.keeps
    if keeps is None:
        return
    holder.run()
    if keeps.changes(holder.initial.kept, keeps.read()).keys() - keeps.forgetful:
        keeps.forgetful |= _forgetful(holder)
    holder.restore()
    holder.program.feed.pause()


def _forgetful(holder: Holder) -> set[str]:
    """Names of state that a step leaves alike whatever the one before has left there: no step depends on it."""
    keeps, ends = holder.program.keeps, []
    assert keeps is not None
    for earlier in (True, False):
        holder.restore()
        if earlier:
            holder.program.run()
            holder.program.put(holder.initial.values)  # all but what Python keeps
            random_state.seed(holder.seed)
        else:
            holder.program.feed.next()
        holder.program.run()
        ends.append(keeps.changes(keeps.first, keeps.read()))
    holder.restore()
    holder.program.feed.pause()
    after, alone = ends
    return {name for name in after.keys() & alone.keys() if same(after[name].after, alone[name].after)}
