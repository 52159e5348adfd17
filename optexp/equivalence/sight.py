"""Whether gates that passed could have failed: a limit as large as the tensor lets any tensor pass.

A tensor is seen where the limit of G1 or the candidate's own error is small beside the tensor. An unseen tensor is not
verified. A baseline further from float64 than rounding can move it computes another program than its reference.
"""

from __future__ import annotations

from collections.abc import Callable

from optexp.support.tolerances import TOLERANCES

SEEN = 0.02  # of s: the largest limit at which a tensor counts as seen
SEEN_UNITS = 32.0  # the same in u, at lower precision
APART = 16.0  # times the baseline's spread: arithmetic explains no larger error of the baseline
APART_UNITS = 64.0  # added to it, in u of the baseline's coarsest arithmetic


def unseen(
    found: float,
    plain: float,
    limit: float,
    spread: float | None,
    scale: float,
    terms: Callable[[], float],
    unit: float,
    coarsest: float,
) -> tuple[str, bool]:
    """The reason why a wrong value would have passed, and whether float64 computes another program.

    The reason is empty for a tensor that is seen.

    found:    RMS error of the candidate against float64; a small one needs no tighter limit
    plain:    RMS error of the baseline against float64
    limit:    of G1, without the resolution of the stored dtype
    spread:   RMS of the baseline's movement by reassociated and noisy runs; None without such runs
    scale:    s, the RMS of the tensor
    terms:    RMS over elements of Σ|terms|, for sums that cancel; asked for where it decides, as it costs a step
    unit:     u of the promised arithmetic
    coarsest: the largest eps that the baseline used, e.g. TF32's where torch allows TF32
    """
    if not scale or not limit:
        return "", False  # any error fails
    if spread is not None and plain > APART * spread + APART_UNITS * max(unit, coarsest / 2) * scale:
        shares = f"{plain / scale:.2g} of its size from float64, and rounding moves it by {spread / scale:.2g}"
        return f"the baseline is {shares}", True
    unit = max(unit, coarsest / 2)
    low = unit > TOLERANCES["float32"].unit
    hidden = min(limit, found)
    if hidden <= max(SEEN, SEEN_UNITS * unit * low) * scale:
        return "", False
    rounding = SEEN_UNITS * unit * terms()
    if hidden <= rounding and (low or scale <= rounding):  # a tensor so small is little but rounding of its terms
        return "", False
    return f"rounding alone moves the baseline's so far that {limit / scale:.2g} of its size would pass", False
