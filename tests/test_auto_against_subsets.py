"""The benchmark of mode=auto against all subsets: what it runs, resumes, and prints."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from optexp.config import search_path
from optexp.pages.rules import subsets as subsets_rule
from optexp.pages.rules.subsets import AUTO, DIRECT, SUBSET, Job
from tests.benchmarks import auto_against_subsets as benchmark
from tests.benchmarks.auto_against_subsets import Subject, parse, read, records, subjects, work

SPEEDUPS = {"fusion": 1.5, "amp": 2.0, "fusion+amp": 2.5}
FOUR = "fusion+amp+cuda_graph+inplace"


def options(folder: Path, *more: str) -> argparse.Namespace:
    return parse([str(folder / "store.json"), "--only", "mlp", *more])


def job(kind: str, stack: str, against: str = "", *, winner: str = "", speedup: float | None = None) -> Job:
    low, high = (speedup - 0.1, speedup + 0.1) if speedup else (None, None)
    verdict, trials = "FASTER" if speedup else "INVALID", 5 * bool(winner)
    return Job("mlp", kind, stack, against, verdict, speedup, low, high, 1.0, verdict, "CPU", winner, trials)


def table(store: Path) -> str:
    return records(read(store), "")["search"].text()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Jobs in the order in which they run; the search finds amp alone."""
    ran: list[tuple[str, str, str]] = []

    def run(subject: Subject, kind: str, stack: str, against: str, *_: object) -> Job:
        ran.append((kind, stack, against))
        speedup = {SUBSET: SPEEDUPS.get(stack), AUTO: 2.0, DIRECT: 0.8}[kind]
        return job(kind, stack, against, winner="amp" if kind == AUTO else "", speedup=speedup)

    monkeypatch.setattr(benchmark, "run", run)
    return ran


def test_the_search_then_subsets_then_the_winner_against_the_best(
    tmp_path: Path, asked: list[tuple[str, str, str]]
) -> None:
    work(options(tmp_path))
    assert len(asked) == 17
    assert len({stack for kind, stack, _ in asked if kind == SUBSET}) == 15
    assert [asked[0], asked[-1]] == [(AUTO, FOUR, ""), (DIRECT, "amp", "fusion+amp")]
    shown = table(tmp_path / "store.json").splitlines()
    found = "`fusion+amp` | 2.5× | `amp` | 2× (FASTER) | 0.800 (0.700 to 0.900) | 5 of 16"
    assert shown[2:] == [f"| mlp | {found} | 15 | 1 | 16 of 16 | CPU |"]


def test_a_later_run_goes_on_and_makes_anew_what_is_asked_for(
    tmp_path: Path, asked: list[tuple[str, str, str]]
) -> None:
    work(options(tmp_path, "--seconds", "0"))
    assert asked == []
    work(options(tmp_path, "--seconds", "200"))
    assert len(asked) == 15, "a search may take 240 s"
    work(options(tmp_path))
    asked.clear()
    work(options(tmp_path))
    assert asked == []
    work(options(tmp_path, "--again", "INVALID"))
    assert len(asked) == 12  # of 15 subsets three have a speedup


def test_a_store_may_begin_as_a_record(tmp_path: Path, asked: list[tuple[str, str, str]]) -> None:
    found = job(SUBSET, "amp", speedup=2.0)
    records({found.key: found}, "")["search"].write(tmp_path / "store.json")
    work(options(tmp_path, "--seconds", "200"))
    assert len(asked) == 14
    assert len(read(tmp_path / "store.json")) == 15


def test_equal_stacks_are_not_compared(tmp_path: Path, asked: list[tuple[str, str, str]]) -> None:
    store = tmp_path / "store.json"
    benchmark.kept(store).write([job(AUTO, FOUR, winner="amp+fusion", speedup=2.4)])  # in another order
    work(options(tmp_path))
    assert DIRECT not in [kind for kind, *_ in asked]
    assert "1 (the same stack)" in table(store)


def test_subjects_exist() -> None:
    for subject in subjects(Path("cases")):
        settings = [*benchmark.FIXED, *subject.overrides, f"strategy=[{','.join(subject.strategies)}]"]
        assert set(search_path.compose(settings).strategy) == set(subject.strategies)


def test_a_search_that_broke_off_has_no_winner_and_is_made_again_with_what_follows_it(
    tmp_path: Path, asked: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, working = tmp_path / "store.json", benchmark.run
    broken = job(AUTO, FOUR, speedup=None)
    monkeypatch.setattr(benchmark, "run", lambda subject, kind, *rest: (
        replace(broken, verdict="ERROR") if kind == AUTO else working(subject, kind, *rest)))  # fmt: skip
    work(options(tmp_path))
    assert DIRECT not in [kind for kind, *_ in asked]
    assert "| ERROR | – |" in table(store)
    benchmark.kept(store).add(job(DIRECT, "", "fusion+amp", speedup=0.1))
    monkeypatch.setattr(benchmark, "run", working)
    asked.clear()
    work(options(tmp_path, "--again", "ERROR"))
    assert asked == [(AUTO, FOUR, ""), (DIRECT, "amp", "fusion+amp")]
    assert (DIRECT, "") not in [key[1:3] for key in read(store)]


def test_the_best_subset_is_a_faster_one() -> None:
    undecided = replace(job(SUBSET, "amp", speedup=9.0), verdict="INCONCLUSIVE")
    found = {each.key: each for each in (undecided, job(SUBSET, "fusion", speedup=1.5))}
    assert benchmark.best(subjects(None)[0], found) == "fusion"


def test_a_wide_interval_does_not_make_the_best_subset() -> None:
    wide = replace(job(SUBSET, "amp", speedup=5.3), low=3.0)
    assert subsets_rule.best([wide, job(SUBSET, "fusion", speedup=4.2)]) == "fusion"
    assert subsets_rule.best([wide, job(SUBSET, "fusion", speedup=3.2)]) == "amp"
    assert subsets_rule.best([]) == ""
