"""Files whose lines a process allows once: optexp runs them in several processes, and twice in one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optexp.user_code.importing import import_file

SETTINGS = """
import os
import hydra
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "%d"
mp.set_start_method("spawn")
torch.set_num_interop_threads(1)
dist.init_process_group("gloo", rank=0, world_size=1)
hydra.initialize(version_base=None)
total = torch.ones(2)
dist.all_reduce(total)
"""
TWICE = """
import multiprocessing
from pathlib import Path
import torch
from optexp.user_code.importing import import_file
before = torch.set_num_interop_threads, torch.distributed.init_process_group, multiprocessing.set_start_method
for _ in range(2):
    assert import_file(Path("mine.py"), "workload.path", anew=True).total.tolist() == [1.0, 1.0]
assert multiprocessing.get_start_method() == "spawn"
assert before == (
    torch.set_num_interop_threads, torch.distributed.init_process_group, multiprocessing.set_start_method)
"""

OPERATORS = """
import torch
from torch.library import Library
lib = Library("once_only", "DEF")
lib.define("scaled(Tensor x, float a) -> Tensor")
lib.impl("scaled", lambda x, a: a * x, "CompositeExplicitAutograd")
torch.library.register_fake("once_only::scaled", lambda x, a: torch.empty_like(x), lib=lib)
torch.library.define("once_only::raised", "(Tensor x) -> Tensor")
torch.library.impl("once_only::raised", "CompositeExplicitAutograd", lambda x: x + len(__file__))
scaled = torch.ops.once_only.scaled.default
"""


def test_operators_are_defined_again_and_the_newest_kernel_is_called(tmp_path: Path) -> None:
    modules = []
    for name in ("first.py", "first.py", "other.py"):
        (tmp_path / name).write_text(OPERATORS.replace("a * x", "2 * a * x") if name == "other.py" else OPERATORS)
        modules.append(import_file(tmp_path / name, "workload.path", anew=True))
    assert torch.library.Library.__module__ == "torch.library"
    assert [module.scaled(torch.ones(1), 3.0).item() for module in modules] == [6.0, 6.0, 6.0]
    path = str(tmp_path / "other.py")
    assert torch.ops.once_only.raised(torch.zeros(1)).item() == len(path)


@pytest.mark.slow
def test_lines_that_a_process_allows_once_run_again_beside_another_arm(tmp_path: Path) -> None:
    with socket.socket() as taken:  # as another arm holds the port
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / "mine.py").write_text(SETTINGS % taken.getsockname()[1])
        done = subprocess.run([sys.executable, "-c", TWICE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
