"""A stack in the user's file: the patch applies, the file needs no optexp, and is the program that was verified."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from optexp.comparison.runner import leave_patch
from optexp.export.patch import applied_at
from optexp.program import STEPS, Program, ResidentFeed
from optexp.records.patch import Patch
from optexp.result import Result, Verdict
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fused_optimizer import FusedOptimizer
from optexp.strategies.fusion import Fusion
from optexp.strategies.inference_mode import InferenceMode
from optexp.strategies.inplace import Inplace
from optexp.strategies.pinned_memory import PinnedMemory
from optexp.strategies.prefetch import Prefetch
from optexp.strategies.replace import Replace
from optexp.strategies.tf32 import Tf32
from optexp.strategy import Strategy
from optexp.workloads.module import Module
from tests.test_every_choice import run

ALONE = "import sys; sys.modules['optexp'] = None\n"
MODEL = """\
\"\"\"A user's file.\"\"\"
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16):
        super(Model, self).__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x) + 1)) * 0.5


"""
INPUTS = "def get_inputs():\n    return [torch.randn(16, 8)]\n"
PAIR = "def get_inputs():\n    return [torch.randn(16, 8), torch.randn(16, 4)]\n\n\n"
LOSS = "def loss(outputs, batch):\n    return (outputs - batch[1]).square().mean()\n"
OPTIMIZER = "\n\ndef get_optimizer(params):\n    return torch.optim.AdamW(params, lr=1e-2)\n"
STEP = """\


