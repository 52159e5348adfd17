"""Tables of one arm's profile on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optexp.profiling.bounds import Bound
from optexp.records.prediction import Prediction
from optexp.records.profile import ApiEntry, ArmProfile, Bottleneck, CopyEntry, ModuleEntry, OperatorEntry, TopEntry
from optexp.reporting import range_tables, summary
from optexp.reporting.tables import frameless, labelled, spaced
from optexp.support import units

WIDEST = 60  # of a name


def reading(title: str, profile: ArmProfile, found: Sequence[Bottleneck], least: Sequence[Bound], rows: int) -> Group:
    """Everything that a trace shows, under its title."""
    parts = [*of_arm(profile, rows), bottlenecks(found), bounds(least)]
    return Group(Text(title, style="bold"), Text(), *spaced(parts), Text())


def sentences(label: str, texts: Sequence[str], note: str) -> Table:
    """Sentences under one label, and a note."""
    return labelled([*((label if not index else " ", text) for index, text in enumerate(texts)), ("note", note)])


def of_arm(profile: ArmProfile, rows: int) -> Iterator[RenderableType]:
    """Terms of a step, kernels, operators and modules, at most so many rows of each."""
    yield terms(profile)
    yield of_place("kernel", "device", profile.top_kernels[:rows])
    if profile.operators:
        yield operators(profile.operators[:rows])
    else:  # of an earlier record
        yield of_place("operator", "host", profile.top_ops[:rows])
    yield from range_tables.of_ranges(profile.ranges, rows)
    yield modules(profile.modules[:rows])
    yield api(profile.api[:rows])
    yield copies(profile.copies)


def terms(profile: ArmProfile) -> Table:
    """The terms of a step, which add up to one."""
    table = frameless("where a step goes", "share>", "")
    for name, value in summary.parts(profile.metrics):
        table.add_row(name, units.share(value), Text("█" * round(30 * value), style="cyan"))
    return table


def of_place(kind: str, place: str, entries: Sequence[TopEntry]) -> Table:
    """Kernels and copies, or operators without those that they called; the share is of all of them."""
    table = frameless(kind, "calls>", f"{place} time>", f"{place} share>")
    for entry in entries:
        table.add_row(_name(entry.name), units.count(entry.calls), _us(entry.us), units.share(entry.share))
    return table


def operators(entries: Sequence[OperatorEntry]) -> Table:
    """Operators by their own time; each share stands beside the time that it is a share of."""
    on_device = any(entry.device_share for entry in entries)
    device = ["device self>", "device share>"] if on_device else []
    table = frameless("operator", "category", "calls>", *device, "host self>", "host share>")
    for entry in entries:
        launched = [_us(entry.device_self_us), units.share(entry.device_share)] if on_device else []
        host = [_us(entry.host_self_us), units.share(entry.host_share)]
        table.add_row(_name(entry.name), entry.category, units.count(entry.calls), *launched, *host)
    return table


def modules(entries: Sequence[ModuleEntry]) -> Table:
    """Modules with those inside; the share is of the model's forward and backward."""
    on_device = any(entry.device_us or entry.backward_device_us for entry in entries)
    place = "device" if on_device else "host"
    table = frameless("module", "class", "calls>", f"forward, {place}>", f"backward, {place}>", "share>")
    for entry in entries:
        forward = entry.device_us if on_device else entry.host_us
        backward = entry.backward_device_us if on_device else entry.backward_host_us
        name, count = _name(entry.name or "(model)"), units.count(entry.calls)
        table.add_row(name, entry.kind, count, _us(forward), _us(backward), units.share(entry.share))
    return table


def api(entries: Sequence[ApiEntry]) -> Table:
    """Calls of the CUDA API; the share is of all of them."""
    table = frameless("CUDA API", "calls>", "host time>", "share>")
    for entry in entries:
        table.add_row(_name(entry.name), units.count(entry.calls), _us(entry.us), units.share(entry.share))
    return table


def copies(entries: Sequence[CopyEntry]) -> Table:
    """Copies by kind."""
    table = frameless("copies", "count>", "MiB>", "pageable MiB>", "device time>")
    for entry in entries:
        sizes = f"{entry.bytes / 2**20:.3g}", f"{entry.pageable / 2**20:.3g}"
        table.add_row(entry.kind, units.count(entry.count), *sizes, _us(entry.us))
    return table


def bottlenecks(found: Sequence[Bottleneck]) -> Table:
    """Each bottleneck with its share of the step and its remedies."""
    table = frameless("bottleneck", "share>", "why", "try")
    for bottleneck in found:
        share, why = units.share(bottleneck.share), Text(bottleneck.why)
        table.add_row(bottleneck.label.replace("_", " "), share, why, ", ".join(bottleneck.try_))
    return table


def predictions(found: Sequence[Prediction]) -> Table:
    """Strategies by the most that each alone can gain."""
    table = frameless("strategy", "at most>", "step>", "if")
    for one in found:
        table.add_row(Text(one.name), units.ratio(one.speedup), units.microseconds(one.bound_us), Text(one.text))
    return table


def bounds(found: Sequence[Bound]) -> Table:
    """Lower bounds of the step, each under its assumption."""
    table = frameless("a step at best, if", "time>")
    for bound in found:
        table.add_row(bound.text, units.microseconds(bound.us))
    return table


def _name(text: str) -> Text:
    return Text(text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…", no_wrap=True)


def _us(value: float | None) -> str:
    return "" if value is None else units.microseconds(value)
