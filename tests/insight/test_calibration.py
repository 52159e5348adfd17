"""Ceilings are measured once, cached, and leave no setting behind."""

import json
import time

import pytest
import torch

from optexp.insight import calibration
from optexp.insight.calibration import Calibration, cached, calibrate

CPU = torch.device("cpu")


CARD = Calibration("card", 1e12, {"float32": 1e13}, 2.5, 1e10, 5e9)


def test_a_cpu_is_measured():
    measured = calibrate(CPU)
    assert 1e8 < measured.bandwidth < 1e13
    assert 1e8 < measured.matrix["float32"] < 1e14
    assert measured.pinned is measured.launch_us is None


def test_measured_once_then_read(tmp_path):
    path = tmp_path / "optexp" / "card.json"
    assert cached(path, lambda: CARD) == CARD
    assert cached(path, lambda: pytest.fail("measured again")) == CARD
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "{}", '{"device": "cpu", "bandwidth": 1, "unknown": 2}', "[1]"])
def test_a_damaged_cache_is_measured_anew(tmp_path, content):
    path = tmp_path / "card.json"
    path.write_text(content)
    assert cached(path, lambda: CARD) == CARD
    assert json.loads(path.read_text())["bandwidth"] == CARD.bandwidth


def test_a_home_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    assert cached(tmp_path / "file" / "card.json", lambda: CARD) == CARD


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
