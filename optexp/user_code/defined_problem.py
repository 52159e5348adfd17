"""A kernel definition of flashinfer-bench or SOL-ExecBench as a workload, and a solution of it as a model.

The folder of a problem holds definition.json, workload.json and reference.py: files, because Triton reads a kernel's
source from its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from optexp.errors import ConfigError, NotCovered, Unsupported
from optexp.program import Batch
from optexp.user_code import texts
from optexp.user_code.adapters import maker
from optexp.user_code.definitions import ENTRY, BuildSpec, CaseSpec, CompileOptions, Definition, shape, sizes
from optexp.user_code.given_inputs import USUAL, GivenInputs, torch_dtype
from optexp.user_code.importing import import_file
from optexp.user_code.listing import Spelled
from optexp.user_code.lookup import find
from optexp.user_code.parts import Parts
from optexp.user_code.workload import UserWorkload

DEFINITION, CASE, REFERENCE, SPEC = "definition.json", "workload.json", "reference.py", "spec.json"
CUDA_LANGUAGES = {"cuda", "cuda_cpp", "cutlass", "cudnn", "cublas"}
COMPILED = (".cu", ".cpp", ".cc", ".cxx", ".c")


@dataclass
class DefinedProblem(UserWorkload):
    """folder:  of the problem
    by_name: random inputs mean something by their names, as in SOL-ExecBench
    """

    families: ClassVar = ("normal", "integers", "corners", "large", "small", "offset")

    folder: str = ""
    by_name: bool = False

    @property
    def name(self) -> str:
        return self.definition.name

    @cached_property
    def definition(self) -> Definition:
        return read_definition(Path(self.folder))

    @cached_property
    def inputs(self) -> GivenInputs:
        case = read_case(Path(self.folder))
        return GivenInputs(
            self.definition, case, vars(import_file(Path(self.folder, REFERENCE), "reference")), self.by_name
        )

    def code(self) -> list[bytes]:
        return [*super().code(), *(Path(self.folder, name).read_bytes() for name in (DEFINITION, CASE))]

    def load(self) -> Parts:
        return Parts(maker(Reference, [self.folder]), self.inputs)

    @property
    def bounded(self) -> frozenset[str]:
        return self.inputs.ranged

    def tails(self) -> list[DefinedProblem]:  # type: ignore[override]
        """None: the workload gives the sizes, and constants among them are part of the reference."""
        return []

    def in_dtype(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Inputs keep the dtypes of the definition, but for fp64."""
        return super().in_dtype(batch, dtype) if dtype is torch.float64 else batch

    def note_conversion(self, what: str, tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Nothing is converted."""

    def spelled(self) -> Spelled:
        raise NotCovered("its reference lies in a definition")


class Reference(nn.Module):
    """The function `run` of a definition's reference."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.names = list(read_definition(Path(folder)).outputs)
        self.function = find(f"{Path(folder, REFERENCE)}:{ENTRY}", "reference")

    def forward(self, *inputs: Any) -> Any:
        return in_order(self.function(*inputs), self.names)


class Solved(nn.Module):
    """A solution, built and called as its specification says.

    Args:
        folder: Of the problem.
        sources: Folder of the solution's files, and of its specification.
    """

    def __init__(self, folder: str, sources: str) -> None:
        super().__init__()
        definition, case = read_definition(Path(folder)), read_case(Path(folder))
        spec = msgspec.json.decode(Path(sources, SPEC).read_bytes(), type=BuildSpec)
        known = sizes(definition, case)
        self.names = list(definition.outputs)
        self.passes_outputs = spec.destination_passing_style
        self.outputs = [(shape(one, known) or (), torch_dtype(one)) for one in definition.outputs.values()]
        self.function = built(spec, Path(sources))

    def forward(self, *inputs: Any) -> Any:
        if not self.passes_outputs:
            return in_order(self.function(*inputs), self.names)
        device = next((value.device for value in inputs if isinstance(value, Tensor)), None)
        outputs = [torch.empty(size, dtype=dtype, device=device) for size, dtype in self.outputs]
        self.function(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def in_order(result: Any, names: Sequence[str]) -> Any:
    """Outputs in the order of the definition, a single one by itself.

    Raises:
        ConfigError: there are more or fewer outputs than the definition has.
    """
    if isinstance(result, Mapping):
        if missing := [name for name in names if name not in result]:
            raise ConfigError(f"the result has no {', '.join(missing)}")
        found = [result[name] for name in names]
    else:
        found = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(found) != len(names):
        raise ConfigError(f"{len(found)} outputs were returned, and the definition has {', '.join(names)}")
    return found[0] if len(found) == 1 else tuple(found)


def built(spec: BuildSpec, sources: Path) -> Callable[..., Any]:
    """The function of a solution.

    Raises:
        Unsupported: its binding is not supported.
        ConfigError: a file or function does not exist.
    """
    if not spec.compiled:
        return _named(import_file(sources / spec.file, "entry_point"), spec)
    if spec.bound_by != "torch":
        raise Unsupported(f"the binding {spec.bound_by} is not supported: build it with binding=torch")
    from torch.utils.cpp_extension import load  # slow to import

    options, cuda = spec.compile_options or CompileOptions(), CUDA_LANGUAGES & {spec.language, *spec.languages}
    files = sorted(str(path) for path in sources.rglob("*") if path.suffix in COMPILED)
    build = sources / "build"
    build.mkdir(exist_ok=True)
    extension = load(
        name=f"solution_{sources.name}",
        sources=files,
        extra_cflags=options.cflags,
        extra_cuda_cflags=options.cuda_cflags,
        extra_ldflags=options.ld_flags if cuda else [],
        extra_include_paths=[str(sources)],
        build_directory=str(build),
        with_cuda=bool(cuda),
    )
    return _named(extension, spec)


def _named(module: ModuleType, spec: BuildSpec) -> Callable[..., Any]:
    """The entry point of a module.

    Raises:
        ConfigError: there is no such function.
    """
    function: Callable[..., Any] | None = getattr(module, spec.function, None)
    if not callable(function):
        raise ConfigError(f"entry_point={spec.entry_point}: {spec.file} has no function {spec.function!r}")
    return function


def read_definition(folder: Path) -> Definition:
    return msgspec.json.decode(_noted(folder / DEFINITION), type=Definition)


def read_case(folder: Path) -> CaseSpec:
    return msgspec.json.decode(_noted(folder / CASE), type=CaseSpec)


def _noted(path: Path) -> bytes:
    text = path.read_bytes()
    texts.note(path, text)
    return text


def precision(definition: Definition) -> str:
    """The coarsest usual dtype of its tensors, by whose limits results are judged; float32 where all are integers."""
    found = {torch_dtype(spec) for spec in (*definition.inputs.values(), *definition.outputs.values())}
    real = [dtype for dtype in USUAL if dtype in found]
    coarsest = max(real, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    return str(coarsest).removeprefix("torch.")
