"""Any model of images that torchvision can build by name, with random weights: what classifies them or their pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.errors import ConfigError
from optexp.program import Batch, Feed
from optexp.program.feeds import HostFeed
from optexp.schema import choice, suggest
from optexp.workload import Workload, extra, known, sgd_or_adamw

MADE_FOR = {"vit_": 224, "maxvit": 224, "inception": 299}  # images of this side, and none as small as others take


@dataclass
class Vision(Workload):
    """Images (batch_size, 3, image, image) to classes: of each image, or of each pixel. One sample is one image.

    `dropout` replaces every rate that the model has (0: every element can be compared); null leaves the author's.
    With `source` host, images are copied to the device in every step.
    """

    families: ClassVar = ("normal", "small", "offset")
    sizes: ClassVar = {"cuda": {"batch_size": 32, "image": 224}, "cpu": {"batch_size": 2, "image": 64}}
    preload: ClassVar = ("torchvision",)

    mode: str = choice("forward", "forward_backward", "train")
    architecture: str = "resnet50"
    batch_size: int | None = None
    image: int | None = None
    classes: int = 1000
    dropout: float | None = 0.0
    optim: str = choice("sgd", "adamw")
    lr: float = 1e-2
    source: str = choice("device", "host")

    def resolve(self, device: str) -> Self:
        if find_spec("torchvision") is not None:
            models: Any = extra("torchvision", self.name).models
            names = [name for family in (models, models.segmentation) for name in models.list_models(family)]
            if self.architecture not in names:
                given = f"workload.architecture={self.architecture}"
                raise ConfigError(f"{given} is not allowed{suggest(self.architecture, names)}")
        sides = [side for start, side in MADE_FOR.items() if self.architecture.startswith(start)]
        resolved = super().resolve(device)
        return replace(resolved, image=sides[0]) if sides and self.image is None else resolved

    @property
    def samples(self) -> int:
        return known(self.batch_size)

    @property
    def targets(self) -> int:
        return 0 if self.mode == "forward" else 1

    def model(self) -> nn.Module:
        return torchvision_model(self.name, self.architecture, self.classes, self.dropout)

    def batch(self, generator: torch.Generator) -> Batch:
        count, side, device = known(self.batch_size), known(self.image), generator.device
        images = torch.randn(count, 3, side, side, generator=generator, device=device)
        if self.mode == "forward":
            return (images,)
        return images, torch.randint(self.classes, (count,), generator=generator, device=device)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        scores, labels = main_output(output), batch[-1]
        if scores.dim() == 4:  # a score for every pixel: the whole image is of one class
            labels = labels[:, None, None].expand(-1, *scores.shape[2:])
        return F.cross_entropy(scores, labels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd_or_adamw(self.optim, model, self.lr)

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        return super().feed(device, dtype) if self.source == "device" else HostFeed(device)


def torchvision_model(workload: str, architecture: str, classes: int, dropout: float | None) -> nn.Module:
    """A new model; nothing is downloaded."""
    models: Any = extra("torchvision", workload).models
    builder = models.get_model_builder(architecture)
    options: dict[str, Any] = {"num_classes": classes}
    if "weights_backbone" in signature(builder).parameters:
        options["weights_backbone"] = None  # or a segmentation model downloads those
    model: nn.Module = builder(weights=None, **options)
    if dropout is not None:
        set_dropout(model, dropout)
    return model


def set_dropout(model: nn.Module, rate: float) -> None:
    """Every dropout of a model, of whole layers (stochastic depth) and inside attention too."""
    for module in model.modules():
        layer: Any = module
        if "Dropout" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
            layer.p = rate
        elif isinstance(module, nn.MultiheadAttention):
            layer.dropout = rate
        elif isinstance(getattr(module, "attention_dropout", None), float):  # Swin's own attention
            layer.attention_dropout = rate


def main_output(output: Any) -> Tensor:
    """The scores; models with auxiliary heads return them beside."""
    if isinstance(output, Mapping):
        output = output["out"]
    elif isinstance(output, tuple):
        output = output[0]
    assert isinstance(output, Tensor)
    return output
