"""CUDA C++ of `kernels/`: compiled when first needed, for the card at hand, and kept by what it was made of."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optexp.kernelkit.kernel import runs_on
from optexp.kernelkit.launching import launching

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # what `with_type` in vector.cuh understands

# Sources for one architecture, whose own instructions they use.
ONLY = {"hopper_gemm": ["9.0a"], "few_rows_gemm": ["9.0a"]}

loaded: dict[str, Path] = {}  # by the name of the source

# torch forbids conversions between half and float in extensions; these kernels are made of them.
FLAGS = ["-O3", "-std=c++17", "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]


def why_not(device: torch.device) -> str | None:
    """What is missing to build and run CUDA C++ here, and how to get it; None where nothing is."""
    if device.type != "cuda":
        return f"CUDA C++ needs a CUDA device, and this run is on the {device.type.upper()}: use device=cuda"
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None or shutil.which("nvcc", path=str(Path(home) / "bin")) is None:
        version = torch.version.cuda
        return (
            f"no CUDA compiler was found: install the CUDA {version} toolkit (nvcc), and set CUDA_HOME to where it is"
        )
    if shutil.which("ninja") is None:
        return "torch builds extensions with ninja, and it was not found: pip install ninja"
    compiler = os.environ.get("CXX", "c++")
    return None if shutil.which(compiler) else f"nvcc needs a C++ compiler, and {compiler} was not found: install g++"


def takes(*tensors: Tensor) -> bool:
    """Whether our CUDA C++ serves these: on a GPU, in float32 or 16 bits, all in one dtype."""
    first = tensors[0]
    return (
        first.is_cuda
        and runs_on(first.device)
        and first.dtype in TYPES
        and all(tensor.dtype == first.dtype for tensor in tensors)
    )


def sources(name: str) -> list[Path]:
    """`<name>.cu`, then the headers."""
    folder = Path(next(iter(import_module("optexp.kernels").__path__)))
    return [folder / f"{name}.cu", *sorted(folder.glob("*.cuh"))]


def architectures(device: torch.device | None = None) -> list[str]:
    """What to compile for, as in "9.0": $TORCH_CUDA_ARCH_LIST, else the card's own."""
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return listed.replace(";", " ").split()
    return ["{}.{}".format(*torch.cuda.get_device_capability(device))]


def build(name: str, targets: Sequence[str]) -> Path:
    """The compiled library of `<name>.cu` for these architectures; "9.0+PTX" also keeps what later cards compile."""
    from torch.utils import cpp_extension

    codes = [flag for target in targets for flag in _gencode(target)]
    made_of = [torch.__version__, str(torch.version.cuda), *FLAGS, *codes]
    key = hashlib.sha256("\n".join([*made_of, *(file.read_text() for file in sources(name))]).encode())
    module = f"optexp_{name}_{key.hexdigest()[:16]}"
    source = str(sources(name)[0])
    cpp_extension.load(module, [source], extra_cuda_cflags=[*FLAGS, *codes], is_python_module=False)
    return Path(cpp_extension._get_build_directory(module, verbose=False)) / f"{module}.so"


def _gencode(target: str) -> list[str]:
    number, _, ptx = target.partition("+")
    digits = number.replace(".", "")
    codes = [f"-gencode=arch=compute_{digits},code=sm_{digits}"]
    return codes + ([f"-gencode=arch=compute_{digits},code=compute_{digits}"] if ptx else [])


@cache
def library(name: str, index: int) -> ctypes.CDLL:
    """Loaded, for the card of this index."""
    loaded[name] = build(name, ONLY.get(name) or architectures(torch.device("cuda", index)))
    return ctypes.CDLL(str(loaded[name]))


def run(name: str, function: str, *args: Any) -> None:
    """Call a C function of `<name>.cu` on the current stream of its tensors' device.

    Tensors become pointers, dtypes their numbers, integers and booleans int64_t, floats double; the stream comes last.
    """
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    call = getattr(library(name, device.index), function)
    values = [*map(_number, args), torch._C._cuda_getCurrentRawStream(device.index)]
    if call.argtypes is None:
        call.argtypes = [ctypes.c_double if isinstance(value, float) else ctypes.c_int64 for value in values]
    with launching(f"{name}.{function}", device, args):
        status = call(*values)
    if status:
        raise RuntimeError(f"{name}.cu: {function} failed with CUDA error {status}")


def _number(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    return TYPES[arg] if isinstance(arg, torch.dtype) else arg
