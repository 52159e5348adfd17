"""A result as lines and rows of text: the terminal, the report and the MLflow note show the same words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from optexp.records.measurement import About, Control, Cost, Watch
from optexp.records.verification import Verification
from optexp.reporting.wording import constant_inputs
from optexp.result import ArmSummary, Result, Verdict
from optexp.support.units import count, duration, joules, mebibytes, microseconds, rate, ratio, share, watts

# What a person does next where nothing was measured, or what was measured cannot be used.
WHAT_NOW = {
    Verdict.NOT_ENGAGED: "A strategy ran and changed nothing here: leave it out, or try its options.",
    Verdict.NOT_EQUIVALENT: "No speedup is shown for a result that is wrong. The report has the worst tensor.",
    Verdict.UNVERIFIED: "No speedup is shown for a result that could not be checked.",
    Verdict.INVALID: "The measurement is not shown.",
}
LESS_EXACT = (
    "No speedup is shown for a result that is less exact than its strategy promises: compare its formulas, sum in"
    " another order or in a wider dtype, or promise a precision. The report has the worst tensor."
)
QUIET = " Run it again when the machine is quiet."
PART = "share_"  # how the names of a breakdown's terms begin
# Rows that an undecided verdict says nothing of: times, and what other programs lengthen like them.
SPEED = ("time/step", "device time/step", "device busy/step", "one step alone", "throughput", "energy", "set-up")
BOUND = "physical lower bound"
SHORT = ("time/step", BOUND, "throughput", "peak memory", "kernels/step")
PERCENTILES = {
    "5th percentile": "p5_us", "median": "alone_us", "95th percentile": "p95_us", "99th percentile": "p99_us",
}  # fmt: skip
MEMORY = {  # beyond the peak that torch's allocator gave out
    "reserved by torch": "memory_reserved_mib",
    "of the process (NVML)": "memory_process_mib",
    "pinned on the host": "memory_pinned_mib",
}
CLOCKS = {
    "time/step": "wall clock of the host",
    "device time/step": "span between events, warm L2",
    "device time/step, cold L2": "span between events",
    "device busy/step": "kernels and copies, by the trace",
}

OTHERWISE = 1.25  # a speedup that differs by this factor from the headline's is worth a line
COUNTED = 2**-10  # MiB: a ratio to less memory is a ratio to nothing
NOTICED = 1.0  # MiB: less memory beside the peak is bookkeeping of torch, and says nothing of the program
AT_LOW = "at the low end of the interval"

Unit = Callable[[float], str]


@dataclass(frozen=True)
class Row:
    """One line of the table that compares the arms; an empty cell was not measured."""

    name: str
    baseline: str
    candidate: str
    change: str


def what_now(result: Result) -> str:
    """For a reader of a verdict without a measurement; empty where there is one."""
    machines = any(watch.about is About.MACHINE and not watch.ok for watch in watches(result))
    if result.verdict is Verdict.NOT_EQUIVALENT and less_exact(result):
        return LESS_EXACT
    return WHAT_NOW.get(result.verdict, "") + (QUIET if result.verdict is Verdict.INVALID and machines else "")


def less_exact(result: Result) -> bool:
    """Whether all that failed looks like rounding."""
    failures = result.equivalence.failures if result.equivalence else []
    return bool(failures) and all(failure.nature == "rounding" for failure in failures)


def rows(result: Result, details: bool = False) -> list[Row]:
    """Time, throughput, memory and kernels of both arms; `details` adds what the report has room for."""
    before, after = result.baseline, result.candidate
    gain = result.speedup.estimate if result.speedup else None  # of pairs: a ratio of medians may differ from it
    found = [
        _row("time/step", before.step_us, after.step_us, microseconds, "slower", "faster", 1 / gain if gain else None),
        _row("device time/step", before.device_us, after.device_us, microseconds, "slower", "faster"),
        _row("device busy/step", before.busy_us, after.busy_us, microseconds, "longer", "shorter"),
        _row("device time/step, cold L2", before.cold_us, after.cold_us, microseconds, "slower", "faster"),
        *(
            _row(f"one step alone, {name}", *_both(result, key), microseconds, "slower", "faster")
            for name, key in PERCENTILES.items()
            if all((*_both(result, "alone_us"), *_both(result, key)))  # else too few steps were timed alone
        ),
        physics(result),
        _row("throughput", before.throughput, after.throughput, rate, "more", "less", gain),
        _row("energy/step", before.energy_j, after.energy_j, joules, "more", "less"),
        _row("power", before.power_w, after.power_w, watts, "more", "less"),
        _row("GPU utilisation (NVML)", before.utilisation, after.utilisation, share, "more", "less"),
        _row("peak memory", *_worth_saying(before.peak_mib, after.peak_mib), mebibytes, "more", "less"),
        *(_row(name, *_noticed(result, key), mebibytes, "more", "less") for name, key in MEMORY.items()),
        _row("kernels/step", before.kernels, after.kernels, count, "more", "fewer"),
        _row("GPU busy", before.gpu_busy, after.gpu_busy, share, "more", "less"),
        _row("set-up", before.setup_s, after.setup_s, duration, "longer", "shorter"),
    ]
    shown = [row for row in found if row and (details or row.name in SHORT)]
    if details:
        shown = [replace(row, name=_said(result, row.name)) for row in shown]
    if result.verdict is Verdict.INCONCLUSIVE:  # a ratio in a column of its own would be read as a finding
        shown = [replace(r, change="undecided") if r.change and r.name.startswith(SPEED) else r for r in shown]
    return shown


def physics(result: Result) -> Row | None:
    """The physical lower bound of a step, and its share of the step's time: what was reached of the possible."""
    arms, cells = result.profile.arms(), list[str]()
    for name in ("baseline", "candidate"):
        found = arms[name].roofline if name in arms else None
        us, step_us = found.bound.us if found and found.bound else None, getattr(result, name).step_us
        reached = _reached(us, step_us) if us and step_us else ""
        cells.append(f"{microseconds(us)}{reached}" if us else "")
    return Row(BOUND, cells[0], cells[1], "") if any(cells) else None


