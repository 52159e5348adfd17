"""What compilers made of our kernels is written down: of variants that ran, and of libraries that were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from optexp.kernelkit import assembly, extension
from optexp.kernelkit.assembly import Code

USAGE = """
Resource usage:
 Function _ZN6optexp12relu_forwardIfLi4EEEvPKT_PS1_l:
  REG:24 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [Code("gelu_forward", warps, 16 * warps, 0, 512, "ptx", "LDG.E.128 R4; STG.E.128 R4;") for warps in (4, 8)]
    monkeypatch.setattr(assembly, "compiled", lambda: iter(codes))
    monkeypatch.setattr(assembly, "_cuobjdump", lambda option, path: USAGE if option == "-res-usage" else "sass of it")
    monkeypatch.setattr(extension, "loaded", {})


def test_variants_that_ran_and_libraries_are_written(built: None, tmp_path: Path) -> None:
    extension.loaded["relu"] = tmp_path / "relu.so"
    assembly.write(tmp_path / "code", {("gelu_forward", 8), ("another", 4)})
    written = sorted(path.name for path in (tmp_path / "code").iterdir())
    assert written == ["gelu_forward-0.ptx", "gelu_forward-0.sass", "registers.md", "relu.cu.sass"]
    table = (tmp_path / "code" / "registers.md").read_text().splitlines()
    assert table[2] == "| gelu_forward-0 | 8 | 128 | 0 | 512 | 1 LDG.128, 1 STG.128 |"
    assert table[3] == "| relu.cu: `_ZN6optexp12relu_forwardIfLi4EEEvPKT_PS1_l` | | 24 | 8 bytes | 1024 | |"


def test_all_variants_are_written_where_nobody_says_which_ran(built: None, tmp_path: Path) -> None:
    assembly.write(tmp_path)
    assert len(list(tmp_path.glob("*.sass"))) == 2


def test_where_nothing_of_ours_ran_there_is_no_folder(built: None, tmp_path: Path) -> None:
    assembly.write(tmp_path / "code", {("ampere_sgemm_128x64_tn", 8)})
    assert not (tmp_path / "code").exists()
