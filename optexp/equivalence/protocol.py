"""How a candidate is verified: who does what, in which order. Runs in the parent, and never holds a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any, Protocol

from optexp.strategy import BITWISE, REASSOCIATES, Contract

REPEATS = 3  # how often the baseline must give the same bits again
SPREAD_RUNS = 5  # yardstick runs of a baseline that does not

Message = dict[str, Any]
Progress = Callable[[str], None]


class Arm(Protocol):
    """A process that holds one program, or the judge.

    reference: draw(seed, count) -> parcel; reference_info() -> dict;
               yardstick(step, parcel); judge(step, parcel) -> messages
    others:    load(parcel); observe(step, restore, noise) -> parcel; repeats(times) -> bool
    """

    def call(self, method: str, **arguments: Any) -> Any: ...


@dataclass
class Verification:
    """What verification found. Ratios are the candidate's error over the baseline's, both against fp64."""

    contract: str
    ok: bool = True
    weakest: Message = field(default_factory=dict)  # the largest error above "warn", where there is one
    bitwise: bool = True
    repeats: bool = True
    seeds: list[int] = field(default_factory=list)
    reference: str = ""
    families: list[str] = field(default_factory=lambda: ["normal"])
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    worst: Message = field(default_factory=dict)
    failures: list[Message] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error_ratio: float | None = None
    max_ratio: float | None = None
    headline: str = ""

    @property
    def weakness(self) -> str | None:
        """What passes, though with clearly more error than the yardstick's; shown beside any speedup."""
        if not self.weakest:
            return None
        return f"{self.weakest['tensor']} has {self.weakest['error_ratio']:.2f}× its error"

    def to_dict(self) -> dict[str, Any]:
        """As it stands in `result.json`: numbers that JSON has no word for become null."""
        clean: dict[str, Any] = _clean(self.__dict__)
        return clean


def verify(
    reference: Arm,
    yardstick: Arm,
    candidate: Arm,
    seeds: Sequence[int],
    steps: int,
    contract: Contract,
    on_progress: Progress = lambda text: None,
) -> Verification:
    """Compare the candidate with fp64, by the measure of what the baseline does, on fresh inputs for every seed.

    yardstick: the bare eager program; for a PRECISION contract plain autocast
    steps:     consecutive steps per seed; several for training, so that a frozen step count shows
    Inputs are drawn here, so after the arms compiled, warmed up and captured. Ends at the first seed that fails.
    Where equivalence cannot be decided, the reference raises NoReference.
    """
    verification = Verification(str(contract))
    messages: list[Message] = []
    for position, seed in enumerate(seeds):
        on_progress(f"fresh input set {position + 1} of {len(seeds)}")
        batches = reference.call("draw", seed=seed, count=steps)
        for arm in (yardstick, candidate):
            arm.call("load", parcel=batches)
        info = reference.call("reference_info")
        if position == 0:
            verification.repeats = yardstick.call("repeats", times=REPEATS)
        for noise in range(info["noisy_steps"]):
            _measure(reference, yardstick, noise % steps, noise + 1)
        for extra in range(0 if verification.repeats else (SPREAD_RUNS - 1) * steps):
            _measure(reference, yardstick, extra % steps)
        for step in range(steps):
            _measure(reference, yardstick, step)
            seen = candidate.call("observe", step=step, restore=step == 0, noise=None)
            judged = reference.call("judge", step=step, parcel=seen)
            messages += [{**message, "seed": seed, "step": step} for message in judged]
        verification.seeds.append(seed)
        verification.reference = info["reference"]
        if not all(message["ok"] for message in messages):
            break
    return _conclude(verification, messages, contract)


def _measure(reference: Arm, yardstick: Arm, step: int, noise: int | None = None) -> None:
    """One more run of the baseline for the reference to take its yardsticks from."""
    seen = yardstick.call("observe", step=step, restore=step == 0, noise=noise)
    reference.call("yardstick", step=step, parcel=seen)


