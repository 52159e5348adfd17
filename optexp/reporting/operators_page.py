"""Tables of operators, modules and calls as Markdown: a page beside a record, and of `python -m optexp.read`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from optexp.profiling.aten import entry
from optexp.records.profile import ArmProfile, CallEntry, ModuleEntry, OperatorEntry
from optexp.support import units


def markdown(title: str, profile: ArmProfile) -> str:
    """All tables of one arm; device columns only where a device did something. Times are of one step."""
    return "\n".join(
        [
            f"# {title}",
            "",
            *_operators(profile.operators),
            *_modules(profile.modules),
            *_calls(profile),
            *_device(profile),
        ]
    )


def on_device(operators: Sequence[OperatorEntry]) -> bool:
    """Whether any operator launched anything."""
    return any(row.device_share for row in operators)


def _operators(rows: Sequence[OperatorEntry]) -> Iterator[str]:
    device = on_device(rows)
    yield "## Operators"
    yield ""
    yield "Self: without the operators that it called. Shares are of all self times. The entry is in torch's"
    yield "repository; an operator without a CUDA function is composed of others."
    yield ""
    names = ["operator", "category", "calls"]
    names += ["device self", "device share", "device total"] if device else []
    names += ["host self", "host share", "host total", "backward", "bytes", "flop", "CUDA function", "entry"]
    yield from _head(names, text=2)
    for row in rows:
        cells = [f"`{row.name}`", row.category, units.count(row.calls)]
        cells += [_us(row.device_self_us), units.share(row.device_share), _us(row.device_us)] if device else []
        backward = row.backward_device_us if device else row.backward_host_us
        cells += [_us(row.host_self_us), units.share(row.host_share), _us(row.host_us), _us(backward)]
        known = entry(row.name)
        cuda = f"[`{known.cuda}`]({known.cuda_url})" if known and known.cuda else ""
        source = [cuda, f"[native_functions.yaml:{known.line}]({known.url})" if known else ""]
        yield _row([*cells, _number(row.bytes), _number(row.flops), *source])
    yield ""


def _modules(rows: Sequence[ModuleEntry]) -> Iterator[str]:
    if not rows:
        return
    yield "## Modules"
    yield ""
    yield "With the modules inside. The share is of the model's forward and backward."
    yield ""
    yield from _head(
        ["module", "class", "calls", "share", "device", "backward, device", "host", "backward, host"], text=2
    )
    for row in rows:
        times = row.device_us, row.backward_device_us, row.host_us, row.backward_host_us
        name = f"`{row.name}`" if row.name else "(model)"
        yield _row([name, row.kind, units.count(row.calls), units.share(row.share), *map(_us, times)])
    yield ""


def _calls(profile: ArmProfile) -> Iterator[str]:
    rows: Sequence[CallEntry] = profile.calls
    if not rows:
        return
    device = any(row.device_us for row in rows)
    yield "## Calls"
    yield ""
    yield "Operators below those that called them, kernels below those that launched them."
    yield ""
    yield from _head(["call", "calls", *(["device"] if device else []), "host"], text=1)
    for row in rows:
        name = f"*{row.name}*" if row.kernel else f"`{row.name}`"
        times = [*([_us(row.device_us)] if device else []), "" if row.kernel else _us(row.host_us)]
        yield _row(["&nbsp;&nbsp;" * row.depth + name, units.count(row.calls), *times])
    yield ""


def _device(profile: ArmProfile) -> Iterator[str]:
    if profile.launches:
        yield "## Launches"
        yield ""
        yield "A wave is one block on each multiprocessor."
        yield ""
        yield from _head(["kernel", "grid", "block", "calls", "waves", "device", "host, to launch"], text=3)
        for row in profile.launches:
            name = f"`{row.name}`" + (" (in a graph)" if row.in_graph else "")
            waves = "" if row.waves is None else f"{row.waves:.3g}"
            yield _row([name, row.grid, row.block, units.count(row.calls), waves, _us(row.us), _us(row.launch_us)])
        yield ""
    if profile.api:
        yield "## CUDA API"
        yield ""
        yield from _head(["function", "calls", "share", "host"], text=1)
        for call in profile.api:
            yield _row([f"`{call.name}`", units.count(call.calls), units.share(call.share), _us(call.us)])
        yield ""
    if profile.copies:
        yield "## Copies"
        yield ""
        yield from _head(["kind", "count", "MiB", "pageable MiB", "device"], text=1)
        for copy in profile.copies:
            sizes = _number(copy.bytes / 2**20), _number(copy.pageable / 2**20)
            yield _row([copy.kind, units.count(copy.count), *sizes, _us(copy.us)])
        yield ""


def _us(value: float | None) -> str:
    return units.microseconds(value) if value else ""


def _number(value: float | None) -> str:
    return f"{value:.3g}" if value else ""


def _head(names: Sequence[str], text: int) -> Iterator[str]:
    """The first `text` columns are words, the others figures."""
    yield _row(names)
    yield _row(["---"] * text + ["--:"] * (len(names) - text))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
