"""The benchmark command: what it prints, writes and refuses. On a CPU it times the interpreter, of small calls."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optexp.commands import kernel_benchmark
from optexp.commands.kernel_benchmark import as_record
from optexp.kernelkit.benchmark import measure
from optexp.kernelkit.benchmark.calls import copying, forward_passes, passes, with_lower_bound
from optexp.kernelkit.benchmark.measure import Settings
from optexp.kernelkit.benchmark.race import host_cost, prepare, race
from optexp.kernelkit.benchmark.report import draw
from optexp.kernelkit.benchmark.rows import HostCost, HostTimes, Row
from optexp.kernelkit.kernel import Case, Fill, is_small, kernels
from optexp.kernelkit.recording import rehearsals
from optexp.measurement import clock
from optexp.measurement.clock import Timing
from optexp.pages.record import Record
from optexp.records.profile import Calibration


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose calls take no time."""

    def gemm(fill: Fill) -> tuple[Any, ...]:
        return fill(4, 8), fill(8, 8), fill(8), "tanh"

    gelu, linear, add = (kernels()[name] for name in ("gelu", "linear_gelu", "add"))
    some = {
        "add": replace(add, benchmarks=[Case("10", lambda fill: (fill(10), fill(10)))], cuda=None),
        "gelu": replace(gelu, benchmarks=[Case("4×5", lambda fill: (fill(4, 5), "tanh"))], cuda=None),
        "linear_gelu": replace(
            linear,
            benchmarks=[Case("4×8→8", lambda fill: (fill(4, 8), fill(8, 8), fill(8), "tanh"))],
            best_library=None,
        ),
    }
    monkeypatch.setattr(kernel_benchmark, "kernels", lambda: some)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)


def run(tmp_path: Path, *arguments: str) -> list[Row]:
    quick = ["--device", "cpu", "--quick", "--compile", "none", "--output", str(tmp_path)]
    kernel_benchmark.main([*quick, *arguments])
    return [Row(**values) for values in json.loads((tmp_path / "kernels.json").read_text())]


@pytest.mark.slow
@pytest.mark.usefixtures("small", "interpreted")
def test_rows_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(tmp_path, "--dtype", "float32")
    assert [(row.kernel, row.direction) for row in rows if row.cache == "warm"] == [
        ("add", "forward"),  # whose backward passes on what arrives
        ("gelu", "forward"),
        ("gelu", "backward"),
        ("linear_gelu", "forward"),
        ("linear_gelu", "both passes"),
    ]
    assert [row.moved for row in rows if row.cache == "cold"] == [120, 160, 240, None, None]
    for row in rows:
        assert set(row.us) - {"plain"} == {"lower_bound", "eager", "ours"}
        assert ("plain" in row.us) == (row.direction == "forward")
        timed = {name: us for name, us in row.us.items() if us is not None or row.direction != "backward"}
        assert all(us is not None and us > 0 for us in timed.values())
    text = (tmp_path / "kernels.md").read_text()
    assert "| gelu 4×5, float32 | forward | cold |" in text
    assert "| gelu 4×5 |" in text.partition("Calls one after the other")[2]
    assert text in capsys.readouterr().out


@pytest.mark.usefixtures("small")
def test_a_choice_of_kernels_shapes_and_dtypes(tmp_path: Path) -> None:
    rows = run(tmp_path, "--kernels", "gelu,linear_gelu", "--shapes", "4×5", "--dtype", "bfloat16", "--forward")
    assert [(row.kernel, row.shape, row.dtype) for row in rows] == [("gelu", "4×5", "bfloat16")] * 2


@pytest.mark.usefixtures("small")
def test_an_unknown_kernel_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--kernels", "gelu,gulu")
    assert "no kernel gulu; there are add, gelu, linear_gelu" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="a machine with an NVIDIA GPU"):
        kernel_benchmark.main(["--kernels", "gelu"])