def train_step(model, batch, optimizer):
    for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
        ((model(x) - y).square().mean() / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
LOADER = """\
from torch.utils.data import DataLoader, TensorDataset


def get_loader():
    made = torch.Generator().manual_seed(1)
    pairs = TensorDataset(torch.randn(64, 8, generator=made), torch.randn(64, 4, generator=made))
    return DataLoader(pairs, batch_size=16, shuffle=True)
"""
GUARD = '\n\n# as a script\nif __name__ == "__main__":\n    print(Model()(get_inputs()[0]).shape)\n'
LEARNS = OPTIMIZER + STEP


def git(folder: Path, *arguments: str) -> str:
    """What git prints, as a user who has configured nothing."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def repository(folder: Path, files: dict[str, bytes]) -> Path:
    (root := folder / "theirs").mkdir()
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all")
    return root


def job(folder: Path, path: Path, *overrides: str, stack: str = "", mode: str = "forward") -> Result:
    settings = ["workload=module", f"workload.path={path}", f"workload.mode={mode}", "verify=only", "patch=verified"]
    return run(folder, *settings, *([f"strategy=[{stack}]"] if stack else []), *overrides)


def applied(folder: Path, root: Path, patch: Path, name: str) -> Path:
    """The file in a fresh clone to which the patch was applied."""
    clone = folder / "clone"
    git(folder, "clone", "-q", str(root), str(clone))
    git(clone, "apply", str(patch))
    assert git(clone, "diff", "--name-only").splitlines() == [name]
    return clone / name


def alone(code: str, folder: Path) -> str:
    """What plain Python prints, where optexp cannot be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE + code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as a module, made where optexp cannot be imported."""
    module = ModuleType(path.stem)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "optexp", None)
        patched.setitem(sys.modules, path.stem, module)
        exec(compile(path.read_text(), path, "exec"), vars(module))
    return module


def rest(after: bytes) -> bytes:
    """The patched file without its block."""
    return re.sub(rb"(\r?\n){2}# --- [^\n]* verified by optexp.*\n# --- end of [^\n]*\n", b"", after, flags=re.DOTALL)


CASES = [  # text, mode, stack, settings of the comparison of both files
    (MODEL + INPUTS, "forward", "amp", ("strategy.replace.precision=bfloat16",)),
    (MODEL + INPUTS, "forward", "inference_mode", ()),
    (MODEL + INPUTS, "forward", "amp,inference_mode", ("strategy.replace.precision=bfloat16",)),
    (MODEL + PAIR + LOSS + OPTIMIZER, "train", "amp,fused_optimizer", ("strategy.replace.precision=bfloat16",)),
    (MODEL + PAIR + "loss = nn.MSELoss()\n", "forward_backward", "amp", ("strategy.replace.precision=bfloat16",)),
]
IMAGES = MODEL.replace("nn.Linear(8, width)", "nn.Conv2d(3, width, 3)").replace(
    "nn.Linear(width, 4)", "nn.Conv2d(width, 4, 3)"
) + INPUTS.replace("16, 8", "2, 3, 9, 9")
CASES += [(IMAGES, "forward", "channels_last", ())]
LONGER = [
    (MODEL + PAIR + LOSS, "forward_backward", "amp", ("strategy.replace.precision=bfloat16",)),
    (MODEL + LOADER + LEARNS, "train", "amp,fused_optimizer", ("strategy.replace.precision=bfloat16",)),
    (MODEL + PAIR + LEARNS, "train", "fused_optimizer", ()),
    (MODEL + INPUTS, "forward", "fusion", ()),
    (MODEL + PAIR + LOSS + OPTIMIZER, "train", "fusion,compiled_optimizer", ()),
    (MODEL + LOADER + LEARNS, "train", "amp,fusion,fused_optimizer", ("strategy.replace.precision=bfloat16",)),
]


@pytest.mark.parametrize(
    ("text", "mode", "stack", "settings"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER)]
)
def test_the_patched_file_is_the_program_that_was_verified(
    text: str, mode: str, stack: str, settings: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repository(tmp_path, {"net.py": text.encode()})
    result = job(tmp_path / "job", root / "net.py", stack=stack, mode=mode)
    assert result.verdict is Verdict.VERIFIED, result.headline
    new = applied(tmp_path, root, tmp_path / "job" / "optimized.patch", "net.py")
    assert rest(new.read_bytes()) == text.encode()
    output = imported(new, monkeypatch).Model().eval()(torch.ones(2, 3, 9, 9) if text == IMAGES else torch.ones(16, 8))
    assert output.dtype is (torch.bfloat16 if "amp" in stack else torch.float32)
    output.sum().backward()
    versions = ["strategy=replace", f"strategy.replace.target={new}", *settings]
    again = job(tmp_path / "again", root / "net.py", *versions, mode=mode)
    assert again.verdict is Verdict.VERIFIED, again.headline


NESTED = MODEL.replace("width=16):", "width=8, inner=True):").replace(
    "nn.Linear(width, 4)", "(Model(8, False) if inner else nn.Linear(width, 4))"
)


def test_autocast_ends_with_a_model_that_holds_another_of_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repository(tmp_path, {"net.py": (NESTED + INPUTS).encode()})
    job(tmp_path / "job", root / "net.py", stack="amp")
    new = imported(applied(tmp_path, root, tmp_path / "job" / "optimized.patch", "net.py"), monkeypatch)
    assert new.Model()(torch.ones(2, 8)).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_other_arguments_of_a_function_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MODEL + LOADER + LEARNS
    text = text.replace("get_optimizer(params)", "get_optimizer(params, rate=1e-2)").replace("lr=1e-2", "lr=rate")
    text = text.replace("get_loader()", "get_loader(size=16)").replace("batch_size=16", "batch_size=size")
    root = repository(tmp_path, {"net.py": text.encode()})
    workload = Module(path=str(root / "net.py"), mode="train")
    program = Program(torch.nn.Linear(1, 1), STEPS["forward"], ResidentFeed(torch.device("cpu")))
    stack = [FusedOptimizer(), PinnedMemory(0)]
    found = workload.patch(program, stack, {"pinned_memory": {"copies": False}})
    assert found is not None
    (tmp_path / "both.patch").write_bytes(found.diff)
    new = imported(applied(tmp_path, root, tmp_path / "both.patch", "net.py"), monkeypatch)
    assert new.get_optimizer([*new.Model().parameters()], 0.5).param_groups[0]["lr"] == 0.5
    assert new.get_loader(size=8).batch_size == 8


@pytest.mark.slow
def test_the_patched_file_is_the_next_baseline(tmp_path: Path) -> None:
    root = repository(tmp_path, {"net.py": (MODEL + LOADER + LEARNS).encode()})
    job(tmp_path / "job", root / "net.py", stack="fused_optimizer", mode="train")
    new = applied(tmp_path, root, tmp_path / "job" / "optimized.patch", "net.py")
    result = job(tmp_path / "again", new, stack="amp", mode="train")
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert "optimized.patch puts amp into net.py" in result.notes[-1]
    assert job(tmp_path / "itself", new, mode="train").verdict is Verdict.VERIFIED
    git(new.parent, "apply", str(tmp_path / "again" / "optimized.patch"))
    assert new.read_text().count("# --- end of ") == 2


def patched(text: bytes, tmp_path: Path, name: str = "net.py", **files: bytes) -> bytes:
    """The file after inference_mode was put into it."""
    root = repository(tmp_path, {name: text, **files})
    result = job(tmp_path / "job", root / name, stack="inference_mode")
    assert result.verdict is Verdict.VERIFIED, result.headline
    return applied(tmp_path, root, tmp_path / "job" / "optimized.patch", name).read_bytes()


def test_a_block_stands_before_what_runs_as_a_script(tmp_path: Path) -> None:
    text = patched((MODEL + INPUTS + GUARD).encode(), tmp_path).decode()
    assert text.endswith("# --- end of inference_mode ---\n" + GUARD)
    assert alone("import runpy; runpy.run_path('net.py', run_name='__main__')", tmp_path / "clone") == (
        "torch.Size([16, 4])\n"
    )


def test_carriage_returns_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    text = (MODEL + INPUTS).rstrip().replace("\n", "\r\n").encode()
    new = patched(text, tmp_path)
    assert new.startswith(text + b"\r\n")
    assert new.count(b"\n") == new.count(b"\r\n") == 30


def test_a_mark_of_utf_8_and_letters(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbf" + (MODEL + INPUTS).replace("user's", "utilisateur · äöü").encode()
    assert rest(patched(text, tmp_path)) == text


def test_a_file_of_a_package(tmp_path: Path) -> None:
    head, body = (MODEL + INPUTS).split("\n\n\n", 1)
    text = f"{head}\nfrom .parts import WIDTH\n\n\n{body.replace('width=16', 'width=WIDTH')}".encode()
    new = patched(text, tmp_path, "my pack/net.py", **{"my pack/__init__.py": b"", "my pack/parts.py": b"WIDTH = 8\n"})
    assert rest(new) == text


def test_outside_a_repository_it_applies_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "net.py").write_text(MODEL + INPUTS)
    monkeypatch.chdir(tmp_path)
    job(tmp_path / "job", Path("nets/net.py"), stack="inference_mode")
    git(tmp_path, "apply", str(tmp_path / "job" / "optimized.patch"))
    assert "inferring" in (tmp_path / "nets" / "net.py").read_text()
    monkeypatch.chdir(tmp_path / "job")
    assert applied_at(tmp_path / "nets" / "net.py") == "net.py"


def test_flags_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL + INPUTS)
    program = Program(torch.nn.Linear(1, 1), STEPS["forward"], ResidentFeed(torch.device("cpu")))
    found = Module(path=str(tmp_path / "net.py")).patch(program, [Tf32()], {})
    assert found is not None
    added = [line for line in found.diff.decode().splitlines() if line.startswith("+torch")]
    assert added == ['+torch.set_float32_matmul_precision("high")', "+torch.backends.cudnn.allow_tf32 = True"]


def test_workers_of_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = repository(tmp_path, {"net.py": (MODEL + LOADER + LEARNS).encode()})
    workload = Module(path=str(root / "net.py"), mode="train")
    program = Program(torch.nn.Linear(1, 1), STEPS["forward"], ResidentFeed(torch.device("cpu")))
    for copies, workers, lines in ((True, None, 1), (True, 2, 3), (False, 1, 2)):
        notes: dict[str, Any] = {"pinned_memory": {"copies": copies}}
        found = workload.patch(program, [PinnedMemory(workers)], notes)
        assert found is not None
        assert found.diff.count(b"+    loader.") == lines
    (tmp_path / "workers.patch").write_bytes(found.diff)
    new = imported(applied(tmp_path, root, tmp_path / "workers.patch", "net.py"), monkeypatch)
    loader = new.get_loader()
    assert (loader.num_workers, loader.prefetch_factor, loader.pin_memory) == (1, 2, False)
    assert len(list(loader)) == 4


def test_a_loader_that_pins_is_copied_without_waiting(tmp_path: Path) -> None:
    pins = LOADER.replace("shuffle=True", "shuffle=True, pin_memory=True")
    for text, expected in ((LOADER, False), (pins, True)):
        (tmp_path / "net.py").write_text(MODEL + text + LEARNS)
        program = Module(path=str(tmp_path / "net.py"), mode="train").build(torch.device("cpu"), torch.float32, 0)
        assert getattr(program.feed, "non_blocking") is expected  # noqa: B009  # of this feed


def test_patch_applies_it_as_well(tmp_path: Path) -> None:
    root = repository(tmp_path, {"net.py": (MODEL + INPUTS).encode()})
    job(tmp_path / "job", root / "net.py", stack="inference_mode")
    if shutil.which("patch") is None:
        pytest.skip("there is no patch here")
    subprocess.run(["patch", "-sp1", "-i", str(tmp_path / "job" / "optimized.patch")], cwd=root, check=True)
    assert "inferring" in (root / "net.py").read_text()


@pytest.mark.slow
def test_a_class_of_another_file_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"import torch\nfrom nets import Net\n\nModel = Net\n\n\n" + INPUTS.encode()
    new = patched(text, tmp_path, **{"nets.py": MODEL.replace("Model", "Net").encode()})
    assert b"class Model(Model):" in new
    code = "import net, nets; print(net.Model.forward is nets.Net.forward, issubclass(net.Model, nets.Net))"
    assert alone(code, tmp_path / "clone") == "False True\n"


FACTORY = "import torch\nfrom torch import nn\n\n\ndef Model():\n    return nn.Linear(8, 4)\n\n\n"
LATE = MODEL.split("class")[0] + GUARD + MODEL[MODEL.index("class") :]
NONE: dict[str, Any] = {}
TAKEN = INPUTS + "inferring = 1\n"


@pytest.mark.parametrize(
    ("text", "settings", "strategy", "notes", "reason"),
    [
        (MODEL + PAIR, {"mode": "train"}, Amp(), {"loss_scaling": False}, "amp: the file has no loss"),
        (MODEL + PAIR + LOSS, {"mode": "train", "loss": "mse_loss"}, Fusion(), {"captures": False},
         "fusion: workload.loss= takes the place of the file's loss"),
        (MODEL + PAIR + "loss = nn.functional.mse_loss\n", {"mode": "train"}, Fusion(), {"captures": False},
         "fusion: loss is torch's own function: write it as `def loss(outputs, batch)`"),
        (MODEL + PAIR + LEARNS, {"mode": "train"}, Amp("float16"), {"loss_scaling": True},
         "amp: float16 needs a loss scale, and the file has no step that could hold one: use bfloat16"),
        (MODEL + PAIR + LOSS, {"mode": "train"}, FusedOptimizer(), NONE,
         "fused_optimizer: the file has no get_optimizer"),
        (MODEL + INPUTS, {}, Fusion(backend="kernels"), NONE,
         "fusion: backend=kernels is code of optexp's, which repro.py carries along"),
        (MODEL + INPUTS, {}, Fusion(mode="reduce-overhead"), {"captures": True},
         "fusion: mode=reduce-overhead overwrites the results of a call at the next, which the file may keep"),
        (MODEL + INPUTS, {}, Fusion(mode="max-autotune"), {"captures": False},
         "fusion: mode=max-autotune overwrites the results of a call at the next, which the file may keep"),
        (MODEL + INPUTS, {}, Inplace(), NONE,
         "inplace: the rewritten forward is the graph of this one model, which other arguments of its class, changed"
         " attributes and edits of the file would not reach; repro.py holds it"),
        (MODEL + PAIR + LOSS, {"mode": "train"}, CudaGraph(), {"parameters": 4},
         "cuda_graph: the file has no train_step"),
        (MODEL + INPUTS, {}, CudaGraph(scope="model"), NONE,
         "cuda_graph: scope=model records a part of a step, and a file holds none; use scope=step"),
        (MODEL + "def get_loader():\n    yield torch.ones(2, 8)\n", {}, PinnedMemory(), {"copies": True},
         "pinned_memory: get_loader() returns no DataLoader"),
        (MODEL + INPUTS, {}, Prefetch(), NONE, "prefetch: it changes nothing that has a name in the file"),
        (MODEL + INPUTS, {}, Replace("a.py"), NONE, "replace: a.py is a file already"),
        (FACTORY + INPUTS, {}, Amp(), NONE,
         "Model is no class of a model and no function: name the class by workload.names.model="),
        (MODEL + TAKEN, {}, InferenceMode(), NONE,
         "the file has a name inferring of its own, which the block would bind anew"),
        (LATE + INPUTS, {}, InferenceMode(), NONE, "Model is defined below `if __name__ == ...`: move it above"),
    ],
)  # fmt: skip
def test_half_a_patch_is_none(
    text: str, settings: dict[str, Any], strategy: Strategy, notes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(text)
    workload = Module(path=str(tmp_path / "net.py"), **settings)
    program = Program(torch.nn.Linear(1, 1), STEPS["forward"], ResidentFeed(torch.device("cpu")))
    found = workload.patch(program, [strategy], {strategy.name: notes})
    assert found is not None
    assert (found.reason, found.diff) == (reason, b"")


@pytest.mark.parametrize(
    ("verdict", "asked", "reason", "written"),
    [
        (Verdict.FASTER, "faster", "", True),
        (Verdict.SAME, "faster", "", False),
        (Verdict.SAME, "verified", "", True),
        (Verdict.VERIFIED, "faster", "", False),
        (Verdict.NOT_EQUIVALENT, "verified", "", False),
        (Verdict.FASTER, "faster", "amp: the file has no loss", False),
    ],
)
def test_only_a_verified_gain_is_written(
    verdict: Verdict, asked: str, reason: str, written: bool, tmp_path: Path
) -> None:
    result = SimpleNamespace(verdict=verdict, notes=[])
    experiment = SimpleNamespace(patch=asked)
    (tmp_path / "optimized.patch").write_bytes(b"an earlier job's")
    patch = Patch("net.py", b"" if reason else b"--- a/net.py", reason)
    session: Any = SimpleNamespace(result=result, experiment=experiment, output=tmp_path, patch=patch, stack=[Amp()])
    leave_patch(session)
    file = tmp_path / "optimized.patch"
    assert file.exists() == written
    if written:
        assert file.read_bytes() == b"--- a/net.py"
        assert result.notes == [f"optimized.patch puts amp into net.py: git apply {file}"]
    else:
        assert result.notes == ([f"no optimized.patch: {reason}"] if reason else [])


# --- two versions of a file --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("optimizer.step()", "optimizer.step()", Verdict.VERIFIED),
        ("(model(x) - y)", "(y - model(x))", Verdict.VERIFIED),
        ("parameters(), 1.0)", "parameters(), 0.1)", Verdict.NOT_EQUIVALENT),
        ("lr=1e-2", "lr=2e-2", Verdict.NOT_EQUIVALENT),
        ("torch.relu", "torch.tanh", Verdict.NOT_EQUIVALENT),
        ("self.first", "self.inner", Verdict.VERIFIED),
    ],
)
def test_a_whole_file_takes_the_place_of_another(old: str, new: str, verdict: Verdict, tmp_path: Path) -> None:
    text = MODEL + PAIR + LEARNS
    (tmp_path / "before.py").write_text(text)
    (tmp_path / "after.py").write_text(text.replace(old, new))
    second = ["strategy=replace", f"strategy.replace.target={tmp_path / 'after.py'}"]
    result = job(tmp_path / "job", tmp_path / "before.py", *second, mode="train")
    assert result.verdict is verdict, result.headline


def test_a_whole_file_is_fed_what_the_other_is(tmp_path: Path) -> None:
    text = MODEL + LOADER + "\n\n" + LOSS + OPTIMIZER
    (tmp_path / "before.py").write_text(text)
    (tmp_path / "after.py").write_text(text.replace("batch_size=16", "batch_size=8"))
    second = ["strategy=replace", f"strategy.replace.target={tmp_path / 'after.py'}"]
    result = job(tmp_path / "job", tmp_path / "before.py", *second, mode="train")
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert (
        "its loader gives 8 batches an epoch (the baseline's 4); its batch 0 holds 0 [8, 8] float32" in result.headline
    )


def test_other_names_in_a_whole_file_excuse_nothing(tmp_path: Path) -> None:
    text = MODEL + PAIR + LEARNS
    (tmp_path / "before.py").write_text(text)
    (tmp_path / "after.py").write_text(text.replace("self.first", "self.inner").replace("lr=1e-2", "lr=2e-2"))
    second = ["strategy=replace", f"strategy.replace.target={tmp_path / 'after.py'}"]
    result = job(tmp_path / "job", tmp_path / "before.py", *second, mode="train")
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline
    assert "inner" not in result.headline  # it has the baseline's names


def test_a_lower_precision_is_promised(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(MODEL + INPUTS)
    autocast = 'Model.forward = torch.autocast("cpu", torch.bfloat16)(Model.forward)\n'
    (tmp_path / "after.py").write_text(MODEL + INPUTS + autocast)
    second = ["strategy=replace", f"strategy.replace.target={tmp_path / 'after.py'}"]
    assert job(tmp_path / "one", tmp_path / "before.py", *second).verdict is Verdict.NOT_EQUIVALENT
    promised = [*second, "strategy.replace.precision=bfloat16"]
    assert job(tmp_path / "two", tmp_path / "before.py", *promised).verdict is Verdict.VERIFIED


def test_a_whole_file_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "after.py").write_text(MODEL + INPUTS)
    second = ["strategy=replace", f"strategy.replace.target={tmp_path / 'after.py'}"]
    result = run(tmp_path / "job", "workload=gelu", "workload.size=8", *second)
    assert result.verdict is Verdict.UNSUPPORTED
    assert "give workload=module workload.path=, or name a model in it" in result.headline
    result = job(tmp_path / "two", tmp_path / "after.py", *second, "strategy.replace.args=[3]")
    assert "args, kwargs, names and of_model are for one name of a file" in result.headline
