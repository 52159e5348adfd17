"""A promise of equal bits, where the baseline does not give the same bits every time.

Tensors that the baseline repeats are held to the promise. The others are compared under torch's deterministic
algorithms, where most baselines repeat them. What varies even there is judged by the gates, and named.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

import torch

from optexp.equivalence.checksums import compact
from optexp.equivalence.observation import observe, tensors
from optexp.equivalence.quantities import source
from optexp.equivalence.tensor_math import identical
from optexp.program import Batch, Program, Snapshot
from optexp.records.verification import Finding

REPEATS = 3  # how often the baseline must give the same bits again
SURE = 128  # the same before a candidate is said to give others: of runs that differ once in 50 this misses 8 %
AGAIN = 8  # further runs of a step, in half of which a tensor has other bits again if the candidate is the cause
DETERMINISTIC = " under torch.use_deterministic_algorithms, where that repeats its bits"
STATE = ("after/", "buffer/", "param/")  # what later steps begin with


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch takes algorithms that give the same bits every time, where it has some."""
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=only_warns)


def varying(program: Program, batch: Batch, snapshot: Snapshot, times: int) -> list[str]:
    """Names of an observation that `times` further steps from the same state and batch do not give the same bits of."""
    snapshot.restore(program)
    first, found = compact(tensors(observe(program, batch))), set[str]()
    for _ in range(times):
        snapshot.restore(program)
        again = compact(tensors(observe(program, batch)))
        found |= first.keys() ^ again.keys()
        found |= {name for name in first.keys() & again.keys() if not identical(first[name], again[name])}
    return sorted(found)


@dataclass
class Bits:
    """Tensors that the baseline does not repeat bit for bit, as names of its observations.

    varying:  as it runs
    hopeless: under deterministic algorithms too; None where that was not tried
    compared: equal under those
    """

    varying: set[str] = field(default_factory=set)
    hopeless: set[str] | None = None
    compared: set[str] = field(default_factory=set)

    def source(self, message: Finding) -> str:
        """The observation's name of the tensor that a message is about."""
        return _source(message)

    def binding(self, message: Finding, later: bool) -> bool:
        """Whether the tensor of a message has bits to be equal to.

        later: the step began where another one had ended
        """
        moved = later and any(name.startswith(STATE) for name in self.varying)
        return not moved and _source(message) not in self.varying

    def deviating(self, message: Finding, later: bool) -> bool:
        """Whether it has other bits than it was promised to have."""
        differs = message.ok and not message.bitwise and message.gate != "SKIPPED"
        return bool(differs) and self.binding(message, later)

    def settled(self, messages: Sequence[Finding]) -> list[Finding]:
        """Of a run under deterministic algorithms, what it says of tensors that vary otherwise."""
        repeated = self.varying - (self.hopeless or set())
        return [promised(m, DETERMINISTIC) for m in messages if m.ok and _source(m) in repeated]

    def note(self, settled: Sequence[Finding]) -> None:
        """That these were compared."""
        self.compared |= {_source(m) for m in settled}

    def unchecked(self, messages: Sequence[Finding]) -> list[str]:
        """Tensors that nothing was found equal to."""
        return sorted({m.tensor for m in messages if _source(m) in self.varying - self.compared})


def promised(message: Finding, where: str = "") -> Finding:
    """The same finding; failed where its bits are not the baseline's.

    where: how both were run, where that is not as usual
    """
    if message.bitwise or not message.ok or message.gate == "SKIPPED":
        return message
    text = f"differs from the baseline{where}, though within rounding; the contract promises equal bits"
    return replace(message, ok=False, gate="BITWISE", failed=("BITWISE",), used=inf, message=text)


def _source(message: Finding) -> str:
    """The observation's name of the tensor that a message is about."""
    name = str(message.tensor)
    return source(name) if "/" in name else source(f"out/{name}")
