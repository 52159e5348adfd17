"""TF32: where it applies, what proves it, and that both generations of torch's settings agree afterwards."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optexp.equivalence import process_state
from optexp.errors import Unsupported
from optexp.strategies.amp import Amp
from optexp.strategies.tf32 import Tf32, kind
from optexp.strategy import compose, precision
from optexp.support.tf32 import allow_tf32, flags
from optexp.trace import Kernel, Span, Trace
from optexp.workloads.gelu import Gelu
from optexp.workloads.mlp import Mlp

CUDA = torch.device("cuda")
OFF, ON = {"products": "none", "convolutions": "tf32"}, {"products": "tf32", "convolutions": "tf32"}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """As if there were a GPU of this compute capability."""

    def of(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")

    return of


@pytest.fixture
def _flags():
    """The process's flags as they are at its start, before and after."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def kernels(*names: str) -> Trace:
    return Trace(steps=(Span("step", 0.0, 9.0),), kernels=tuple(Kernel(name, 0.0, 1.0) for name in names))


def test_a_cpu_an_old_card_and_other_dtypes_are_told_what_to_do(build, card):
    program = build(Mlp(dim=8))
    assert "compute capability 8.0 or newer" in Tf32().unsupported(program, torch.device("cpu"))
    card(7, 5)
    assert Tf32().unsupported(program, CUDA) == (
        "TF32 needs compute capability 8.0, and Card is older: try strategy.amp.dtype=float16"
    )
    card(9, 0)
    assert Tf32().unsupported(program, CUDA) is None
    lowered = replace(program, model=program.model.to(torch.bfloat16))
    assert "computes in bfloat16: use dtype=float32" in Tf32().unsupported(lowered, CUDA)


def test_one_strategy_decides_how_products_are_computed():
    assert Tf32().contract == precision("tf32")
    with pytest.raises(Unsupported, match="tf32 does not work with amp: leave one out"):
        compose([Amp(), Tf32()])


@pytest.mark.usefixtures("_flags")
def test_flags_are_set_in_both_generations_of_settings(build):
    before, off = process_state.settings(), flags()
    program, notes = Tf32().apply(build(Mlp(dim=8, layers=2)))
    assert off["products"] != "tf32"
    assert (notes["before"], notes["after"], flags()) == (off, ON, ON)
    assert notes["found"] == {"addmm": 2}
    # The older settings can still be read: torch.compile does, and mixed settings raise.
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32 is True
    after = process_state.settings()
    assert {name for name, value in after.items() if before[name] != value} <= Tf32().changes <= after.keys()
    program.run()


@pytest.mark.parametrize(
    ("found", "lowered", "engaged", "words"),
    [
        ({"addmm": 3}, {"addmm": 2}, True, "with other bits than before: 2 of 3 addmm; kernels: s1688gemm"),
        ({"addmm": 3}, {}, False, "addmm may run in TF32, but give the same bits as before"),
        ({}, {}, False, "no product in float32 was left to lower"),
        ({"convolution": 1}, {"convolution": 1}, False, "convolutions were in TF32 already"),
        ({"addmm": 1, "convolution": 1}, {"addmm": 1}, True, "1 of 1 addmm; kernels: s1688gemm (convolutions were"),
    ],
)
def test_evidence_is_a_flag_and_products_with_other_bits(found: dict, lowered: dict, engaged: bool, words: str):
    """Other kernels prove nothing: fusion brings some too."""
    notes = {"before": OFF, "after": ON, "found": found, "lowered": lowered}
    evidence = Tf32().evidence(kernels("gelu", "sgemm"), kernels("triton_fused", "s1688gemm"), notes, {})
    assert evidence.engaged is engaged
    assert words in evidence.text


@pytest.mark.usefixtures("_flags")
def test_a_formula_has_no_products(build):
    assert Tf32().apply(build(Gelu(size=8)))[1]["found"] == {}


class Rounding(TorchDispatchMode):
    """As a card would, where the flags let it: products of numbers with 11 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        lowered = name in ("addmm", "convolution") and flags()[kind(name)] == "tf32"
        return result.to(torch.float16).to(result.dtype) if lowered else result


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize(("exact", "lowered"), [("products", {"addmm": 1}), ("convolutions", {"convolution": 1})])
def test_what_comes_out_with_other_bits_counts(build, exact: str, lowered: dict):
    allow_tf32(**{"products": True, "convolutions": True, exact: False})
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 4))
    program = replace(build(Gelu(size=8)), model=model)
    program.feed.reset([(torch.randn(1, 1, 8, 8),)])
    with Rounding():
        _, notes = Tf32().apply(program)
    assert notes["found"] == {"addmm": 1, "convolution": 1}
    assert notes["lowered"] == lowered
    assert flags() == ON


# --- on a GPU, in a process of its own: the flags are the process's

ON_GPU = f"""
import sys
sys.path[:] = {sys.path!r}
import torch
from optexp.trace import Trace, record
from optexp.strategies.fusion import Fusion
from optexp.strategies.tf32 import Tf32
from optexp.workloads.mlp import Mlp

def program():
    built = workload.build(torch.device("cuda"), torch.float32, 0)
    built.feed.reset([workload.batch(torch.Generator("cuda").manual_seed(i)) for i in range(4)])
    return built

def traced(name, program):
    record(program.run, 3, folder / name, torch.device("cuda"))
    return Trace.read(folder / name)

from pathlib import Path
folder = Path(sys.argv[1])
workload = Mlp(mode="forward_backward", dim=512, batch_size=512)
plain = program()
exact, before = plain.run()["loss"].item(), traced("before.json.gz", plain)
lowered, notes = Tf32().apply(program())
loss, after = lowered.run()["loss"].item(), traced("after.json.gz", lowered)
evidence = Tf32().evidence(before, after, notes, {{}})
print(evidence.text)
assert evidence.engaged
assert not Tf32().evidence(after, after, Tf32().apply(program())[1], {{}}).engaged, "the second time nothing is left"
x, w = torch.randn(2, 512, 512, device="cuda")
error = ((x @ w).double() - x.double() @ w.double()).abs().max().item()
assert 1e-3 < error < 0.5, error
assert abs(loss - exact) < 1e-2 * abs(exact)
compiled, _ = Fusion().apply(lowered)
assert abs(compiled.run()["loss"].item() - exact) < 1e-2 * abs(exact)
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_products_run_in_tf32_forward_and_backward_compiled_too(tmp_path):
    script = tmp_path / "lowered.py"
    script.write_text(ON_GPU)
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("in TF32, with other bits than before: ")
    assert " addmm" in done.stdout


@pytest.mark.gpu
def test_a_real_card_is_new_enough_or_says_so(build):
    reason = Tf32().unsupported(build(Mlp(dim=8), device="cuda"), torch.device("cuda", torch.cuda.current_device()))
    assert (reason is None) == (torch.cuda.get_device_capability() >= (8, 0))
