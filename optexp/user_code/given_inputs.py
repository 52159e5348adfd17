"""Inputs of a kernel definition: the values that flashinfer-bench and SOL-ExecBench describe, drawn anew."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from optexp.errors import ConfigError
from optexp.user_code.definitions import CaseSpec, Custom, Definition, Scalar, Stored, TensorSpec, shape, sizes

INTEGERS = {torch.int8: 128, torch.int16: 1024, torch.int32: 1024, torch.int64: 1024}  # values lie in −high … high − 1
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_LARGEST = 2.0  # of random values, so that sums of them stay finite
USUAL = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Draw = Callable[[Sequence[int], torch.device], Tensor]


def _normal(size: Sequence[int], device: torch.device) -> Tensor:
    return torch.randn(size, device=device)


def _scaled(size: Sequence[int], device: torch.device) -> Tensor:
    return _normal(size, device) / math.sqrt(size[-1])


def _about_one(size: Sequence[int], device: torch.device) -> Tensor:
    return 1 + 0.1 * _normal(size, device)


def _positive(size: Sequence[int], device: torch.device) -> Tensor:
    return _normal(size, device).abs() + 0.1


def _softmax(size: Sequence[int], device: torch.device) -> Tensor:
    return _normal(size, device).softmax(-1)


def _decay(size: Sequence[int], device: torch.device) -> Tensor:
    return -5 * torch.rand(size, device=device)


def _decayed(size: Sequence[int], device: torch.device) -> Tensor:
    return (-0.1 * torch.rand(size, device=device)).cumsum(-1)


def _binary(size: Sequence[int], device: torch.device) -> Tensor:
    return (torch.rand(size, device=device) < 0.5).float()


def _sine(size: Sequence[int], device: torch.device) -> Tensor:
    return (math.pi * (2 * torch.rand(size, device=device) - 1)).sin()


@dataclass(frozen=True)
class Rule:
    """Values of inputs whose names match.

    ranged: the values have a range of their own, which a reference may rely on
    """

    name: re.Pattern[str]
    draw: Draw
    ranged: bool = True


def _rule(pattern: str, draw: Draw, ranged: bool = True) -> Rule:
    return Rule(re.compile(pattern), draw, ranged)


# Random inputs mean something by their names, as in SOL-ExecBench: a normal standard deviation would give NaN.
RULES = (
    _rule(r"(.*_)?(layer)?norm\d*_weight\d*", _about_one, ranged=False),
    _rule(r"(.*_)?(rstd|std|variance|var)\d*", _positive),
    _rule(r"(attn|attention|routing)_weights", _softmax),
    _rule(r"(rope_)?(cos|sin)(_cached)?", _sine),
    _rule(r"A_cumsum", _decayed),
    _rule(r"A|A_log|g", _decay),
    _rule(r".*_mask", _binary),
    _rule(r"(.*_)?(weights?|projs?|weight_matrix)\d*", _scaled, ranged=False),
)


class GivenInputs:
    """Inputs of one workload of a definition, in the order of the reference's arguments.

    reference: names in the reference's module
    by_name:   random inputs mean something by their names (SOL-ExecBench)
    """

    def __init__(self, definition: Definition, case: CaseSpec, reference: Mapping[str, Any], by_name: bool) -> None:
        self.definition, self.case, self.reference, self.by_name = definition, case, reference, by_name
        self.sizes = sizes(definition, case)

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """Tensors of files, by input."""
        sources = {name: source for name, source in self.case.inputs.items() if isinstance(source, Stored)}
        return {name: self._read(name, source) for name, source in sources.items()}

    def __call__(self, _: Mapping[str, int], device: torch.device) -> tuple[Any, ...]:
        custom: Mapping[str, Any] = {}
        if any(isinstance(source, Custom) for source in self.case.inputs.values()):
            custom = self._custom(device)
        return tuple(self._one(name, spec, custom, device) for name, spec in self.definition.inputs.items())

    @property
    def ranged(self) -> frozenset[str]:
        """Positions of inputs that have a range of their own."""
        named = enumerate(self.definition.inputs.items())
        return frozenset(str(index) for index, (name, spec) in named if self._is_ranged(name, spec))

    def _is_ranged(self, name: str, spec: TensorSpec) -> bool:
        rule = self._rule(name, spec)
        drawn = not isinstance(self.case.inputs.get(name), (Custom, Stored))
        return not drawn or torch_dtype(spec) not in USUAL or (rule is not None and rule.ranged)

    def _rule(self, name: str, spec: TensorSpec) -> Rule | None:
        if self.definition.op_type == "sampling" and name == "probs":
            return _rule("probs", _softmax)
        if not self.by_name or torch_dtype(spec) not in USUAL:
            return None
        found = next((rule for rule in RULES if rule.name.fullmatch(name)), None)
        flat = found is not None and found.draw is _scaled and len(spec.shape or ()) < 2  # a bias, or a norm's
        return None if flat else found

    def _one(self, name: str, spec: TensorSpec, custom: Mapping[str, Any], device: torch.device) -> Any:
        source, size = self.case.inputs.get(name), shape(spec, self.sizes)
        if isinstance(source, Scalar):
            return source.value
        if isinstance(source, Stored):
            return self.stored[name].to(device, copy=True)
        if isinstance(source, Custom):
            return custom[name]
        dtype = torch_dtype(spec)
        if size is None:
            return random_values((), dtype, torch.device("cpu")).item()
        rule = self._rule(name, spec)
        return rule.draw(size, device).to(dtype) if rule else random_values(size, dtype, device)

    def _custom(self, device: torch.device) -> Mapping[str, Any]:
        """The result of the reference's own function.

        Raises:
            ConfigError: there is no such function, or it leaves an input out.
        """
        entry = self.definition.custom_inputs_entrypoint
        function = self.reference.get(entry or "")
        if function is None:
            raise ConfigError(f"{self.definition.name}: inputs are custom, and the reference has no {entry!r}")
        scalars = {name: source.value for name, source in self.case.inputs.items() if isinstance(source, Scalar)}
        made: Mapping[str, Any] = function({**self.sizes, **scalars}, device)
        wanted = {name for name, source in self.case.inputs.items() if isinstance(source, Custom)}
        if missing := wanted - made.keys():
            raise ConfigError(f"{self.definition.name}: {entry} makes no {', '.join(sorted(missing))}")
        return made

    def _read(self, name: str, source: Stored) -> Tensor:
        """A tensor of a file.

        Raises:
            ConfigError: safetensors is not installed, or the file does not hold the tensor.
        """
        try:
            from safetensors import safe_open
        except ModuleNotFoundError:
            raise ConfigError("inputs of a .safetensors file need the package: pip install safetensors") from None
        try:
            with safe_open(source.path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(source.tensor_key)
        except Exception as error:  # the library's own exceptions, and the system's
            raise ConfigError(f"input {name}: {source.path} does not give {source.tensor_key!r}: {error}") from None
        spec = self.definition.inputs[name]
        expected, size = torch_dtype(spec), shape(spec, self.sizes)
        if list(tensor.shape) != size or tensor.dtype is not expected:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ConfigError(f"input {name} of {source.path} is {found}, and the definition says {expected} {size}")
        return tensor


def random_values(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, integers of a fixed range, or fair coins, as flashinfer-bench draws them.

    Raises:
        ConfigError: there are no random values of this dtype.
    """
    if dtype in USUAL:
        return torch.randn(size, dtype=dtype, device=device)
    if dtype in FP8:
        return torch.randn(size, device=device).clamp_(-FP8_LARGEST, FP8_LARGEST).to(dtype)
    if dtype is torch.bool:
        return torch.rand(size, device=device) < 0.5
    if dtype in INTEGERS:
        return torch.randint(-INTEGERS[dtype], INTEGERS[dtype], size, dtype=dtype, device=device)
    raise ConfigError(f"random inputs of {dtype} are not supported")


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The dtype of a tensor.

    Raises:
        ConfigError: torch has no such dtype.
    """
    found = getattr(torch, spec.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {spec.dtype} is not supported: this torch has none of that name")
    return found
