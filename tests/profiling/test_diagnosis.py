"""Each cause is named where it was built in, and advice never repeats or invents a strategy."""

from pathlib import Path

import pytest
import torch
from torch import nn

from optexp.comparison.suggestions import answered, installed, narrowed, suggestion
from optexp.profiling.breakdown import Breakdown, breakdown
from optexp.profiling.diagnosis import AVOIDABLE_FIRST, BOTTLENECKS
from optexp.profiling.diagnosis import diagnose as bottlenecks_of
from optexp.profiling.view import View
from optexp.profiling.waste import RULES as WASTE
from optexp.records.profile import Bottleneck, Calibration
from optexp.trace import Trace
from tests.profiling.conftest import ChromeTrace
from tests.profiling.recording import undisturbed

STRATEGIES = installed()


def diagnose(trace: Trace, breakdown: Breakdown, calibration: Calibration | None = None) -> list[Bottleneck]:
    return answered(bottlenecks_of(View(trace, breakdown)), STRATEGIES, trace, calibration)[0]


def found(trace: Trace, calibration=None) -> dict[str, Bottleneck]:
    bottlenecks = diagnose(trace, breakdown(trace, calibration), calibration)
    known = {rule.__name__ for rules in (*BOTTLENECKS.values(), WASTE) for rule in rules}
    assert known.issuperset(b.label for b in bottlenecks)  # each is the function of its name
    shares = [b.share for b in bottlenecks if b.share < AVOIDABLE_FIRST]
    assert shares == sorted(shares, reverse=True)
    return {b.label: b for b in bottlenecks}


def test_many_small_kernels(eager):
    causes = found(eager)
    assert list(causes) == ["many_small_kernels"]
    assert causes["many_small_kernels"].try_ == ("strategy=cuda_graph", "strategy=fusion", "strategy=fused_optimizer")
    assert "45 kernels" in causes["many_small_kernels"].why


def test_a_captured_step_is_not_to_be_captured_again(captured):
    causes = found(captured)
    assert list(causes) == ["many_small_kernels"]  # the GPU's own gaps between them are left, and fusion removes those
    assert causes["many_small_kernels"].try_ == ("strategy=fusion", "strategy=fused_optimizer")


def test_waiting_for_data_and_copying_from_pageable_memory(feeding):
    causes = found(feeding)
    assert causes["cpu_bottleneck"].share > 0.4
    assert "for data" in causes["cpu_bottleneck"].why
    workers, words, *_ = causes["cpu_bottleneck"].try_
    assert workers.startswith("strategy=pinned_memory strategy.pinned_memory.workers=")
    assert "DataLoader(num_workers" in words
    assert not {"strategy=fusion", "strategy=cuda_graph"} & {*causes["cpu_bottleneck"].try_}  # launches are not late
    assert "pageable" in causes["memory_copy"].why


def test_no_stream_hides_a_copy_into_the_memory_of_a_graph(chrome):
    build = chrome()

    def step() -> None:
        build.copy("Memcpy DtoD (Device -> Device)", 250.0, 2**28)
        build.graph(kernels=1, kernel_us=190.0)

    trace = build.steps(step)
    copies = found(trace)["memory_copy"]
    assert copies.why.endswith("a graph reads its batch from memory of its own)")
    assert copies.try_ == ()
    assert "streams" not in (suggestion(diagnose(trace, breakdown(trace)), ["cuda_graph"]) or "")


def test_a_copy_within_the_device_is_somebodys_own(chrome):
    build = chrome()

    def step() -> None:
        build.copy("Memcpy DtoD (Device -> Device)", 250.0, 2**28)
        build.op("aten::add", 20.0, 190.0)

    (advice,) = found(build.steps(step))["memory_copy"].try_
    assert not advice.startswith("strategy=")


def test_bound_by_the_card(products, passes, card):
    assert list(found(products, card)) == ["compute_bound"]
    assert list(found(passes, card)) == ["memory_bound"]
    assert suggestion(diagnose(products, breakdown(products, card)), []).startswith("strategy=amp:")
    assert suggestion(diagnose(passes, breakdown(passes, card)), []).startswith("strategy=fusion:")


def test_amp_is_not_proposed_to_low_precision(chrome, card):
    build = chrome()
    shapes = {"Input type": ["c10::BFloat16"] * 2, "Input Dims": [[4096, 4096]] * 2}
    trace = build.steps(lambda: build.op("aten::mm", 2.0, 2 * 4096**3 / 650e6, "gemm", **shapes))
    causes = found(trace, card)
    assert list(causes) == ["compute_bound"]
    assert "strategy=amp" not in causes["compute_bound"].try_


def test_idle_for_a_reason_that_no_rule_knows(chrome):
    build = chrome()

    def step():
        build.gpu += 60.0  # queued in time, and yet late: it waits for something else
        build.op("aten::add", 20.0, 12.0)

    assert list(found(build.steps(step))) == ["gpu_idle"]


def test_suggestion_adds_to_the_stack_and_never_repeats_it(eager):
    causes = diagnose(eager, breakdown(eager))
    assert suggestion(causes, []).startswith("strategy=cuda_graph: 45 kernels")
    assert suggestion(causes, ["cuda_graph"]).startswith("strategy=[cuda_graph,fusion]: ")
    assert suggestion(causes, ["cuda_graph", "fusion", "fused_optimizer"]) is None
    assert suggestion(narrowed(causes, ["strategy=fusion"]), []).startswith("strategy=fusion: 45 kernels")
    assert suggestion(narrowed(causes, []), []) is None
    assert suggestion([], []) is None
    with_options = [Bottleneck("slow", 0.5, "it is", ("in words", "strategy=fusion strategy.fusion.mode=max-autotune"))]
    assert narrowed(with_options, [])[0].try_ == ("in words",)
    assert suggestion(with_options, ["amp"]) == "strategy=[amp,fusion] strategy.fusion.mode=max-autotune: it is"


