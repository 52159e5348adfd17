"""Ceilings are measured once, cached, and leave no setting behind."""

import json
import time

import pytest
import torch

from optexp.insight import calibration
from optexp.insight.calibration import Calibration, calibrate

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "optexp"


def test_measured_once_then_read(cache, monkeypatch):
    first = calibrate(CPU)
    assert 1e8 < first.bandwidth < 1e13
    assert 1e8 < first.matrix["float32"] < 1e14
    assert first.pinned is first.launch_us is None
    monkeypatch.setattr(calibration, "_measure_cpu", lambda: pytest.fail("measured again"))
    assert calibrate(CPU) == first
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "{}", '{"device": "cpu", "bandwidth": 1, "unknown": 2}', "[1]"])
def test_a_damaged_cache_is_measured_anew(cache, content):
    calibrate(CPU)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert calibrate(CPU).bandwidth > 1e8
    assert json.loads(file.read_text())["bandwidth"] > 1e8


def test_a_home_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert calibrate(CPU).bandwidth > 0


def test_travels_as_plain_values():
    measured = Calibration("card", 1e12, {"float32": 1e13}, 2.5, 1e10, 5e9)
    assert Calibration.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


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
