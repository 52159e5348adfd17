"""A training loop as people write it: a DataLoader makes batches, each is copied to the device, the network learns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from optexp.program import Batch, Feed, to_device
from optexp.program.feeds import LoaderFeed, as_batch
from optexp.schema import choice
from optexp.workload import Workload, known, sgd_or_adamw
from optexp.workloads.lenet5 import CLASSES, lenet5
from optexp.workloads.vision import torchvision_model

WORKERS = 4  # proposed for a loader that has none, at most
Example = tuple[Tensor, Tensor]  # image (channels, side, side) in float32, class


@dataclass
class Training(Workload):
    """LeNet-5, an MLP or ResNet-50 learns ten classes of images by cross-entropy. One sample is one image.

    Settings of the loader begin as in a first draft: no workers, no pinned memory.

    data:      digits: scikit-learn's 1,797 handwritten ones, enlarged; synthetic: `examples` random images
    image:     side in pixels; LeNet-5 takes 28
    workers:   processes that make batches, `prefetch` each ahead; 0 makes them in the loop
    """

    sizes: ClassVar = {"cuda": {"batch_size": 128}, "cpu": {"batch_size": 32}}
    preload: ClassVar = ("sklearn.datasets",)

    mode: str = choice("train", "forward_backward", "forward")
    architecture: str = choice("lenet5", "mlp", "resnet50")
    data: str = choice("digits", "synthetic")
    examples: int = 8192
    image: int | None = None
    batch_size: int | None = None
    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    non_blocking: bool = False
    optim: str = choice("sgd", "adamw")
    lr: float = 1e-2

    def __post_init__(self) -> None:
        if self.architecture == "lenet5" and self.image not in (None, 28):
            raise ValueError(f"image={self.image} is not allowed with architecture=lenet5, which takes 28")
        if self.workers < 0 or self.prefetch < 1:
            raise ValueError(f"workers={self.workers} must be at least 0, and prefetch={self.prefetch} at least 1")

    @property
    def samples(self) -> int:
        return known(self.batch_size)

    @property
    def targets(self) -> int:
        return 1

    @property
    def shape(self) -> tuple[int, int]:
        """Channels and side of an image; ResNet-50 has its colours and its size."""
        channels, side = (3, 224) if self.architecture == "resnet50" else (1, 28)
        return channels, side if self.image is None else self.image

    @property
    def remedies(self) -> Mapping[str, str]:
        cores = len(os.sched_getaffinity(0))
        more = min(2 * self.workers or WORKERS, max(1, cores - 1))
        return {"data_loading": f"workload.workers={more}"} if more > self.workers else {}

    def model(self) -> nn.Module:
        channels, side = self.shape
        if self.architecture == "lenet5":
            return lenet5()
        if self.architecture == "mlp":
            return mlp(channels * side * side)
        return torchvision_model(self.name, "resnet50", CLASSES, dropout=0.0)

    def dataset(self) -> Digits | Synthetic:
        return Digits(*self.shape) if self.data == "digits" else Synthetic(self.examples, *self.shape)

    def batch(self, generator: torch.Generator) -> Batch:
        """Examples picked at random: what the loader would yield under some shuffle."""
        data = self.dataset()
        picked = torch.randint(len(data), (known(self.batch_size),), generator=generator, device=generator.device)
        return to_device(as_batch(default_collate([data[i] for i in picked.tolist()])), generator.device)

    def loader(self) -> DataLoader[Example]:
        return DataLoader(
            self.dataset(),
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,  # every batch has one shape
            num_workers=self.workers,
            prefetch_factor=self.prefetch if self.workers else None,
            pin_memory=self.pin_memory,
        )

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        return LoaderFeed(self.loader(), device, dtype, non_blocking=self.non_blocking)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return F.cross_entropy(output, batch[-1])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd_or_adamw(self.optim, model, self.lr)


def mlp(features: int, width: int = 1024) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


# --- data sets: every example is decoded when it is asked for, as from files -----------------------------------


class Digits(Dataset[Example]):
    """8 × 8 pixels from 0 to 16, enlarged to `side`."""

    def __init__(self, channels: int, side: int) -> None:
        self.channels, self.side = channels, side
        self.images, self.classes = load_digits()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        image = self.images[index].to(torch.float32)[None, None] / 8 - 1
        enlarged = F.interpolate(image, (self.side, self.side), mode="bilinear", align_corners=False)[0]
        return enlarged.expand(self.channels, -1, -1), self.classes[index]


@lru_cache(maxsize=1)
def load_digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 8, 8) in uint8 and classes, from a file that scikit-learn ships."""
    from sklearn import datasets  # slow to import, and only this needs it

    digits = datasets.load_digits()
    return torch.from_numpy(digits.images).to(torch.uint8), torch.from_numpy(digits.target).to(torch.int64)


class Synthetic(Dataset[Example]):
    """Random bytes that depend on the index alone, so that a set of any size takes no memory."""

    def __init__(self, examples: int, channels: int, side: int) -> None:
        self.examples, self.shape = examples, (channels, side, side)

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> Example:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, self.shape, generator=generator, dtype=torch.uint8)
        return image.to(torch.float32) / 127.5 - 1, torch.randint(CLASSES, (), generator=generator)
