"""Tables of phases, regions and lines of code on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optexp.records.ranges import LineEntry, RangeEntry, Ranges
from optexp.reporting.tables import frameless
from optexp.support import units

WIDEST = 60  # of a name


def of_ranges(found: Ranges | None, rows: int) -> Iterator[RenderableType]:
    """Phases of the step, regions and lines, at most so many rows of each."""
    if found is None:
        return
    yield ranges("phase", found.phases)
    yield ranges("region", found.regions[:rows])
    yield lines(found.lines[:rows])


def ranges(kind: str, entries: Sequence[RangeEntry]) -> Table:
    """Host and device time with backward functions; each share stands beside the time that it is a share of."""
    on_device = any(entry.device_share for entry in entries)
    device = ["device>", "device share>", "kernels>"] if on_device else []
    table = frameless(kind, "calls>", *device, "host>", "host share>")
    for entry in entries:
        launched = [
            _us(entry.device_us, entry.backward_device_us),
            units.share(entry.device_share),
            units.count(entry.kernels),
        ]
        host = [_us(entry.host_us, entry.backward_host_us), units.share(entry.host_share)]
        table.add_row(_name(entry.name), units.count(entry.calls), *(launched if on_device else []), *host)
    return table


def lines(entries: Sequence[LineEntry]) -> Table:
    """Lines of code by the operators that they call."""
    on_device = any(entry.device_share for entry in entries)
    table = frameless("line", "operator", "calls>", f"{'device' if on_device else 'host'} share>")
    for entry in entries:
        place = file_of(entry.place, (other.place for other in entries))
        share = entry.device_share if on_device else entry.host_share
        table.add_row(_name(place), entry.operator, units.count(entry.calls), units.share(share))
    return table


def file_of(place: str, among: Iterable[str] = ()) -> str:
    """ "net.py:17" of a line with its whole path; with the folder where another file among them has that name, too."""

    def path(line: str) -> list[str]:
        return line.rpartition(":")[0].split("/")

    twice = any(path(other)[-1] == path(place)[-1] and path(other) != path(place) for other in among)
    return "/".join(place.split("/")[-2 if twice else -1 :])


def _name(text: str) -> Text:
    return Text(text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…", no_wrap=True)


def _us(*values: float | None) -> str:
    known = [value for value in values if value is not None]
    return units.microseconds(sum(known)) if known else ""
