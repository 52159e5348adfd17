"""A script's model inside its step: calls of it are the program's, all else is its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optexp.program import Program, ResidentFeed
from optexp.user_code.script_step import ScriptModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 1), 0

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)

    def loss(self, x: Tensor) -> Any:
        self.calls += 1
        return self(x).sum()


def test_calls_from_methods_of_the_class_are_the_programs() -> None:
    net = Net()
    feed = ResidentFeed(torch.device("cpu"))
    program = Program(net, lambda program, batch: {}, feed, forward=lambda x: net(x) + 100)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = ScriptModel(program, optimizer)
    x = torch.zeros(1, 2)
    assert torch.equal(model.loss(x), net(x).sum() + 100)
    assert torch.equal(model.returned, net(x) + 100)
    assert net.calls == 1  # `self.calls += 1` reached the model
    assert model.layer is net.layer
    assert isinstance(model, Net)
    model.layer = nn.Identity()
    assert isinstance(net.layer, nn.Identity)
