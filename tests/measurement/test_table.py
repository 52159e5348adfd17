"""samples.parquet holds every block, and the ratio that was reported follows from it."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median

import pytest
from pyarrow import parquet

from optexp.measurement import samples_file
from optexp.measurement.gpu import Reading
from optexp.measurement.samples import COLD, RETRIED, SAME, UNBOUND, Pair, Sample
from optexp.records import filenames
from tests.measurement.samples import constant, made, timing


def read(samples: list[Sample], folder: Path) -> list[dict]:  # type: ignore[type-arg]
    samples_file.write(samples, folder / filenames.SAMPLES)
    return list(parquet.read_table(folder / filenames.SAMPLES).to_pylist())


def test_every_block_is_there_and_gives_the_same_ratio(tmp_path: Path) -> None:
    samples = made(constant(2e-3), constant(1e-3), pairs=12, processes=3)
    rows = read(samples, tmp_path)
    assert len(rows) == 3 * 12 * 2
    for process, sample in enumerate(samples):
        walls = {
            arm: [r["wall_us"] for r in rows if r["process"] == process and r["arm"] == arm]
            for arm in ("baseline", "candidate")
        }
        ratios = [log(b / c) for b, c in zip(walls["baseline"], walls["candidate"], strict=True)]
        assert median(ratios) == pytest.approx(sample.log_ratio)
    assert rows[0]["start_s"] == 0.0
    assert rows[-1]["start_s"] == pytest.approx(20.46)
    assert rows[0]["device_us"] is None
    assert {row["sm_mhz"] for row in rows} == {None}
    assert all(row["first"] != other["first"] for row, other in zip(rows[::2], rows[1::2], strict=True))


def test_what_the_card_said_stands_beside_its_blocks(tmp_path: Path) -> None:
    hot = Reading(1.0, sm_mhz=1200, power_w=690.5, temperature_c=88, reasons=("thermal slow-down",))
    (sample,) = made(constant(1e-3), constant(1e-3), pairs=2, processes=1)
    sample.pairs[1] = replace(sample.pairs[1], readings=(Reading(0.5, sm_mhz=1980), hot))
    rows = read([sample], tmp_path)
    assert [row["kept"] for row in rows] == [True, True, False, False]
    assert rows[2]["sm_mhz"] == 1200
    assert rows[2]["power_w"] == 690.5
    assert rows[2]["memory_mhz"] is None
    assert rows[2]["reasons"] == "thermal slow-down"


def test_blocks_that_no_verdict_rests_on_are_there_and_of_a_kind_of_their_own(tmp_path: Path) -> None:
    main, again, free = made(constant(2e-3), constant(1e-3), pairs=2, processes=3)
    again.aim, again.pairs[1] = RETRIED, replace(again.pairs[1], kind=SAME)
    free.aim = UNBOUND
    rows = read([main, again, free], tmp_path)
    assert [row["kind"] for row in rows[::2]] == ["main"] * 2 + ["retried main", "retried same"] + ["unbound main"] * 2
    assert len(samples_file.pairs(tmp_path / filenames.SAMPLES, cold=False)) == 1


def test_nothing_is_written_of_nothing(tmp_path: Path) -> None:
    samples_file.write([], tmp_path / filenames.SAMPLES)
    samples_file.write([Sample()], tmp_path / filenames.SAMPLES)
    assert list(tmp_path.iterdir()) == []


def test_kinds_of_pairs_are_numbered_apart(tmp_path: Path) -> None:
    (sample,) = made(constant(1e-3), constant(1e-3), pairs=2, processes=1)
    sample.pairs.append(Pair(timing(1.0, device_s=1e-5), timing(1.0, device_s=2e-5), True, COLD))
    rows = read([sample], tmp_path)
    assert [(row["kind"], row["pair"]) for row in rows[::2]] == [("main", 0), ("main", 1), ("cold", 0)]
    assert rows[-1]["device_us"] == 20
