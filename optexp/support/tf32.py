"""What torch may do in TensorFloat-32, for the whole process."""

from __future__ import annotations

from typing import Any

import torch


def allow_tf32(products: bool = True, convolutions: bool = True) -> None:
    """These two keep the older and the newer settings of torch in step; assigning `matmul.fp32_precision` alone makes
    `get_float32_matmul_precision` raise, which torch.compile calls."""
    torch.set_float32_matmul_precision("high" if products else "highest")
    torch.backends.cudnn.allow_tf32 = convolutions


def tf32_allowed() -> dict[str, bool]:
    """Arguments of `allow_tf32` that leave everything as it is now; to read them never raises."""
    return {name: precision == "tf32" for name, precision in flags().items()}


def flags() -> dict[str, str]:
    """What torch now does with float32, read back."""
    backends: Any = torch.backends
    return {"products": backends.cuda.matmul.fp32_precision, "convolutions": backends.cudnn.conv.fp32_precision}
