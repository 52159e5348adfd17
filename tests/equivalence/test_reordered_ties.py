"""The order of equal elements, which torch leaves open, tells no two programs apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.equivalence.reassociation import Reassociated
from optexp.result import Verdict
from tests.two_files import compared

NEIGHBOURS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 3)

    def forward(self, x):
        far = (x[:, :, None] - x[:, None]).square().sum(-1)
        near = far.topk(3, largest=False).indices
        others = x[torch.arange(len(x))[:, None, None], near]
        return self.mlp(torch.cat((x[:, :, None].expand_as(others), others), -1)).amax((1, 2))

def get_inputs():
    return [torch.randn(4, 8, 2), torch.randint(3, (4,))]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch[1])
"""
DETECTIONS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(8, 5)

    def forward(self, x):
        scores, places = self.classes(x).sigmoid().flatten(1).topk(6)
        return scores, places % 5

def get_inputs():
    return [torch.randn(3, 10, 8)]
"""
OF_SCORES = "scores, places = self.classes(x).sigmoid().flatten(1).topk(6)"


@pytest.mark.parametrize("select", ["topk(4)", "sort(descending=True)"])
def test_the_first_run_turns_equal_elements_around(select: str) -> None:
    x, arguments = torch.tensor([1.0, 3.0, 3.0, 2.0]), {"topk(4)": {"k": 4}}.get(select, {"descending": True})
    with Reassociated(1) as mode:
        values, places = getattr(x, select.partition("(")[0])(**arguments)
    assert values.tolist() == [3, 3, 2, 1]
    assert (places.tolist(), mode.ties) == ([2, 1, 3, 0], 2)


def test_elements_that_differ_and_stable_sorts_keep_their_order() -> None:
    x = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    with Reassociated(1) as mode:
        assert x.sort(stable=True).indices.tolist() == [[0, 1], [0, 1]]
        assert x[1].topk(2).indices.tolist() == [1, 0]
        assert torch.tensor(1.0).topk(1).indices.tolist() == 0
    assert mode.ties == 0


def test_another_selection_of_neighbours_is_verified(tmp_path: Path) -> None:
    stable = NEIGHBOURS.replace("far.topk(3, largest=False).indices", "far.sort(stable=True).indices[..., :3]")
    assert compared(tmp_path, NEIGHBOURS, stable).verdict is Verdict.VERIFIED


def test_fewer_neighbours_are_refused(tmp_path: Path) -> None:
    fewer = NEIGHBOURS.replace("far.topk(3, ", "far.topk(2, ")
    assert compared(tmp_path, NEIGHBOURS, fewer).verdict is Verdict.NOT_EQUIVALENT


def test_a_selection_by_logits_is_verified(tmp_path: Path) -> None:
    logits = DETECTIONS.replace(
        OF_SCORES, "logits, places = self.classes(x).flatten(1).topk(6)\n        scores = logits.sigmoid()"
    )
    assert compared(tmp_path, DETECTIONS, logits, "workload.mode=forward").verdict is Verdict.VERIFIED


def test_indices_by_logits_are_verified_and_others_refused(tmp_path: Path) -> None:
    """Scores of 1 in float32 are ties there, and none in float64."""
    places = DETECTIONS.replace("places % 5", "places").replace("self.classes(x)", "(20 + self.classes(x))")
    logits = places.replace(".sigmoid().flatten(1).topk(6)", ".flatten(1).topk(6)").replace(
        "return scores,", "return scores.sigmoid(),"
    )
    lowest = places.replace(".topk(6)", ".topk(6, largest=False)")
    for second, verdict in ((logits, Verdict.VERIFIED), (lowest, Verdict.NOT_EQUIVALENT)):
        found = compared(tmp_path, places, second, "workload.mode=forward")
        assert found.verdict is verdict, found.headline


def test_integers_that_equal_elements_alone_decide_are_unseen(tmp_path: Path) -> None:
    labels = DETECTIONS.replace(".sigmoid()", ".mul(0).relu()").replace("places % 5", "places * 7 % 11")
    sort = labels.replace(".topk(6)", ".sort(descending=True, stable=True)").replace(
        "return scores, places * 7 % 11", "return scores[:, :6], places[:, :6] * 7 % 11"
    )
    found = compared(tmp_path, labels, sort, "workload.mode=forward")
    assert found.verdict is Verdict.UNVERIFIED, found.headline
    assert "the order of equal elements" in found.headline


def test_another_class_is_refused(tmp_path: Path) -> None:
    other = DETECTIONS.replace("places % 5", "(places + 1) % 5")
    assert compared(tmp_path, DETECTIONS, other, "workload.mode=forward").verdict is Verdict.NOT_EQUIVALENT
