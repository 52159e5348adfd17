"""The structured log of a real compilation, kept in a process of its own as an arm keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optexp.profiling.compiler_log import CompilerLog, read

PROGRAM = """
import sys
from pathlib import Path
import torch
from optexp.kernelkit import structured_log

before = structured_log.overhead_s()
structured_log.keep(Path(sys.argv[1]))
call = torch.compile(lambda x: torch.nn.functional.gelu(x).sum(), backend=sys.argv[2])
x = torch.randn(64, requires_grad=True)
for _ in range(3):
    call(x).backward()
assert structured_log.overhead_s() > before
"""


def compiled(folder: Path, backend: str, cache: Path) -> CompilerLog:
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    program = [sys.executable, "-c", PROGRAM, str(folder), backend]
    done = subprocess.run(program, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FUSION" not in done.stderr  # the IR goes to the log alone
    return read(folder)


@pytest.mark.slow
def test_graphs_of_a_back_end_without_code(tmp_path: Path) -> None:
    log = compiled(tmp_path / "log", "aot_eager", tmp_path)
    stages = {section.direction: list(section.texts) for section in log.sections}
    assert stages == {"forward": ["captured", "transformed"], "backward": ["transformed"]}


@pytest.mark.slow
def test_ir_and_code_are_kept_also_where_they_come_from_the_cache(tmp_path: Path) -> None:
    for attempt in ("cold", "warm"):
        log = compiled(tmp_path / attempt, "inductor", tmp_path / "cache")
        found = {graph.direction: graph for graph in log.evidence(attempt).graphs}
        assert found.keys() == {"forward", "backward"}
        for graph in found.values():
            assert list(graph.files) == ["captured", "transformed", "ir_before", "ir_after", "generated"]
            assert graph.cached is (attempt == "warm")
            assert graph.kernels == 1
