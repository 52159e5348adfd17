"""Torchvision's models by name. Where it is not installed, a stand-in with the same few functions takes its place."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from optexp.comparison import runner
from optexp.config import search_path
from optexp.errors import ConfigError, Unsupported
from optexp.workloads.training import Training
from optexp.workloads.vision import Vision
from tests.reached import measured

CPU = torch.device("cpu")


class Small(nn.Module):
    """Convolution, batch norm, dropout; scores of the image, or of each pixel beside an auxiliary head's."""

    def __init__(self, classes: int, pixels: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head, self.pixels = nn.Conv2d(8, classes, 1), pixels

    def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
        scores = self.head(self.body(x))
        return {"out": scores, "aux": scores * 2} if self.pixels else scores.mean((2, 3))


def resnet50(*, weights: None = None, num_classes: int = 1000) -> nn.Module:
    assert weights is None
    return Small(num_classes)


def fcn_resnet50(*, weights: None = None, num_classes: int = 21, weights_backbone: str | None = "some") -> nn.Module:
    assert weights is None
    assert weights_backbone is None, "nothing is downloaded"
    return Small(num_classes, pixels=True)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    models.segmentation = ModuleType("torchvision.models.segmentation")  # type: ignore[attr-defined]
    models.list_models = {models: ["resnet50"], models.segmentation: ["fcn_resnet50"]}.__getitem__  # type: ignore[attr-defined]
    models.get_model_builder = {"resnet50": resnet50, "fcn_resnet50": fcn_resnet50}.__getitem__  # type: ignore[attr-defined]
    package = ModuleType("torchvision")
    package.models, package.__path__, package.__spec__ = models, [], ModuleSpec("torchvision", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def run(workload: Vision | Training) -> dict[str, Tensor]:
    program = workload.build(CPU, torch.float32, seed=0)
    program.feed.reset([workload.batch(torch.Generator().manual_seed(0))])
    return program.run()


def test_missing_library_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    workload = Vision().resolve("cpu")
    with pytest.raises(Unsupported) as reason:
        workload.model()
    assert str(reason.value) == "workload=vision needs torchvision: pip install 'optexp[models]'"


def test_an_unknown_name_is_answered_with_the_nearest(torchvision):
    with pytest.raises(ConfigError, match=r"architecture=resnet5 is not allowed \(did you mean resnet50"):
        Vision(architecture="resnet5").resolve("cpu")


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
@pytest.mark.parametrize("architecture", ["resnet50", "fcn_resnet50"])
def test_every_mode_of_classification_and_segmentation(torchvision, architecture: str, mode: str):
    workload = Vision(mode=mode, architecture=architecture, image=8, classes=5).resolve("cpu")
    outputs = run(workload)
    names = {"resnet50": ["output"], "fcn_resnet50": ["output.out", "output.aux"]}[architecture]
    assert list(outputs) == (names if mode == "forward" else ["loss"])


def test_dropout_is_off_unless_asked_for(torchvision):
    rates = {0.0: 0.0, 0.3: 0.3, None: 0.5}
    for given, expected in rates.items():
        assert Vision(dropout=given).model().body[3].p == expected


def test_training_takes_torchvisions_resnet(torchvision):
    workload = Training(architecture="resnet50", image=16, batch_size=2, data="synthetic").resolve("cpu")
    assert workload.batch(torch.Generator().manual_seed(0))[0].shape == (2, 3, 16, 16)
    assert run(workload)["loss"].isfinite()


@pytest.mark.slow
def test_a_network_with_batch_norm_has_a_reference_and_equals_itself(torchvision, tmp_path: Path):
    settings = ["isolation=none", "device=cpu", "measurement=quick", "tracking.enabled=false"]
    quicker = ["measurement.warmup_s=0.3", "measurement.block_ms=10", "measurement.pairs=10"]
    workload = ["workload=vision", "workload.mode=train", "workload.image=8", "workload.classes=5"]
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        result = runner.run(compose("config", overrides=[*settings, *quicker, *workload]), tmp_path)
    assert measured(result), result.headline
    assert result.equivalence.bitwise
