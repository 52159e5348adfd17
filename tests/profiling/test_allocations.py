"""Lives of memory, read from snapshots in the format of torch.cuda.memory._snapshot."""

from __future__ import annotations

from typing import Any

import pytest

from optexp.profiling.allocations import (
    Call,
    Event,
    History,
    Life,
    Sighting,
    history_of,
    identify,
    largest_free,
    modules_at,
    user_line,
)
from optexp.profiling.memory import MOMENTS, Recording, memory_profile

MIB = 2**20


def frames(*places: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": "f"} for file, line in places]


USER = frames(
    ("/env/lib/python3.12/site-packages/torch/nn/functional.py", 1467),
    ("/home/me/project/model.py", 30),
    ("/home/me/project/train.py", 12),
)


def entry(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": [], **more}


def block(address: int, size: int, requested: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def segment(blocks: list[dict[str, Any]], pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": pool,
        "blocks": blocks,
    }


def snapshot() -> dict[str, Any]:
    """A parameter from before, a graph's pool, a tensor that stays, and two that share an address in turn."""
    return {
        "segments": [
            segment([block(0x1000, 4 * MIB, 4 * MIB - 100), block(0x500000, MIB, MIB, "inactive")]),
            segment([block(0x900000, 3 * MIB, 2 * MIB), block(0xC00000, 5 * MIB, 0, "inactive")]),
            segment([block(0x2000000, MIB, MIB), block(0x2100000, 7 * MIB, 0, "inactive")], pool=(0, 1)),
            segment([block(0x9000000, 64 * MIB, 64 * MIB)], device=1),
        ],
        "device_traces": [
            [
                entry("segment_alloc", 0x900000, 20 * MIB),
                entry("alloc", 0x600000, 1000, frames=USER),
                entry("free_requested", 0x600000, 1000),
                entry("free_completed", 0x600000, 1000),
                entry("alloc", 0x600000, 2000),
                entry("free_requested", 0x700000, 300),  # from before
                entry("free_completed", 0x700000, 300),
                entry("alloc", 0x900000, 2 * MIB),
                entry("free_requested", 0x600000, 2000),
                {"action": "snapshot", "size": 0, "stream": 0, "time_us": 9, "frames": []},
            ],
            [entry("alloc", 0x9000000, 64 * MIB)],
        ],
    }


def test_a_snapshot_has_the_life_of_every_piece_of_memory() -> None:
    lives = {(life.address, life.born): life for life in history_of(snapshot(), 0).lives()}
    assert lives == {
        (0x1000, -1): Life(0x1000, 4 * MIB, -1, None, 4 * MIB - 100),
        (0x2000000, -1): Life(0x2000000, MIB, -1, None, MIB),
        (0x700000, -1): Life(0x700000, 512, -1, 3, 300),
        (0x600000, 0): Life(0x600000, 1024, 0, 1, 1000, "project/model.py:30"),
        (0x600000, 2): Life(0x600000, 2048, 2, 5, 2000),
        (0x900000, 4): Life(0x900000, 3 * MIB, 4, None, 2 * MIB),
    }


def test_pools_of_graphs_and_free_blocks_are_known() -> None:
    assert history_of(snapshot(), 0).pooled == {0x2000000, 0x2100000}
    assert largest_free(snapshot(), 0) == 7 * MIB


def test_blocks_without_an_address_lie_side_by_side() -> None:
    older = snapshot()
    for found in older["segments"]:
        for piece in found["blocks"]:
            del piece["address"]
    older["segments"][0]["blocks"].reverse()  # the free one first
    assert 0x1000 + MIB in history_of(older, 0).before


def test_an_address_that_is_given_out_anew_ends_the_life_before() -> None:
    """A CPU's trace lacks releases of memory from before it began."""
    history = History([Event(64, 8), Event(64, 16)], {64: Event(64, 4)})
    assert [(life.bytes, life.born, life.died) for life in history.lives()] == [(4, -1, 0), (8, 0, 1), (16, 1, None)]


def test_memory_is_what_was_seen_there_while_it_lived() -> None:
    lives = history_of(snapshot(), 0).lives()
    seen = [
        Sighting(0, 0x1000, "parameters", "w"),
        Sighting(1, 0x600000, "activations", "relu"),  # the first of two at this address
        Sighting(1, 0x600000, "outputs", "loss"),
        Sighting(3, 0x600000, "gradients", "w"),
        Sighting(2, 0x600000, "inputs", "x"),  # between two lives: nothing was there
    ]
    found = {(held.life.address, held.life.born): held.seen for held in identify(lives, seen)}
    assert found[0x1000, -1] == seen[0]
    assert found[0x600000, 0] == seen[1], "kept for backward comes before an output"
    assert found[0x600000, 2] == seen[3]
    assert found[0x900000, 4] is None


def test_the_innermost_module_allocates() -> None:
    calls = [Call(0, 10, ""), Call(2, 6, "block"), Call(3, 4, "block.act")]
    assert modules_at(calls, [1, 2, 3, 5, 8, 12]) == {1: "", 2: "block", 3: "block.act", 5: "block", 8: ""}


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/me/project/model.py", "project/model.py:7"),
        ("/env/lib/python3.12/site-packages/transformers/models/bert/modeling_bert.py", "bert/modeling_bert.py:7"),
        ("/env/lib/python3.12/site-packages/torch/nn/modules/linear.py", ""),
        ("torch/nn/modules/linear.py", ""),
        ("/usr/lib/python3.12/contextlib.py", ""),
        ("contextlib.py", ""),
        ("model.py", "model.py:7"),
        ("optexp/program/steps.py", ""),
        ("/env/lib/python3.12/site-packages/optexp/trace.py", ""),
        ("optexp/workloads/mlp.py", "workloads/mlp.py:7"),
        ("<string>", ""),
        ("/tmp/torchinductor_me/ab/cab.py", "ab/cab.py:7"),
        (f"/tmp/torchinductor_me/bk/cbktsexckiq{'x' * 40}.py", "bk/cbktsexc….py:7"),
    ],
)
def test_a_line_is_the_users(file: str, shown: str) -> None:
    assert user_line([(file, 7)]) == shown


# --- the profile of a recording ----------------------------------------------------------------------------------


def recording(**more: Any) -> Recording:
    seen = [
        Sighting(0, 0x1000, "parameters", "w"),
        Sighting(1, 0x600000, "activations", "relu", "act", "project/model.py:30", "250", "float32"),
        Sighting(5, 0x900000, "tool"),
    ]
    return Recording(history_of(snapshot(), 0), [0], seen, **more)


def test_the_peak_is_composed_without_the_tools_own() -> None:
    found = memory_profile(recording())
    # at the begin: a parameter, the rest of a graph's pool, a temporary of before, and the activation
    assert found.peak == {"parameters": 4 * MIB, "graph_pools": MIB, "temporaries": 512 + 2048}
    assert found.peak_bytes == 5 * MIB + 2560
    assert [(row.name, row.module, row.bytes) for row in found.saved] == [("relu", "act", 1000)]
    assert found.allocations_per_step == 3


def test_the_allocators_own_count_beyond_events_is_rounding() -> None:
    """At the peak 5 MiB + 2560 of blocks, of which 5 MiB - 100 + 2300 were asked for."""
    asked = 5 * MIB - 100 + 2300
    found = memory_profile(recording(allocated=6 * MIB, requested=asked, pools=3 * MIB))
    assert found.peak["rounding"] == MIB - 2560
    assert found.peak["graph_pools"] == MIB + 3 * MIB
    assert found.peak_bytes == 9 * MIB


def test_what_the_requests_do_not_cover_is_unknown() -> None:
    found = memory_profile(recording(allocated=9 * MIB, requested=8 * MIB))
    assert "rounding" not in found.peak
    assert found.peak["unknown"] == 4 * MIB - 2560


@pytest.mark.parametrize(("owned", "category"), [({0x1000: "16 float32"}, "unknown"), ({}, "workspace")])
def test_memory_of_no_tensor_is_a_librarys(owned: dict[int, str], category: str) -> None:
    found = memory_profile(Recording(history_of(snapshot(), 0), [0], owned=lambda: owned))
    assert found.peak[category] >= 4 * MIB
    assert {row.name for row in found.allocations if row.category == "unknown"} == set(owned.values())


def test_a_long_timeline_is_short_and_keeps_its_peak() -> None:
    events = []
    for index in range(5000):
        size = 10**6 if index == 3333 else 1000 + index % 7
        events += [Event(64, size), Event(64, -size)]
    found = memory_profile(Recording(History(events), [0, 5000]))
    assert len(found.timeline.at) <= MOMENTS
    assert max(found.timeline.bytes["temporaries"]) == found.peak_bytes == 10**6
    assert found.timeline.steps == [0, 5000]


def test_the_peak_lies_inside_the_steps() -> None:
    events = [Event(64, 10**6), Event(64, -(10**6)), Event(64, 1000), Event(64, -1000)]
    assert memory_profile(Recording(History(events), [2])).peak_bytes == 1000


def test_a_measured_peak_that_is_another_leaves_a_rest() -> None:
    found = memory_profile(recording())
    assert found.reconciled(found.peak_bytes * 1.005) is found
    more = found.reconciled(6 * MIB)
    assert more.peak["unknown"] == MIB - 2560
    assert sum(more.peak.values()) == more.peak_bytes == 6 * MIB
