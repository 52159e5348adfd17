"""TensorFloat-32: float32 GEMMs on tensor cores, which use 11 bits of each factor and accumulate in float32."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from optexp.program import Program, preserved, to_device
from optexp.strategy import Contract, Counters, Evidence, Notes, Stage, Strategy, UserFile, precision
from optexp.support.eagerly import EagerMode, name_of
from optexp.support.tf32 import allow_tf32, flags, tf32_allowed
from optexp.trace import short_name

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

NAMED = re.compile("tf32|s1688")  # the size of the tensor cores' tile in TF32


@dataclass
class Tf32(Strategy):
    """Sets torch's flags, which also apply to the backward pass, compiled code and captured steps."""

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

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """float32 GEMMs, convolutions and attention at the card's ceiling for TF32."""
        from optexp.profiling.lower_precision import with_tf32

        step = view.parts(ceilings)
        rate = ceilings.matrix.get("tf32") if ceilings else None
        if not step.on_gpu or not rate:
            return None
        text = f"float32 products at this card's {rate / 1e12:.3g} TFLOP/s of TF32, the rest as it is"
        return step.less(text, device=step.saved_us(lambda piece: with_tf32(step, piece)))

    def unsupported_on(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            return None
        return (
            f"TF32 is a mode of NVIDIA's tensor cores, and this run is on the {device.type.upper()}:"
            " use device=cuda on a machine with an NVIDIA GPU of compute capability 8.0 or newer"
        )

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if reason := self.unsupported_on(device):
            return reason
        if torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            return f"TF32 needs compute capability 8.0, and {name} is older: try strategy.amp.dtype=float16"
        types = {p.dtype for p in program.model.parameters() if p.is_floating_point()}
        if types and torch.float32 not in types:
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            return f"TF32 is for products of float32, and this model computes in {found}: use dtype=float32"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        before, allowed = flags(), tf32_allowed()
        allow_tf32()
        with preserved(program), torch.set_grad_enabled(program.trains), Products(allowed) as probe:
            program.rehearse(to_device(program.feed.next(), program.device))
        notes = {"found": dict(probe.found), "lowered": dict(probe.lowered)}
        return program, {"before": before, "after": flags(), **notes}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        changed = {flag for flag, value in notes["after"].items() if value != notes["before"][flag]}
        found, lowered = ({n: c for n, c in notes[key].items() if kind(n) in changed} for key in ("found", "lowered"))
        already = "convolutions" in {kind(name) for name in notes["found"]} - changed
        left = " (convolutions were in TF32 already, as torch has it)" if already else ""
        if not found:
            return Evidence(False, f"no product in float32 was left to lower{left}")
        if not lowered:
            names = ", ".join(sorted(found))
            return Evidence(False, f"{names} may run in TF32, but give the same bits as before{left}")
        counts = ", ".join(f"{count} of {found[name]} {name}" for name, count in sorted(lowered.items()))
        named = sorted({short_name(k.name) for k in after.kernels if NAMED.search(k.name)})
        kernels = f"; kernels: {', '.join(named[:3])}" if named else ""
        return Evidence(True, f"in TF32, with other bits than before: {counts}{kernels}{left}")

    def recipe(self, notes: Notes) -> str:
        return "allow_tf32()"

    def patch(self, notes: Notes, file: UserFile) -> str:
        return 'torch.set_float32_matmul_precision("high")\ntorch.backends.cudnn.allow_tf32 = True'


def kind(operation: str) -> str:
    """The flag that applies to an operation."""
    return "convolutions" if "conv" in operation else "products"


class Products(EagerMode):
    """Computes each product again with the previous flags: equal bits show that TF32 was not used.

    Kernels' names are weaker evidence: not all show the precision, and other strategies of a stack change them too.
    """

    def __init__(self, before: dict[str, bool]) -> None:
        super().__init__()
        self.before = before
        self.found: Counter[str] = Counter()
        self.lowered: Counter[str] = Counter()

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        from torch.utils.flop_counter import flop_registry  # imports triton

        result = func(*args, **kwargs)
        counted = getattr(func, "overloadpacket", func) in flop_registry
        if counted and torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            allow_tf32(**self.before)
            exact = func(*args, **kwargs)
            allow_tf32()
            name = name_of(func)
            self.found[name] += 1
            self.lowered += Counter({name: int(not all(map(torch.equal, tensors(result), tensors(exact))))})
        return result


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
