"""An epoch's last batch, where it is smaller, is among those that are verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from optexp.equivalence.input_families import NORMAL, ONE_BY_ONE
from optexp.equivalence.input_source import InputSource
from optexp.program import tensors_of
from optexp.user_code.adapters import Maker
from optexp.user_code.given_batches import GivenBatches
from optexp.user_code.parts import Parts
from optexp.workloads.module import Module

DATA = TensorDataset(torch.randn(22, 4), torch.randint(2, (22,)))
OTHER = TensorDataset(torch.randn(17, 4), torch.randint(2, (17,)))


class Streamed(IterableDataset[Any]):
    def __iter__(self):
        return iter(DATA)


def remainder(loader: Callable[[], DataLoader[Any]]) -> Any:
    given = GivenBatches(Parts(Maker(nn.Linear, (4, 2), {}, "model"), loader=loader), [])
    return given.remainder(torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("loader", "rows"),
    [
        (lambda: DataLoader(DATA, 8), 6),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, drop_last=False)), 6),
        (lambda: DataLoader(DATA, 8, drop_last=True), None),
        (lambda: DataLoader(DATA, 11), None),
        (lambda: DataLoader(OTHER, 8), None),
        (lambda: DataLoader(DATA, 32), None),
        (lambda: DataLoader(DATA, None), None),
        (lambda: DataLoader(Streamed(), 8), None),
    ],
    ids=["smaller", "of a batch sampler", "dropped", "of one size", "a single sample", "one batch", "none", "streamed"],
)
def test_what_an_epoch_leaves_over(loader: Callable[[], DataLoader[Any]], rows: int | None) -> None:
    found = remainder(loader)
    assert (None if found is None else len(found[0])) == rows


def test_it_ends_a_set(tmp_path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "Model = lambda: nn.Linear(4, 2)\n"
        "def get_loader():\n    return DataLoader(TensorDataset(torch.randn(22, 4)), 8)\n"
    )
    workload = Module(path=str(path))
    workload.build(torch.device("cpu"), torch.float32, 0)
    source = InputSource(workload, torch.device("cpu"), torch.float32, 0, 0)
    sizes = {
        family: [len(next(iter(tensors_of(batch).values()))) for batch in source.draw(0, 2, family).batches]
        for family in (NORMAL, ONE_BY_ONE)
    }
    assert sizes == {NORMAL: [8, 8, 6], ONE_BY_ONE: [8, 8, 8]}
