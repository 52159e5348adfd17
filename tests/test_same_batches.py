"""A second file's loader beside the first one's: what differs is said, and random numbers excuse what they explain."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.comparison.same_batches import Feeds
from optexp.errors import NoReference
from optexp.strategy import REASSOCIATES
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec
from optexp.workloads.module import Module
from tests.export.test_patch import LOADER, LOSS, MODEL, OPTIMIZER

DRAWS = """\
class Noisy(torch.utils.data.Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.pairs[index][0] + torch.randn(8), self.pairs[index][1]


"""
FILE = f"{MODEL}{LOADER}\n\n{LOSS}{OPTIMIZER}"
INPUT = "def get_inputs():\n    return [torch.ones(16, 8), torch.ones(16, 4)]\n"
AT_IMPORT = "import torch\nDATA = torch.randn(64, 8)\n" + FILE.replace("torch.randn(64, 8, generator=made)", "DATA")
NOISY = FILE.replace("from torch.utils.data", f"{DRAWS}from torch.utils.data", 1).replace("(pairs,", "(Noisy(pairs),")
SYSTEM = "torch.Generator().manual_seed(int.from_bytes(__import__('os').urandom(4), 'little'))"
FIXED = "torch.Generator().manual_seed(1)"


def feeds(folder: Path, first: str, second: str) -> Feeds:
    """Arms of two files, and the reference of the first."""

    def spec(name: str) -> Spec:
        return Spec(Module(path=str(folder / name), mode="train"), [], "cpu", "float32", 7, contract=REASSOCIATES)

    (folder / "before.py").write_text(first)
    (folder / "after.py").write_text(second)
    baseline, candidate = InProcess(Arm(), "baseline"), InProcess(Arm(), "candidate")
    reference = InProcess(Reference(), "reference")
    baseline.target.hold(spec("before.py"))
    candidate.target.hold(spec("after.py"))
    reference.target.hold(spec("before.py"))
    return Feeds(baseline, candidate, reference)


@pytest.mark.parametrize(
    ("first", "old", "new", "words"),
    [
        (FILE, "shuffle=True", "shuffle=True, num_workers=1", None),
        (FILE, "batch_size=16", "batch_size=8", "8 batches an epoch (the baseline's 4); its batch 0 holds 0 [8, 8]"),
        (FILE, "(64, ", "(62, ", "62 samples an epoch (the baseline's 64)"),
        (FILE, "8, generator=made)", "8, generator=made) / 2", "other values: an element of 0 [16, 8] is"),
        (FILE, "shuffle=True", "shuffle=False", "its batch 0 holds other values"),
        (FILE, "return DataLoader", "pairs.tensors[0][-1] = 0\n    return DataLoader", "an element of 0"),
        (FILE, LOADER, INPUT, "come from get_inputs(), the baseline's come from a"),
        (FILE, FIXED, "torch.Generator().manual_seed(2)", "its batch 0 holds other values"),
        (FILE.replace(LOADER, INPUT), "(16, ", "(8, ", "its batch 0 holds 0 [8, 8]"),
        (FILE.replace(LOADER, INPUT), "ones(16, 8)", "zeros(16, 8)", "an element of 0 [16, 8] is 0, the baseline's 1"),
        (NOISY, "Model()", "Model()", None),
        (AT_IMPORT, "DATA = ", "torch.rand(3)\nDATA = torch.zeros(()) + ", "its batch 0 holds other values"),
        (AT_IMPORT, "Model()", "Model()", None),
    ],
)  # fmt: skip
def test_what_differs_is_said(first: str, old: str, new: str, words: str | None, tmp_path: Path) -> None:
    found = feeds(tmp_path, first, first.replace(old, new)).difference()
    assert (found is None) is (words is None), found
    if found is not None and words is not None:
        assert words in found.text
        assert not found.rounding


def test_values_that_differ_by_rounding_are_no_others(tmp_path: Path) -> None:
    rounded = FILE.replace("8, generator=made)", "8, generator=made).div(3).mul(3)")
    found = feeds(tmp_path, FILE, rounded).difference()
    assert found is not None
    assert found.rounding


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (NOISY, NOISY.replace("shuffle=True", "shuffle=True, num_workers=1"), "both loaders draw random numbers"),
        (FILE.replace(FIXED, SYSTEM), FILE, "the baseline's own batches are others each time"),
        (NOISY, NOISY.replace("torch.randn(8), ", "torch.rand(8), "), "both loaders draw random numbers"),
    ],
)  # fmt: skip
def test_what_is_drawn_at_random_need_not_be_equal(first: str, second: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(NoReference, match=words):
        feeds(tmp_path, first, second).difference()


LONG = FILE.replace("(64, ", "(6400, ")
ONWARDS = "return DataLoader(Turns(pairs), "
TURNS = """\
class Turns(torch.utils.data.Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        x, y = self.pairs[index]
        return x * FACTOR if index >= 3200 else x, y


"""


def turning(factor: float) -> str:
    """A file whose loader gives its data in order, and other values in the second half of an epoch."""
    text = LONG.replace("from torch.utils.data", f"{TURNS}from torch.utils.data", 1).replace(", shuffle=True", "")
    return text.replace("DataLoader(pairs,", "DataLoader(Turns(pairs),").replace("FACTOR", str(factor))


def test_batches_behind_the_first_ones_are_compared(tmp_path: Path) -> None:
    found = feeds(tmp_path, turning(1.0), turning(2.0)).difference()
    assert found is not None
    assert "holds other values: an element of 0 [16, 8] is" in found.text
    same = feeds(tmp_path, turning(2.0), turning(2.0))
    assert same.difference() is None
    assert (
        same.looked_at == "loaders: the first 64 batches and 33 others at random of 400, and the next one are compared"
    )
    shuffled = feeds(tmp_path, LONG, LONG.replace("shuffle=True", "shuffle=True, num_workers=1"))
    assert shuffled.difference() is None


FROZEN = """
class Once(torch.utils.data.Sampler):
    order = None

    def __len__(self):
        return 6400

    def __iter__(self):
        Once.order = Once.order or list(torch.utils.data.RandomSampler(range(6400)))
        return iter(Once.order)


"""


def test_an_order_that_is_never_shuffled_again_is_another_one(tmp_path: Path) -> None:
    plain = LONG.replace(FIXED, "None")
    frozen = plain.replace("from torch.utils.data", f"{FROZEN}from torch.utils.data", 1)
    found = feeds(tmp_path, plain, frozen.replace("shuffle=True", "sampler=Once()")).difference()
    assert found is not None
    assert "its batch 400 holds other values" in found.text


@pytest.mark.parametrize("more", ["", f", generator={FIXED}"], ids=["torchs", "own"])
def test_batches_of_the_next_epoch_are_those_that_the_loader_gives(more: str, tmp_path: Path) -> None:
    text = FILE.replace("shuffle=True", f"shuffle=True{more}")
    both = feeds(tmp_path, text, text)
    first = both.baseline.call(Arm.fed)
    assert both.baseline.call(Arm.fed_later, positions=[3, 9]) == {3: first.batches[3], 9: first.batches[9]}


@pytest.mark.parametrize("text", [LONG, LONG.replace(FIXED, "None"), turning(2.0)], ids=["own", "torchs", "in order"])
def test_picked_batches_are_those_that_the_loader_gives(text: str, tmp_path: Path) -> None:
    both = feeds(tmp_path, text, text)
    first = both.baseline.call(Arm.fed)
    assert both.baseline.call(Arm.fed_later, positions=[3, 60]) == {3: first.batches[3], 60: first.batches[60]}
