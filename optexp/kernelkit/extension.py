"""CUDA C++ of `kernels/`: compiled at first use for the present card, and cached by source text and options."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optexp.kernelkit.capability import Capability
from optexp.kernelkit.kernel import runs_on
from optexp.kernelkit.launching import launching

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # numbers of dtypes for `with_type` in vector.cuh

# torch disables conversions between half and float in extensions; these kernels need them.
FLAGS = ["-O3", "-std=c++17", "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]

loaded: dict[str, Path] = {}  # by the name of the source


@dataclass(frozen=True)
class Source:
    """CUDA C++ in `kernels/<name>.cu`, declared by the kernel that launches it.

    A source whose name ends in `_gemm` is profiled as a GEMM: its functions' first matrix is x and their last is y.

    needs:  capability that its instructions need; None: any card that the compiler supports
    """

    name: str
    needs: Capability | None = None

    def targets(self, device: torch.device) -> list[str]:
        """The architectures to compile for, as in "9.0a"."""
        return (self.needs and self.needs.targets()) or architectures(device)

    def run(self, function: str, *args: Any) -> None:
        """Call one of its C functions on the current stream of its tensors' device.

        Tensors become pointers, dtypes their numbers, integers and booleans int64_t, floats double; the stream comes
        last.

        Raises:
            RuntimeError: The source does not compile, or the function returns a CUDA error.
        """
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        call = getattr(library(self, device.index), function)
        values = [*map(_number, args), torch._C._cuda_getCurrentRawStream(device.index)]
        if call.argtypes is None:
            call.argtypes = [ctypes.c_double if isinstance(value, float) else ctypes.c_int64 for value in values]
        with launching(f"{self.name}.{function}", device, args):
            status = call(*values)
        if status:
            raise RuntimeError(f"{self.name}.cu: {function} failed with CUDA error {status}")


def why_not(device: torch.device) -> str | None:
    """The reason why CUDA C++ cannot be built and run here, with its remedy; None where it can."""
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
    """Whether CUDA C++ serves these tensors: on a GPU, in float32 or 16 bits, all of one dtype."""
    first = tensors[0]
    return (
        first.is_cuda
        and runs_on(first.device)
        and first.dtype in TYPES
        and all(tensor.dtype == first.dtype for tensor in tensors)
    )


def source_files(name: str) -> list[Path]:
    """`<name>.cu`, then the headers."""
    folder = Path(next(iter(import_module("optexp.kernels").__path__)))
    return [folder / f"{name}.cu", *sorted(folder.glob("*.cuh"))]


def architectures(device: torch.device | None = None) -> list[str]:
    """The architectures to compile for, as in "9.0": $TORCH_CUDA_ARCH_LIST, else the card's own."""
    if listed := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return listed.replace(";", " ").split()
    return ["{}.{}".format(*torch.cuda.get_device_capability(device))]


def build(name: str, targets: Sequence[str]) -> Path:
    """The compiled library of `<name>.cu`.

    targets:  architectures, as "9.0" or "9.0a"; "9.0+PTX" also includes the PTX that later cards compile

    Raises:
        RuntimeError: The compiler refuses the source, or there is none.
    """
    from torch.utils import cpp_extension

    codes = [flag for target in targets for flag in _gencode(target)]
    made_of = [torch.__version__, str(torch.version.cuda), *FLAGS, *codes]
    key = hashlib.sha256("\n".join([*made_of, *(file.read_text() for file in source_files(name))]).encode())
    module = f"optexp_{name}_{key.hexdigest()[:16]}"
    source = str(source_files(name)[0])
    cpp_extension.load(module, [source], extra_cuda_cflags=[*FLAGS, *codes], is_python_module=False)
    return Path(cpp_extension._get_build_directory(module, verbose=False)) / f"{module}.so"


def _gencode(target: str) -> list[str]:
    number, _, ptx = target.partition("+")
    digits = number.replace(".", "")
    codes = [f"-gencode=arch=compute_{digits},code=sm_{digits}"]
    return codes + ([f"-gencode=arch=compute_{digits},code=compute_{digits}"] if ptx else [])


@cache
def library(source: Source, index: int) -> ctypes.CDLL:
    """The compiled source, loaded for the card of this index."""
    loaded[source.name] = build(source.name, source.targets(torch.device("cuda", index)))
    return ctypes.CDLL(str(loaded[source.name]))


def _number(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    return TYPES[arg] if isinstance(arg, torch.dtype) else arg
