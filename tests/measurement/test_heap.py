"""Memory that is freed and needed again is not asked of the system again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, torch
from optexp.measurement import heap

def step():
    tensors = [torch.ones(1 << 20) for _ in range(16)]

def faults():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
heap.keep()
print(before, faults())
"""


def faults(**variables: str) -> tuple[int, int]:
    """Of five steps with 64 MiB: before and after."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=others | paths | variables, capture_output=True, text=True, check=True
    )
    before, after = done.stdout.split()
    return int(before), int(after)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_step_finds_the_memory_that_the_last_one_freed() -> None:
    before, after = faults()
    assert before > 1000  # what there would be to suffer from
    assert after < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_the_user_has_set_stays() -> None:
    assert faults(MALLOC_TRIM_THRESHOLD_="131072")[1] > 1000


RESERVED = """
import torch
from optexp.measurement import heap

heap.keep()
if {reserve}:
    heap.reserve(100 << 20)
before = heap.given()
held = [torch.ones(1 << 20) for _ in range(20)]
print((heap.given() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(("reserve", "least", "most"), [(False, 75, 100), (True, 0, 10)])
def test_what_was_reserved_is_there(reserve: bool, least: int, most: int) -> None:
    """80 MiB of tensors that no step has freed."""
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = RESERVED.format(reserve=reserve)
    done = subprocess.run([sys.executable, "-c", code], env=others | paths, capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most
