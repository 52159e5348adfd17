"""The training loop: real digits, made by its loader, and a network that learns them."""

import pytest
import torch

from optexp.errors import ConfigError
from optexp.program.feeds import LoaderFeed
from optexp.schema import build
from optexp.workloads.training import Digits, Synthetic, Training

CPU = torch.device("cpu")


def program_of(workload: Training):
    program = workload.build(CPU, torch.float32, seed=0)
    torch.manual_seed(0)
    program.feed.reset([])
    return program


def test_digits_are_scikit_learns():
    data = Digits(1, 28)
    images, classes = zip(*(data[i] for i in range(20)), strict=True)
    assert len(data) == 1797
    assert torch.stack(classes).tolist() == [*range(10), *range(10)]
    assert torch.stack(images).shape == (20, 1, 28, 28)
    assert (torch.stack(images).min(), torch.stack(images).max()) == (-1, 1)


def test_synthetic_examples_depend_on_their_index_alone():
    data = Synthetic(10, 3, 8)
    assert len(data) == 10
    (image, label), (again, _), (other, _) = data[3], Synthetic(99, 3, 8)[3], data[4]
    assert torch.equal(image, again)
    assert not torch.equal(image, other)
    assert image.abs().max() <= 1
    assert 0 <= label < 10


@pytest.mark.parametrize("architecture", ["lenet5", "mlp"])
def test_it_learns_to_read(architecture: str):
    program = program_of(Training(architecture=architecture, batch_size=16, optim="adamw", lr=2e-3))
    losses = [program.run()["loss"].item() for _ in range(40)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_settings_reach_the_loader():
    feed = Training(batch_size=4, workers=2, prefetch=3, pin_memory=True, non_blocking=True).feed(CPU, torch.float32)
    assert isinstance(feed, LoaderFeed)
    assert (feed.workers, feed.prefetch, feed.pin_memory, feed.non_blocking, feed.queue) == (2, 3, True, True, 6)


def test_verification_draws_what_the_loader_could_have_made():
    workload = Training(batch_size=5)
    images, classes = workload.batch(torch.Generator().manual_seed(7))
    again, _ = workload.batch(torch.Generator().manual_seed(7))
    assert torch.equal(images, again)
    data = workload.dataset()
    every = {(tuple(data[i][0].flatten().tolist()), int(data[i][1])) for i in range(len(data))}
    assert all((tuple(x.flatten().tolist()), int(y)) in every for x, y in zip(images, classes, strict=True))
    drawn, _ = program_of(workload).feed.next()
    assert (drawn.shape, drawn.dtype) == (images.shape, images.dtype)


def test_what_the_network_cannot_take_is_a_mistake():
    with pytest.raises(ConfigError, match="image=32 is not allowed with architecture=lenet5"):
        build({"_target_": "optexp.workloads.training.Training", "image": 32}, "workload")


def test_the_loader_shuffles():
    """As training does: with every seed in another order, and never in the order of the data."""
    workload = Training(batch_size=16)
    ordered = torch.stack([workload.dataset()[i][1] for i in range(16)])
    first = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        first.append(next(iter(workload.loader()))[1])
    assert not torch.equal(first[0], first[1])
    assert not any(torch.equal(labels, ordered) for labels in first)
