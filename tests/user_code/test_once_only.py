"""Files whose lines a process allows once: optexp runs them in several processes, and twice in one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

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


def test_lines_that_a_process_allows_once_run_again_beside_another_arm(tmp_path: Path) -> None:
    with socket.socket() as taken:  # as another arm holds the port
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / "mine.py").write_text(SETTINGS % taken.getsockname()[1])
        done = subprocess.run([sys.executable, "-c", TWICE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
