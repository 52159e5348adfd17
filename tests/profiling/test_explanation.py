"""What changed is said with the numbers that were built in, for faster and for slower."""

import re

import torch
from torch import nn

from optexp.profiling.breakdown import breakdown
from optexp.profiling.explanation import explain
from optexp.trace import Trace
from tests.profiling.recording import undisturbed


def explained(before: Trace, after: Trace) -> list[str]:
    return explain(before, after, breakdown(before), breakdown(after))


def test_capture(eager, captured):
    sentences = explained(eager, captured)
    assert "45 launches a step became 1 (1 CUDA graph of 45 kernels)" in sentences
    assert any(re.fullmatch(r"GPU busy rose from 13 % to (79|80) % of the step", s) for s in sentences)
    assert any(re.fullmatch(r"Host-late gaps fell from 8\d % to \d % of the step", s) for s in sentences)
    assert re.match(r"The profiled step got faster, 67\d µs → 11\d µs: gaps while the host dispatched −", sentences[0])


def test_slower_is_explained_by_the_kernel_that_appeared(chrome):
    def attention(name: str, us: float) -> Trace:
        build = chrome()

        def step():
            build.op("aten::mm", 10.0, 100.0, "gemm")
            build.op("aten::sdpa", 10.0, us, name)

        return build.steps(step)

    sentences = explained(attention("flash_fwd_kernel", 50.0), attention("math_attention", 900.0))
    assert sentences[0].startswith("The profiled step got slower, 152 µs → 1 ms: kernels of unknown class +850 µs")
    assert "Kernels new: math_attention (1×, 900 µs)" in sentences
    assert "Kernels gone: flash_fwd_kernel (1×, 50 µs)" in sentences


def test_the_same_kernel_that_takes_longer(chrome):
    def one(us: float) -> Trace:
        build = chrome()
        return build.steps(lambda: build.op("aten::mm", 10.0, us, "gemm"))

    assert "Kernels that take another time: gemm 100 µs → 150 µs" in explained(one(100.0), one(150.0))


def test_nothing_changed(eager):
    assert explained(eager, eager) == ["The profiled step takes about as long, 675 µs → 675 µs"]


def test_terms_account_for_the_difference(eager, captured, feeding):
    for before, after in ((eager, captured), (captured, feeding), (feeding, eager)):
        a, b = breakdown(before), breakdown(after)
        changes = sum(b.us(term) - a.us(term) for term in {*a.terms, *b.terms})
        assert abs(changes - (b.wall_us - a.wall_us)) <= 0.01 * abs(b.wall_us - a.wall_us)


@torch.no_grad()
def test_precision_and_operators_on_a_cpu(tmp_path):
    model, inputs = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(32, 64)

    def lowered():
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs)

    before = undisturbed(lambda: model(inputs), tmp_path / "before.json.gz")
    sentences = explained(before, undisturbed(lowered, tmp_path / "after.json.gz"))
    assert "Matrix products a step, now 1 in bfloat16 (before: float32)" in sentences
    assert any(s.startswith("Operators new:") and "aten::_to_copy" in s for s in sentences)
    assert any(re.match(r"\d+ operator calls a step became \d+", s) for s in sentences)
