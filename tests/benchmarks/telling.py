"""A plugin of pytest (`-p tests.benchmarks.telling`): how long each test took, and why it failed, at once.

pytest itself says both at the end, which a run that is cut off never sees.
"""

from __future__ import annotations

import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    print(f"\n{report.duration:6.1f} s {report.outcome} {report.nodeid} ({report.when})", flush=True)
    if report.failed:
        print(report.longreprtext, report.capstdout[-4000:], flush=True)
