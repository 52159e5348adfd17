"""At p = 0 nothing is dropped and nothing drawn, however a model asks for dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout as imported_before

from optexp.equivalence import randomness
from optexp.equivalence.dropout import NoDropout, rates, silence

CPU = torch.device("cpu")
X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))

CALLS = {
    "functional": lambda x: F.dropout(x, 0.5),
    "by keyword": lambda x: F.dropout(x, p=0.5, training=True),
    "imported before": lambda x: imported_before(x, 0.5),
    "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "whole channels": lambda x: F.dropout1d(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "native": lambda x: torch.dropout(x, 0.5, True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "attention by position": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
}
PLAIN = {"attention": lambda x: F.scaled_dot_product_attention(x, x, x)}


@pytest.mark.parametrize("name", CALLS)
def test_functions_drop_nothing(name):
    before = randomness.state(CPU)
    assert not torch.equal(CALLS[name](X), CALLS[name](X))
    assert randomness.drawn(before, CPU)
    before = randomness.state(CPU)
    with NoDropout():
        found = CALLS[name](X)
    assert not randomness.drawn(before, CPU)
    assert torch.equal(found, PLAIN.get(name.split(" ")[0], lambda x: x)(X))


class StochasticDepth(nn.Module):
    """As torchvision's: no function of torch's that is known as dropout."""

    def __init__(self):
        super().__init__()
        self.p = 0.5

    def forward(self, x):
        return x * (torch.rand(x.shape[0], 1, 1) >= self.p) if self.p else x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8, 2, dropout=0.5)

    def forward(self, x):
        return self.inner(x)[0]


MODULES = [nn.Dropout(0.5), nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.5), StochasticDepth(), Attention(), Recurrent()]


@pytest.mark.parametrize("model", MODULES, ids=lambda model: type(model).__name__)
def test_modules_drop_nothing(model):
    before = randomness.state(CPU)
    model(X)
    assert randomness.drawn(before, CPU)
    silence(model)
    before = randomness.state(CPU)
    model(X)
    assert not randomness.drawn(before, CPU)


@pytest.mark.slow
def test_compiled_models_drop_nothing():
    def function(x):
        return F.dropout(torch.relu(x), 0.5)

    compiled = torch.compile(function, fullgraph=True)
    with NoDropout():
        assert torch.equal(compiled(X), torch.relu(X))
    assert not torch.equal(compiled(X), torch.relu(X))


def test_rates_are_those_that_drop() -> None:
    x = torch.randn(2, 4, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=0.3)
    inference = nn.Dropout(0.2).eval()

    def step() -> None:
        F.dropout(torch.dropout(x, 0.5, True), 1 - 0.9)
        inference(torch.dropout(F.dropout(x, 0.0), 0.4, False))
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.25)
        attention(x, x, x)

    assert rates(step) == [0.1, 0.25, 0.3, 0.5]


def test_compiled_code_has_the_rates_of_its_plain_version_and_stays_compiled() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.1) + 1, backend="aot_eager")
    compiled(torch.randn(4))
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    assert rates(lambda: compiled(torch.randn(4))) == [0.1]
    compiled(torch.randn(4))
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames
