"""Least time of a step's work in the memory format channels-last."""

from __future__ import annotations

from math import prod

from optexp.measurement.floor import MARGIN
from optexp.profiling.predicting import Parts
from optexp.profiling.work import size
from optexp.profiling.work_list import Piece

CHANGING = ("convolutions", "normalization")  # accounts whose time depends on the layout


def with_images_last(step: Parts, piece: Piece) -> float:
    """Least µs, over all steps, of a piece: convolutions and normalizations at the card's ceilings, copies for free."""
    if piece.account == "layout copies" or "pool" in piece.name or "upsample" in piece.name:
        return 0.0
    if piece.account not in CHANGING:
        return piece.us
    image = max(piece.shapes, key=prod, default=())
    passed = MARGIN * 1e6 * step.moving_s(2 * size(piece.dtype, image)) if len(image) == 4 else 0.0
    return min(piece.us, max(step.of_work(piece), passed))
