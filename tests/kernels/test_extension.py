"""CUDA C++: it compiles wherever there is a compiler, says what is missing, and what no other test reaches is right."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from optexp.kernelkit import assembly, extension
from optexp.kernelkit.kernel import kernels
from optexp.kernels import add, layernorm_linear, relu
from optexp.kernels._layernorm_linear_cuda import cuda_plain

SOURCES = sorted(path.stem for path in extension.source_files("add")[0].parent.glob("*.cu"))
CUDA = torch.device("cuda")


def compile(name: str, output: Path) -> str:
    """To machine code of an H100; returns what the compiler said."""
    declared = {source.name: source for kernel in kernels().values() for source in kernel.sources}
    (target,) = declared[name].targets(CUDA)
    # What torch defines for extensions.
    defined = [f"-D__CUDA_NO_{what}__" for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS")]
    flags = [
        *defined,
        "--expt-relaxed-constexpr",
        *extension.FLAGS,
        *extension._gencode(target),
        "-Werror",
        "all-warnings",
    ]
    command = ["nvcc", "-cubin", *flags, "-Xptxas", "-v", str(extension.source_files(name)[0]), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA compiler")
@pytest.mark.parametrize("name", SOURCES)
def test_compiles_without_warnings_or_spills(name: str, tmp_path: Path) -> None:
    spilled = re.findall(r"(\d+) bytes spill stores", compile(name, tmp_path / "out"))
    assert spilled
    assert set(spilled) == {"0"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA compiler")
@pytest.mark.parametrize("function", ["forward", "backward"])
def test_rows_are_read_before_one_is_written(function: str, tmp_path: Path) -> None:
    """Four of the bias_scale's loads are on their way at once, in half precision too."""
    compile("relu_bias_scale", tmp_path / "out")
    sass = assembly._cuobjdump("-sass", tmp_path / "out")
    codes = [c for c in sass.split("Function :") if f"scale_{function}I13__nv_bfloat16Li8" in c.split("\n")[0]]
    assert len(codes) == {"forward": 1, "backward": 2}[function]  # of one group of rows, or of several
    for code in codes:
        accesses = re.findall(r"\b(LDG|STG)\.E\.128", code)
        loads = accesses[: accesses.index("STG")]
        assert len(loads) == {"forward": 5, "backward": 4}[function]  # forward also reads the bias


def test_architectures_can_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    assert extension.architectures() == ["8.0", "9.0+PTX"]
    flags = [flag for target in extension.architectures() for flag in extension._gencode(target)]
    assert [flag.partition("=arch=")[2] for flag in flags] == [
        "compute_80,code=sm_80",
        "compute_90,code=sm_90",
        "compute_90,code=compute_90",
    ]


def test_reasons_say_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "use device=cuda" in extension.why_not(torch.device("cpu"))
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "no CUDA compiler was found" in extension.why_not(CUDA)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    assert "no CUDA compiler was found" in extension.why_not(CUDA)
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler was not found" in extension.why_not(CUDA)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: "/nvcc" if name == "nvcc" else None)
    assert "pip install ninja" in extension.why_not(CUDA)


def test_off_the_gpu_it_is_torch_that_computes() -> None:
    x = torch.randn(5)
    assert torch.equal(relu.cuda(x), torch.relu(x))
    assert torch.equal(relu.relu_(x.clone()), torch.relu(x))


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 33), (3, 256), (4096, 1024)])
def test_add_with_any_grid(blocks: int, threads: int) -> None:
    a, b = torch.randn(2, 10_001, device="cuda")
    assert torch.equal(add.launched(a, b, blocks, threads), a + b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relu_is_written_over_its_input(dtype: torch.dtype) -> None:
    x = torch.randn(3, 1001, device="cuda").to(dtype)
    x[0, 0] = torch.nan
    expected, address, version = torch.relu(x), x.data_ptr(), x._version
    y = relu.relu_(x)
    assert y is x
    assert y.data_ptr() == address
    assert x._version > version
    assert torch.equal(torch.nan_to_num(y), torch.nan_to_num(expected))
    assert y[0, 0].isnan()
    torch.testing.assert_close(relu.relu_(x.T.neg()), torch.relu(x.T.neg()), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_relu_over_its_input_has_a_gradient() -> None:
    x = torch.randn(100, device="cuda", requires_grad=True)
    relu.relu_(x * 1).sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


@pytest.mark.gpu
def test_the_plain_norm_and_gemm() -> None:
    case = layernorm_linear.KERNEL.cases[0]
    args = case.arguments(lambda *shape: torch.randn(*shape, device="cuda"))
    torch.testing.assert_close(cuda_plain(*args), layernorm_linear.reference(*args), atol=1e-5, rtol=1e-4)


WALK = f"""
import sys
sys.path[:] = {sys.path!r}
import torch
from optexp.kernel import kernels
from optexp.kernelkit import extension, hopper
from optexp.kernels._layernorm_linear_cuda import by_few, by_hopper
from optexp.kernels.linear_gelu import HOPPER_GEMM, by_hopper as by_hopper_then_gelu

if sys.argv[1] == "racecheck":  # see hopper.cuh
    extension.FLAGS.append("-DOPTEXP_FOR_RACECHECK")
for kernel in kernels().values():
    if kernel.cuda is not None:
        for case in kernel.cases:
            args = case.arguments(lambda *shape: torch.randn(*shape, device="cuda"))
            args = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
            kernel.cuda(*args).sum().backward()
if hopper.takes(HOPPER_GEMM, torch.empty(8, 8, device="cuda")):
    for m, n, k in ((1, 8, 8), (65, 136, 520), (130, 264, 2048)):
        sizes = ((m, k), (n, k), (k,), (k,), (n,))
        x, weight, gamma, beta, bias = (torch.randn(*size, device="cuda").bfloat16() for size in sizes)
        by_few(x, gamma, beta, weight, bias, 1e-5)
        by_few(x, None, None, weight, None, 1e-5)
        by_hopper_then_gelu(x, weight, bias, "tanh")
        for beside, apart, polls in ((False, False, 1000), (True, False, 1000), (True, True, 1000), (True, True, 0)):
            by_hopper(x, gamma, beta, weight, bias, 1e-5, beside, apart, polls)
            by_hopper(x, None, None, weight, None, 1e-5, beside, apart, polls)
torch.cuda.synchronize()
print("walked")
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_read_or_written_where_it_should_not_be(tool: str, tmp_path: Path) -> None:
    script = tmp_path / "walk.py"
    script.write_text(WALK)
    only = ["--kernel-name-exclude", "regex=2at6native|cutlass|cublas|gemm|triton|layernorm_backward"]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *only, sys.executable, str(script), tool]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "walked" in done.stdout
