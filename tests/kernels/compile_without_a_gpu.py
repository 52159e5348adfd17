"""Compiles every Triton kernel for an H100 on a machine that has none: `python compile_without_a_gpu.py [name ...]`.

Prints a line of JSON for each variant that the benchmarks' calls and their gradients would launch.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from optexp.kernelkit import assembly, elementwise, gemm, kernel, rows

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")

seen = set()


def launch(function: Any, programs: int, *args: Any, **constants: Any) -> None:
    """In the place of `launching.launch`: compile, and leave the result unwritten."""
    if "PDL" in function.arg_names:
        constants |= {"PDL": True, "launch_pdl": not constants.pop("without_pdl", False)}
    options = {name: constants.pop(name) for name in OPTIONS if name in constants}
    given = dict(zip(function.arg_names, args, strict=False)) | constants
    signature: dict[str, str] = {}
    fixed: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, name in enumerate(function.arg_names):
        value, annotation = given[name], str(function.fn.__annotations__.get(name))
        if "constexpr" in annotation or value is None or (isinstance(value, int) and value == 1):
            signature[name], fixed[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}[{','.join(map(str, value.block_shape))}]>"
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp64" if annotation == "tl.float64" else "fp32"
    key = (function.fn.__name__, str(signature), str(fixed), str(attributes), str(options))
    if key in seen:
        return
    seen.add(key)
    source = ASTSource(function, signature=signature, constexprs=fixed, attrs=attributes)
    code = assembly.code_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))
    pointers = [text for text in signature.values() if text.startswith("*")]
    fact = {"name": code.name, "registers": code.registers, "spills": code.spills, "shared": code.shared}
    fact["order"] = list(dict.fromkeys(re.findall(r"\b(PREEXIT|ACQBULK|LDG|LDGSTS|UTMALDG|STG)\b", code.sass)))
    fact |= {"pointers": pointers, "constants": [*fixed.values()], "options": options}
    print(json.dumps({**fact, "instructions": code.instructions}, default=str), flush=True)


def every_config(what: str, key: object, candidates: Any, run: Any, device: torch.device) -> Any:
    """In the place of `optexp.kernelkit.tuning.fastest`: walk through all."""
    for candidate in candidates:
        run(candidate)
    return candidates[0]


def main(names: list[str]) -> None:
    every = kernel.kernels()  # imports their modules
    chosen = names or sorted(every)
    modules = [
        kernel,
        gemm,
        rows,
        elementwise,
        *(module for name, module in sorted(sys.modules.items()) if name.startswith("optexp.kernels.")),
    ]
    replaced = {"launch": launch, "fastest": every_config, "INTERPRETED": True}
    replaced["runs_on"] = lambda device: True
    for module in modules:
        for name, value in {**replaced, "multiprocessors": lambda device: 132}.items():
            if hasattr(module, name):
                setattr(module, name, value)
    for name in chosen:
        one = every[name]
        for dtype in (torch.float32, torch.bfloat16):
            for case in one.benchmarks:
                # Rows are cut: what is compiled does not depend on their number.
                args = case.arguments(lambda *shape, d=dtype: torch.empty(min(shape[0], 8192), *shape[1:], dtype=d))
                with torch.no_grad():
                    one.function(*args)
                leaves = [arg.requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
                result = one.function(*leaves)
                result.backward(torch.empty_like(result))


if __name__ == "__main__":
    main(sys.argv[1:])