@pytest.mark.usefixtures("small")
def test_a_picture_over_size(tmp_path: Path) -> None:
    sizes = [16, 64]
    ceilings = Calibration("card", 1e12, {"bfloat16": 1e14})
    for name in ("gelu", "linear_gelu"):
        rows = [Row(name, str(size), "bfloat16", "forward", "cold", 1, {"ours": 2.0, "eager": None}) for size in sizes]
        drawn = []
        for path in (tmp_path / f"{name}.svg", tmp_path / "again.svg"):
            draw(kernel_benchmark.kernels()[name], rows, ceilings, path)  # type: ignore[attr-defined]
            drawn.append(path.read_text())
        assert f"{name} on card" in drawn[0]
        assert ("TFLOP/s" in drawn[0]) == (name == "linear_gelu")
        assert drawn[0] == drawn[1]


def test_what_fails_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RuntimeError("out of luck\nand more")

    found = race({"good": [lambda: None], "bad": [fails]}, torch.device("cpu"), 3)
    assert found["bad"] is None
    assert found["good"] is not None
    assert capsys.readouterr().err == "bad: out of luck\n"


def test_the_faster_copy_is_the_lower_bound() -> None:
    calls = copying(1000, torch.device("cpu"), 2)
    for made in calls.values():
        assert [call().nbytes for call in made] == [512, 512]  # read, and written: no less than the 1000
    fastest = {"ours": 3.0, "lower_bound": 1.0}
    assert with_lower_bound({"ours": 3.0, "copy engine": 2.0, "copy kernel": 1.0}) == fastest
    assert with_lower_bound({"ours": 3.0, "copy engine": None, "copy kernel": 1.0}) == fastest
    assert with_lower_bound(fastest) == fastest  # a bare GEMM
    assert copying(None, torch.device("cpu")) == {}


def test_no_backward_pass_comes_right_behind_its_forward_pass() -> None:
    order: list[str] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        order.append("forward")
        y = x * x
        y.register_hook(lambda _: order.append("backward"))
        return y

    xs, dys = [torch.tensor(3.0), torch.tensor(5.0)], [torch.tensor(1.0), torch.tensor(10.0)]
    calls = passes(square, [(x,) for x in xs], dys)
    for _ in range(2):  # a forward pass alone, as a warm-up makes, leaves nothing behind
        calls[0]()
        order.clear()
        assert [call() for call in calls][2:] == [(torch.tensor(6.0),), (torch.tensor(100.0),)]
        assert order == ["forward", "forward", "backward", "backward"]


def test_forward_passes_by_themselves_keep_as_many_results() -> None:
    seen: list[tuple[int, bool]] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        y = x + x
        seen.append((y.data_ptr(), torch.is_grad_enabled()))
        return y

    for call in forward_passes(double, [(torch.zeros(1000),)] * 8):
        call()
    addresses, with_gradients = zip(*seen, strict=True)
    assert len(set(addresses)) == 8
    assert not any(with_gradients)


@pytest.mark.parametrize("apart", [True, False])
def test_gradients_have_memory_of_their_own_where_they_are_to_be_cold(apart: bool) -> None:
    x, dy = torch.zeros(1000), torch.ones(1000)
    calls = passes(torch.sin, [(x,)] * 8, [dy] * 8, apart)
    for begin in calls[:8]:
        begin()
    gradients = [weakref.ref(end()[0]) for end in calls[8:]]
    assert [gradient() is not None for gradient in gradients] == [apart] * 8  # who is alive has memory of its own


def test_backward_is_both_passes_less_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    us = {"eager": 5.0, "eager, forward": 6.0, "ours": 4.0, "ours, forward": 3.0}
    us |= {"copy engine": 2.0, "copy kernel": 1.0}
    monkeypatch.setattr(measure, "race", lambda calls, *_: {name: us.get(name) for name in calls})
    case, settings = Case("4", lambda fill: (fill(4),)), Settings(compile="none")
    forward, backward = measure.rows_of(kernels()["relu"], case, "float32", "cold", torch.device("cpu"), settings)
    assert {name: time for name, time in forward.us.items() if time} == {"eager": 5.0, "ours": 4.0, "lower_bound": 1.0}
    assert backward.us == {"eager": 4.0, "ours": 5.0, "lower_bound": 1.0, "cuda": None}
    assert backward.moved == 3 * 16  # x, what arrives, and what goes on
    monkeypatch.setattr("optexp.kernelkit.bitmask.BITS_FROM", 4)
    _, backward = measure.rows_of(kernels()["relu"], case, "float32", "cold", torch.device("cpu"), settings)
    assert backward.moved == 2 * 4 + 2 * 16  # a word of bits, written and read


