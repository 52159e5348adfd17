"""A stack in the user's own file: the patch applies, the file runs without optexp, and it is the program that was measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from optexp.result import Result, Verdict
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
    assert git(clone, "diff", "--name-only").split() == [name]
    return clone / name


def alone(code: str, folder: Path) -> str:
    """What plain Python prints, where optexp cannot be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE + code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def outside(before: bytes, after: bytes) -> list[bytes]:
    """The patched file without its block, and blank lines around it, beside the file as it was."""
    lines = after.splitlines(keepends=True)
    first = next(index for index, line in enumerate(lines) if line.startswith(b"# --- ") and b"optexp" in line)
    last = next(index for index, line in enumerate(lines) if line.startswith(b"# --- end of "))
    rest = b"".join(lines[:first]).rstrip() + b"".join(lines[last + 1 :]).strip()
    return [rest.replace(b"\r", b"").replace(b"\n", b""), before.replace(b"\r", b"").replace(b"\n", b"")]


CASES = [  # text, mode, stack, settings of the comparison of both files
    (MODEL + INPUTS, "forward", "amp", ("strategy.replace.precision=bfloat16",)),
    (MODEL + INPUTS, "forward", "inplace", ()),
    (MODEL + INPUTS, "forward", "inference_mode", ()),
    (MODEL + INPUTS, "forward", "inplace,amp,inference_mode", ("strategy.replace.precision=bfloat16",)),
    (MODEL + PAIR + LOSS, "forward_backward", "inplace,amp", ("strategy.replace.precision=bfloat16",)),
    (MODEL + PAIR + LOSS + OPTIMIZER, "train", "amp,fused_optimizer", ("strategy.replace.precision=bfloat16",)),
    (MODEL + PAIR + "loss = nn.MSELoss()\n", "forward_backward", "amp", ("strategy.replace.precision=bfloat16",)),
    (MODEL + PAIR + LEARNS, "train", "inplace,fused_optimizer", ()),
    (MODEL + LOADER + LEARNS, "train", "amp,fused_optimizer", ("strategy.replace.precision=bfloat16",)),
]
COMPILED = [
    (MODEL + INPUTS, "forward", "inplace,fusion", ()),
    (MODEL + PAIR + LOSS + OPTIMIZER, "train", "fusion,compiled_optimizer", ()),
    (MODEL + LOADER + LEARNS, "train", "amp,fusion,fused_optimizer", ("strategy.replace.precision=bfloat16",)),
]


@pytest.mark.parametrize(("text", "mode", "stack", "settings"), [*CASES, *(pytest.param(*c) for c in COMPILED)])
def test_the_patched_file_is_the_program_that_was_verified(
    text: str, mode: str, stack: str, settings: Sequence[str], tmp_path: Path
) -> None:
    root = repository(tmp_path, {"net.py": text.encode()})
    result = job(tmp_path / "job", root / "net.py", stack=stack, mode=mode)
    assert result.verdict is Verdict.VERIFIED, result.headline
    new = applied(tmp_path, root, tmp_path / "job" / "optimized.patch", "net.py")
    assert outside(text.encode(), new.read_bytes())[0] == outside(text.encode(), new.read_bytes())[1]
    assert "optexp" not in new.read_text().replace("measured by optexp", "")
    alone("import net, torch; net.Model().eval()(torch.ones(16, 8)).sum().backward()", new.parent)
    versions = ["strategy=replace", f"strategy.replace.target={new}", *settings]
    again = job(tmp_path / "again", root / "net.py", *versions, mode=mode)
    assert again.verdict is Verdict.VERIFIED, again.headline
