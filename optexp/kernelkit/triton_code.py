"""Compiled code of every Triton kernel in this process: Inductor's, optexp's and the user's."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

OURS = ("optexp.kernels.", "optexp.kernelkit.")


@dataclass(frozen=True)
class Variant:
    """A kernel compiled for one signature.

    origin:    "Inductor", or "Triton" for a handwritten kernel
    warps:     warps of a block
    registers: registers of a thread
    spills:    words of local memory, as Triton counts them
    shared:    bytes of a block
    ptx, cubin: the compilers' output; empty where it is not stored
    ours:      whether optexp wrote the kernel
    """

    name: str
    origin: str
    warps: int
    registers: int | None
    spills: int | None
    shared: int | None
    ptx: str = ""
    cubin: bytes = b""
    ours: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Name and warps of a block: they identify the kernel in a trace."""
        return self.name, self.warps


def variants() -> Iterator[Variant]:
    """Every loaded variant."""
    yield from _inductors()
    yield from _written()


def _inductors() -> Iterator[Variant]:
    """Kernels in Inductor's generated code, as chosen by autotuning, including a user's kernels inside it."""
    cache = sys.modules.get("torch._inductor.codecache")
    heuristics = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if cache is None or heuristics is None:
        return
    for module in list(cache.PyCodeCache.modules):
        for tuner in list(vars(module).values()):
            if isinstance(tuner, heuristics.CachingAutotuner):
                for launcher in tuner.launchers:
                    yield inductor_variant(tuner.fn.__name__, launcher, _triton_cache())


def inductor_variant(name: str, launcher: Any, cache: Path) -> Variant:
    """The variant of one of Inductor's launchers.  cache: Triton's folder, which holds its code by hash"""
    folder = cache / str(getattr(launcher, "cache_hash", ""))
    ptx, cubin = (folder / f"{name}.{kind}" for kind in ("ptx", "cubin"))
    return Variant(
        name,
        "Inductor",
        int(launcher.config.num_warps),
        _count(launcher.n_regs),
        _count(launcher.n_spills),
        _count(launcher.shared),
        ptx.read_text() if ptx.is_file() else "",
        cubin.read_bytes() if cubin.is_file() else b"",
    )


def _triton_cache() -> Path:
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    return Path(triton_cache_dir(0))  # an arm sees one card


def _written() -> Iterator[Variant]:
    """Handwritten kernels that were launched directly."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return
    for function in [value for value in gc.get_objects() if type(value) is jit.JITFunction]:
        ours = (getattr(function.fn, "__module__", None) or "").startswith(OURS)  # a cleared function has no `fn`
        for compiled, *_ in list(function.device_caches.values()):
            yield from (written_variant(variant, ours) for variant in list(compiled.values()))


def written_variant(compiled: Any, ours: bool = False) -> Variant:
    """The variant of a kernel as `triton.compile` returned it."""
    facts, code = compiled.metadata, compiled.asm
    registers, spills = (_count(getattr(compiled, name, None)) for name in ("n_regs", "n_spills"))
    return Variant(
        facts.name,
        "Triton",
        facts.num_warps,
        registers,
        spills,
        _count(facts.shared),
        code.get("ptx", ""),
        code.get("cubin", b""),
        ours,
    )


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def write(
    folder: Path, ran: Sequence[tuple[str, int]], most_sass: int | None, found: Collection[Variant]
) -> list[tuple[Variant, dict[str, str]]]:
    """Write PTX and machine code of variants that ran.

    Args:
        ran: Name and warps of each kernel, those with most time first.
        most_sass: Most kernels to disassemble, which takes 0.1 s each; None: all.

    Returns:
        Each variant with its files' names in `folder`, by "ptx" and "sass".
    """
    order = {key: index for index, key in enumerate(ran)}
    known = {variant.key: variant for variant in found if variant.key in order}
    kept = sorted(known.values(), key=lambda variant: order[variant.key])
    with ThreadPoolExecutor(4) as several:
        codes = [*several.map(sass, [variant.cubin for variant in kept[:most_sass]])]
    rows = []
    for index, variant in enumerate(kept):
        stem, files = f"{variant.name[:120]}-{variant.warps}w", dict[str, str]()
        contents = {"ptx": variant.ptx, "sass": codes[index] if index < len(codes) else ""}
        for kind, content in contents.items():
            if content:
                folder.mkdir(parents=True, exist_ok=True)
                files[kind] = f"{stem}.{kind}"
                (folder / files[kind]).write_text(content)
        rows.append((variant, files))
    return rows


def sass(cubin: bytes) -> str:
    """Disassembled machine code; empty without machine code or disassembler."""
    if not cubin:
        return ""
    from triton import knobs

    with TemporaryDirectory() as folder, suppress(OSError, subprocess.SubprocessError, RuntimeError):
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return ""