def test_a_loader_is_mended_by_workers_and_by_nothing_else(chrome):
    """Beside it many small operators, which fusion would make fewer of."""

    def loading(iterator: str, python_us: float = 0.0) -> Trace:
        build = chrome()

        def step() -> None:
            build.spend("user_annotation", f"enumerate(DataLoader)#{iterator}.__next__", 4000.0)
            for _ in range(60):
                build.spend("cpu_op", "aten::add", 5.0)
            build.host += python_us

        return build.steps(step)

    also_python = loading("_SingleProcessDataLoaderIter", python_us=1500.0)
    assert [found.label for found in diagnose(also_python, breakdown(also_python))][:2] == ["data_loading", "python"]
    single, several = loading("_SingleProcessDataLoaderIter"), loading("_MultiProcessingDataLoaderIter")
    causes = diagnose(single, breakdown(single))
    assert causes[0].label == "data_loading"
    assert suggestion(causes, []).startswith("strategy=pinned_memory strategy.pinned_memory.workers=")
    refused = narrowed(causes, ["strategy=fusion"])  # as of an iterable data set
    assert suggestion(refused, []).startswith("DataLoader(num_workers=…")
    assert suggestion(diagnose(several, breakdown(several)), []).startswith("more DataLoader workers")


def test_a_strategy_that_made_it_worse_is_not_extended(eager):
    causes = diagnose(eager, breakdown(eager))
    assert suggestion(causes, [], without=["cuda_graph"]).startswith("strategy=fusion: 45 kernels")
    assert suggestion(causes, ["amp"], without=["cuda_graph", "fusion", "fused_optimizer"]) is None


@pytest.mark.parametrize(("bfloat16", "proposed"), [(2e11, True), (4e9, False)])
def test_lower_precision_is_for_processors_that_have_it(tmp_path, bfloat16, proposed):
    layer, inputs = nn.Linear(1024, 1024), torch.randn(512, 1024)
    with torch.no_grad():
        trace = undisturbed(lambda: layer(inputs), tmp_path / "t.json.gz")
    processor = Calibration("cpu", 1e10, {"float32": 1e11, "bfloat16": bfloat16})
    causes = {cause.label: cause for cause in diagnose(trace, breakdown(trace, processor), processor)}
    assert ("strategy=amp" in causes["matrix_products"].try_) is proposed


def on_cpu(step, path: Path, calibration=None) -> dict[str, Bottleneck]:
    return found(undisturbed(step, path), calibration)


@torch.no_grad()
@pytest.mark.parametrize(("bfloat16", "lowers"), [(4e11, True), (1e9, False), (None, False)])
def test_products_dominate_on_a_cpu(tmp_path, bfloat16, lowers):
    """A processor that emulates bfloat16, or of which nothing is known, is not sent to amp."""
    layer, inputs = nn.Linear(1024, 1024), torch.randn(512, 1024)
    ceilings = Calibration("cpu", 1e10, {"float32": 1e11, "bfloat16": bfloat16}) if bfloat16 else None
    causes = on_cpu(lambda: layer(inputs), tmp_path / "t.json.gz", ceilings)
    assert next(iter(causes)) in ("matrix_products", "one_op")
    assert ("strategy=amp" in causes["matrix_products"].try_) is lowers
    assert "strategy=cuda_graph" not in {text for cause in causes.values() for text in cause.try_}


def test_passes_over_memory_dominate_on_a_cpu(tmp_path):
    x = torch.randn(1024, 1024)
    causes = on_cpu(lambda: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x * x * x))), tmp_path / "t.json.gz")
    assert "strategy=fusion" in causes["memory_passes"].try_


@pytest.mark.slow
def test_many_small_operators_on_a_cpu(tmp_path):
    x = torch.randn(8)

    def step():
        y = x
        for _ in range(200):
            y = y + 1

    assert "strategy=fusion" in on_cpu(step, tmp_path / "t.json.gz")["many_small_ops"].try_


@pytest.mark.parametrize("work", [0, 1])
def test_python_dominates_on_a_cpu(tmp_path, work):
    x = torch.randn(8)

    def step():
        sum(range(20_000))
        for _ in range(work):
            x.add(1)

    assert "outside_ops" in on_cpu(step, tmp_path / "t.json.gz")


def test_a_step_of_copies_alone_is_bound_by_no_kernel(chrome: type[ChromeTrace]) -> None:
    build = chrome()
    trace = build.steps(lambda: build.copy("Memcpy HtoD (Pageable -> Device)", 500.0, 2**20))
    assert list(found(trace)) == ["memory_copy"]


def test_an_operator_in_several_threads_takes_no_more_than_the_step(chrome: type[ChromeTrace]) -> None:
    build = chrome()

    def step() -> None:
        for thread in range(3):
            build.event("cpu_op", "aten::mm", build.host, 100.0)
            build.events[-1]["tid"] = thread
        build.host += 100.0

    assert found(build.steps(step))["one_op"].share == 1.0
