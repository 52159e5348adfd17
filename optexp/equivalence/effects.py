"""G0: what a step returns, changes and leaves alone, beside what the baseline does. No number is compared here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from optexp.equivalence.gates import structure
from optexp.equivalence.nature import SURELY
from optexp.equivalence.observation import NAMES, Observation, unpacked
from optexp.equivalence.optimizer_rules import LEFT
from optexp.equivalence.rule import RULE
from optexp.equivalence.tensor_math import alike, finite, identical, rms
from optexp.errors import NoReference
from optexp.program.counters import is_counted
from optexp.records.verification import Finding, broken

Alike = Callable[[str, bytes, bytes], bool]


def broken_effects(
    seen: Observation,
    baseline: Observation,
    initial: Mapping[str, Tensor] | None,
    by_value: bool,
    skips: bool,
) -> Iterator[Finding]:
    """Everything that differs, without what Python keeps.

    initial:  the state that training has to start from; None for steps that are not the first
    by_value: a dtype may differ;  skips: gradients overflowed in both
    """
    yield from _effects(seen, baseline)
    yield from _outputs(seen, baseline)
    yield from _replayed(seen, baseline)
    names, expected = ({name for name in some if not optional(name)} for some in (seen, baseline))
    updates = any(name.startswith("after/") for name in expected)  # which differ: without a gradient nothing decays
    for name in sorted(names ^ expected):
        if name.startswith("buffer/") and _stays(name, baseline if name in expected else seen):
            continue  # a mask or a table, which may be folded into others, or be made in each step
        nothing = name.startswith("grad/") and not updates and not bool((seen | baseline)[name].any())
        # A buffer may be as it was at first in one of them, and so may a parameter that no optimizer changes.
        if not name.startswith(("input/", "before/buffer/", "before/param/", "param/")) and not nothing:
            yield broken(title(name), "missing" if name in expected else "the baseline has no such tensor")
    common = {
        name
        for name in names & expected
        if not name.startswith(("flag/", "before/scaler/")) and not (skips and name.startswith("grad/"))
    }
    plain = finite({name: seen[name] for name in common}) & finite({name: baseline[name] for name in common})
    starts = {f"before/{name}": tensor for name, tensor in initial.items()} if initial is not None else {}
    begun = {name: seen[name] for name in common if initial is not None and name.startswith("before/")}
    right = {name: starts.get(name, baseline[name]).to(t.device, t.dtype) for name, t in begun.items()}
    wrong = {name for name in begun.keys() - alike(begun, right) if not _rounds(name, begun[name], right[name])}
    for name in sorted(common):
        any_dtype = by_value or "/optimizer/" in name
        if difference := structure(seen[name], baseline[name], any_dtype=any_dtype, known_finite=name in plain):
            yield broken(title(name), difference)
        elif name in wrong:
            yield broken(title(name), "training does not start from the baseline's state")


def _rounds(name: str, seen: Tensor, expected: Tensor) -> bool:
    """Whether optimizer state differs from the expected state by rounding alone.

    State may begin as the norm of a parameter, whose sum runs in any order. Steps are judged from an arm's own state.
    """
    if not name.startswith("before/optimizer/") or not seen.is_floating_point() or seen.shape != expected.shape:
        return False
    return rms(seen.double() - expected.double()) <= SURELY * torch.finfo(seen.dtype).eps / 2 * rms(expected)


def _stays(buffer: str, seen: Observation) -> bool:
    """Whether a buffer still has its first values."""
    before = seen.get(f"before/{buffer}")
    if not any(name.startswith("after/") for name in seen):  # without an optimizer, only what changed is there
        return before is None and f"changed/{buffer}" not in seen
    return before is not None and identical(before, seen[buffer])


def _effects(seen: Observation, baseline: Observation) -> Iterator[Finding]:
    """On what is not the step's own."""
    changed, expected = (
        {name for name in some if name.startswith(("changed/", "input/"))} for some in (seen, baseline)
    )
    for name in sorted(changed ^ expected):
        whose = "the caller's batch" if name.startswith("input/") else "it"
        what = f"changes {whose}; the baseline leaves it alone"
        what = what if name in changed else f"leaves {whose} as it was; the baseline changes it"
        yield broken(name.removeprefix("changed/"), f"the step {what}")


def unlike_memories(seen: Observation, baseline: Observation, same: Alike) -> Iterator[Finding]:
    """On what a user's step keeps in Python. A hyperparameter that is a tensor is state.

    same: of two memories by name, packed
    """
    changed, expected = unpacked("remembers", seen), unpacked("remembers", baseline)
    for name in sorted(changed | expected):
        if f"after/{name}" in seen:
            continue
        if name not in expected:
            yield broken(name, "the step changes it; the baseline leaves it alone")
        elif name not in changed:
            yield broken(name, LEFT)
        elif not same(name, changed[name], expected[name]):
            # Another value may follow from another loss, which then has a larger share of its limit.
            yield replace(broken(name, "the step remembers something else there than the baseline does"), used=1.0)


def _outputs(seen: Observation, baseline: Observation) -> Iterator[Finding]:
    """As objects: plain, finished, in the right place, in memory of their own."""
    if not seen["flag/finished"]:
        yield broken("outputs", "an output still changes after the step's stream has finished: no stream waits for it")
    if not seen["flag/plain"]:
        yield broken("outputs", "an output or a gradient is not a plain torch.Tensor")
    ours, theirs = seen["flag/device"].tolist(), baseline["flag/device"].tolist()
    if len(ours) == len(theirs) and ours != theirs:  # where lengths differ, so do names
        yield broken("outputs", "an output is not on the device where the baseline leaves it")
    ours, theirs = seen["flag/aliases"].tolist(), baseline["flag/aliases"].tolist()
    if len(ours) == len(theirs):
        for position, (shared, expected) in enumerate(zip(ours, theirs, strict=True)):
            if shared not in (position, expected):
                yield broken("outputs", f"output {position} {_shares(shared)}; the baseline's does not")


def _shares(shared: int) -> str:
    if shared == -3:
        return "has several elements in one place, as expand() leaves them"
    other = {-1: "an input", -2: "a parameter, a buffer or optimizer state"}.get(shared, f"output {shared}")
    return f"shares memory with {other}"


def _replayed(seen: Observation, baseline: Observation) -> Iterator[Finding]:
    """Whether a timed step was given what the baseline's was."""
    ours, theirs = (sorted(name for name in some if name.startswith("batch/")) for some in (seen, baseline))
    if ours != theirs or any(not identical(seen[name], baseline[name]) for name in theirs):
        if not baseline["flag/drawn"]:
            raise NoReference(
                "at the timed step the loader gives another batch than the baseline's: its sampler or its data set"
                " draws random numbers that torch.manual_seed does not reach, or that depend on its worker processes"
            )
        if not baseline["flag/inputs_intact"]:
            raise NoReference("the model writes to its own input: timed steps meet other numbers; let it copy that")
        yield broken("inputs", "the timed step was not given the batch that the baseline's was")


def optional(name: str) -> bool:
    """Whether one program alone may have this value.

    A learning rate is state only as a tensor, as its container decides; a value beside the parameters' state counts
    only once it has changed.
    """
    rate = "/optimizer/group" in name and name.endswith("/lr")
    counts = is_counted(name.partition("/")[2])
    packed = ("memory/", "remembers/", "keeps/", "moves/", NAMES, RULE)
    return rate or counts or name.startswith(("changed/", "batch/", "timed/", *packed))


def title(name: str) -> str:
    """For people."""
    return name.removeprefix("out/")
