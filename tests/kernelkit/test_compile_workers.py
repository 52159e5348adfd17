"""Inductor's worker processes end when an arm is set up: their start would take cores from timed steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
import torch._inductor.compile_fx
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, _pool_set
from optexp.kernelkit import toolchain

config.compile_threads = 3
AsyncCompile.wakeup()
(pool,) = _pool_set
assert pool.process.poll() is None, "it is still importing torch"
toolchain.end_compile_workers()
assert pool.process.poll() is not None
AsyncCompile.wakeup()
assert not _pool_set, "a later compilation starts no other"
assert torch.compile(torch.sin, backend="eager")(torch.zeros(2)).sum() == 0
toolchain.allow_compile_threads(3)
assert toolchain.compile_threads() == 3
print("ended")
"""


@pytest.mark.slow
def test_workers_are_ended_and_not_started_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ended"], done.stderr
