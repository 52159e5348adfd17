"""The compilers' output for our kernels: PTX, machine code, registers, spills, width of accesses."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triton import knobs

from optexp.kernelkit import extension
from optexp.kernelkit.kernel import compiled_functions

INTERESTING = re.compile(r"\b(LDG|STG|LDGSTS|UTMALDG|UTMASTG|HGMMA|HMMA|LDL|STL|MUFU)\b(?:\.E)?(?:\.(\d+)\b)?")

USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Code:
    """One kernel, compiled for one signature.

    warps:      warps of a program
    registers:  registers of a thread
    spills:     number of instructions that write registers to local memory
    shared:     bytes of shared memory of a program
    """

    name: str
    warps: int
    registers: int
    spills: int
    shared: int
    ptx: str
    sass: str

    @property
    def instructions(self) -> Counter[str]:
        """Instructions by kind: `LDG.128` is a 16-byte load, `HGMMA` a tensor-core multiplication, `STL` a spill."""
        return Counter(".".join(filter(None, match.groups())) for match in INTERESTING.finditer(self.sass))


def compiled() -> Iterator[Code]:
    """Every variant of our kernels that ran in this process."""
    for function in compiled_functions():
        for variants, *_ in function.device_caches.values():
            yield from map(code_of, variants.values())


def code_of(variant: Any) -> Code:
    """The code of a variant that Triton's compiler returned."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(variant.asm["cubin"])
        usage, sass = (_cuobjdump(option, path) for option in ("-res-usage", "-sass"))
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    facts = variant.metadata
    spills = len(re.findall(r"\bSTL\b", sass))
    return Code(facts.name, facts.num_warps, int(registers[1]), spills, facts.shared, variant.asm["ptx"], sass)


def write(folder: Path, ran: Collection[tuple[str, int]] | None = None) -> dict[tuple[str, int], str]:
    """Write PTX and machine code of all compiled variants and loaded libraries, and a table of registers and spills.

    Where nothing was compiled or loaded, there is no folder.

    ran:  names and numbers of warps of the variants to write (tuning also compiles others); None: all

    Returns: the files' names without suffix, by name and number of warps.
    """
    codes = [code for code in compiled() if ran is None or (code.name, code.warps) in ran]
    if not codes and not extension.loaded:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| kernel | warps | registers | spills | shared memory | instructions |", "| --- " * 6 + "|"]
    stems = {}
    for number, code in enumerate(codes):
        name = stems[code.name, code.warps] = f"{code.name}-{number}"
        (folder / f"{name}.ptx").write_text(code.ptx)
        (folder / f"{name}.sass").write_text(code.sass)
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(code.instructions.items()))
        lines.append(f"| {name} | {code.warps} | {code.registers} | {code.spills} | {code.shared} | {counted} |")
    for name, path in extension.loaded.items():
        (folder / f"{name}.cu.sass").write_text(_cuobjdump("-sass", path))
        for function, registers, stack, shared in USAGE.findall(_cuobjdump("-res-usage", path)):
            lines.append(f"| {name}.cu: `{function}` | | {registers} | {stack} bytes | {shared} | |")
    (folder / "registers.md").write_text("\n".join(lines) + "\n")
    return stems


def _cuobjdump(option: str, path: Path) -> str:
    done = subprocess.run([knobs.nvidia.cuobjdump.path, option, str(path)], capture_output=True, text=True, check=True)
    return done.stdout
