"""A program that compiles itself: its breaks are named, its graphs are files, and its log is kept, of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from optexp.comparison import runner
from optexp.config import search_path
from optexp.result import Result, Verdict

PROGRAM = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x):
        x = self.first(x)
        print(end="")
        if x.sum() > 100:
            x = x / 2
        return self.second(x) * x.abs().max().item()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.net.compile(backend="aot_eager", dynamic=False)

    def forward(self, x):
        return self.net(x)


def get_inputs():
    return [torch.randn(4, 8)]


def get_init_inputs():
    return []
"""
LINES = {text: number for number, text in enumerate(PROGRAM.splitlines(), 1)}
PRINT, BRANCH, ITEM = (
    f"own.py:{next(number for line, number in LINES.items() if text in line)}" for text in ("print(", "if x", ".item(")
)


def profiled(folder: Path, *overrides: str) -> Result:
    search_path.register()
    quick = ["mode=profile", "measurement=quick", "measurement.process_s=0.5", "measurement.warmup_s=0.2", "device=cpu"]
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*quick, "tracking.enabled=false", *overrides])
    return runner.run(config, folder, show=lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiled")


@pytest.fixture(scope="module")
def found(folder: Path) -> Result:
    (folder / "own.py").write_text(PROGRAM)
    workload = ["workload=module", f"workload.path={folder / 'own.py'}"]
    result = profiled(folder / "out", *workload, "isolation=process")
    assert result.verdict is Verdict.PROFILED, result.headline
    return result


def test_each_graph_break_is_named_with_file_and_line(found: Result) -> None:
    notes = "\n".join(found.notes)
    assert f"graph break at {PRINT} (call of print)" in notes
    assert f"graph break at {BRANCH} (branch on the value of a tensor)" in notes
    assert f"graph break at {ITEM} (Tensor.item())" in notes


def test_graphs_are_in_the_record_and_their_texts_beside_it(found: Result, folder: Path) -> None:
    compiler = found.profile.baseline.compiler
    assert len(compiler.graphs) >= 4
    for graph in compiler.graphs:
        for file in graph.files.values():
            assert (folder / "out" / file).stat().st_size
    assert list((folder / "out" / compiler.log).glob("*.log"))
    assert "aten.addmm" in (folder / "out" / "compiler.html").read_text()


def test_objects_in_one_process_keep_no_log(tmp_path: Path) -> None:
    result = profiled(tmp_path, "workload=mlp", "workload.dim=16", "workload.layers=2", "isolation=none")
    assert not (tmp_path / "compiler").exists()
    assert result.profile.baseline.compiler is None
