"""The fastest config is found once: in this process, and by the next from the file of this card."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from optexp.kernelkit import tuning
from optexp.kernelkit.recording import recorded, rehearsal
from optexp.kernels.softmax import softmax
from optexp.measurement.clock import Timing

CUDA = torch.device("cuda", 0)
CONFIGS = ["slow", "fast", "broken"]


class Card:
    """Times what is asked of it, and counts the races. The fast config takes Python long to ask for."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.graphs: dict[object, tuple[str, int]] = {}

    def device_step_s(self, work, steps: int, device: torch.device) -> float:
        if work in self.graphs:
            config, calls = self.graphs[work]
            return calls * {"slow": 2e-6, "fast": 1e-6}[config]
        return {"loose": 5e-7}[work.args[0]]

    def time_block(self, work, steps: int, device: torch.device) -> Timing:
        config = work.args[0]
        self.races.append(config)
        return Timing(steps, 1.0, {"slow": 9e-6, "fast": 30e-6, "loose": 5e-7}[config])

    def recorded(self, calls, device: torch.device):
        config = calls[0].args[0]
        if config == "loose":
            raise RuntimeError("operation not permitted when stream is capturing")
        graph = partial(run, config)
        self.graphs[graph] = config, len(calls)
        return graph


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Card:
    card = Card()
    monkeypatch.setattr(tuning.clock, "time_block", card.time_block)  # type: ignore[attr-defined]
    monkeypatch.setattr(tuning.clock, "device_step_s", card.device_step_s)  # type: ignore[attr-defined]
    monkeypatch.setattr(tuning, "recorded", card.recorded)
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_file", lambda device: tmp_path / "cache" / "tuning.json")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return card


def run(config: str) -> None:
    if config == "broken":
        error = tuning.triton.runtime.errors.OutOfResources(1, 2, "shared memory")  # type: ignore[attr-defined]
        raise error  # which has a name here, as where Triton raises it: the frame and its error hold each other


def test_the_fastest_that_works_is_remembered(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuning.fastest("kernel", (torch.float32, 7), CONFIGS, run, CUDA) == "fast"
    raced = len(card.races)
    assert tuning.fastest("kernel", (torch.float32, 7), CONFIGS, run, CUDA) == "fast"
    monkeypatch.setattr(tuning, "_chosen", {})  # as in another process
    assert tuning.fastest("kernel", (torch.float32, 7), CONFIGS, run, CUDA) == "fast"
    assert len(card.races) == raced
    tuning.fastest("kernel", (torch.float32, 8), CONFIGS, run, CUDA)
    assert len(card.races) > raced
    tuning.fastest("kernel", (torch.float32, 7), CONFIGS[:2], run, CUDA)  # other configs, another answer
    assert len(card.races) > 1.5 * raced


def test_while_a_graph_is_captured_nothing_is_timed(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuning.fastest("kernel", (), CONFIGS, run, CUDA) == "slow"
    assert not card.races
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuning.fastest("kernel", (), CONFIGS, run, CUDA) == "fast"


def test_a_way_that_is_not_offered_is_not_taken(card: Card) -> None:
    """What suits aligned memory may be the fastest there; of the same shape elsewhere it is not among the configs."""
    assert tuning.fastest("kernel", (7,), ["slow", "fast"], run, CUDA) == "fast"
    assert tuning.fastest("kernel", (7,), ["slow", "broken"], run, CUDA) == "slow"


def test_what_cannot_be_captured_is_timed_as_it_is_called(card: Card) -> None:
    assert tuning.fastest("kernel", (), ["slow", "loose", "fast"], run, CUDA) == "loose"


class Graph:
    """Stands for what autograd keeps while it calls backward."""


def test_a_way_that_does_not_fit_keeps_nothing_alive(card: Card) -> None:
    """Else a leaf's node would outlive its call and its stream, and the next capture of backward would fail."""

    def backward() -> weakref.ref[Graph]:
        graph = Graph()
        assert tuning.fastest("kernel", (), CONFIGS, run, CUDA) == "fast"
        return weakref.ref(graph)

    collecting = gc.isenabled()
    gc.disable()
    try:
        assert backward()() is None
    finally:
        if collecting:
            gc.enable()


def test_what_other_code_found_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="card", multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    file = tuning._file.__wrapped__
    before = file(CUDA)
    assert file(CUDA) == before
    monkeypatch.setattr(tuning, "_sources", lambda: "edited")
    assert file(CUDA) != before


def test_on_a_cpu_it_is_the_first(card: Card) -> None:
    assert tuning.fastest("kernel", (), CONFIGS, run, torch.device("cpu")) == "slow"
    assert not card.races


def test_a_folder_that_cannot_be_written_costs_time_alone(
    card: Card, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert tuning.fastest("kernel", (), CONFIGS, run, CUDA) == "fast"


@pytest.mark.gpu
def test_on_a_gpu_the_quicker_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_file", lambda device: tmp_path / "tuning.json")
    cycles = [3_000_000, 100_000, 1_000_000]
    assert tuning.fastest("sleep", (), cycles, torch.cuda._sleep, CUDA) == 100_000


@pytest.mark.gpu
def test_python_s_time_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is captured is ranked by the device; what cannot be, is timed all the same, and leaves the stream alone."""
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_file", lambda device: tmp_path / "tuning.json")

    def work(config: tuple[float, int]) -> None:
        host_s, cycles = config
        if host_s < 0 and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this one wants to see its result")
        time.sleep(max(host_s, 0.0))
        torch.cuda._sleep(cycles)

    stream = torch.cuda.current_stream()
    configs = [(0.0, 200_000), (3e-4, 20_000), (-1.0, 2_000_000)]
    assert tuning.fastest("sleep", (), configs, work, CUDA) == (3e-4, 20_000)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.gpu
def test_backward_can_be_captured_when_a_way_did_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two rows of 128 KiB on their way at once are more than shared memory holds."""
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_file", lambda device: tmp_path / "tuning.json")
    x = torch.randn(64, 32768, device=CUDA, requires_grad=True)

    def both() -> None:
        torch.autograd.grad(softmax(x), x, x.detach())

    with rehearsal():  # so few rows are torch's otherwise
        both()
        replay = recorded([both], CUDA)
    replay()


def test_a_way_without_enough_memory_loses(card: Card) -> None:
    def greedy(config: str) -> None:
        if config == "fast":
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert tuning.fastest("kernel", (), CONFIGS[:2], greedy, CUDA) == "slow"


def test_what_is_close_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one short look a config was often called the fastest that was not; what is far off is looked at once."""
    looks = 1 + tuning.TURNS
    times = {"lucky": [1.00, 1.04, 1.03] + [1.04] * (looks - 3), "steady": [1.02] * looks, "far": [1.5]}
    left = {config: iter(values) for config, values in times.items()}
    monkeypatch.setattr(tuning, "_seconds", lambda work, device: next(left[work.args[0]]))
    configs = list(times)
    assert configs[tuning._race(configs, run, CUDA)] == "steady"
    assert [next(rest, None) for rest in left.values()] == [None] * 3
