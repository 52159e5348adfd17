"""A user's own training step: what strategies did to the model applies, and everything it changes can be compared."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence.other_changes import OtherChanges
from optexp.errors import NoReference, Unsupported
from optexp.program import Program, ResidentFeed, gradients
from optexp.user_code.step_state import TrackedStepState
from optexp.user_code.train_step import TrainStep


def program(function: Callable[..., Any]) -> Program:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.randn(8, 4), torch.randint(2, (8,)))])
    step = TrainStep(function, unpack=lambda batch: batch)
    return Program(model, step, feed, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), targets=1)


def accumulate(model: Any, batch: tuple[Tensor, Tensor], optimizer: Any) -> Tensor:
    for images, labels in zip(*(part.chunk(2) for part in batch), strict=True):
        loss = nn.functional.cross_entropy(model(images), labels) / 2
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_does_what_a_plain_loop_does() -> None:
    ours, plain = program(accumulate), program(accumulate)
    for _ in range(3):
        outputs = ours.run()
        assert plain.optimizer is not None
        loss = accumulate(plain.model, plain.feed.next(), plain.optimizer)  # type: ignore[arg-type]
        assert torch.equal(outputs["loss"], loss)
    assert not outputs["loss"].requires_grad
    for one, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def test_no_autograd_graph_outlives_its_use() -> None:
    """A CUDA graph of a later step would meet gradients that belong to the stream of this one."""
    outputs = list[weakref.ref[Tensor]]()

    def step(model: Any, batch: tuple[Tensor, Tensor], optimizer: Any) -> None:
        for images, labels in zip(*(part.chunk(2) for part in batch), strict=True):
            assert not any(output() is not None for output in outputs)
            outputs.append(weakref.ref(output := model(images)))
            nn.functional.cross_entropy(output, labels).backward()
            del output
        optimizer.step()
        optimizer.zero_grad()

    program(step).run()
    assert [output() for output in outputs] == [None, None]


CLEARS: dict[str, Callable[[Any, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": by_hand,
    "in a group": lambda model, optimizer: by_hand(nn.ParameterList(optimizer.param_groups[0]["params"]), optimizer),
}


@pytest.mark.parametrize("clear", CLEARS)
def test_gradients_stay_to_be_compared(clear: str) -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        assert all(p.grad is None for p in model.parameters())
        model(batch[0]).square().mean().backward()
        optimizer.step()
        CLEARS[clear](model, optimizer)

    trained = program(step)
    assert trained.run() == {}
    trained.run()
    assert set(gradients(trained)) == {"grad/weight", "grad/bias"}


def test_gradients_are_those_of_a_closure() -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        def closure() -> Tensor:
            loss: Tensor = model(batch[0]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        by_hand(model, optimizer)

    trained = program(step)
    trained.run()
    assert set(gradients(trained)) == {"grad/weight", "grad/bias"}


def test_a_step_without_gradients_shows_none() -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        optimizer.step()
        model(batch[0]).square().mean().backward()

    trained = program(step)
    trained.run()
    assert gradients(trained) == {}


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_after_the_step_are_no_part_of_later_ones(to_none: bool) -> None:
    second = list[Tensor]()

    def step(model: Any, batch: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            model(batch[0]).square().mean().backward()
            second.append(model.weight.grad.clone())
            if len(second) == 1:
                optimizer.step()
                model.zero_grad() if to_none else optimizer.zero_grad(set_to_none=False)
                with torch.no_grad():
                    model.weight.zero_()
                    model.bias.zero_()

    trained = program(step)
    trained.run()
    assert not second[1].any()
    assert torch.equal(gradients(trained)["grad/weight"], second[0])  # those that were taken


def test_gradients_left_for_the_next_step_are_refused() -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        for index in range(2):
            model(batch[0]).square().mean().backward()
            if index == 0:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(NoReference, match="leaves gradients that it computed after"):
        program(step).run()


def test_zeros_in_the_place_of_gradients_are_said_to_be_no_gradients() -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        model(batch[0]).square().mean().backward()
        optimizer.step()
        torch._foreach_zero_([p.grad for p in model.parameters()])

    with pytest.raises(NoReference, match="zeros into gradients after"):
        program(step).run()


def test_a_strategy_wraps_what_the_step_calls() -> None:
    calls = []

    def wrapped(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return plain.model(x) * 1.0

    plain = program(accumulate)
    replace(plain, forward=wrapped).run()
    assert calls == [(4, 4), (4, 4)]


class Lit(nn.Module):
    """A module with a training step of its own, as Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_a_strategy_wraps_what_a_method_of_the_model_calls() -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        model.training_step(batch).backward()
        optimizer.step()

    calls, net = [], Lit()
    plain = program(step)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    replace(plain, model=net, forward=lambda x: calls.append(1) or net(x), optimizer=optimizer).run()  # type: ignore[func-returns-value]
    assert calls == [1]


def test_what_train_and_to_return_is_called_by_a_strategy() -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        model = model.train().to("cpu").requires_grad_(True).apply(lambda module: None)
        model(batch[0]).sum().backward()
        optimizer.step()

    calls, plain = [], program(step)
    replace(plain, forward=lambda x: calls.append(1) or plain.model(x)).run()  # type: ignore[func-returns-value]
    assert calls == [1]


def test_gradients_are_those_that_an_optimizer_took_before_it_wrote_to_them() -> None:
    class Decays(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]  # as of a dataclass

        def step(self, closure: Any = None, scale: float = 1.0) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.data.add_(parameter.data, alpha=0.5 * scale)
            super().step()

    def step(model: Any, batch: Any, optimizer: Any) -> None:
        model(batch[0]).sum().backward()
        seen.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step(scale=2.0)
        optimizer.zero_grad()

    seen = list[list[Tensor]]()
    plain = program(step)
    plain = replace(plain, optimizer=Decays(plain.model.parameters(), lr=0.1))
    for _ in range(5):
        plain.run()
        assert all(map(torch.equal, gradients(plain).values(), seen[-1]))


def test_for_all_else_the_model_is_the_model() -> None:
    seen: dict[str, Any] = {}

    def step(model: Any, batch: Any, optimizer: Any) -> None:
        seen["features"], seen["rate"] = model.in_features, optimizer.param_groups[0]["lr"]
        model(batch[0]).sum().backward()
        optimizer.step()

    program(step).run()
    assert seen == {"features": 4, "rate": 0.1}


@pytest.mark.parametrize("times", [0, 2])
def test_one_call_is_one_optimizer_step(times: int) -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        model(batch[0]).sum().backward()
        for _ in range(times):
            optimizer.step()

    with pytest.raises(NoReference, match=f"{times} times"):
        program(step).run()


def test_a_scaler_cannot_reach_in() -> None:
    with pytest.raises(Unsupported, match="bfloat16"):
        replace(program(accumulate), scaler=torch.amp.GradScaler("cpu")).run()


def test_what_follows_a_step_is_no_part_of_a_copy_of_its_model() -> None:
    def step(model: Any, batch: Any, optimizer: Any) -> None:
        model(batch[0]).square().mean().backward()
        optimizer.step()
        averaged.append(torch.optim.swa_utils.AveragedModel(model))

    averaged = list[nn.Module]()
    plain = program(step)
    tracked, uncopied = TrackedStepState(step, plain.model, plain.optimizer), ((sys,), {})  # type: ignore[arg-type,var-annotated]
    followed = replace(plain, step_state=tracked, made_with=uncopied)
    with OtherChanges(followed, {name: t.clone() for name, t in plain.state().items()}).followed():
        followed.run()
    assert torch.equal(averaged[0].module.weight, plain.model.weight)  # type: ignore[union-attr,arg-type]
