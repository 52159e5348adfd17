"""A comparison on a GPU has a core of its own, beside other comparisons and other programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from optexp.errors import ConfigError
from optexp.measurement import placement

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="there is one core")


@pytest.fixture(autouse=True)
def _claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None from before, and none left."""
    monkeypatch.setattr(placement, "_claims", {})
    monkeypatch.setattr(placement, "_busy", dict)
    monkeypatch.setattr(placement, "CLAIM", f"\0optexp test {os.getpid()} core {{}}")
    yield
    for claim in placement._claims.values():
        claim.close()


def test_a_core_is_kept_from_one_comparison_to_the_next() -> None:
    first = placement.choose("auto", "cuda")
    assert len(first) == 1
    assert placement.choose("auto", "cuda") == first


def test_two_comparisons_have_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, held = placement.choose("auto", "cuda"), placement._claims
    monkeypatch.setattr(placement, "_claims", {})  # as another process has it
    assert held
    assert placement.choose("auto", "cuda") != mine


def test_where_all_are_claimed_the_quietest_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for core in CORES:
        assert placement._claimed_core([core]) == core
    claims = placement._claims  # somebody else's from now on, and as long as they are held
    for quiet in (CORES[0], CORES[-1]):
        monkeypatch.setattr(placement, "_claims", {})
        monkeypatch.setattr(placement, "_busy", lambda: dict.fromkeys(CORES, 0.9) | {quiet: 0.3})  # noqa: B023
        assert placement.choose("auto", "cuda") == [quiet]
        assert not placement._claims
    for claim in claims.values():
        claim.close()


def test_a_core_that_somebody_works_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_busy", lambda: {core: 0.5 * (core == CORES[-1]) for core in CORES})
    assert CORES[-1] not in placement.choose("auto", "cuda")


def test_who_works_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        os.sched_setaffinity(other.pid, {CORES[-1]})
        busy = max(placement._busy()[CORES[-1]] for _ in range(3))
        other.kill()
    assert busy > placement.QUIET


@pytest.mark.parametrize(("setting", "device"), [("all", "cuda"), ("auto", "cpu")])
def test_all_cores_where_that_is_meant(setting: str, device: str) -> None:
    assert placement.choose(setting, device) == CORES


def test_a_list_of_cores() -> None:
    assert placement.choose(f"{CORES[0]}", "cuda") == [CORES[0]]
    with pytest.raises(ConfigError, match="allowed are auto, all, or core numbers"):
        placement.choose("fast", "cuda")
    with pytest.raises(ConfigError, match="not among"):
        placement.choose(f"{CORES[-1] + 1}", "cuda")
