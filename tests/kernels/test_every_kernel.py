"""Every kernel of `kernels/`: right beside fp64, whatever the layout; registered; and clear about what it refuses.

A new kernel is tested too. Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import optexp.kernelkit.kernel
from optexp.equivalence.gates import Limits, Yardstick, measure, structure
from optexp.equivalence.tensor_math import error, name_of, rms
from optexp.kernelkit.kernel import DTYPES, SUPPORTED, Case, Kernel, kernels
from optexp.support.tolerances import TOLERANCES

KERNELS = list(kernels().values())


class KeepingBits(Kernel):
    """For backward, however few its elements."""


IN_BITS = [KeepingBits(**vars(kernel)) for kernel in KERNELS if kernel.saved_bytes is not None]
IN_CUDA = [replace(kernel, function=kernel.cuda) for kernel in KERNELS if kernel.cuda is not None]


def everywhere(*more: Callable[[Kernel], Sequence[Any]]) -> list[Any]:
    """Each kernel (and each of what `more` gives for it): interpreted, on a GPU, and there in CUDA C++ too.

    One that keeps bits of many elements for backward is there as one that keeps them of few, too.
    """
    return [
        pytest.param(kernel, device, *rest, id="-".join([kernel.name, language, *(r.name for r in rest)]), marks=marks)
        for group, device, language, marks in (
            (KERNELS, "cpu", "interpreted", ()),
            (IN_BITS, "cpu", "interpreted-bits", ()),
            (KERNELS, "cuda", "triton", pytest.mark.gpu),
            (IN_BITS, "cuda", "triton-bits", pytest.mark.gpu),
            (IN_CUDA, "cuda", "c++", pytest.mark.gpu),
        )
        for kernel in group
        for rest in product(*(of(kernel) for of in more))
    ]


every_kernel = pytest.mark.parametrize(("kernel", "device"), everywhere())
every_case = pytest.mark.parametrize(("kernel", "device", "case"), everywhere(lambda kernel: kernel.cases))
every_invalid_case = pytest.mark.parametrize(
    ("kernel", "device", "invalid"), everywhere(lambda kernel: kernel.invalid_cases)
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
on_gpus = pytest.mark.parametrize(("kernel", "device"), [p for p in everywhere() if p.values[1] == "cuda"])

Arguments = Sequence[Any]


@pytest.fixture(autouse=True)
def _bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    called = getattr(request.node, "callspec", None)
    if called is not None and isinstance(called.params.get("kernel"), KeepingBits):
        monkeypatch.setattr("optexp.kernelkit.bitmask.BITS_FROM", 0)


def arguments(case: Case, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
    """The case's arguments. Drawn on the device, so that the largest are quick."""
    generator = torch.Generator(device).manual_seed(seed)
    return case.arguments(lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype))


