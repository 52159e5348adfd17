"""The meaning of a card's architecture for compilers and versions: a table of `python -m optexp.doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TRITON_LEAST = (8, 0)  # compute capability that Triton compiles for
BFLOAT16_LEAST, TMA_LEAST = (8, 0), (9, 0)


@dataclass(frozen=True)
class Architecture:
    """A card's compute capability, and the software for it.

    built_for: architectures in torch's binaries, as "sm_90";  cuda: CUDA version that torch was built with
    driver_cuda: newest CUDA version that the driver runs;  nvcc: release of the compiler; each "" where not known
    """

    capability: tuple[int, int]
    built_for: Sequence[str]
    cuda: str
    driver: str = ""
    driver_cuda: str = ""
    nvcc: str = ""


@dataclass(frozen=True)
class Line:
    """One line; ok: None where it is worth knowing and nothing is wrong."""

    name: str
    ok: bool | None
    text: str
    fix: str = ""


def lines(found: Architecture) -> Iterator[Line]:
    """Torch's own kernels, CUDA versions, Triton, nvcc."""
    major, minor = found.capability
    same = f"sm_{major}{minor}" in found.built_for or f"sm_{major}{minor}a" in found.built_for
    compatible = any(_runs(name, found.capability) for name in found.built_for)
    how = "its own machine code" if same else "code of an older card" if compatible else "no code that runs here"
    fix = f"a torch whose torch.cuda.get_arch_list() has sm_{major}{minor}"
    yield Line("kernels of torch", True if same else None if compatible else False, f"has {how} for this card", fix)
    yield from _versions(found)
    yield from _compilers(found)


def _versions(found: Architecture) -> Iterator[Line]:
    if not found.cuda:
        return
    text = f"torch was built with {found.cuda}"
    text += f", the driver{f' {found.driver}' if found.driver else ''} runs up to {found.driver_cuda}" * bool(
        found.driver_cuda
    )
    fits = not found.driver_cuda or _number(found.driver_cuda)[0] >= _number(found.cuda)[0]
    yield Line("CUDA", fits, text, "a newer driver, or a torch for an older CUDA")


def _compilers(found: Architecture) -> Iterator[Line]:
    if found.capability < TRITON_LEAST:
        yield Line("Triton", None, "compiles for 8.0 and newer: kernels and Inductor are not served here")
    else:
        has = ["bfloat16 in tensor cores"] * (found.capability >= BFLOAT16_LEAST)
        has += ["TMA and wgmma"] * (found.capability[:1] == TMA_LEAST[:1]) + ["TMA"] * (found.capability[0] > 9)
        yield Line("Triton", True, f"compiles for sm_{''.join(map(str, found.capability))}: {', '.join(has)}")
    if not found.nvcc or not found.cuda:
        return
    same = _number(found.nvcc)[:1] == _number(found.cuda)[:1]
    text = f"release {found.nvcc}, torch's CUDA is {found.cuda}"
    yield Line("nvcc", same or None, text, "torch refuses to build extensions with another major version")


def _runs(name: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on cards of the same major version, not older; of one card alone where its name ends in a."""
    digits = name.partition("_")[2]
    if not digits.isdigit():
        return False
    major, minor = int(digits[:-1]), int(digits[-1])
    return (name.startswith("sm_") and major == capability[0] and minor <= capability[1]) or (
        name.startswith("compute_") and (major, minor) <= capability
    )


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit()) or (0,)
