"""The MLP: sizes, modes, and the same numbers from the same seed."""

import pytest
import torch

from optexp.program import gradients
from optexp.workloads.mlp import Mlp
from tests.workloads.operators import operators

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


@pytest.mark.parametrize(("layers", "dim"), [(2, 64), (3, 1024)])
def test_styles_are_the_same_network_written_differently(layers: int, dim: int):
    """1→64→1 and 1→1024→1024→1: products with a bias of their own give what nn.Linear gives."""
    sizes = {"mode": "forward", "dim": dim, "layers": layers, "in_features": 1, "out_features": 1, "batch_size": 3}
    linear = build(Mlp(style="linear", activation="relu", **sizes), dtype=torch.float64)
    products = build(Mlp(style="products", activation="relu", **sizes), dtype=torch.float64)
    assert len(products.model) == len(linear.model) == 2 * layers - 1
    for ours, theirs in zip(products.model, linear.model, strict=True):
        if isinstance(theirs, torch.nn.Linear):
            assert ours.weight.shape == (theirs.in_features, theirs.out_features)
            ours.weight.data, ours.bias.data = theirs.weight.data.T.clone(), theirs.bias.data.clone()
    expected, output = linear.run()["output"], products.run()["output"]
    assert output.shape == (3, 1)
    torch.testing.assert_close(output, expected)


def test_steps_are_passes_one_after_the_other():
    sizes = {"mode": "forward", "dim": 4, "layers": 2, "batch_size": 3}
    once, thrice = build(Mlp(**sizes)), build(Mlp(num_steps=3, **sizes))
    (x,) = once.feed.batches[0]
    for _ in range(3):
        x = once.step(once, (x,))["output"]
    torch.testing.assert_close(thrice.run()["output"], x)
    assert sum(p.numel() for p in thrice.model.parameters()) == sum(p.numel() for p in once.model.parameters())


def test_an_output_that_does_not_fit_the_input_cannot_be_fed_back():
    with pytest.raises(ValueError, match="num_steps=2"):
        Mlp(in_features=1, num_steps=2)


def test_written_by_hand_each_layer_is_a_product_and_an_addition():
    sizes = {"mode": "forward", "dim": 8, "layers": 3, "batch_size": 4}
    by_hand, linear = (operators(build(Mlp(style=style, **sizes))) for style in ("products", "linear"))
    assert (by_hand["mm"], by_hand["add"], by_hand["addmm"]) == (3, 3, 0)
    assert (linear["mm"], linear["add"], linear["addmm"]) == (0, 0, 3)
