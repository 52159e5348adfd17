"""The machine of a record, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def sentence(facts: Mapping[str, Any]) -> str:
    """Device, driver and versions.

    facts: environment of a comparison's record, as `optexp.measurement.environment.describe` finds it
    """
    device = facts.get("gpu") or facts.get("cpu") or facts.get("device")
    device = f"{device} (power limit {facts['power_limit_w']:.0f} W)" if facts.get("power_limit_w") else device
    device = f"{device}, {facts['cpu_count']} cores" if facts.get("cpu_count") else device
    driver = f"driver {facts.get('driver') or 'not recorded'}" if facts.get("gpu") else ""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "triton") if facts.get(name))
    return f"{'; '.join(filter(None, (str(device), driver, versions)))}."


def here(device: str) -> str:
    """The same of this machine. device: as torch names it"""
    return sentence(_facts(device))


def of_rows(names: Iterable[str], device: str) -> str:
    """The machine of rows that were kept in a file: this one where it has their device, else no more than their names.

    names: of each row's card, or "CPU"
    """
    facts, found = _facts(device), {"CPU" if name == "cpu" else name for name in names}
    if found == {facts.get("gpu") or "CPU"}:
        return sentence(facts)
    return f"{', '.join(sorted(found))}; driver and versions not recorded."


def _facts(device: str) -> Mapping[str, Any]:
    import torch

    from optexp.measurement import environment

    return environment.describe(torch.device(device))
