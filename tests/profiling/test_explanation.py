"""What changed is said with the numbers that were built in, for faster and for slower."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from optexp.profiling.accounts import accounts
from optexp.profiling.breakdown import breakdown
from optexp.profiling.causes import backend
from optexp.profiling.explanation import coverage, difference, explain
from optexp.profiling.view import View
from optexp.records.difference import Cause, Difference
from optexp.trace import Trace
from tests.profiling.conftest import MATRICES, ChromeTrace
from tests.profiling.recording import undisturbed

Step = Callable[[ChromeTrace], None]


def arm(trace: Trace, beside: Trace | None = None) -> View:
    return View(trace, breakdown(trace), beside=beside)


def explained(before: Trace, after: Trace) -> list[str]:
    arms = arm(before), arm(after, before)
    return explain(*arms, difference(*arms))


def why(before: Trace, after: Trace) -> Difference:
    found = difference(arm(before), arm(after, before))
    assert found is not None
    return found


def traced(step: Step) -> Trace:
    build = ChromeTrace()
    return build.steps(lambda: step(build))


def test_capture(eager: Trace, captured: Trace) -> None:
    sentences = explained(eager, captured)
    assert re.match(r"The profiled step got faster, 67\d µs → 11\d µs: gaps while the host dispatched −", sentences[0])
    assert re.fullmatch(r"45 launches a step became 1 \(1 CUDA graph of 45 kernels\), −5\d\d µs", sentences[1])
    assert any(re.fullmatch(r"GPU busy rose from 13 % to (79|80) % of the step", s) for s in sentences)
    assert any(re.fullmatch(r"Host-late gaps fell from 8\d % to \d % of the step", s) for s in sentences)


def test_a_graph_that_is_gone(eager: Trace, captured: Trace) -> None:
    first = why(captured, eager).causes[0]
    assert first.account == "cuda graph"
    assert first.words.startswith("1 launch a step became 45: no CUDA graph any more, +")


def attending(backend: str, kernel: str, us: float, tensors: int = 3) -> Step:
    def step(build: ChromeTrace) -> None:
        build.op("aten::mm", 10.0, 100.0, "gemm")
        inputs = {"Input type": ["float"] * tensors, "Input Dims": [[8, 64, 64, 32]] * tensors}
        build.event("cpu_op", "aten::scaled_dot_product_attention", build.host, 12.0, **inputs)
        build.op(f"aten::_scaled_dot_product_{backend}", 10.0, us, kernel)
        build.host += 5.0

    return step


def test_slower_is_explained_by_another_attention_kernel() -> None:
    before = traced(attending("flash_attention", "flash_fwd_kernel", 50.0))
    found = why(before, traced(attending("efficient_attention", "fmha_cutlassF_bf16", 900.0, tensors=4)))
    assert found.causes[0].account == "attention"
    assert found.causes[0].words == (
        "attention: memory-efficient kernels instead of flash ones (fmha_cutlassF_bf16 instead of flash_fwd_kernel),"
        " because it gets an explicit mask, which flash attention does not take, +850 µs"
    )
    (gone, new) = found.changes
    assert {gone.us, new.us} == {-50.0, 900.0}


def test_attention_that_leaves_its_flash_kernel_under_capture() -> None:
    before = traced(attending("flash_attention", "flash_fwd_kernel", 50.0))
    build = ChromeTrace()
    after = build.steps(lambda: build.graph(kernels=1, kernel_us=900.0, kernel="fmha_cutlassF_bf16"))
    (words,) = (cause.words for cause in why(before, after).causes if cause.account == "attention")
    assert "while a graph is captured, a model cannot look at the values of its mask" in words


def test_attention_that_is_computed_operator_by_operator_under_capture() -> None:
    before = traced(attending("cudnn_attention", "cudnn_sdpa_flash_fprop", 50.0))
    build = ChromeTrace()

    def step() -> None:
        build.graph(3, 100.0, kernel="sm80_xmma_gemm_f32f32")
        build.graph(1, 60.0, kernel="softmax_warp_forward")
        build.graph(5, 80.0, kernel="vectorized_elementwise_kernel")

    found = why(before, build.steps(step))
    assert found.causes[0].account == "attention"
    assert found.causes[0].us == pytest.approx(2 * 100 + 60 + 5 * 80 - 50, abs=1)
    assert "math kernels instead of cuDNN ones (matrix products, activation, elementwise" in found.causes[0].words
    assert "an explicit one, which cuDNN attention does not take" in found.causes[0].words


def test_more_products_without_a_softmax_are_no_attention() -> None:
    before = traced(attending("cudnn_attention", "cudnn_sdpa_flash_fprop", 50.0))
    build = ChromeTrace()
    after = build.steps(lambda: build.graph(3, 100.0, kernel="sm80_xmma_gemm_f32f32"))
    (words,) = (cause.words for cause in why(before, after).causes if cause.account == "attention")
    assert words.startswith("attention: 1 → 0 a step")


def one(name: str, us: float, kernel: str = "gemm", **args: object) -> Step:
    return lambda build: build.op(name, 10.0, us, kernel, **args)


def test_the_same_kernel_that_takes_longer() -> None:
    found = why(traced(one("aten::mm", 100.0)), traced(one("aten::mm", 150.0)))
    assert found.causes[0].words == "matrix products: 100 µs → 150 µs a step, +50 µs"
    (change,) = found.changes
    assert (change.name, change.us_before, change.us_after) == ("aten::mm", 100.0, 150.0)


def lower(dtype: str) -> dict[str, object]:
    return MATRICES | {"Input type": [dtype, dtype]}


@pytest.mark.parametrize(("us", "words"), [(40.0, "−60 µs"), (300.0, "slower: no fast kernel for these shapes")])
def test_another_precision(us: float, words: str) -> None:
    before = traced(one("aten::mm", 100.0, **MATRICES))
    first = why(before, traced(one("aten::mm", us, "bf16_gemm", **lower("c10::BFloat16")))).causes[0]
    assert first.account == "matrix products"
    assert first.words.startswith("matrix products in bfloat16 instead of float32: 100 µs → ")
    assert words in first.words


def test_casts_that_cost_more_than_they_save() -> None:
    casting = {"Input type": ["c10::BFloat16", "float"], "Input Dims": [[4096, 4096], [4096, 4096]]}

    def after(build: ChromeTrace) -> None:
        for _ in range(4):
            build.op("aten::copy_", 10.0, 60.0, "void cast", **casting)
        build.op("aten::mm", 10.0, 40.0, "bf16_gemm", **lower("c10::BFloat16"))

    found = why(traced(one("aten::mm", 100.0, **MATRICES)), traced(after))
    assert found.causes[0].words == "casts between dtypes: 0 → 4 a step, 0 → 240 µs (new: cast), +240 µs"
    assert [cause.account for cause in found.causes if (cause.us or 0) < -1] == ["matrix products"]


def test_a_synchronisation() -> None:
    def waiting(build: ChromeTrace) -> None:
        build.op("aten::mm", 10.0, 500.0)
        build.synchronise()
        build.spend("cpu_op", "aten::later", 300.0)

    def ahead(build: ChromeTrace) -> None:
        build.op("aten::mm", 10.0, 500.0)
        build.spend("cpu_op", "aten::later", 300.0)

    assert why(traced(ahead), traced(waiting)).causes[0].account == "synchronisation"


def test_nothing_changed(eager: Trace) -> None:
    assert explained(eager, eager) == ["The profiled step takes about as long, 675 µs → 675 µs"]
    assert why(eager, eager).changes == []


def test_accounts_add_up_to_the_step(eager: Trace, captured: Trace, feeding: Trace, products: Trace) -> None:
    for trace in (eager, captured, feeding, products):
        found = breakdown(trace)
        together = sum(account.us for account in accounts(trace, found).values())
        assert together == pytest.approx(found.wall_us, rel=1e-6)


def test_causes_account_for_the_difference(eager: Trace, captured: Trace, feeding: Trace) -> None:
    for before, after in ((eager, captured), (captured, feeding), (feeding, eager)):
        found = why(before, after)
        assert sum(cause.us or 0.0 for cause in found.causes) == pytest.approx(found.traced_us, rel=1e-6)


def test_what_the_trace_did_not_see_is_unexplained() -> None:
    found = Difference(-100.0, -100.0, 0.0, [Cause("attention", "attention, −100 µs", -100.0)])
    assert found.explained == 1.0
    timed = found.timed(-125.0)
    assert timed.explained == pytest.approx(0.8)
    assert coverage(timed) == "Of −125 µs a step, these causes explain 80 %; −25 µs is unexplained"
    assert timed.untimed().causes == [Cause("attention", "attention")]


@torch.no_grad()
def test_precision_and_operators_on_a_cpu(tmp_path: Path) -> None:
    model, inputs = nn.Sequential(nn.Linear(256, 256), nn.GELU()), torch.randn(512, 256)

    def lowered() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs)

    before = undisturbed(lambda: model(inputs), tmp_path / "before.json.gz")
    after = undisturbed(lowered, tmp_path / "after.json.gz")
    found = why(before, after)
    words = [cause.words for cause in found.causes]
    assert any("matrix products in bfloat16 instead of float32" in said for said in words), words
    assert any(said.startswith("casts between dtypes: 0 → 3 a step") for said in words), words
    assert any(change.name == "aten::copy_" and change.calls_before == 0 for change in found.changes)
    for trace in (before, after):
        found_ = breakdown(trace)
        together = sum(account.us for account in accounts(trace, found_).values())
        assert together == pytest.approx(found_.wall_us, rel=1e-6)


def test_compiled_regions_on_a_cpu(tmp_path: Path) -> None:
    x = torch.randn(256, 256)

    def plain() -> torch.Tensor:
        return ((x + 1).exp() * 2).sum()

    compiled = torch.compile(plain)
    before, after = (
        undisturbed(step, tmp_path / name) for step, name in ((plain, "before.json.gz"), (compiled, "after.json.gz"))
    )
    for one, other, words in (
        (before, after, r"fusion: \d+ operators became 1 compiled region( and \d operators?)?, "),
        (after, before, r"no fusion any more: 1 compiled region( and \d operators?)? became \d+ operators, "),
    ):
        (cause,) = (cause for cause in why(one, other).causes if cause.account == "compiled kernels")
        assert re.match(words, cause.words), cause.words


def test_kernels_of_cudnn_are_no_flash_kernels() -> None:
    build = ChromeTrace()
    kernel = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"
    assert backend(arm(build.steps(lambda: build.graph(kernels=1, kernel_us=100.0, kernel=kernel)))) == "cuDNN"


def test_more_products_are_no_slow_kernels() -> None:
    def step(dtype: str, calls: int) -> Step:
        def products(build: ChromeTrace) -> None:
            for _ in range(calls):
                build.op("aten::mm", 10.0, 100.0, "gemm", **{**MATRICES, "Input type": [dtype] * 2})

        return products

    words = why(traced(step("float", 1)), traced(step("c10::BFloat16", 3))).causes[0].words
    assert words.startswith("matrix products in bfloat16 instead of float32")
    assert "no fast kernel" not in words


def test_kernels_that_leave_a_graph_are_the_same_kernels() -> None:
    build = ChromeTrace()
    before = build.steps(lambda: build.graph(kernels=1, kernel_us=50.0, kernel="k"))
    found = why(before, traced(one("aten::add", 50.0, "k", grid=16)))
    assert not found.changes
    assert not {"elementwise", "other kernels"} & {cause.account for cause in found.causes if cause.us}
