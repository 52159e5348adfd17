"""Names of results by the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optexp.result import Result
from optexp.schema import shown


def titles(results: Sequence[Result]) -> list[str]:
    """Each result's workload, with the settings in which the results differ: `mlp dim=512 dtype=bfloat16`.

    Options of strategies and of the baseline stack are in the strategy's label already.
    """
    flat = [flatten(result.config) for result in results]
    names = []
    for result, config in zip(results, flat, strict=True):
        # A job that was never built has a configuration that was never resolved: it tells nothing about the others.
        alike = [c for r, c in zip(results, flat, strict=True) if r.workload == result.workload and r.fingerprint]
        varying = [
            key
            for key in config
            if not key.startswith(("strategy", "baseline.", "measurement."))
            and len({str(other[key]) for other in alike if key in other}) > 1
        ]
        settings = (f"{_short(key, varying)}={as_typed(config[key])}" for key in varying)
        names.append(" ".join([result.workload, *settings]))
    return names


def as_typed(value: Any) -> str:
    """A value as the command line has it: `[{B: 16}]`, `null`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_typed(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(as_typed, value))}]" if isinstance(value, (list, tuple)) else shown(value)


def _short(key: str, beside: Sequence[str]) -> str:
    """A workload's key without `workload.`, unless it would read like a key beside it: both have a `mode`."""
    own = key.removeprefix("workload.")
    return key if own in beside else own


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted key."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        name: leaf
        for key, value in node.items()
        for name, leaf in flatten(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }
