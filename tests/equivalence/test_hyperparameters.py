"""Optimizers that hold their hyperparameters in float32 are no false alarm; a rate that is off still is one."""

from dataclasses import replace

import pytest
import torch

from optexp.equivalence.hyperparameters import bias_correction_error
from optexp.program import Program, prime


class OnTheDevice(torch.optim.Optimizer):
    """AdamW as capturable optimizers compute it: step counts and bias corrections are float32 tensors."""

    def __init__(self, plain: torch.optim.Optimizer, rate: float) -> None:
        super().__init__(plain.param_groups, {})
        self.rate = rate

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                zeros = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state = self.state[p] = self.state[p] or zeros
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                assert correction2.dtype is torch.float32
                denominator = (state["exp_avg_sq"] / correction2).sqrt() + group["eps"]
                p.sub_(self.rate * group["lr"] / correction1 * state["exp_avg"] / denominator)


def on_the_device(rate: float):
    def change(program: Program) -> Program:
        changed = replace(program, optimizer=OnTheDevice(program.optimizer, rate))
        prime(changed)
        return changed

    return change


def test_bias_corrections_in_float32_are_no_false_alarm(check, net):
    verification = check(net(mode="train"), on_the_device(1.0), seeds=5)
    assert verification.ok, verification.headline
    assert verification.bitwise is False


class Uneven(torch.nn.Module):
    """A few rows of its weights get a hundred times the gradient of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = torch.nn.Linear(192, 1024), torch.nn.Linear(1024, 10)
        self.register_buffer("sizes", torch.ones(1024).index_fill(0, torch.arange(22), 100.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.wide(x.flatten(1)) * self.sizes).tanh())


def test_betas_in_float32_are_no_false_alarm_where_a_few_rows_hold_all_that_counts(check, net):
    def rounded(program: Program) -> Program:
        (group,) = program.optimizer.param_groups
        group["betas"] = tuple(torch.tensor(beta, dtype=torch.float32).item() for beta in group["betas"])
        return program

    verification = check(net(mode="train", make=Uneven), rounded, seeds=1)
    assert verification.ok, verification.headline


def test_betas_in_float32_are_no_false_alarm_beside_a_gradient_that_is_rounding_in_both(check, net):
    """The bias before BatchNorm: its gradient is zero but for rounding, and the candidate's is the larger one later."""

    def rounded(program: Program) -> Program:
        (group,) = program.optimizer.param_groups
        group["betas"] = tuple(torch.tensor(beta, dtype=torch.float32).item() for beta in group["betas"])
        bias, state = program.model[0].bias, program.optimizer.state
        bias.register_hook(lambda gradient: gradient * (16 if state[bias]["step"] > 14 else 1))
        return program

    verification = check(net(mode="train"), rounded, seeds=1, steps=16)
    assert verification.ok, verification.headline


@pytest.mark.parametrize("rate", [1.01, 1.001])
def test_a_rate_that_is_off_by_little_is_seen(check, net, rate):
    verification = check(net(mode="train"), on_the_device(rate), seeds=2)
    assert not verification.ok
    assert "change/" in verification.headline


def test_the_error_of_a_correction_is_far_below_a_wrong_rate():
    parameter = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.999))
    errors = []
    for _ in range(100):
        parameter.grad = torch.ones(3)
        optimizer.step()
        errors.append(bias_correction_error(optimizer)[parameter])
    assert errors[0] == pytest.approx(2**-24 * (0.5 / 0.001 + 1 / 0.1))
    assert max(errors) < 1e-4
    sgd = torch.optim.SGD([parameter], lr=0.1)
    sgd.step()
    assert bias_correction_error(sgd) == {}
