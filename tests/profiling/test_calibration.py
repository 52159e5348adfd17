"""Ceilings are measured once, cached, and leave no setting behind."""

import json
import time
from dataclasses import replace

import pytest
import torch

from optexp.profiling import calibration
from optexp.profiling.calibration import cached, calibrate, write
from optexp.records.profile import Calibration

CPU = torch.device("cpu")


CARD = Calibration("card", 1e12, {"float32": 1e13}, 2.5, 1e10, 5e9)


def test_a_cpu_is_measured():
    measured = calibrate(CPU)
    assert 1e8 < measured.bandwidth < 1e13
    assert all(1e8 < measured.matrix[dtype] < 1e14 for dtype in ("float32", "bfloat16"))
    assert measured.pinned is measured.launch_us is None


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A GPU whose ceilings are told, not measured: those that were asked for, the last one first."""
    asked = [replace(CARD, bandwidth=bandwidth) for bandwidth in (3e12, 2e12, 1e12)]
    monkeypatch.setattr(calibration, "_cache_file", lambda device: tmp_path / "optexp" / "card.json")
    monkeypatch.setattr(calibration, "_measure_gpu", lambda device: asked.pop())
    return lambda **how: calibrate(torch.device("cuda"), **how).bandwidth


def test_measured_once_then_read_until_it_is_asked_for_anew(card, tmp_path):
    assert [card(), card(), card(anew=True), card()] == [1e12, 1e12, 2e12, 2e12]
    assert [path.name for path in (tmp_path / "optexp").iterdir()] == ["card.json"]


def test_what_is_measured_in_company_is_not_kept(card):
    assert [card(keep=False), card(keep=False), card(), card(keep=False)] == [1e12, 2e12, 3e12, 3e12]


@pytest.mark.parametrize("content", ["", "{}", '{"device": "cpu", "bandwidth": 1, "unknown": 2}', "[1]"])
def test_a_damaged_cache_is_measured_anew(tmp_path, content):
    path = tmp_path / "card.json"
    path.write_text(content)
    assert cached(path) is None
    write(path, CARD)
    assert cached(path) == CARD


def test_a_home_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    write(tmp_path / "file" / "card.json", CARD)
    assert cached(tmp_path / "file" / "card.json") is None


def test_travels_as_plain_values():
    assert Calibration.from_dict(json.loads(json.dumps(CARD.to_dict()))) == CARD


@pytest.mark.parametrize("before", ["none", "tf32", "ieee"])
def test_tf32_is_as_it_was(before):
    matmul = torch.backends.cuda.matmul
    original = matmul.fp32_precision
    try:
        matmul.fp32_precision = before
        for enabled, inside in ((True, "tf32"), (False, "ieee")):
            with calibration._tf32(enabled):
                assert matmul.fp32_precision == inside
            assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = original


@pytest.mark.gpu
def test_a_gpu_within_its_time():
    device = torch.device("cuda")
    torch.ones(1, device=device)
    start = time.perf_counter()
    measured = calibrate(device)
    assert time.perf_counter() - start < 1.5
    assert measured.matrix["bfloat16"] > measured.matrix["float32"]
    assert measured.pinned is not None
    assert measured.pinned < measured.bandwidth
    assert 0.5 < measured.launch_us < 100


@pytest.mark.gpu
def test_memory_that_torch_has_cached_makes_no_gpu_slower():
    device = torch.device("cuda")
    calm = calibration._measure_gpu(device).bandwidth
    large = [torch.zeros(6 * 2**30, dtype=torch.uint8, device=device) for _ in range(2)]
    del large
    assert calibration._measure_gpu(device).bandwidth > 0.95 * calm