def changed(args: Arguments, change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    return tuple(change(arg) if isinstance(arg, Tensor) else arg for arg in args)


def differentiated(function: Callable[..., Tensor], args: Arguments, dy: Tensor | None = None) -> dict[str, Tensor]:
    """The output, and the gradient of every real tensor when `dy` arrives at it."""
    leaves = changed(args, lambda t: t.detach().requires_grad_(t.is_floating_point()))
    output = function(*leaves)
    if dy is None:
        return {"output": output.detach()}
    output.backward(dy.to(output).expand(output.shape))
    grads = {f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {"output": output.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def assert_as_good_as_the_reference(kernel: Kernel, args: Arguments, dtype: torch.dtype, plain: Arguments = ()) -> None:
    """Outputs, of inference too, and gradients pass the gates: beside fp64, they err no more than the reference may.

    plain:  the same values laid out plainly, for the reference
    """
    plain = plain or args
    shape = kernel.reference(*plain).shape
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(args[0].device)
    ours = differentiated(kernel.function, args, dy)
    theirs = differentiated(kernel.reference, plain, dy)
    golden = differentiated(kernel.reference, changed(plain, Tensor.double), dy)
    with torch.no_grad():  # where there may be other configs
        ours["inference"] = kernel.function(*args)
    theirs["inference"], golden["inference"] = theirs["output"], golden["output"]
    assert ours.keys() == theirs.keys()
    for name, g in golden.items():
        assert structure(ours[name], theirs[name]) is None, name
        scale = rms(g)
        baseline = error(theirs[name], g, scale)
        yardstick = Yardstick(baseline.rms, baseline.peak)
        found = error(ours[name], g, scale)
        verdict = measure(name, found, scale, yardstick, yardstick, Limits(TOLERANCES[name_of(dtype)]))
        assert verdict.ok, f"{name}: {verdict.message}"


@every_dtype
@every_case
def test_as_good_as_the_reference(kernel: Kernel, case: Case, dtype: torch.dtype, device: str) -> None:
    assert_as_good_as_the_reference(kernel, arguments(case, device, dtype), dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values, every other element of memory."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]


def transposed(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions swapped in memory."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, beginning at an address that no vector access accepts."""
    buffer = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def expanded(tensor: Tensor) -> Tensor:
    """The same shape, all rows the same memory."""
    return tensor[:1].expand_as(tensor) if tensor.dim() > 1 else tensor


@pytest.mark.parametrize("layout", [strided, transposed, misaligned, expanded])
@every_kernel
def test_any_layout(kernel: Kernel, layout: Callable[[Tensor], Tensor], device: str) -> None:
    args = changed(arguments(kernel.cases[0], device), layout)
    with torch.no_grad():
        plain = changed(args, lambda t: t.contiguous().clone())
    assert_as_good_as_the_reference(kernel, args, torch.float32, plain)


@every_kernel
def test_nothing_to_do(kernel: Kernel, device: str) -> None:
    """No rows: nothing is launched, gradients of what all rows share are zero."""
    args = arguments(kernel.cases[0], device)
    rows = args[0].shape
    empty = changed(args, lambda t: t[:0] if t.shape == rows else t)
    dy = torch.empty_like(kernel.reference(*empty))
    ours, theirs = (differentiated(f, empty, dy) for f in (kernel.function, kernel.reference))
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@every_kernel
def test_what_is_not_finite_goes_where_the_reference_lets_it(kernel: Kernel, value: float, device: str) -> None:
    args = arguments(kernel.cases[0], device)
    args[0].view(-1)[3] = value
    golden = kernel.reference(*changed(args, Tensor.double))
    assert structure(kernel.function(*args), golden.float()) is None


class Recorder(TorchDispatchMode):
    """Our ops that run inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Arguments] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "optexp":
            self.calls[func] = changed(args, torch.clone)
        return func(*args, **(kwargs or {}))


@every_kernel
def test_ops_are_registered_as_torch_wants_them(kernel: Kernel, device: str) -> None:
    args = arguments(kernel.cases[0], device)
    with Recorder() as recorder:
        differentiated(kernel.function, args, kernel.reference(*args))
    assert recorder.calls
    for op, given in recorder.calls.items():
        torch.library.opcheck(op, given)
    forward, *_ = recorder.calls
    torch.library.opcheck(forward, changed(recorder.calls[forward], lambda t: t.requires_grad_(t.is_floating_point())))


@every_kernel
def test_compiles_without_a_graph_break(kernel: Kernel, device: str) -> None:
    args = arguments(kernel.cases[0], device)
    backend = "inductor" if device == "cuda" else "aot_eager"  # Inductor's C++ takes long to compile
    compile_graph, recorded = torch._dynamo.lookup_backend(backend), []

    def watched(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        recorded.extend(str(node.target) for node in graph.graph.nodes)
        return compile_graph(graph, inputs)

    compiled = torch.compile(kernel.function, fullgraph=True, backend=watched)
    torch.manual_seed(0)  # of gradients in another order one in a hundred and fifty is beyond assert_close's limits
    dy = torch.randn_like(kernel.reference(*args))
    ours, theirs = (differentiated(f, args, dy) for f in (compiled, kernel.function))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)
    assert any(target.startswith("optexp.") for target in recorded), recorded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
@every_kernel
def test_autocast_gives_the_dtypes_it_gives_the_reference(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    args = arguments(kernel.cases[0], device)
    half = changed(args, lambda t: t.to(dtype) if t is args[0] else t)
    for given in (args, half):
        with torch.autocast(device, dtype):
            ours, theirs = kernel.function(*given), kernel.reference(*given)
        golden = kernel.reference(*changed(given, Tensor.double))
        assert ours.dtype is theirs.dtype
        assert (ours - golden).abs().max() <= 3 * (theirs - golden).abs().max() + 1e-6


@every_kernel
def test_gradcheck(kernel: Kernel, device: str) -> None:
    for case in kernel.cases[:2]:
        args = changed(arguments(case, device), lambda t: t.double().requires_grad_())
        assert torch.autograd.gradcheck(kernel.function, args, fast_mode=True)


@every_kernel
def test_gradgradcheck(kernel: Kernel, device: str) -> None:
    """Gradients can be differentiated, by what the reference does."""
    args = changed(arguments(kernel.cases[0], device), lambda t: t.double().requires_grad_())
    assert torch.autograd.gradgradcheck(kernel.function, args, fast_mode=True)


@every_kernel
def test_many_gradients_at_once(kernel: Kernel, device: str) -> None:
    """As `is_grads_batched` asks for them: from the reference, a kernel has no memory to read there."""
    x, *rest = arguments(kernel.cases[0], device)
    x = x.requires_grad_()
    ours, theirs = (
        torch.autograd.grad(y, x, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)[0]
        for y in (function(x, *rest) for function in (kernel.function, kernel.reference))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@every_kernel
def test_a_result_can_be_written_to(kernel: Kernel, device: str) -> None:
    """As a residual is added in place: gradients are those of a sum beside it. Where they need the result as it was,
    torch refuses; of ours nowhere else than of its own."""
    for case in kernel.cases:
        ours, theirs = (_written_to(f, arguments(case, device)) for f in (kernel.function, kernel.reference))
        if ours is None:
            assert theirs is None
        else:
            beside = differentiated(lambda *leaves: kernel.reference(*leaves) + 1, arguments(case, device), ONE)
            torch.testing.assert_close(ours, beside, rtol=1e-4, atol=1e-4)


ONE = torch.ones(())


def _written_to(function: Callable[..., Tensor], args: Arguments) -> dict[str, Tensor] | None:
    """The result, and gradients; None where torch refuses."""
    try:
        return differentiated(lambda *leaves: function(*leaves).add_(1), args, ONE)
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return None
        raise


@every_kernel
def test_the_transforms_of_torch_func_and_forward_mode(kernel: Kernel, device: str) -> None:
    """They are given the reference, compiled too."""
    x, *rest = arguments(kernel.cases[0], device)

    def ours(x: Tensor) -> Tensor:
        return kernel.function(x, *rest)

    def theirs(x: Tensor) -> Tensor:
        return kernel.reference(x, *rest)

    def forward(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]

    def backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: function(x).square().sum())(x)

    tangent = forward(theirs, x)
    for transform, expected in ((forward, tangent), (backward, backward(theirs, x))):
        torch.testing.assert_close(transform(ours, x), expected)
    torch._dynamo.reset()  # what was compiled for other kernels counts as the same function
    compiled = torch.compile(partial(backward, ours), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    compiled = torch.compile(ours, backend="aot_eager")
    compiled(x)  # before, and without: there it is ours
    for function in (ours, compiled):
        with torch.autograd.forward_ad.dual_level():
            y = function(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, tangent)


@every_invalid_case
def test_an_invalid_case_is_a_value_error(kernel: Kernel, invalid: Case, device: str) -> None:
    with pytest.raises(ValueError, match=kernel.name):
        kernel.function(*arguments(invalid, device))


def _is_number(x: Any, operations: float = 1) -> bool:
    return isinstance(x, Tensor) and x.dtype in SUPPORTED


def treat_as_small(kernel: Kernel, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """However large a call is, launches are all that counts. Returns the kernel's module."""
    module = importlib.import_module(kernel.function.__module__)
    if device == "cuda":
        monkeypatch.setattr(optexp.kernelkit.kernel, "SMALL", 2**62)
    else:
        for user in (optexp.kernelkit.kernel, module):
            monkeypatch.setattr(user, "is_small", _is_number, raising=False)
    return module


@every_invalid_case
def test_an_invalid_case_in_a_small_call_is_a_value_error(
    kernel: Kernel, invalid: Case, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though torch sees it first."""
    treat_as_small(kernel, device, monkeypatch)
    with pytest.raises(ValueError, match=kernel.name):
        kernel.function(*arguments(invalid, device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", sorted(set(kernels()) - {"layernorm_linear"}))
def test_a_small_call_is_torch_s_and_waits_for_no_check(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels()[name]
    module = treat_as_small(kernel, device, monkeypatch)
    monkeypatch.setattr(module, "check_tensors", None)
    args = arguments(kernel.cases[1], device)
    leaves = [arg.requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    results = []
    for function in (kernel.function, kernel.reference):
        torch.manual_seed(0)
        y = function(*leaves)
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results.append([y, *torch.autograd.grad(y, wanted, torch.ones_like(y))])
    assert all(map(torch.equal, *results))


@on_gpus
def test_tensors_of_two_devices_are_refused_in_a_small_call(
    kernel: Kernel, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_small(kernel, device, monkeypatch)
    test_tensors_of_two_devices_are_refused(kernel, device)


@on_gpus
def test_tensors_of_two_devices_are_refused(kernel: Kernel, device: str) -> None:
    args = arguments(kernel.cases[0], device)
    others = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)][1:]
    if others:
        moved = tuple(arg.cpu() if i == others[0] else arg for i, arg in enumerate(args))
        with pytest.raises(ValueError, match="one device"):
            kernel.function(*moved)


@every_kernel
def test_the_plain_version_computes_the_same(kernel: Kernel, device: str) -> None:
    if kernel.plain is not None:
        args = arguments(kernel.cases[0], device)
        torch.testing.assert_close(kernel.plain(*args), kernel.reference(*args), atol=1e-5, rtol=1e-4)


@every_kernel
def test_a_profiler_sees_what_a_kernel_was_given(kernel: Kernel, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optexp.kernelkit.kernel.SMALL", 0)
    args = arguments(kernel.cases[0], device)
    y = kernel.function(*args)  # compiles, and chooses
    with torch.profiler.profile(record_shapes=True) as profiler:
        kernel.function(*args)
    seen = [event.input_shapes for event in profiler.events() if event.name.startswith("optexp.")]
    elements = {math.prod(shape) for shapes in seen for shape in shapes}
    x = next(arg for arg in args if isinstance(arg, Tensor))
    assert {x.numel(), y.numel()} & elements  # of a library's GEMM the one or the other


@on_gpus
def test_captured_in_a_graph(kernel: Kernel, device: str) -> None:
    args = arguments(kernel.cases[0], device)
    kernel.function(*args)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.function(*args)
    fresh = arguments(kernel.cases[0], device, seed=1)
    for static, new in zip(args, fresh, strict=True):
        if isinstance(static, Tensor):
            static.copy_(new)
    graph.replay()
    torch.testing.assert_close(captured, kernel.function(*fresh))


ROW = torch.ones(1, dtype=torch.bfloat16)
TALL = {
    "relu_bias_scale": (ROW, 2.0),
    "relu_bias_dropout": (ROW, 0.0),
    "bias_gelu": (ROW, "tanh"),
    "softmax": (-1,),
    "layernorm": ((1,), None, ROW),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("name", TALL)
def test_more_rows_than_an_int32_counts(name: str) -> None:
    kernel, rest = kernels()[name], changed(TALL[name], Tensor.cuda)
    x = torch.zeros(2**31 + 5, 1, device="cuda", dtype=torch.bfloat16)
    x[-2:] = 1.0
    with torch.no_grad():
        y, last = kernel.function(x, *rest), kernel.reference(x[-4:], *rest)
    torch.testing.assert_close(y[:4], last[:1].expand(4, 1))
    torch.testing.assert_close(y[-4:], last)


@on_gpus
@pytest.mark.usefixtures("much_memory")
def test_more_elements_than_an_int32_counts(kernel: Kernel, device: str) -> None:
    args = arguments(kernel.large, device, torch.bfloat16)
    assert args[0].numel() > 2**31
    with torch.no_grad():
        theirs = kernel.reference(*args)
        apart = kernel.function(*args).float().sub_(theirs).abs_()
        assert apart.sub_(theirs.abs_().mul_(0.03)).max() < 0.05  # a few roundings to bfloat16
