"""From the findings of all checks to a `Verification`: gates, ratios, unseen tensors, and one sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt

from optexp.equivalence.far_off import FarOff
from optexp.equivalence.input_families import FAMILIES, NONCONTIGUOUS, NORMAL, ONE_BY_ONE
from optexp.equivalence.sight import SEEN
from optexp.program import unreadable
from optexp.records.verification import Finding, GateResult, Verification
from optexp.reporting.wording import unchecked_bits, yardstick
from optexp.strategy import BITWISE, Contract

TABULATED = 50  # tensors that have a row of their own in the record, those nearest to their limits
PARTED = "the baseline is further from float64 than rounding moves it"
CLOSE = 1.5  # times the yardstick's error, above which nothing is called as close


def aggregate(verification: Verification, findings: list[Finding], contract: Contract) -> Verification:
    """Fill in everything that follows from the findings of all steps and sets, the headline last."""
    verification.bitwise = all(f.bitwise for f in findings if f.gate not in ("G0", "SKIPPED"))
    verification.failures = [f for f in findings if not f.ok]
    verification.ok = bool(findings) and not verification.failures
    if verification.ok:
        verification.weakest = max((f for f in findings if f.weak), key=lambda f: f.error_ratio or 0.0, default=None)
    if verification.failures and not verification.repeats:
        verification.notes.append(
            "the baseline does not repeat its own steps bit for bit: by chance, or because it keeps what neither"
            " parameters, buffers nor the optimizer hold, nor globals beside train_step, and no arm can restore"
        )
    verification.bitwise = verification.bitwise and not any("G0" in f.failed for f in verification.failures)
    verification.notes += sorted({f.message for f in findings if f.ok and f.message})
    verification.notes += sorted(
        f"inputs of family {f.family.replace('_', ' ')} prove nothing about {f.tensor}: {f.unseen}"
        for f in findings
        if f.unseen and f.family in FAMILIES
    )
    verification.unseen = unseen(findings)
    verification.unread = sorted({f.tensor for f in findings if unreadable(f.tensor)})
    verification.far_off = _far_off(findings)
    verification.worst = max(findings, key=_harm, default=None)
    verification.gates = _gates(findings, contract)
    nearest = {f.tensor: f for f in sorted(findings, key=lambda f: f.used)}
    verification.tensors = dict(sorted(nearest.items(), key=lambda item: -item[1].used)[:TABULATED])
    for f in findings:
        if f.scale is not None and f.family in (NORMAL, ONE_BY_ONE):
            verification.sizes[f.tensor] = max(f.scale, verification.sizes.get(f.tensor, 0.0))
    for f in findings:
        if f.zero:
            verification.zeros[f.tensor] = max(f.scale or 0.0, verification.zeros.get(f.tensor, 0.0))
    outputs = [f for f in findings if "/" not in f.tensor and f.error_rms is not None]
    verification.error_ratio = _pooled(outputs)
    verification.max_ratio = max((f.max_ratio for f in outputs if f.max_ratio is not None), default=None)
    verification.headline = headline(verification, findings, contract)
    return verification


def _harm(finding: Finding) -> tuple[bool, int, bool, float]:
    """Other results first: where some are wrong, other bits within rounding follow from that, or say less. Of these
    the first step's, as later ones follow from it, and real numbers before integers that are chosen by them."""
    wrong = not finding.ok and finding.gate != "BITWISE"
    return wrong, -finding.step if wrong else 0, finding.gate != "EXACT", finding.used


def _far_off(findings: list[Finding]) -> dict[str, tuple[int, int, int]]:
    """Of all sets of inputs as declared, where a row is off at all."""
    found: dict[str, FarOff] = {}
    for finding in findings:
        if finding.far_off and finding.family in (NORMAL, ONE_BY_ONE):
            found[finding.tensor] = found.get(finding.tensor, FarOff(0, 0, 0)) + FarOff(*finding.far_off)
    return {name: rows.to_tuple() for name, rows in found.items() if rows.candidate or rows.plain}


def unseen(findings: Sequence[Finding]) -> dict[str, str]:
    """Tensors that no set of usual inputs could have shown to be wrong. A gradient that hangs on a tie in one set is
    seen in another; equal bits show it only where others would not have been let through.

    Whether the baseline parts from float64 is known only of sets with noisy or reassociated runs. Where it does, other
    sets do not show the tensor; equal bits need not be shown, and other bits in any set do.
    """
    usual = [f for f in findings if f.family not in FAMILIES and f.error_rms is not None]
    parted = {(f.tensor, f.seed, f.family) for f in usual if f.parted}
    apart = {tensor for tensor, _, _ in parted}
    telling = [f for f in usual if f.tensor not in apart or (f.tensor, f.seed, f.family) in parted]
    seen = {f.tensor for f in telling if (_narrow(f) if f.bitwise else not f.unseen)}
    usual = [replace(f, unseen=f.unseen or PARTED) if f.tensor in apart and not f.bitwise else f for f in usual]
    hidden = [f for f in usual if f.unseen and f.tensor not in seen]
    return {f.tensor: f.unseen for f in sorted(hidden, key=lambda f: -(f.visible or (inf,))[0])}


def _narrow(finding: Finding) -> bool:
    """Whether another value would have failed, beside a baseline that is float64's program."""
    return not finding.parted and finding.visible is not None and finding.visible[0] <= SEEN


def _gates(findings: list[Finding], contract: Contract) -> dict[str, GateResult]:
    measured = [f for f in findings if f.error_rms is not None]
    ratios: dict[str, float | None] = {
        "G0": None,
        "G1": max((f.error_ratio for f in measured if f.error_ratio is not None), default=None),
        "G2": max((f.max_ratio for f in measured if f.max_ratio is not None), default=None),
        "G3": max((f.block_ratio for f in measured if f.block_ratio is not None), default=None),
    }
    if contract == BITWISE:
        ratios["BITWISE"] = None
    if contract.name == "PRECISION":
        ratios["CAP"] = None
    failed = {gate for f in findings for gate in f.failed}
    ratios |= dict.fromkeys(failed - ratios.keys())
    return {gate: GateResult(gate not in failed, ratio) for gate, ratio in ratios.items()}


def _pooled(findings: list[Finding]) -> float | None:
    """The largest ratio of RMS errors over tensors, each over all its steps: one step of one scalar may be luck."""
    ratios = []
    for tensor in {f.tensor for f in findings}:
        same = [f for f in findings if f.tensor == tensor]
        error = sqrt(sum((f.error_rms or 0.0) ** 2 for f in same))
        baseline = sqrt(sum((f.baseline_rms or 0.0) ** 2 for f in same))
        ratios.append(error / baseline if baseline else (inf if error else 0.0))
    return max(ratios, default=None)


def headline(verification: Verification, findings: list[Finding], contract: Contract) -> str:
    """One sentence for people."""
    beside = yardstick(str(contract))
    beside = "the baseline" if beside == "baseline" else beside
    if not verification.ok:
        return failure(verification.worst) if verification.worst else "nothing was compared"
    what = _listed([f.tensor for f in findings])
    sets = f"{len(verification.seeds)} fresh input set{'s' if len(verification.seeds) > 1 else ''}"
    others = len(verification.families) - 1
    sets += f" and {others} other famil{'ies' if others > 1 else 'y'} of inputs" if others else ""
    sets = "; ".join(filter(None, (_off(findings, contract), sets, unchecked_bits(verification.unchecked_bits))))
    if verification.bitwise:
        return f"{what} equal those of {beside} bit for bit; {sets}"
    if verification.weakest:
        return f"{what} agree with fp64, but weaker than {beside}: {verification.weakness}; {sets}"
    ratio = verification.error_ratio
    if ratio is not None and CLOSE < ratio < inf:  # where the yardstick happens to err by less than rounding may
        return f"{what} agree with fp64 to rounding (outputs at worst {ratio:.2f}× the error of {beside}); {sets}"
    compared = f" (outputs at worst {ratio:.2f}× its error)" if ratio is not None and 0.01 <= ratio < inf else ""
    return f"{what} agree with fp64 as closely as {beside} does{compared}; {sets}"


def _off(findings: Sequence[Finding], contract: Contract) -> str:
    """How far off the outputs are at lower precision, in words; empty without a PRECISION contract."""
    if contract.name != "PRECISION":
        return ""
    found = [
        f.error_rms / f.scale
        for f in findings
        if f.family == NORMAL and "/" not in f.tensor and f.error_rms is not None and f.scale
    ]
    return f"outputs are off by {100 * max(found):.2g} % of their RMS" if found else ""


def failure(finding: Finding) -> str:
    """One sentence about what failed, and where."""
    where = f"seed {finding.seed}, step {finding.step}"
    if finding.family in FAMILIES or finding.family == NONCONTIGUOUS:
        where += f", {finding.family.replace('_', ' ')} inputs"
    return f"{finding.tensor} fails {finding.gate}: {finding.message} ({where})"


def _listed(tensors: Sequence[str]) -> str:
    words = {"input": "inputs", "grad": "gradients", "change": "parameter changes", "optimizer": "optimizer state"}
    words |= {"buffer": "buffers", "rule": "hyperparameters"}
    kinds = dict.fromkeys(words.get(t.partition("/")[0], t) if "/" in t else _output(t) for t in tensors)
    kinds.pop("", None)
    names = [kind for kind in kinds if not kind.startswith(("scaler", "generators", "attribute "))]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _output(name: str) -> str:
    return "outputs" if name.startswith("output") else name
