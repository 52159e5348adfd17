"""The MLP: sizes, modes, and the same numbers from the same seed."""

import pytest
import torch

from optexp.program import gradients
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")


def build(workload: Mlp, seed: int = 0, dtype: torch.dtype = torch.float32):
    program = workload.build(CPU, dtype, seed)
    generator = torch.Generator().manual_seed(1)
    program.feed.reset([tuple(t.to(dtype) for t in workload.batch(generator)) for _ in range(2)])
    return program


def test_default_is_what_the_readme_measures():
    workload = Mlp()
    assert (workload.mode, workload.dim, workload.layers, workload.samples) == ("forward_backward", 256, 4, 256)


def test_forward_is_the_written_out_product():
    program = build(Mlp(mode="forward", dim=8, layers=2, batch_size=3, activation="relu"))
    (x,) = program.feed.batches[0]
    first, second = (layer for layer in program.model if isinstance(layer, torch.nn.Linear))
    expected = torch.relu(torch.relu(x @ first.weight.T + first.bias) @ second.weight.T + second.bias)
    output = program.run()["output"]
    assert output.shape == (3, 8)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
def test_gradients_match_finite_differences(activation: str):
    program = build(Mlp(dim=4, layers=2, batch_size=3, activation=activation), dtype=torch.float64)
    batch = program.feed.batches[0]
    program.step(program, batch)
    weight = program.model[0].weight
    gradient = gradients(program)["grad/0.weight"][1, 2].item()
    losses = []
    for change in (1e-6, -2e-6):
        weight.data[1, 2] += change
        losses.append(program.step(program, batch)["loss"].item())
    assert gradient == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_training_lowers_the_loss_on_one_batch(optim: str):
    program = build(Mlp(mode="train", dim=16, layers=2, batch_size=8, optim=optim, lr=1e-2))
    batch = program.feed.batches[0]
    losses = [program.step(program, batch)["loss"].item() for _ in range(20)]
    assert losses[-1] < losses[0]


def test_equal_seeds_give_equal_parameters_and_others_do_not():
    first, again, other = (build(Mlp(dim=4), seed=seed).model[0].weight for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
