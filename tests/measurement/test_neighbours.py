"""Strangers on the card are named; arms, and whoever asked and now waits, are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from optexp.measurement.gpu import Gpu
from optexp.measurement.neighbours import lineage, looking_out, neighbours
from optexp.support.pausing import pause
from tests.measurement.nvml import Nvml

HIDDEN = 2**22 + 1  # beyond what Linux gives to any process


@pytest.fixture
def child() -> Iterator[int]:
    """A process that somebody started, here: a stranger as much as an arm, until its id is known as one."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.communicate()


def test_a_stranger_is_named_with_its_memory(nvml: Nvml, gpu: Gpu, child: int) -> None:
    nvml.running = {child: 3 * 2**30}
    (text,), hidden = neighbours(gpu)
    assert f"process {child} (" in text
    assert "3072 MiB" in text
    assert hidden == 0


def test_arms_and_what_they_started_are_ours(nvml: Nvml, gpu: Gpu, child: int) -> None:
    nvml.running = {child: None}
    assert neighbours(gpu, ours=[child]) == ([], 0)
    assert neighbours(gpu, ours=[os.getpid()]) == ([], 0)  # the child's parent


def test_the_caller_may_hold_a_context_but_not_compute(nvml: Nvml, gpu: Gpu) -> None:
    nvml.running = {os.getpid(): 2**28, os.getppid(): 2**28}
    assert neighbours(gpu, since_s=0.0) == ([], 0)
    nvml.utilisation = {os.getppid(): 35, os.getpid(): 0}
    (text,), _ = neighbours(gpu, since_s=0.0)
    assert f"process {os.getppid()} (" in text


def test_who_comes_and_goes_between_two_readings_of_a_round_was_there(nvml: Nvml, gpu: Gpu, child: int) -> None:
    met = dict[str, str]()
    read = looking_out(gpu, (), 0.0, met)
    assert read() is not None
    nvml.running = {child: 2**30}
    read()
    nvml.running = {child: 2**31, HIDDEN: 1}
    read()
    nvml.running = {}
    read()
    assert [f"process {child} (" in text for text in met.values()] == [True]


def test_a_paused_comparison_on_the_same_card_is_no_stranger_unless_it_computed(
    nvml: Nvml, gpu: Gpu, child: int
) -> None:
    nvml.running, pausing = {child: 2**30}, [os.getpid()]
    assert len(neighbours(gpu, since_s=0.0, pausing=pausing)[0]) == 1  # it is not paused
    pause(child)
    assert neighbours(gpu, since_s=0.0, pausing=pausing) == ([], 0)
    assert len(neighbours(gpu, since_s=0.0)[0]) == 1  # somebody else's
    nvml.utilisation = {child: 12}  # what it had launched before
    assert len(neighbours(gpu, since_s=0.0, pausing=pausing)[0]) == 1


def test_ids_of_another_container_are_counted_only(nvml: Nvml, gpu: Gpu) -> None:
    nvml.running = {HIDDEN: 2**30}
    assert neighbours(gpu) == ([], 1)


def test_lineage_ends_at_the_first_process(child: int) -> None:
    above = lineage(child)
    assert above[:2] == [child, os.getpid()]
    assert above[-1] == 1
    assert lineage(HIDDEN) == []
