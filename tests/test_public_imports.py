"""Names that extensions, scripts and configurations outside the repository import stay where they are."""

from __future__ import annotations

import sys
from importlib import import_module
from runpy import run_module

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
def test_commands_keep_their_names(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit):
        run_module(command, run_name="__main__")
    assert f"python -m {command}" in "".join(capsys.readouterr())
