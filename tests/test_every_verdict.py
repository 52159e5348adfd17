"""The benchmark of strategies × workloads: what it runs, resumes, and prints."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from optexp.config import search_path
from optexp.pages.rules import strategies
from optexp.pages.rules.strategies import Pair
from tests.benchmarks import every_verdict
from tests.benchmarks.every_verdict import KERNELS, members, overrides, records, wanted, work
from tests.benchmarks.kept import Kept

FASTER = Pair("mlp", "cuda_graph", "FASTER", "FASTER: ...", "CPU", 1.0, 4.0, 3.5, 4.5, 500.0, 5.0, 0.97, -20, 1.0)
SLOWER = Pair("mlp", "amp", "SLOWER", "SLOWER: ...", "CPU", 1.0, 0.7, 0.6, 0.8, 500.0)
REFUSED = Pair("mlp", "streams", "UNSUPPORTED", "UNSUPPORTED: no branches", "CPU", 1.0)


def test_a_later_run_makes_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def run(workload: str, strategy: str, *_: object) -> Pair:
        ran.append((workload, strategy))
        return Pair(workload, strategy, "SAME", "SAME", "CPU", 1.0)

    monkeypatch.setattr(every_verdict, "run", run)
    options = argparse.Namespace(store=tmp_path / "pairs.json", only=["mlp", "sleep"], seconds=0.0, overrides=[])
    work(options)
    assert ran == []
    options.seconds = 60.0
    Kept(options.store, Pair).add(FASTER)
    work(options)
    assert ("mlp", "cuda_graph") not in ran
    assert [pair for pair in ran if pair[0] == "sleep"] == [("sleep", "fusion"), ("sleep", "cuda_graph")]
    ran.clear()
    work(options)
    assert ran == []


def test_tables_hold_verdicts_reasons_and_shares() -> None:
    found = strategies.grid([FASTER, SLOWER, REFUSED])
    assert "| `cuda_graph` | FASTER 4× |" in found
    assert "| `streams` | UNSUPPORTED 1 |" in found
    assert found.endswith("1. no branches")
    shares = strategies.explained([FASTER, SLOWER, REFUSED])
    assert "| `mlp` | `cuda_graph` | FASTER | 4× | 97% | -20 B | 100% |" in shares
    assert "| `mlp` | `amp` | SLOWER | 0.7× | none |  |  |" in shares
    assert shares.startswith("2 of 3 differences are explained by at least 95%.")
    sleep = Pair("sleep", "fusion", "FASTER", "", "CPU", 1.0, 2.0, 1.9, 2.1, 50_000.0)
    assert "| `sleep` | 50 ms | FASTER 2× | 1.9 to 2.1 |" in strategies.intervals([sleep])


def test_one_store_has_the_records_of_several_pages() -> None:
    sleep = Pair("sleep", "fusion", "FASTER", "", "CPU", 1.0, 2.0, 1.9, 2.1, 50_000.0)
    found = records({pair.key: pair for pair in (FASTER, SLOWER, REFUSED, sleep)}, "a machine.")
    assert "| `cuda_graph` | FASTER 4× |" in found["strategies"].text()
    assert "`sleep`" not in found["strategies"].text()
    assert "| `sleep` |" in found["strategies.others"].text()
    assert "| `mlp` | `cuda_graph` | FASTER | 5.00× | 4.00× | 0.80 |" in found["bounds"].text()
    assert "1 of 3 comparisons have a bound" in found["bounds"].text()
    assert found["why.explained"].text().startswith("**Machine.** a machine.\n\n2 of 4 differences")


def test_every_pair_can_be_composed() -> None:
    assert len(list(wanted([]))) == len(set(wanted([]))) == 9 * 16 + 11 * 2
    for workload, strategy in wanted(["mlp"]):
        names = members(workload, strategy)
        config = search_path.compose([*overrides(workload, strategy), f"strategy=[{','.join(names)}]"])
        assert set(config.strategy) == set(names)
    assert members("mlp", KERNELS) == {"fusion": {"backend": "kernels"}}