def _reached(bound_us: float, step_us: float) -> str:
    """The share of the possible; never more than all of it."""
    return " (beaten, so it is none)" if step_us < bound_us else f" ({share(bound_us / step_us)} reached)"


def unbound(result: Result) -> str:
    """Why a CPU's ceilings give no physical bound; empty where they do."""
    ceilings = result.profile.calibration
    return f"not known: {ceilings.doubt}" if ceilings and ceilings.doubt else ""


def physical_facts(result: Result) -> list[tuple[str, str]]:
    """Of a profile: utilisation, the bound as formula or the reason why there is none, start-up, launches ahead."""
    arm, found = result.baseline, result.profile.baseline.roofline if result.profile.baseline else None
    used = [f"{share(arm.utilisation)} of the time by NVML"] if arm.utilisation is not None else []
    used += [f"{share(arm.gpu_busy)} of a traced step"] if arm.gpu_busy is not None else []
    facts = [("GPU busy", ", ".join(used))]
    if found is None:
        return facts
    bound, ahead = found.bound, found.ahead
    if bound is not None:
        why = bound.text if bound.us is not None else f"not known: {bound.reason}"
        facts.append(("bound", why))
    if ahead is not None:
        typical, most = microseconds(ahead.median_us), microseconds(ahead.most_us)
        facts.append(("host ahead", f"{typical} from a launch to its kernel (median), {most} at most"))
    facts.append(("start", ", ".join(f"{phase.name} {duration(phase.seconds)}" for phase in found.startup)))
    return facts


def _both(result: Result, figure: str) -> tuple[float | None, float | None]:
    return getattr(result.baseline, figure), getattr(result.candidate, figure)


def _profiled(result: Result, metric: str) -> tuple[float | None, float | None]:
    """The same figure of both arms' profiles."""
    arms = result.profile.arms()
    found = [arms[arm].metrics if arm in arms else {} for arm in ("baseline", "candidate")]
    return found[0].get(metric), found[1].get(metric)


def _worth_saying(before: float | None, after: float | None) -> tuple[float | None, float | None]:
    """Memory of both arms in MiB, unless both take less than 1 KiB, which no step notices."""
    return (before, after) if max(before or 0.0, after or 0.0) >= COUNTED else (None, None)


def _noticed(result: Result, metric: str) -> tuple[float | None, float | None]:
    """Memory beside the peak in both arms, unless neither has an amount that says something."""
    before, after = _profiled(result, metric)
    return (before, after) if max(before or 0.0, after or 0.0) >= NOTICED else (None, None)


def _said(result: Result, name: str) -> str:
    """A row's name, and by which clock its time was taken."""
    clock, cold = CLOCKS.get(name), bool(result.measurement and result.measurement.l2.headline == "cold")
    if cold and name in ("time/step", "device time/step"):
        clock = "device, each step by events, emptied L2"
    return f"{name} ({clock})" if clock else name


