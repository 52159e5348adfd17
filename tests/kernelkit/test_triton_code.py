"""Compiled code of Triton kernels: Inductor's launchers and kernels as they are written, and their files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from optexp.kernelkit import triton_code
from optexp.kernelkit.triton_code import Variant, inductor_variant, written_variant


def test_a_launcher_of_inductor_has_its_code_in_tritons_cache(tmp_path: Path) -> None:
    (tmp_path / "HASH").mkdir()
    (tmp_path / "HASH" / "triton_red_0.ptx").write_text(".visible .entry")
    (tmp_path / "HASH" / "triton_red_0.cubin").write_bytes(b"elf")
    config = SimpleNamespace(num_warps=8)
    launcher = SimpleNamespace(config=config, n_regs=40, n_spills=0, shared=1024, cache_hash="HASH")
    found = inductor_variant("triton_red_0", launcher, tmp_path)
    assert found == Variant("triton_red_0", "Inductor", 8, 40, 0, 1024, ".visible .entry", b"elf")
    launcher.cache_hash, launcher.n_regs = "elsewhere", None
    assert inductor_variant("triton_red_0", launcher, tmp_path) == Variant("triton_red_0", "Inductor", 8, None, 0, 1024)


def test_a_kernel_that_somebody_wrote() -> None:
    metadata = SimpleNamespace(name="mine", num_warps=4, shared=0)
    compiled = SimpleNamespace(metadata=metadata, asm={"ptx": "p", "cubin": b"c"}, n_regs=18, n_spills=6)
    assert written_variant(compiled) == Variant("mine", "Triton", 4, 18, 6, 0, "p", b"c")


def test_variants_that_ran_are_written_those_with_most_time_disassembled(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(triton_code, "sass", lambda cubin: f"sass of {cubin.decode()}")
    found = [Variant(name, "Inductor", 4, 32, 0, 0, f"ptx {name}", name.encode()) for name in ("a", "b", "tuned_away")]
    rows = triton_code.write(tmp_path / "code", [("b", 4), ("gemm", 8), ("a", 4)], 1, found)
    assert [(variant.name, files) for variant, files in rows] == [
        ("b", {"ptx": "b-4w.ptx", "sass": "b-4w.sass"}),
        ("a", {"ptx": "a-4w.ptx"}),
    ]
    assert (tmp_path / "code" / "b-4w.sass").read_text() == "sass of b"
    assert not triton_code.write(tmp_path / "none", [("gemm", 8)], None, found)
    assert not (tmp_path / "none").exists()


def test_without_code_nothing_is_disassembled() -> None:
    assert triton_code.sass(b"") == ""
