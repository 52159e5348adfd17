"""Results in fp64 hold for one set of inputs, on one device, from one initial state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from optexp.equivalence import fp64_reference
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.input_families import NORMAL
from optexp.workloads.module import Module
from tests.equivalence.conftest import CPU


@pytest.fixture
def fp64(net: type) -> Fp64Reference:
    """After a step from the state that all arms share."""
    found = Fp64Reference(net(mode="forward"), CPU, torch.float32, 7)
    found.draw(0, 2, NORMAL)
    found.step(0, found.initial)
    return found


def test_a_step_from_the_shared_state_is_computed_once(fp64: Fp64Reference) -> None:
    assert fp64.step(0, fp64.initial) is fp64.step(0, fp64.initial)
    assert fp64.step(0, dict(fp64.initial)) is not fp64.step(0, fp64.initial)


@pytest.mark.parametrize(
    "change",
    [
        lambda fp64: fp64.draw(1, 2, NORMAL),
        lambda fp64: fp64.rest(),
        lambda fp64: fp64.settle(CPU),
        lambda fp64: fp64.turn_parameters(),
        lambda fp64: fp64.follow(["param/1.weight"]),
    ],
    ids=["draw", "rest", "settle", "turn_parameters", "follow"],
)
def test_results_end_with_what_they_were_computed_from(
    fp64: Fp64Reference, change: Callable[[Fp64Reference], None]
) -> None:
    before = fp64.results
    assert before.golden
    change(fp64)
    assert not fp64.results.golden
    assert before.golden, "a new object, and not the old one emptied"


@pytest.mark.parametrize("context", [Fp64Reference.aside, Fp64Reference.unremembered])
def test_steps_aside_are_not_remembered(
    fp64: Fp64Reference, context: Callable[[Fp64Reference], AbstractContextManager[None]]
) -> None:
    before = fp64.results
    with context(fp64):
        fp64.step(1, fp64.initial)
    assert fp64.results is before
    assert before.golden.keys() == {0}


class NotLookedAt(nn.Linear):
    """Its step fails where a mode looks at its operations, as flex_attention's does."""

    def __init__(self) -> None:
        super().__init__(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("no rule for this mode")
        return super().forward(x.flatten(1))


@pytest.mark.parametrize(("model", "may"), [(NotLookedAt, True), (None, False)])
def test_a_step_that_does_not_run_where_its_operations_are_looked_at_runs_all_the_same(
    net: type, model: type | None, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = net(mode="forward", **({"make": model} if model else {}))
    fp64 = Fp64Reference(workload, CPU, torch.float32, 7)
    expected = fp64_outputs(Fp64Reference(workload, CPU, torch.float32, 7))
    monkeypatch.setattr(fp64_reference, "TRIED", 0)
    fp64.drawn_on = cast(Any, SimpleNamespace(type="cuda"))
    found = fp64_outputs(fp64)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert (fp64.source.asserts.looked, fp64.source.asserts.may) == (True, may)


def fp64_outputs(fp64: Fp64Reference) -> Mapping[str, torch.Tensor]:
    fp64.draw(0, 1, NORMAL)
    return fp64.step(0, fp64.initial)


@pytest.mark.parametrize(("context", "kept"), [(Fp64Reference.aside, True), (Fp64Reference.unremembered, False)])
def test_only_a_step_aside_leaves_the_state_alone(
    net: type, context: Callable[[Fp64Reference], AbstractContextManager[None]], kept: bool
) -> None:
    fp64 = Fp64Reference(net(mode="train"), CPU, torch.float32, 7)
    fp64.draw(0, 2, NORMAL)
    before = {name: tensor.clone() for name, tensor in fp64.program.state().items()}
    with context(fp64):
        fp64.step(1, {name: tensor + 1 for name, tensor in fp64.initial.items()})
    assert all(torch.equal(tensor, before[name]) for name, tensor in fp64.program.state().items()) is kept


@pytest.mark.parametrize("beside", ["on the host", "for inputs"])
def test_another_program_of_the_same_file_leaves_its_variables_alone(beside: str) -> None:
    """A schedule in a variable of the file steps the optimizer that was built last in that module."""
    path = Path(__file__).parents[1] / "cheats" / "scheduled.py"
    workload = Module(mode="train", path=str(path))
    fp64 = Fp64Reference(workload, CPU, torch.float32, 7)
    fp64.draw(0, 2, NORMAL)
    if beside == "on the host":
        fp64.source._try_on_host(fp64.batches[0])
    else:
        workload.build(CPU, torch.float32, 7)
    fp64.step(0, fp64.initial)
    assert fp64.results.update_inputs.left[0] == [pytest.approx(0.0999)]


def test_models_that_a_file_registers_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "registered.py"
    path.write_text(
        dedent("""
        import torch
        from torch import nn
        LAYERS = []
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
                LAYERS.append(self.layer)
            def forward(self, x):
                for layer in LAYERS:
                    x = layer(x)
                return x
        get_inputs = lambda: [torch.randn(8, 4)]
    """)
    )
    fp64 = Fp64Reference(Module(mode="forward", path=str(path)), CPU, torch.float32, 7)
    fp64.draw(0, 1, NORMAL)
    (output,) = (t for name, t in fp64.step(0, fp64.initial).items() if name.startswith("out/"))
    expected = fp64.program.model.layer(fp64.batches[0][0].double())  # type: ignore[operator]
    assert torch.equal(output, expected)