def _row(
    name: str,
    before: float | None,
    after: float | None,
    unit: Unit,
    up: str,
    down: str,
    change: float | None = None,
) -> Row | None:
    """A row of two figures of which neither is known is left out."""
    if before is None and after is None:
        return None
    if change is None and before and after and not (unit is mebibytes and min(before, after) < COUNTED):
        change = after / before
    return Row(name, _cell(before, unit), _cell(after, unit), _change(change, up, down))


def _cell(value: float | None, unit: Unit) -> str:
    return "" if value is None else unit(value)


def _change(change: float | None, up: str, down: str) -> str:
    """ "5.91× faster" rather than a bare ratio, whose direction has to be guessed."""
    if change is None:
        return ""
    if 0.995 < change < 1.005:
        return "same"
    return f"{ratio(change)} {up}" if change > 1 else f"{ratio(1 / change)} {down}"


# --- lines -----------------------------------------------------------------------------------------------------


def verified(result: Result) -> str:
    """The checks of the numbers, and their outcome."""
    if result.equivalence is None:
        return ""
    headline, contract = result.equivalence.headline, result.equivalence.contract
    if contract in headline:
        return headline
    promised = f"{promise(contract)}: contract {contract}"
    return f"{headline} ({promised})" if headline else promised


def promise(contract: str) -> str:
    """A contract in words."""
    allowed = {"BITWISE": "the same bits", "REASSOCIATES": "sums may be in another order"}
    return allowed.get(contract, "rounding to a lower precision is allowed")


def evidence(result: Result) -> list[str]:
    """The proof that each strategy engaged, or that it did not."""
    return [f"{e.strategy}: {'' if e.engaged else 'did not engage: '}{e.text}" for e in result.evidence]


def measured(result: Result) -> str:
    """How: the preset and where the arms ran."""
    placed, preset = placement(result), result.measurement.preset if result.measurement else ""
    passed = [name for name, c in controls(result).items() if c.ok and c.found and c.estimate]
    shapes = len(result.config.get("workload.shapes") or ())
    parts = [f"{preset} preset" if preset else "", placed, f"{shapes} shapes in turn" if shapes > 1 else ""]
    days = {f", remembered from {c.since}" for c in controls(result).values() if c.since}
    which = "" if len(passed) == len(controls(result)) else "of the controls only these "
    parts += [f"{which or 'controls '}passed ({', '.join(passed)}{''.join(days)})"] if passed else []
    return ", ".join(text for text in parts if text)


def controls(result: Result) -> dict[str, Control]:
    """Known truths, and whether the measurement saw them, by name."""
    return result.measurement.controls if result.measurement else {}


def watches(result: Result) -> list[Watch]:
    """Watchdogs; without a measurement those that may be shown."""
    return result.measurement.watchdogs if result.measurement else result.objections


def placement(result: Result) -> str:
    """Where the arms ran, and the ratio on all cores where that is known."""
    bound = result.placement.text if result.placement else ""
    return "; ".join(filter(None, (bound, result.measurement.unbound if result.measurement else "")))


def cost(result: Result) -> str:
    """Time of set-up, and the steps that pay for it; empty where no speedup may be shown."""
    facts = result.measurement.cost if result.measurement else Cost()
    if result.speedup is None or facts.setup_s is None:
        return ""
    text = f"set-up {duration(facts.setup_s)}"
    if facts.baseline_setup_s is not None:
        text += f" (baseline {duration(facts.baseline_setup_s)})"
    if facts.cold_setup_s is not None:
        text += f", {duration(facts.cold_setup_s)} with empty compile caches"
    if result.verdict is Verdict.INCONCLUSIVE:
        return text
    steps, hours = facts.break_even_steps, facts.hours_saved
    if isinstance(steps, str):
        text += ", never paid back"
    elif steps is not None:
        text += f", paid back after {steps:,} steps" if steps > 0 else ", no more than the baseline's"
    at_low = facts.break_even_steps_at_low
    beside = [f"{at_low if isinstance(at_low, str) else f'{at_low:,}'} {AT_LOW}"] if at_low not in (None, steps) else []
    if steps is not None:
        beside.insert(0, "empty caches" if facts.paid_back == "cold" else "warm caches")
    text += f" ({', '.join(beside)})" if beside else ""
    if hours is not None:
        text += f"; {_saved(hours)} in {facts.horizon_steps:,} steps"
        if (surely := facts.hours_saved_at_low) is not None:
            text += f" ({_saved(surely)} {AT_LOW})"
    return text


