"""A user's file as a module: its package, its neighbours, and the arguments that it does not see."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader

from optexp.errors import ConfigError
from optexp.strategies.replace import Replace
from optexp.user_code import importing
from optexp.user_code.importing import import_file, place_of
from optexp.user_code.lookup import find
from optexp.workloads.module import Module
from tests.export.test_repro import assert_same, executed, written

CPU = torch.device("cpu")
LAYERS = """
from torch import nn
SCALE = {scale}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        return self.lin(x) * SCALE
"""
MODEL = """
import torch
from torch import nn
from {layers} import Block
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def forward(self, x):
        return self.block(x)
def get_inputs():
    return [torch.randn(8, 4)]
"""


@pytest.fixture(autouse=True)
def _forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test meets another's modules, folders or arguments."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["optexp", "workload=module", "--width=3"])
    monkeypatch.setattr(importing, "_imported", {})
    monkeypatch.setattr(importing, "_folders", set())
    yield
    for name in [name for name, module in list(sys.modules.items()) if lies_in(module, tmp_path)]:
        del sys.modules[name]


def lies_in(module: ModuleType, folder: Path) -> bool:
    if type(module) is not ModuleType:  # torch.classes has a path of its own
        return False
    places = module.__dict__.get("__file__"), *(module.__dict__.get("__path__") or ())
    return any(str(place).startswith(str(folder)) for place in places)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def two_folders(folder: Path) -> tuple[Path, Path]:
    """Projects of the same file names, of which the second scales by 3."""
    files = [{"model.py": MODEL.format(layers="layers"), "layers.py": LAYERS.format(scale=s)} for s in (1.0, 3.0)]
    one, other = (write(folder / name, texts) / "model.py" for name, texts in zip("ab", files, strict=True))
    return one, other


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--width', default=7)\n"
        "WIDTH = p.parse_args().width",
        "import sys\nWIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 7",
        "import sys\nassert sys.argv == [__file__]\nWIDTH = 7",
        "from sys import argv\nWIDTH = 7 if argv[1:] == [] else 0",
    ],
)
def test_a_file_does_not_see_the_arguments_of_the_process(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, {"script.py": text}) / "script.py"
    assert import_file(path, "workload.path").WIDTH == 7


def test_nor_does_a_module_that_is_named(tmp_path: Path) -> None:
    sys.path.insert(0, str(write(tmp_path, {"named_by_path.py": "import sys\nARGUMENTS = list(sys.argv)"})))
    assert find("named_by_path:ARGUMENTS", "workload.target") == [str(tmp_path / "named_by_path.py")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()",
         r"calls sys.exit\(2\) while it is imported in line 4 \(p.parse_args\(\)\):"
         r" the following arguments are required: --data: put the lines .* below `if __name__"),
        ("import sys\ndef main():\n    print('trained')\nsys.exit(main())", r"calls sys.exit\(\) .* in line 4"),
        ("raise SystemExit('usage: train.py DATA')", "usage: train.py DATA"),
        ("try:\n    raise ValueError('Missing option --lr')\nexcept ValueError:\n    raise SystemExit(2)",
         "Missing option --lr"),
    ],
)  # fmt: skip
def test_a_file_that_exits_is_told_in_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    path = write(tmp_path, {"script.py": text}) / "script.py"
    with pytest.raises(ConfigError, match=told):
        import_file(path, "workload.path")


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    text = MODEL.format(layers="layers") + "\nopen(__file__ + '.log', 'a').write('x')\nNew = Model\n"
    path = write(tmp_path, {"train.py": text, "layers.py": LAYERS.format(scale=1.0)}) / "train.py"
    workload = Module(path=str(path))
    for dtype in (torch.float64, torch.float32):
        program = workload.build(CPU, dtype, 0)
    program.feed.reset(workload.batches(torch.Generator().manual_seed(0), 2))
    Replace(f"{path}:New").apply(program)
    assert Path(f"{path}.log").read_text() == "x"


# --- packages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("initialised", [True, False], ids=["package", "namespace"])
def test_relative_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initialised: bool) -> None:
    inner = LAYERS.format(scale=1.0).replace("SCALE = 1.0", "from ..settings import SCALE")
    files = {"pkg/model.py": MODEL.format(layers=".parts.block"), "pkg/parts/block.py": inner}
    files |= {"pkg/settings.py": "SCALE = 2.0"}
    files |= {"pkg/__init__.py": "", "pkg/parts/__init__.py": ""} if initialised else {}
    monkeypatch.chdir(write(tmp_path, files))
    module = import_file(Path("pkg/model.py"), "workload.path")
    assert module.__name__ == "pkg.model"
    assert sys.modules["pkg"].model is module
    assert find("pkg/model.py:Model", "strategy.replace.target") is module.Model
    assert pickle.loads(pickle.dumps(module.Model)) is module.Model
    workload = Module(path="pkg/model.py")
    program = workload.build(CPU, torch.float32, 0)
    strategy = Replace("pkg/model.py:Model")
    program.feed.reset(workload.batches(torch.Generator().manual_seed(0), 2))
    assert strategy.apply(program)[1]["old"] == "Model"
    optimized = written(tmp_path, Module(path="pkg/model.py"), (strategy,))
    assert_same(executed(tmp_path / "repro.py", monkeypatch), optimized)


def test_the_name_of_a_file_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"src/lib/nets/model.py": "from .block import Block", "src/lib/nets/__init__.py": "", "plain/m.py": ""}
    files |= {"src/lib/heads/model.py": "from ..nets.block import Block"}
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    assert place_of(tmp_path / "src/lib/nets/model.py").name == "nets.model"
    assert place_of(tmp_path / "src/lib/heads/model.py").name == "src.lib.heads.model"
    assert place_of(tmp_path / "plain/m.py").name == "m"
    assert place_of(tmp_path / "src/lib/nets/__init__.py").name == "nets"
    monkeypatch.chdir(tmp_path.parent.parent.parent.parent)
    assert place_of(tmp_path / "plain/m.py").name == "m"


def test_a_script_in_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    files = {"broken/__init__.py": "import there_is_no_such_module", "broken/model.py": "from layers import SCALE"}
    path = write(tmp_path, files | {"broken/layers.py": "SCALE = 2.0"}) / "broken/model.py"
    assert import_file(path, "workload.path").SCALE == 2.0


def test_a_file_beside_which_another_is_imported_by_its_plain_name(tmp_path: Path) -> None:
    files = {"pkg/__init__.py": "", "pkg/model.py": "from layers import SCALE", "pkg/layers.py": "SCALE = 2.0"}
    assert import_file(write(tmp_path, files) / "pkg/model.py", "workload.path").SCALE == 2.0


# --- the same names in two folders -------------------------------------------------------------------------------


def test_two_files_of_one_name_keep_their_neighbours(tmp_path: Path) -> None:
    one, other = (import_file(path, "workload.path") for path in two_folders(tmp_path))
    assert one.Block.forward.__globals__["SCALE"] == 1.0
    assert other.Block.forward.__globals__["SCALE"] == 3.0
    assert [import_file(path, "workload.path") for path in two_folders(tmp_path)] == [one, other]
    for module in (one, other):
        for cls in (module.Model, module.Block):
            assert vars(sys.modules[cls.__module__]) is cls.forward.__globals__  # where compilers look names up
            assert pickle.loads(cloudpickle.dumps(cls)) is cls


def test_two_packages_of_one_name(tmp_path: Path) -> None:
    for name, scale in (("a", "1.0"), ("b", "3.0")):
        text = "from .layers import SCALE\ndef late():\n    from . import more\n    return more.SCALE\n"
        files = {"pkg/__init__.py": "", "pkg/model.py": text, "pkg/layers.py": f"SCALE = {scale}"}
        write(tmp_path / name, files | {"pkg/more.py": "from pkg.layers import SCALE" if name == "a" else "SCALE = 4"})
    one, other = (import_file(tmp_path / name / "pkg/model.py", "workload.path") for name in "ab")
    assert (one.SCALE, other.SCALE) == (1.0, 3.0)
    assert (one.late(), other.late()) == (1.0, 4)


def test_a_file_with_the_name_of_an_installed_module(tmp_path: Path) -> None:
    path = write(tmp_path, {"random.py": "MINE = True"}) / "random.py"
    import random

    assert import_file(path, "workload.path").MINE
    assert sys.modules["random"] is random
    assert import_file(path, "workload.path") is import_file(path, "workload.path")


def test_a_second_implementation_of_the_same_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = two_folders(tmp_path)
    workload, strategy = Module(path=str(one)), Replace(f"{other}:Model")
    optimized = written(tmp_path, workload, (strategy,))
    assert_same(executed(tmp_path / "repro.py", monkeypatch), optimized)


def test_a_compiler_reads_the_globals_of_the_file_it_compiles(tmp_path: Path) -> None:
    models = [import_file(path, "workload.path").Model() for path in two_folders(tmp_path)]
    x = torch.randn(8, 4)
    for model in models:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))


def test_workers_of_a_loader_find_what_a_file_defines(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom .size import SIZE\nclass Data(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, index):\n        return torch.full((SIZE,), float(index))\n"
    )
    files = {"pkg/__init__.py": "", "pkg/size.py": "SIZE = 3", "pkg/data.py": text}
    module = import_file(write(tmp_path, files) / "pkg/data.py", "workload.path")
    loader = DataLoader(module.Data(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert [batch.shape for batch in loader] == [(4, 3), (4, 3)]


@pytest.mark.slow
def test_another_thread_may_import_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alone.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    interval, ends = sys.getswitchinterval(), threading.Event()

    def imports() -> None:
        count = 0
        while not ends.is_set():
            sys.modules[f"made_{count % 50}"] = ModuleType("made")
            sys.modules.pop(f"made_{(count + 25) % 50}", None)
            count += 1

    other = threading.Thread(target=imports)
    sys.setswitchinterval(1e-6)
    other.start()
    try:
        for _ in range(25):
            with importing._alone(place_of(tmp_path / "alone.py")):
                pass
    finally:
        ends.set()
        other.join()
        sys.setswitchinterval(interval)
        for name in [name for name in list(sys.modules) if name.startswith("made_")]:
            del sys.modules[name]


def test_a_file_written_again_within_a_second_comes_with_its_new_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "factor.py"
    for factor in (1, 2):
        path.write_text(f"FACTOR = {factor}")
        os.utime(path, (1e9, 1e9))
        found = import_file(path, "workload.path", anew=True)
        assert factor == found.FACTOR
