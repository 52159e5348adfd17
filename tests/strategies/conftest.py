"""Programs with batches in their feed, and what a few steps of them compute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from optexp.errors import Unsupported
from optexp.program import Program, gradients
from optexp.strategy import Stack, captures, compose
from optexp.workload import Workload
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp

WORKLOADS: dict[str, Workload] = {
    "gelu": Gelu(size=64),
    "mlp-forward": Mlp(mode="forward", dim=32, batch_size=16),
    "mlp-forward_backward": Mlp(mode="forward_backward", dim=32, batch_size=16),
    "mlp-adamw": Mlp(mode="train", dim=32, batch_size=16),
    "mlp-sgd": Mlp(mode="train", dim=32, batch_size=16, optim="sgd"),
    "mlp-relu": Mlp(mode="train", dim=32, batch_size=16, activation="relu"),
}

Build = Callable[..., Program]


@pytest.fixture(params=WORKLOADS)
def workload(request: pytest.FixtureRequest) -> Workload:
    return WORKLOADS[request.param]


@pytest.fixture
def build() -> Build:
    """A workload's program with a stack folded over it, as an arm does; four batches wait in its feed."""

    def build(workload: Workload, *stack: Stack, device: str = "cpu", seed: int = 0) -> Program:
        program = workload.build(torch.device(device), torch.float32, seed)
        generator = torch.Generator(device).manual_seed(seed + 100)
        batches = [workload.batch(generator) for _ in range(4)]
        program.feed.reset(batches)
        program = replace(program, captured=captures(stack))
        for strategy in compose(stack):
            if reason := strategy.unsupported(program, torch.device(device)):
                raise Unsupported(reason)
            feed = program.feed
            program, _ = strategy.apply(program)
            if program.feed is not feed:
                program.feed.reset(batches)
        program.feed.reset(batches)
        return program

    return build


@pytest.fixture
def observe() -> Callable[[Program, int], list[dict[str, Tensor]]]:
    """Outputs, gradients and parameters of successive steps, each on another batch, cloned."""

    def observe(program: Program, steps: int = 3) -> list[dict[str, Tensor]]:
        observed = []
        for _ in range(steps):
            values = program.run() | gradients(program)
            values |= {f"param/{name}": p.detach() for name, p in program.model.named_parameters()}
            observed.append({name: value.clone() for name, value in values.items()})
        return observed

    return observe


class Event:
    """See `streams`."""

    def __init__(self, *args: object) -> None:
        self.seen: frozenset[int] = frozenset()

    def record(self, stream: "Stream") -> None:
        self.seen = stream.seen


class Stream:
    """See `streams`. seen: the moments of work that is over before this stream's next work begins."""

    current: "Stream"
    clock: int
    log: list[str]

    def __init__(self, device: object = None, name: str = "side") -> None:
        self.name, self.seen = name, frozenset[int]()

    def wait_stream(self, other: "Stream") -> None:
        Stream.log.append(f"{self.name} waits for {other.name}")
        self.seen |= other.seen

    def wait_event(self, event: Event) -> None:
        self.seen |= event.seen

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        Stream.log.append(f"the host waits for {self.name}")

    @classmethod
    def work(cls, what: str = "") -> SimpleNamespace:
        """Something happens on the current stream: at which moment, on which stream, and surely after what."""
        Stream.clock += 1
        Stream.log.append(f"{what} on {cls.current.name}")
        done = SimpleNamespace(at=Stream.clock, stream=cls.current, after=cls.current.seen)
        cls.current.seen |= {Stream.clock}
        return done


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> type[Stream]:
    """Streams without a GPU: they do everything at once, and know what each of them has waited for."""

    @contextmanager
    def stream(entered: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, entered
        yield
        Stream.current = before

    Stream.current, Stream.clock, Stream.log = Stream(name="main"), 0, []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    return Stream
