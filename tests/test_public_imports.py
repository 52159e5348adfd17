"""Names that extensions, scripts and configurations outside the repository import stay where they are."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

PUBLIC = {
    "optexp": ("compare", "region"),
    "optexp.program": ("Batch", "Feed", "Outputs", "Program", "Source", "map_batch", "tensors_of"),
    "optexp.strategy": (
        "BITWISE", "REASSOCIATES", "Contract", "Counters", "Evidence", "Notes", "Stage", "Strategy", "Unsupported",
        "first_line", "precision", "refusing",
    ),
    "optexp.workload": ("Workload",),
    "optexp.config": ("ConfigError", "build", "one_of", "suggest"),
    "optexp.errors": ("ConfigError", "Failure", "NoReference", "Unsupported"),
    "optexp.schema": ("build", "choice", "suggest", "typed"),
    "optexp.kernel": ("Kernel",),
    "optexp.trace": ("Trace",),
    "optexp.insight.trace": ("Trace",),
    "optexp.feeds": ("HostFeed", "LoaderFeed"),
    "optexp.measurement.protocol": ("Protocol",),
    "optexp.studies.sweep": ("SweepCallback",),
    "optexp.studies.outcome": ("ExitStatus",),
}  # fmt: skip
COMMANDS = ("optexp.audit", "optexp.doctor", "optexp.benchmark", "optexp.read", "optexp.judge")


@pytest.mark.parametrize("module", PUBLIC)
def test_extensions_find_what_they_import(module: str) -> None:
    found = import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_keep_their_names(command: str) -> None:
    # In a process of its own: pytest rewrites the modules of an installed plugin, and runpy cannot run rewritten ones.
    done = subprocess.run([sys.executable, "-m", command, "--help"], capture_output=True, text=True)
    assert f"python -m {command}" in done.stdout, done.stderr