def _conclude(verification: Verification, messages: list[Message], contract: Contract) -> Verification:
    verification.bitwise = all(m["bitwise"] for m in messages if m["gate"] not in ("G0", "SKIPPED"))
    if contract == BITWISE and verification.repeats:
        messages = [_bitwise(m) for m in messages]
    elif contract == BITWISE:
        verification.contract = str(REASSOCIATES)
        verification.notes.append("the baseline does not repeat itself bit for bit: BITWISE is judged as REASSOCIATES")
    verification.failures = [m for m in messages if not m["ok"]]
    verification.ok = bool(messages) and not verification.failures
    if verification.ok:
        verification.weakest = max((m for m in messages if m["weak"]), key=lambda m: m["error_ratio"], default={})
    verification.bitwise = verification.bitwise and not any("G0" in m["failed"] for m in verification.failures)
    verification.notes += sorted({m["message"] for m in messages if m["ok"] and m["message"]})
    verification.worst = max(messages, key=lambda m: m["used"], default={})
    verification.gates = _gates(messages, contract)
    outputs = [m for m in messages if "/" not in m["tensor"] and m["error_rms"] is not None]
    verification.error_ratio = _pooled(outputs)
    verification.max_ratio = max((m["max_ratio"] for m in outputs), default=None)
    verification.headline = _headline(verification, messages, contract)
    return verification


def _bitwise(message: Message) -> Message:
    if message["bitwise"] or not message["ok"] or message["gate"] == "SKIPPED":
        return message
    text = "differs from the baseline, though within rounding; the contract promises equal bits"
    return {**message, "ok": False, "gate": "BITWISE", "failed": ("BITWISE",), "used": inf, "message": text}


def _gates(messages: list[Message], contract: Contract) -> dict[str, dict[str, Any]]:
    """Per gate whether it passed, and the largest ratio to the baseline's error where it has one."""
    measured = [m for m in messages if m["error_rms"] is not None]
    ratios: dict[str, float | None] = {
        "G0": None,
        "G1": max((m["error_ratio"] for m in measured), default=None),
        "G2": max((m["max_ratio"] for m in measured), default=None),
    }
    if contract == BITWISE:
        ratios["BITWISE"] = None
    if contract.name == "PRECISION":
        ratios["CAP"] = None
    failed = {gate for m in messages for gate in m["failed"]}
    ratios |= dict.fromkeys(failed - ratios.keys())
    return {gate: {"passed": gate not in failed, "worst_ratio": ratio} for gate, ratio in ratios.items()}


def _pooled(messages: list[Message]) -> float | None:
    """The largest ratio of RMS errors over tensors, each over all its steps: one step of one scalar may be luck."""
    ratios = []
    for tensor in {m["tensor"] for m in messages}:
        same = [m for m in messages if m["tensor"] == tensor]
        error, baseline = (sqrt(sum(m[key] ** 2 for m in same)) for key in ("error_rms", "baseline_rms"))
        ratios.append(error / baseline if baseline else (inf if error else 0.0))
    return max(ratios, default=None)


def _headline(verification: Verification, messages: list[Message], contract: Contract) -> str:
    """One sentence for people."""
    yardstick = f"plain {contract.dtype} autocast" if contract.name == "PRECISION" else "the baseline"
    if not verification.ok:
        worst = verification.worst
        first = f"{worst['tensor']} fails {worst['gate']}: {worst['message']}"
        return f"{first} (seed {worst['seed']}, step {worst['step']})"
    what = _listed([m["tensor"] for m in messages])
    sets = f"{len(verification.seeds)} fresh input set{'s' if len(verification.seeds) > 1 else ''}"
    if verification.bitwise:
        return f"{what} equal those of {yardstick} bit for bit; {sets}"
    if verification.weakest:
        return f"{what} agree with fp64, but weaker than {yardstick}: {verification.weakness}; {sets}"
    ratio = verification.error_ratio
    compared = f" (worst {ratio:.2f}× its error)" if ratio is not None and 0.01 <= ratio < inf else ""
    return f"{what} agree with fp64 as closely as {yardstick} does{compared}; {sets}"


def _listed(tensors: Sequence[str]) -> str:
    words = {"grad": "gradients", "change": "parameter changes", "optimizer": "optimizer state", "buffer": "buffers"}
    kinds = dict.fromkeys(words.get(t.partition("/")[0], t) if "/" in t else _output(t) for t in tensors)
    kinds.pop("", None)
    names = [kind for kind in kinds if not kind.startswith("scaler")]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _output(name: str) -> str:
    return "outputs" if name.startswith("output") else name


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
