"""A graph that would be another program is refused by whoever works on graphs; a part that would be stays whole."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from optexp.errors import Unsupported
from optexp.program import Program, ResidentFeed, forward
from optexp.strategies.inplace import Inplace
from optexp.strategies.streams import Streams
from optexp.transforms.stream_parallel import side_by_side
from optexp.transforms.tracing import Tracer


class Tower(nn.Module):
    """Two products beside each other, inside of something."""

    def __init__(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.around, self.a, self.b = around, nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            x = self.a(x) + self.b(x)
        return x.relu()


class Checkpointed(Tower):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Counting(Tower):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Remembering(Tower):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Listing(Tower):
    """As one that collects losses of its layers."""

    def __init__(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__(around)
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(super().forward(x))
        return self.found[-1]


class Buffers(Tower):
    def __init__(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__(around)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "autocast": (lambda: Tower(lambda: torch.autocast("cpu", torch.bfloat16)), "changes torch.is_autocast_enabled"),
    "no_grad": (lambda: Tower(torch.no_grad), "changes torch.is_grad_enabled"),
    "attention": (lambda: Tower(lambda: sdpa_kernel(SDPBackend.MATH)), "changes torch.backends.cuda.flash_sdp_enabled"),
    "device": (lambda: Tower(lambda: torch.device("cpu")), "changes the modes of torch functions"),
    "checkpoint": (lambda: Checkpointed(nullcontext), "changes hooks for saved tensors"),
    "counter": (lambda: Counting(nullcontext), "assigns self.calls"),
    "state": (lambda: Remembering(nullcontext), "assigns self.last"),
    "list": (lambda: Listing(nullcontext), "assigns self.found"),
    "buffer": (lambda: Buffers(nullcontext), "assigns self.steps"),
}


def program(model: nn.Module) -> Program:
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.randn(2, 4),)])
    return Program(model=model, step=forward, feed=feed)


@pytest.mark.parametrize("case", CASES)
def test_strategies_that_work_on_graphs_say_what_a_graph_would_leave_out(case: str, streams: object) -> None:
    make, words = CASES[case]
    for strategy in (Streams(), Inplace()):
        model = make()
        before = repr(model.state_dict()), getattr(model, "calls", 0), [*getattr(model, "found", [])]
        with pytest.raises(Unsupported, match=rf"torch\.fx cannot trace this model \(its forward {words}"):
            strategy.apply(program(model))
        assert (repr(model.state_dict()), getattr(model, "calls", 0), [*getattr(model, "found", [])]) == before


def test_a_lookup_that_a_graph_does_not_allow_is_named_with_its_kind() -> None:
    class ByRank(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return {2: x, 3: x.mT}[x.ndim]

    with pytest.raises(Unsupported, match=r"cannot trace this model \(KeyError: Proxy\(getattr_1\)\)"):
        Inplace().apply(program(ByRank()))


def test_operations_on_buffers_alone_are_part_of_the_graph() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.5)
            return (x - self.mean).relu()

    model = Mean()
    graph = Inplace().apply(program(model))[0]
    assert model.mean.tolist() == [1.0] * 4
    graph.model(torch.zeros(2, 4))
    assert model.mean.tolist() == [0.5] * 4


def test_a_plain_model_is_traced_wherever_it_is_called() -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        assert len(Tracer().trace(Tower(nullcontext)).nodes) == 6


def test_a_tower_with_a_context_of_its_own_stays_whole_and_keeps_it(streams: object) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = Tower(lambda: torch.autocast("cpu", torch.bfloat16))
            self.frozen = Tower(torch.no_grad)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"low": self.low(x), "frozen": self.frozen(x)}

    model, x = Both(), torch.randn(2, 4)
    found = side_by_side(model, (x,), {}, 4)
    outputs = found(x)
    assert {node.name: piece.lane for piece in found.pieces for node in piece.nodes} == {"low": 0, "frozen": 1}
    assert (outputs["low"].dtype, outputs["low"].requires_grad) == (torch.bfloat16, True)
    assert (outputs["frozen"].dtype, outputs["frozen"].requires_grad) == (torch.float32, False)
