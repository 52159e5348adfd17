"""The difference of two peaks adds up, and its causes are said where they are known."""

from __future__ import annotations

from typing import Any

import pytest

from optexp.profiling.memory_difference import difference
from optexp.records.memory import AllocationEntry, MemoryProfile, MemoryTimeline, SavedEntry

MIB = 2**20


def profile(saved: list[SavedEntry] | None = None, saved_known: bool = True, **peak: int) -> MemoryProfile:
    """A profile whose peak has these MiB."""
    sizes = {category: size * MIB for category, size in peak.items()}
    rows = [AllocationEntry(category, size, name="thing", module=f"{category}.0") for category, size in sizes.items()]
    kept = saved or []
    return MemoryProfile(
        sum(sizes.values()),
        sizes,
        MemoryTimeline([0], [0], {}),
        rows,
        kept,
        sum(row.bytes for row in kept),
        saved_known,
    )


def kept(mib: int, name: str = "gelu", dtype: str = "float32", **more: Any) -> SavedEntry:
    return SavedEntry(mib * MIB, "8×8", dtype, name=name, **more)


BEFORE = profile([kept(340), kept(100, "addmm")], parameters=100, optimizer_state=217, activations=440, temporaries=55)


def test_peaks_that_agree_need_no_words() -> None:
    assert difference(BEFORE, BEFORE) is None
    assert difference(profile(parameters=1000), profile(parameters=1009)) is None


def test_terms_add_up_and_the_largest_comes_first() -> None:
    after = profile([kept(100, "addmm")], parameters=100, optimizer_state=200, activations=100, temporaries=55)
    found = difference(BEFORE, after)
    assert found is not None
    assert [(term.category, (term.after - term.before) // MIB) for term in found.terms] == [
        ("activations", -340),
        ("optimizer_state", -17),
    ]
    assert found.unexplained_bytes == 0
    assert found.explained == 1
    assert found.sentences[0] == (
        "Peak memory fell, 812 MiB → 455 MiB (−357 MiB): activations kept for backward −340 MiB"
        " (thing in activations.0 −340 MiB)"
    )
    assert found.sentences[1] == (
        "2 tensors kept for backward (440 MiB) became 1 (100 MiB); no longer kept: results of gelu (1×, 340 MiB)"
    )


def test_small_terms_together_are_named() -> None:
    before = profile(activations=1000, parameters=100, gradients=100, inputs=100)
    after = profile(activations=1500, parameters=114, gradients=114, inputs=114)
    assert "other categories +42 MiB" in (found := difference(before, after)).sentences[0], found  # type: ignore[union-attr]


def test_unknown_memory_explains_nothing() -> None:
    found = difference(profile(parameters=100), profile(parameters=150, unknown=50))
    assert found is not None
    assert found.explained == pytest.approx(0.5)
    assert found.sentences[0].endswith("unexplained +50 MiB")
    assert "unknown" not in {term.category for term in found.terms}


def test_a_captured_step_says_where_its_memory_is() -> None:
    after = profile(parameters=100, optimizer_state=217, graph_pools=600)
    found = difference(BEFORE, after)
    assert found is not None
    assert "pools of CUDA graphs +600 MiB" in found.sentences[0]
    assert found.sentences[1].startswith("CUDA graphs keep 600 MiB between replays: activations and temporaries")
    assert len(found.sentences) == 2, "what a graph keeps for backward is hidden, not gone"


def test_lower_precision_is_said_with_its_casts() -> None:
    after = profile(
        [kept(170, dtype="bfloat16"), kept(50, "addmm", "bfloat16"), kept(50, "cast of 0.weight", "bfloat16")],
        parameters=100, optimizer_state=217, activations=270, temporaries=55,
    )  # fmt: skip
    said = " | ".join(difference(BEFORE, after).sentences[1:])  # type: ignore[union-attr]
    assert "Backward is given 270 MiB in bfloat16 in place of 440 MiB in float32" in said
    assert "Casts of parameters to lower precision are kept for backward: 50 MiB" in said


def test_compiled_code_chose_what_is_kept() -> None:
    after = profile([kept(90, "", compiled=True)], parameters=100, optimizer_state=217, activations=90, temporaries=55)
    said = difference(BEFORE, after).sentences  # type: ignore[union-attr]
    assert "the compiler chose what backward is given and computes the rest anew" in said[1], said
    assert "results of gelu (1×, 340 MiB)" in said[1]


def test_nothing_is_said_of_what_hooks_could_not_see() -> None:
    after = profile([], saved_known=False, parameters=100, optimizer_state=217, temporaries=55)
    assert len(difference(BEFORE, after).sentences) == 1  # type: ignore[union-attr]
