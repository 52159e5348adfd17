"""A decay in the loss gives the same update as one in the optimizer, from other gradients: the verdict says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.equivalence.optimizer_rules import IN_THE_LOSS
from optexp.result import Verdict
from tests.user_code.test_listed_state import PROGRAM
from tests.user_code.test_rare_steps import compared


def stepped(optimizer: str) -> str:
    return PROGRAM.format(f"def get_optimizer(params):\n    return torch.optim.{optimizer}")


def in_the_loss(program: str) -> str:
    term = "(loss + 0.005 * sum(p.square().sum() for p in model.parameters())).backward()"
    return program.replace("loss.backward()", term)


DECAYING = stepped("SGD(params, lr=0.1, weight_decay=0.01)")
DECOUPLED = stepped("AdamW(params, lr=0.01, weight_decay=0.01)")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        pytest.param(DECAYING, in_the_loss(stepped("SGD(params, lr=0.1)")), True, id="in the second"),
        pytest.param(in_the_loss(stepped("SGD(params, lr=0.1)")), DECAYING, True, id="in the first", marks=SLOW),
        pytest.param(DECAYING, DECAYING.replace("0.01", "0.02"), False, id="another decay", marks=SLOW),
        pytest.param(DECOUPLED, DECOUPLED.replace("decay=0.01", "decay=0"), False, id="of another kind", marks=SLOW),
    ],
)
def test_a_decay_in_the_loss_is_named(first: str, second: str, named: bool, tmp_path: Path) -> None:
    result = compared(tmp_path, second, first)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "weight_decay of 0.weight is" in result.headline
    assert (IN_THE_LOSS in result.headline) is named
