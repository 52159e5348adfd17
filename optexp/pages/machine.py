"""The machine of a record, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sentence(facts: Mapping[str, Any]) -> str:
    """Device, driver and versions.

    facts: environment of a comparison's record, as `optexp.measurement.environment.describe` finds it
    """
    device = facts.get("gpu") or facts.get("cpu") or facts.get("device")
    driver = f"driver {facts.get('driver') or 'not recorded'}" if facts.get("gpu") else ""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "triton") if facts.get(name))
    return f"{'; '.join(filter(None, (str(device), driver, versions)))}."


def here(device: str) -> str:
    """The same of this machine. device: as torch names it"""
    import torch

    from optexp.measurement import environment

    return sentence(environment.describe(torch.device(device)))
