"""How a command's process ends: its exit status, and nothing that it said lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each case is a fork of one process, which imports once.
SCRIPT = """
import json, os, sys, threading, time
from optexp import __main__ as program

def case(main, stdout="out", closed=False):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(stdout, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stdout = None if closed else open(1, "w", closefd=False)
        program.main = main
        program.command()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), open("err").read()

def says():
    print("said")
    sys.exit(3)

def later():
    threading.Thread(target=lambda: (time.sleep(0.2), open("written", "w").write("all"))).start()
    sys.exit(0)

found = {
    "number": case(says),
    "nothing": case(lambda: None),
    "sentence": case(lambda: sys.exit("a reason")),
    "closed": case(lambda: sys.exit(4), closed=True),
    "full": case(lambda: (print("said"), sys.exit(0)), "/dev/full"),
    "full and failed": case(says, "/dev/full"),
    "thread": case(later),
}
print(json.dumps(found))
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
def test_the_end_of_a_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    found = {name: tuple(ending) for name, ending in json.loads(ran.stdout).items()}
    assert found == {
        "number": (3, ""),
        "nothing": (0, ""),
        "sentence": (1, "a reason\n"),
        "closed": (4, ""),
        "full": (120, ""),
        "full and failed": (3, ""),
        "thread": (0, ""),
    }, ran.stderr
    assert (tmp_path / "out").read_text() == "said\n"
    assert (tmp_path / "written").read_text() == "all"
