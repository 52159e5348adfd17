"""Would a wrong value have been seen? The smallest error that fails a gate, or the error that there is, must be small
beside the tensor.

Nothing is verified that was not seen: a yardstick of half the tensor's size lets any tensor pass. A baseline that lies
further from float64 than its rounding can bring it has another program for a reference.
"""

from __future__ import annotations

from optexp.support.tolerances import TOLERANCES

SEEN = 0.02  # of a tensor's size: the largest limit under which it counts as seen
SEEN_UNITS = 32.0  # the same in u, where precision is low
APART = 16.0  # times what order, rounding and noise move the baseline by: it errs by more than arithmetic explains
APART_UNITS = 64.0  # and by so many u of the coarsest arithmetic that it uses


def unseen(
    found: float,
    plain: float,
    limit: float,
    spread: float | None,
    scale: float,
    terms: float,
    unit: float,
    coarsest: float,
) -> tuple[str, bool]:
    """Why a wrong value could not be told from a right one, empty where it could; and whether float64's is another
    program's.

    found:    RMS error of the candidate against float64: what is known to be right needs no tighter limit
    plain:    RMS error of the baseline against float64;  limit: of G1;  scale: s (RMS of the tensor)
    spread:   RMS of what reassociated and noisy runs move the baseline by; None where there were none
    terms:    RMS over elements of Σ|terms|, of sums that cancel
    unit:     u of the arithmetic that was promised;  coarsest: the largest eps that the baseline was seen to use, as
              TF32's where torch allows it
    """
    if not scale or not limit:
        return "", False  # any error fails
    if spread is not None and plain > APART * spread + APART_UNITS * max(unit, coarsest / 2) * scale:
        shares = f"{plain / scale:.2g} of its size from float64, and rounding moves it by {spread / scale:.2g}"
        return f"the baseline is {shares}", True
    unit = max(unit, coarsest / 2)
    low = unit > TOLERANCES["float32"].unit
    hidden = min(limit, found)
    if hidden <= max(SEEN, SEEN_UNITS * unit * low) * scale or (low and hidden <= SEEN_UNITS * unit * terms):
        return "", False
    return f"rounding alone moves the baseline's so far that {limit / scale:.2g} of its size would pass", False
