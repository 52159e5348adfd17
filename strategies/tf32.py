"""TensorFloat-32: float32 products on tensor cores, which read 11 bits of each factor and sum in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from optexp.insight.trace import short_name
from optexp.program import Program, preserved, to_device
from optexp.strategy import Contract, Counters, Evidence, Notes, Stage, Strategy, precision

if TYPE_CHECKING:
    from optexp.insight.trace import Trace


@dataclass
class Tf32(Strategy):
    """Flags of the process: they reach the backward pass, compiled code and captured steps too."""

    stage = Stage.PRECISION

    @property
    def contract(self) -> Contract:
        return precision("tf32")

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({"precision"})  # another one that decides how products are computed

    @property
    def changes(self) -> frozenset[str]:
        settings = ("backends.cuda.matmul.fp32_precision", "backends.cudnn.conv.fp32_precision")
        return frozenset(f"torch.{name}" for name in (*settings, "get_float32_matmul_precision"))

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"TF32 is a mode of NVIDIA's tensor cores, and this run is on the {device.type.upper()}:"
                " use device=cuda on a machine with an NVIDIA GPU of compute capability 8.0 or newer"
            )
        if torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            return f"TF32 needs compute capability 8.0, and {name} is older: try strategy.amp.dtype=float16"
        types = {p.dtype for p in program.model.parameters() if p.is_floating_point()}
        if types and torch.float32 not in types:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            return f"TF32 is for products of float32, and this model computes in {found}: use dtype=float32"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        from torch.utils.flop_counter import FlopCounterMode  # imports triton

        before = flags()
        allow_tf32()
        with preserved(program), torch.no_grad(), FlopCounterMode(display=False) as counter:
            program.predict(to_device(program.feed.next(), program.device))
        products = sorted(op.__name__ for op in counter.get_flop_counts().get("Global", {}))
        return program, {"before": before, "after": flags(), "products": products}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        convolutions = [name for name in notes["products"] if "conv" in name]
        changed = {name for name, value in notes["after"].items() if value != notes["before"][name]}
        lowered = [n for n in notes["products"] if ("convolutions" if n in convolutions else "products") in changed]
        default = " (convolutions were in TF32 already, as torch has it)" if set(convolutions) - set(lowered) else ""
        if not lowered:
            return Evidence(False, f"no product in float32 was left to lower{default}")
        new = {short_name(k.name) for k in after.kernels} - {short_name(k.name) for k in before.kernels}
        if not new:
            return Evidence(False, f"{', '.join(lowered)} may run in TF32, but the same kernels ran as before")
        return Evidence(True, f"in TF32: {', '.join(lowered)}; new kernels: {', '.join(sorted(new)[:3])}{default}")

    def recipe(self, notes: Notes) -> str:
        return "allow_tf32()"


def allow_tf32() -> None:
    """These two keep the older and the newer settings of torch in step; assigning `matmul.fp32_precision` alone makes
    `get_float32_matmul_precision` raise, which torch.compile calls."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def flags() -> dict[str, str]:
    """What torch now does with float32, read back."""
    backends: Any = torch.backends
    return {"products": backends.cuda.matmul.fp32_precision, "convolutions": backends.cudnn.conv.fp32_precision}
