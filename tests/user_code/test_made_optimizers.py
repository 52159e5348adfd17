"""A first file may make its optimizers in the first call, and the second one make one in `get_optimizer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.result import Verdict
from tests.user_code.test_listed_state import PROGRAM
from tests.user_code.test_rare_steps import compared

ADAM, SGD = "torch.optim.Adam({}, lr=1e-2)", "torch.optim.SGD({}, lr=1e-1, momentum=0.9)"
LISTED = (
    PROGRAM.format("NAME = []")
    .replace(
        "    optimizer.zero_grad()\n",
        "    if not NAME:\n        NAME.extend([FIRST, SECOND])\n    for each in NAME: each.zero_grad()\n",
    )
    .replace("    optimizer.step()\n", "    for each in NAME: each.step()\n")
)
SLOW = pytest.mark.slow


def listed(optimizer: str, name: str = "own") -> str:
    first, second = (optimizer.format(f"model[{layer}].parameters()") for layer in (0, 2))
    return LISTED.replace("FIRST", first).replace("SECOND", second).replace("NAME", name)


def given(optimizer: str) -> str:
    return PROGRAM.format(f"def get_optimizer(params):\n    return {optimizer.format('params')}")


def held(optimizer: str) -> str:
    """Attributes of the model, made with it."""
    net = "nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))"
    first, second = (optimizer.format(f"model[{layer}].parameters()") for layer in (0, 2))
    return (
        PROGRAM.format("")
        .replace(f"    return {net}\n", f"    model = {net}\n    model.own = [{first}, {second}]\n    return model\n")
        .replace("    optimizer.zero_grad()\n", "    for each in model.own: each.zero_grad()\n")
        .replace("    optimizer.step()\n", "    for each in model.own: each.step()\n")
    )


@pytest.mark.parametrize("optimizer", [ADAM, pytest.param(SGD, marks=SLOW)], ids=["Adam", "SGD"])
def test_a_list_of_optimizers_is_one_of_all_parameters(optimizer: str, tmp_path: Path) -> None:
    result = compared(tmp_path, given(optimizer), listed(optimizer))
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    "optimizer", ["torch.optim.SGD({}, lr=1e-1)", pytest.param(SGD, marks=SLOW), pytest.param(ADAM, marks=SLOW)]
)
def test_a_model_may_hold_the_optimizers(optimizer: str, tmp_path: Path) -> None:
    result = compared(tmp_path, held(optimizer), listed(optimizer))
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(given(ADAM.replace("1e-2", "1.01e-2")), id="another rate"),
        pytest.param(given(ADAM.replace("1e-2", "1e-2, betas=(0.9, 0.998)")), id="another average", marks=SLOW),
        pytest.param(given(ADAM.replace("1e-2", "1e-2, amsgrad=True")), id="another switch"),
        pytest.param(listed(ADAM.replace("1e-2", "1e-2, amsgrad=True"), "others"), id="by another name", marks=SLOW),
        pytest.param(held(ADAM.replace("1e-2", "1e-2, amsgrad=True")), id="held by the model", marks=SLOW),
        pytest.param(held(ADAM.replace("1e-2", "1.01e-2")), id="held by the model, another rate", marks=SLOW),
    ],
)
def test_one_that_computes_otherwise_is_another(other: str, tmp_path: Path) -> None:
    result = compared(tmp_path, other, listed(ADAM))
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