def test_what_a_graph_records_is_ours_before_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "optexp.kernelkit.kernel.current_stream", lambda device: 0
    )  # without a GPU there is none to ask
    with FakeTensorMode():
        x = torch.empty(1024, device="cuda")
    small: list[bool] = []
    prepare([lambda: small.append(is_small(x))], torch.device("cpu"), 1e-4)
    assert len(small) > 2
    assert not any(small)  # which then are torch's, and nothing races
    assert is_small(x)


def test_what_cannot_be_prepared_ends_the_rehearsal() -> None:
    def call() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        prepare([call], torch.device("cpu"), 1e-4)
    assert not rehearsals


KINDS = ("", " (grad)", " (both passes)")


def row(goal: float | None = None, **us: float | None) -> Row:
    return Row("gelu", "4", "float32", "forward", "cold", 16, us, goal)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (row(1.05, ours=100.0, lower_bound=98.0, eager=120.0), None),
        (row(1.01, ours=100.0, lower_bound=98.0, eager=120.0), "1.020 times the lower bound, and the goal is 1.01"),
        (row(ours=100.0, lower_bound=50.0, eager=99.0, best_library=99.0), None),  # within noise
        (row(ours=100.0, lower_bound=50.0, eager=120.0, best_library=80.0, cuda=10.0), "1.25 times best library"),
        (row(ours=100.0, lower_bound=50.0, eager=120.0, cuda=130.0), "the one in CUDA C++ 1.08 times eager"),
        (row(ours=2.1, lower_bound=1.0, eager=2.0), None),  # a tenth of a microsecond is nothing
        (row(ours=None, eager=2.0), "ours has no figure"),
    ],
)
def test_goals_that_are_missed_are_told(found: Row, missed: str | None) -> None:
    assert found.missed() == ([] if missed is None else [f"gelu 4 float32 forward cold: {missed}"])


def test_what_is_left_of_scatter_is_no_figure() -> None:
    assert measure.second_pass(1.5, 1.0) == 2.0
    assert measure.second_pass(0.5, 1.5) is None


def test_a_call_that_was_held_up_at_first_is_timed_in_whole_blocks_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a call that takes 10 µs, in a block whose end takes 10, after a first block of 20 ms."""
    blocks: list[int] = []

    def time_block(call: object, steps: int, device: torch.device) -> Timing:
        blocks.append(steps)
        return Timing(steps, 1e-2 if len(blocks) == 1 else 1e-5 + 1e-5 / steps, None)

    monkeypatch.setattr(clock, "time_block", time_block)
    add = kernels()["add"]
    found = host_cost(add, Case("4", lambda fill: (fill(4), fill(4))), torch.device("cpu"))
    assert found.eager.forward_us == pytest.approx(10.1)
    assert max(blocks) == 100


def test_calls_that_take_longer_than_torchs_are_told() -> None:
    cost = HostCost("gelu", "4", eager=HostTimes(5.0, 9.0, 90.0), ours=HostTimes(5.2, 19.0, 50.0))
    assert cost.slow() == ["gelu 4 (grad): 19.0 µs by hand, and 9.0 by torch"]
    assert list(cost.by_column()) == [f"{name}{kind}" for name in ("eager", "ours") for kind in KINDS]


def test_a_record_has_all_that_the_page_shows(tmp_path: Path) -> None:
    """Times with five digits, of which the page shows three; pictures by their names."""
    times = HostTimes(5.0, 9.0, 90.0)
    found = [replace(row(ours=100.123456, lower_bound=50.0, eager=120.0), goal=2.1)]
    record = as_record(
        found, [HostCost("gelu", "4", times, times)], Calibration("a card", 3e12), ["kernels-gelu"], "cpu"
    )
    record.write(tmp_path / "kernels.json")
    text = Record.read(tmp_path / "kernels.json").text()
    assert "1 of 1 goals are met." in text
    assert "| 100 | 2.002 | 2.1 |" in text
    assert "| gelu 4 | 5.0 | 9.0 | 90.0 |" in text
    assert text.endswith("![kernels-gelu](plots/kernels-gelu.svg)")