def _saved(hours: float) -> str:
    return f"{'saves' if hours >= 0 else 'loses'} {duration(abs(hours) * 3600)}"


def memory(result: Result) -> str:
    """Figures of memory beside the peak: "reserved by torch 2.1 GiB → 1.9 GiB"."""
    every = [_row(name, *_noticed(result, key), mebibytes, "", "") for name, key in MEMORY.items()]
    return ", ".join(f"{r.name} {' → '.join(filter(None, (r.baseline, r.candidate)))}" for r in every if r)


def memory_reasons(result: Result) -> list[str]:
    """Why the candidate's peak memory is another, in sentences; none where it is not."""
    found = result.profile.memory
    return found.sentences if found else []


def single(result: Result) -> str:
    """A step that is waited for, where it gains otherwise than steps in a row; the report has all its percentiles."""
    before, after = _both(result, "alone_us")
    if result.verdict is Verdict.INCONCLUSIVE or result.speedup is None or not before or not after:
        return ""
    alone = before / after
    if 1 / OTHERWISE <= alone / result.speedup.estimate <= OTHERWISE:
        return ""
    change = _change(1 / alone, "slower", "faster")
    return f"a step that is waited for is {change} ({microseconds(before)} → {microseconds(after)})"


def remarks(result: Result) -> list[str]:
    """Watchdogs that saw something, and notes on what was ignored or left out."""
    seen = [f"{watch.name}: {watch.text}" for watch in watches(result) if not watch.ok]
    seen += [f"{name}: {c.text}" for name, c in controls(result).items() if not (c.ok and c.found)]
    if result.measurement and (cold := result.measurement.l2.cold):
        seen.append(f"with emptied caches: {cold.text}")
    return [*seen, *unchecked(result), *result.notes]


def unchecked(result: Result) -> list[str]:
    """Limits of a verdict of equality: inputs that nothing depends on or that never varied, and results that
    cannot be read."""
    found = result.equivalence or Verification("")
    dead, constant, unread = map(", ".join, (found.dead, found.constant, found.unread))
    said = [
        (dead, f"the result does not depend on input {dead}: what is done with it is not checked"),
        (constant, constant_inputs(constant)),
        (unread, f"nothing in {unread} can be compared: what it holds is not checked"),
    ]
    return [text for names, text in said if names]


def prediction(result: Result) -> str:
    """The most that the candidate was predicted to gain, and how much of that it gained; empty where nothing was."""
    tested = result.profile.prediction
    if tested is None:
        return ""
    most, measured = tested.prediction.speedup, tested.ratio * tested.prediction.speedup
    text = (
        f"at most {ratio(most)} ({tested.prediction.text}); measured {ratio(measured)}, {share(tested.ratio)} of that"
    )
    return f"{text}: beyond the bound" if tested.refuted else text


def suggestion(result: Result) -> str:
    """The one thing to try next, as the profile has it."""
    return result.profile.suggestion or ""


def regression(result: Result) -> str:
    """The result beside a recorded one; empty where none was asked for."""
    return f"{result.regression.outcome}: {result.regression.text}" if result.regression else ""


def reason(result: Result) -> str:
    """Why there is no speedup, or what to know beside it: the headline without the verdict that it repeats."""
    if result.verdict.measured:
        return "; ".join([*filter(None, [regression(result)]), *remarks(result)])
    return result.headline.removeprefix(result.verdict).lstrip(": ")


def shown(result: Result) -> ArmSummary:
    """The arm that a row about this job has room for: the candidate, or what was profiled alone."""
    return result.baseline if result.verdict is Verdict.PROFILED else result.candidate


def ranked(results: Iterable[Result]) -> list[Result]:
    """The surest gain first, by the interval's lower end; then those without a speedup, failures last.

    What was only profiled is not ranked: it keeps its order.
    """
    return sorted(results, key=rank)


def rank(result: Result) -> tuple[float, int]:
    """The key of `ranked`: lower is better."""
    return -(result.speedup.low if result.speedup else 0.0), -list(Verdict).index(result.verdict)


def counted(verdicts: Iterable[str]) -> str:
    """The verdicts of a sweep with their numbers: `2 FASTER, 1 SAME`."""
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts).items())


def parts(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """The terms of the breakdown that add up to a step, in words; what is practically zero is left out."""
    return [
        (name.removeprefix(PART).replace("_", " "), value)
        for name, value in metrics.items()
        if name.startswith(PART) and value > 0.0005
    ]
