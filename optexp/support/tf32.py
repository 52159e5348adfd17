"""torch's settings for TensorFloat-32, for the whole process."""

from __future__ import annotations

from typing import Any

import torch


def allow_tf32(products: bool = True, convolutions: bool = True) -> None:
    """Allow or forbid TF32 by two functions that keep torch's older and newer settings consistent.

    Assigning `matmul.fp32_precision` alone makes `get_float32_matmul_precision` raise, which torch.compile calls.
    """
    torch.set_float32_matmul_precision("high" if products else "highest")
    torch.backends.cudnn.allow_tf32 = convolutions


def tf32_allowed() -> dict[str, bool]:
    """The present settings as arguments of `allow_tf32`; reading them never raises."""
    return {name: precision == "tf32" for name, precision in flags().items()}


def flags() -> dict[str, str]:
    """torch's present precision of float32 GEMMs and convolutions."""
    backends: Any = torch.backends
    return {"products": backends.cuda.matmul.fp32_precision, "convolutions": backends.cudnn.conv.fp32_precision}
