"""Avoidable work is named where it was built in, and not named where it was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optexp.profiling.breakdown import breakdown
from optexp.profiling.diagnosis import diagnose
from optexp.profiling.view import View
from optexp.trace import Trace
from tests.benchmarks import blind
from tests.benchmarks.blind_programs import PROGRAMS, Program, rows
from tests.profiling.conftest import MATRICES, ChromeTrace

CPU = torch.device("cpu")
Step = Callable[[ChromeTrace], None]
QUICK = ("clones_between_layers", "transposes_made_contiguous", "casts_to_and_fro")


def labels(step: Step) -> list[str]:
    build = ChromeTrace()
    trace: Trace = build.steps(lambda: step(build))
    return [bottleneck.label for bottleneck in diagnose(View(trace, breakdown(trace)))]


def one_product(build: ChromeTrace) -> None:
    build.op("aten::mm", 10.0, 500.0, "gemm", **MATRICES)


def test_a_plain_product_wastes_nothing() -> None:
    assert labels(one_product) == []


def test_a_kernel_of_few_blocks() -> None:
    assert labels(lambda build: build.op("aten::softmax", 10.0, 500.0, "softmax", grid=8))[0] == "small_grids"
    assert "small_grids" not in labels(lambda build: build.op("aten::softmax", 10.0, 500.0, "softmax", grid=512))


@pytest.mark.parametrize(("name", "wasteful"), [("adam_kernel", True), ("multi_tensor_apply_kernel", False)])
def test_an_optimizer_that_goes_from_parameter_to_parameter(name: str, wasteful: bool) -> None:
    def step(build: ChromeTrace) -> None:
        start = build.host
        for _ in range(40):
            build.op("aten::addcmul_", 10.0, 4.0, name)
        build.event("user_annotation", "Optimizer.step#Adam.step", start, build.host - start)

    assert ("optimizer_by_parameter" in labels(step)) is wasteful


def test_an_operator_on_the_host_of_a_gpu_program() -> None:
    def step(build: ChromeTrace) -> None:
        build.spend("cpu_op", "aten::sort", 900.0)
        build.op("aten::mm", 10.0, 100.0)

    assert labels(step)[0] == "operators_on_the_host"


def test_compilation_in_each_step() -> None:
    def step(build: ChromeTrace) -> None:
        build.spend("user_annotation", "entire_frame_compile (dynamo_timed)", 5000.0)
        build.op("aten::mm", 10.0, 100.0)

    assert labels(step)[0] == "compilation"


def by_hand(length: int, softmax: int) -> Step:
    def shapes(*dims: list[int]) -> dict[str, object]:
        return {"Input type": ["c10::BFloat16"] * len(dims), "Input Dims": [*dims]}

    def step(build: ChromeTrace) -> None:
        build.op("aten::bmm", 10.0, 60.0, "gemm", **shapes([128, length, 64], [128, 64, length]))
        build.op("aten::masked_fill_", 10.0, 200.0, "masked_fill", **shapes([8, 16, length, length], [length, length]))
        build.op("aten::_softmax", 10.0, 200.0, "softmax", **shapes([8, 16, length, softmax]))
        build.op("aten::bmm", 10.0, 60.0, "gemm", **shapes([128, length, softmax], [128, softmax, 64]))
        build.op("aten::relu", 10.0, 80.0, "relu", **shapes([8, 16, length, 64]))

    return step


def test_attention_by_hand_is_told_by_its_shapes() -> None:
    build = ChromeTrace()
    step = by_hand(1024, 1024)
    trace: Trace = build.steps(lambda: step(build))
    (found,) = (b for b in diagnose(View(trace, breakdown(trace))) if b.label == "unfused_attention")
    assert found.share == pytest.approx(520 / 600, abs=0.03)
    assert found.why.startswith("attention by hand (a product, a softmax and a product, 1 a step) takes 8")
    assert found.try_[0] == "torch.nn.functional.scaled_dot_product_attention"


def test_a_softmax_of_another_shape_is_no_attention() -> None:
    assert "unfused_attention" not in labels(by_hand(1024, 512))


def test_attention_operator_by_operator() -> None:
    def step(build: ChromeTrace) -> None:
        build.event("cpu_op", "aten::_scaled_dot_product_attention_math", build.host, 40.0)
        for _ in range(3):
            build.op("aten::bmm", 10.0, 300.0, "gemm")

    assert labels(step)[0] == "unfused_attention"


def test_two_streams_of_which_one_waits() -> None:
    def step(build: ChromeTrace, together: bool) -> None:
        for stream in (7, 13):
            start = build.gpu if together or stream == 7 else build.gpu + 400.0
            shape = {"stream": stream, "grid": [512, 1, 1], "block": [128, 1, 1]}
            build.event("kernel", "work", start, 400.0, correlation=stream, **shape)
        build.gpu += 400.0 if together else 800.0
        build.spend("cpu_op", "aten::work", 10.0)

    assert "streams_in_turn" in labels(lambda build: step(build, False))
    assert "streams_in_turn" not in labels(lambda build: step(build, True))


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p.name in QUICK], ids=lambda p: p.name)
def test_what_was_built_into_a_program_on_a_cpu(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line, too: others of these programs need a quiet machine, or a GPU."""
    monkeypatch.setattr("tests.benchmarks.blind_programs.rows", lambda device, *_: rows(device, 1024, 1024))
    for _ in range(5):  # a machine that is busy distorts a trace too much to be diagnosed
        answer = blind.answer(program, CPU, None, tmp_path)
        if answer.bottlenecks:
            break
    why = dict(answer.bottlenecks)
    assert program.label in why, answer
    assert "blind_programs.py:" in why[program.label]


@pytest.mark.gpu
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_what_was_built_into_a_program(program: Program, tmp_path: Path) -> None:
    from optexp.profiling.calibration import calibrate

    device = torch.device("cuda")
    answer = blind.answer(program, device, calibrate(device), tmp_path)
    assert answer.named, answer.bottlenecks
    assert answer.found, answer.causes


def test_streams_that_a_late_host_keeps_apart_do_not_wait_for_each_other() -> None:
    def step(host_us: float) -> Step:
        def launch(build: ChromeTrace) -> None:
            for stream in (7, 8):
                build.op("aten::mm", host_us, 200.0, "gemm")
                build.events[-1]["args"]["stream"] = stream

        return launch

    assert "streams_in_turn" in labels(step(20.0))
    assert "streams_in_turn" not in labels(step(400.0))
