"""Models that keep something in Python, and a strategy that lets it stand still as a captured graph does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from optexp.program import Batch, Outputs, Program, keeping


class Plain(nn.Module):
    """Images to ten numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


class Annealed(Plain):
    """A weight follows a schedule that Python counts."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + (self.calls % 10) / 10)


class Stopped(Annealed):
    """Wrong: from the fourth call on the schedule stands still."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.calls = min(self.calls, 3)
        return output


class Rows(Plain):
    """Each call leaves a row in a plain tensor that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.at = torch.zeros(16, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.leave(output.detach().mean(0))
        return output

    def leave(self, row: Tensor) -> None:
        self.bank[self.at % 16] = row
        self.at += 1


class Flipped(Rows):
    def leave(self, row: Tensor) -> None:
        super().leave(row.flip(0))


class Forgetful(Rows):
    def leave(self, row: Tensor) -> None:
        self.at += 1


class Growing(Plain):
    """A buffer that is assigned anew, one row longer each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1, 10))
        self.bank: Tensor

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.bank = torch.cat([self.bank, output.detach().mean(0, keepdim=True)])
        return output + self.bank.mean(0)


class Listed(Plain):
    """The same in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.bank.append(output.detach().mean(0))
        return output + torch.stack(self.bank).mean(0)


class ListOfKeys(Plain):
    """Adds a mean over its last four calls."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.keys.append(output.detach())
        self.keys = self.keys[-4:]
        return output + torch.stack(self.keys).tanh().mean(0)


class RingOfKeys(Plain):
    """The same in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ring, self.at = torch.zeros(4, 8, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.ring = self.ring.to(output)
        self.ring[self.place()] = output.detach()
        self.at += 1
        return output + self.ring[: min(self.at, 4)].tanh().mean(0)

    def place(self) -> int:
        return self.at % 4


class FullRing(RingOfKeys):
    """Wrong: writes the last place over and over."""

    def place(self) -> int:
        return min(self.at, 3)


class Recurrent(Plain):
    """Goes on from the state that the call before left."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.state = output.detach() if self.state is None else 0.5 * self.state + 0.5 * output.detach()
        return output + self.state


class Reset(Recurrent):
    """Wrong: begins anew each time."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = None
        return super().forward(x)


class Statistics(Plain):
    """Counts calls for a log."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class Lazy(Plain):
    """Makes what it needs at the first call, and keeps a map for its readers."""

    scale: Tensor | None = None
    last: Tensor | None = None
    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale, self.ready = torch.linspace(1, 2, 10, dtype=x.dtype, device=x.device), True
        self.last = super().forward(x).softmax(-1)
        return self.last * self.scale


class WarmedUp(Plain):
    """Normalises once more before the first call."""

    warm = False

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(192))

    def forward(self, x: Tensor) -> Tensor:
        if not self.warm:
            self.warm = True
            self.net(x)
        return super().forward(x)


class Once(WarmedUp):
    warm = True


def of(cls: type[nn.Module], another: bool = False) -> Any:
    """The program with its model's class changed; `another` model, as where `replace` put its own."""

    def change(program: Program) -> Program:
        program.model.__class__ = cls
        assert program.keeps is not None
        program.keeps.another = another
        return program

    return change


def instead(cls: type[nn.Module]) -> Any:
    """The program with a new model of a class that holds things of its own."""

    def change(program: Program) -> Program:
        model = cls()
        model.load_state_dict(program.model.state_dict())
        return keeping(replace(program, model=model))

    return change


def captured(program: Program) -> Program:
    """Records one step, in which Python runs for the last time; all others find what it found then."""
    assert program.keeps is not None
    keeps, plain = program.keeps, program.step
    recorded = keeps.read()

    def replayed(program: Program, batch: Batch) -> Outputs:
        outside = keeps.read()
        recorded.restore()
        try:
            return plain(program, batch)
        finally:
            outside.restore()

    return replace(program, step=replayed)
