"""A model of a user's own that counts in Python, through the command: wrong second implementations and causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_own_model import run, written

TEXT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.position = nn.Linear(8, 8), 0
        self.register_buffer("cache", torch.zeros(16, 8))

    def forward(self, x):
        keys = self.key(x)
        self.leave(keys.mean(0).detach())
        self.position += 1
        return keys

    def leave(self, row):
        self.cache[self.position % 16] = row

class Same(Model):
    pass

class Frozen(Model):
    def leave(self, row):
        self.cache[min(self.position, 3)] = row

class Odd(Model):
    def __init__(self):
        super().__init__()
        self.scales = iter(torch.rand(9999).tolist())

    def forward(self, x):
        return super().forward(x) * next(self.scales)

def get_inputs():
    return [torch.randn(4, 8)]
"""


@pytest.mark.parametrize(
    ("target", "verdict", "words"),
    [("Same", Verdict.VERIFIED, "the same"), ("Frozen", Verdict.NOT_EQUIVALENT, "buffer/cache fails")],
)
def test_a_second_implementation_of_what_counts(target: str, verdict: Verdict, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    target = f"strategy.replace.target={tmp_path / 'mine.py'}:{target}"
    result = run(tmp_path, path, "strategy=replace", target, "verify=only")
    assert result.verdict is verdict, result.headline
    assert words in result.headline


def test_what_nobody_can_put_back_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, written(tmp_path, TEXT), "workload.names.model=Odd", "verify=only")
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "the model keeps scales (list_iterator), an attribute that cannot be put back" in result.headline


DERIVED = """
class Model(nn.Module):
    \"\"\"Its weights are attributes that each step derives from the parameters.\"\"\"

    def __init__(self):
        super().__init__()
        self.first = torch.nn.utils.weight_norm(nn.Linear(8, 16))
        self.second = torch.nn.utils.spectral_norm(nn.Linear(16, 4))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

class Same(Model):
    pass

def get_inputs():
    return [torch.randn(4, 8)]
"""


def test_weights_that_each_step_derives_are_not_kept(tmp_path: Path) -> None:
    """With other parameters, too, which nothing that was there at the start fits."""
    path = written(tmp_path, DERIVED)
    target = f"strategy.replace.target={tmp_path / 'mine.py'}:Same"
    result = run(tmp_path, path, "strategy=replace", target, "verify=only", "workload.mode=forward_backward")
    assert result.verdict is Verdict.VERIFIED, result.headline


FLAT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

class Same(Model):
    pass

class FlatMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.held = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        sizes = [p.numel() for p in group["params"]]
        self.held.lerp_(torch.cat([p.grad.flatten() for p in group["params"]]), 0.1)
        for p, change in zip(group["params"], self.held.split(sizes)):
            p.sub_(group["lr"] * change.view_as(p))

def get_optimizer(params):
    return FlatMomentum(params)

def get_inputs():
    return [torch.randn(4, 8), torch.randint(4, (4,))]

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""


def test_state_that_an_optimizer_makes_at_once_is_float64_in_the_reference(tmp_path: Path) -> None:
    path = written(tmp_path, FLAT)
    target = f"strategy.replace.target={tmp_path / 'mine.py'}:Same"
    result = run(tmp_path, path, "strategy=replace", target, "verify=only", "workload.mode=train")
    assert result.verdict is Verdict.VERIFIED, result.headline
