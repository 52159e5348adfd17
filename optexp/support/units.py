"""Numbers with their units, as text for people, and such text as numbers."""

from __future__ import annotations

import re
from math import floor, isfinite, log10

SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
BYTES = {"": 1.0, "B": 1.0, **{f"{p}iB": 2.0 ** (10 * (n + 1)) for n, p in enumerate("KMGT")}} | {
    f"{p}B": 1e3 ** (n + 1) for n, p in enumerate("KMGT")
}
NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def ratio(value: float) -> str:
    """1.31×, 12.4×, 104×: a measurement carries three digits. Below 0.1 two digits: 0.0037×."""
    if 0 < value < 0.1:
        return f"{value:.2g}×"
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×" if value < 100 else f"{value:.0f}×"


def at_least(value: float) -> str:
    """Three digits as in `ratio`, but never rounded up: a promised speedup must hold."""
    digits = _decimals(value)
    return f"{floor(value * 10**digits) / 10**digits:.{digits}f}"


def low_to_high(low: float, high: float) -> str:
    """Both ends with three digits, zeros included: 1.13 to 1.70, 0.844 to ∞."""
    return f"{at_least(low)} to {f'{high:.{_decimals(high)}f}' if isfinite(high) else '∞'}"


def _decimals(value: float) -> int:
    """Decimals of a number with three digits."""
    return max(0, 2 - floor(log10(value))) if value > 0 else 0


def percent(confidence: float) -> str:
    """99%, 99.5% of a confidence from 0 to 1: six digits, so that 99.999% is not rounded to 100%."""
    return f"{100 * confidence:.6g}%"


def duration(seconds: float) -> str:
    """A time with three digits: 112 µs, 4.2 ms, 3.1 s, 2.4 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        # 0.9995 of a unit would print as 1000 of the smaller one.
        if abs(seconds) >= size * (2 if unit == "min" else 0.9995):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def byte_size(size: float) -> str:
    """An amount of memory: 340 MiB, 1.5 GiB, 64 KiB, 12 B."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= 0.9995 * scale:
            number = size / scale
            return f"{number:.0f} {unit}" if abs(number) >= 99.95 else f"{number:.3g} {unit}"
    return f"{size:.0f} B"


def signed_bytes(size: float) -> str:
    """A change of memory: +340 MiB, −12 KiB."""
    return f"{'+' if size > 0 else '−'}{byte_size(abs(size))}"


def microseconds(value: float) -> str:
    """A time in µs, formatted by `duration`."""
    return duration(value / 1e6)


def mebibytes(value: float) -> str:
    """Memory in MiB: 1.5 GiB, 412 MiB, 12 KiB, "under 1 KiB", or "none" for 0."""
    for unit, size in (("GiB", 1024.0), ("MiB", 1.0), ("KiB", 2**-10)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return "under 1 KiB" if value > 0 else "none"


def joules(value: float) -> str:
    """1.3 J, 45 mJ, 820 µJ."""
    for unit, size in (("J", 1.0), ("mJ", 1e-3)):
        if value >= size:
            return f"{digits(value / size)} {unit}"
    return f"{digits(value * 1e6)} µJ"


def watts(value: float) -> str:
    return f"{value:.0f} W"


def rate(value: float) -> str:
    """Samples a second: 342/s, 342 k/s, 2.1 M/s."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{digits(value / size)} {unit}/s"
    return f"{digits(value)}/s"


def count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def share(value: float) -> str:
    """A fraction as a percentage."""
    return f"{value:.0%}" if value >= 0.0995 or value == 0 else f"{value:.1%}"


def digits(value: float) -> str:
    """Three significant digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def seconds(text: str, key: str) -> float:
    """The seconds in a text such as 90s, 10m, 1.5h or 600.

    Args:
        key: Name of the setting in the message.

    Raises:
        ValueError: The text is no such time.
    """
    return _amount(text, SECONDS, f"{key}={text} is no time: write 90s, 10m, 1.5h, or a number of seconds")


def byte_count(text: str, key: str) -> float:
    """The bytes in a text such as 8GiB, 512MiB, 16GB or 1000; arguments and errors as in `seconds`."""
    return _amount(text, BYTES, f"{key}={text} is no amount of memory: write 8GiB, 512MiB, or a number of bytes")


def _amount(text: str, units: dict[str, float], problem: str) -> float:
    match = NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(problem)
    return float(match[1]) * units[match[2]]


def rough(seconds: float) -> str:
    """An estimated time, rounded to tens of seconds or to minutes: 40 s, 6 min."""
    return f"{max(1, round(seconds / 60))} min" if seconds >= 60 else f"{max(10, round(seconds, -1)):.0f} s"
