"""Learning rates of an optimizer's groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rate_of(group: Mapping[str, Any]) -> float:
    """The group's `lr`; 0 where its optimizer has none, or another name for it, which no schedule changes."""
    return float(group.get("lr", 0.0))
