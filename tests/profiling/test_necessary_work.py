"""Work that no program can leave out, by steps that really run under fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.api import compose
from optexp.config import resolve
from optexp.program import STEPS, Program, ResidentFeed, prime
from optexp.records.roofline import StepWork
from optexp.workers.arm_bound import Bounded, cache_bytes, fake_work
from optexp.workers.messages import Identity

CPU = torch.device("cpu")
M, K, N = 32, 64, 48  # rows, terms, columns
GEMM = 2 * M * K * N


class Of(nn.Module):
    """A function with weights of its own."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.weights)


def program(model: nn.Module, mode: str = "forward", **fields: Any) -> Program:
    model.train(mode != "forward")
    return Program(model=model, step=STEPS[mode], feed=ResidentFeed(CPU), **fields)


def of(function: Callable[..., Any], *shapes: tuple[int, ...], inputs: tuple[Tensor, ...] | None = None) -> StepWork:
    """Work of a forward step."""
    torch.manual_seed(0)
    return fake_work(program(Of(function, *shapes)), inputs or (torch.randn(M, K),))


def flops(work: StepWork) -> float:
    return sum(work.flops.values())


def test_a_product_reads_both_operands_and_writes_its_result() -> None:
    work = of(lambda x, w: x @ w, (K, N))
    assert work.input_bytes == 4 * M * K
    assert work.kept_bytes == 4 * (K * N + M * N)
    assert work.flops == {"float32": GEMM}


HONEST: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], float]] = {
    # what an honest program may do instead, and the flops that are left
    "dead code": (lambda x, w: (x @ w, F.gelu(x))[1], [(K, N)], 0),
    "a constant is kept": (lambda x, a, b: F.gelu(x @ F.gelu(a @ b)), [(K, 16), (16, N)], GEMM),
    "a sum of a product is a product with a sum": (lambda x, w: (x @ w).sum(0), [(K, N)], 0),
    "a mean after a bias": (lambda x, w, b: (x @ w + b).mean(1), [(K, N), (N,)], 0),
    "a square summed by its Gram matrix": (lambda x, w: (x @ w).pow(2).sum(), [(K, N)], 0),
    "the last rows alone": (lambda x, w: F.gelu(x @ w)[-1:], [(K, N)], 0),
    "rows that a mask leaves out": (lambda x, w: F.gelu(x @ w) * (x[:, :1] > 0), [(K, N)], 0),
    "a triangle": (lambda x, w: torch.tril(x) @ w, [(K, N)], 0),
    "a diagonal": (lambda x, w: torch.diag(x[0]) @ w, [(K, N)], 0),
    "repeated rows": (lambda x, w: F.gelu(x[:1].expand(M, K) @ w), [(K, N)], 0),
    "an outer product": (lambda x, w: (x[:, :1] * w[:1]) @ w.t(), [(K, N)], 0),
    "a symmetric product": (lambda x: x @ x.t(), [], M * K * M),
    "three by three filters, transformed": (
        lambda x, w: F.conv2d(x.view(1, 2, M, M), w, padding=1), [(4, 2, 3, 3)], 2 * 4 * 2 * M * M,
    ),
    "patches that do not overlap are products": (
        lambda x, w: F.conv2d(x.view(1, 2, M, M), w, stride=4), [(4, 2, 4, 4)], 2 * 4 * 2 * M * M,
    ),
    "an unknown operator": (lambda x, w: F.gelu(torch.roll(x, 1, 0) @ w), [(K, N)], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_work_that_an_honest_program_leaves_out_is_not_counted(name: str) -> None:
    function, shapes, left = HONEST[name]
    assert flops(of(function, *shapes)) == left


def test_no_convolution_of_a_cpu_is_rounded_to_tf32() -> None:
    assert of(lambda x, w: F.conv2d(x.view(1, 2, M, M), w), (4, 2, 5, 5)).flops.keys() == {"float32"}


SKIPPED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], float]] = {
    "a nonlinearity needs each element": (lambda x, w: F.gelu(x @ w).sum(), [(K, N)], GEMM),
    "through a view and a bias": (lambda x, w, b: F.silu((x @ w + b).view(2, -1)), [(K, N), (N,)], GEMM),
    "two layers": (lambda x, a, b: F.relu(x @ a) @ b, [(K, N), (N, K)], 2 * GEMM),
    "a gate": (lambda x, a, b: F.silu(x @ a) * (x @ b), [(K, N), (K, N)], 2 * GEMM),
    "both halves of one product": (lambda x, w: torch.cat([F.gelu(h) for h in (x @ w).chunk(2, 1)]), [(K, N)], 0),
    "softmax": (lambda x, w: (x @ w).softmax(-1), [(K, N)], GEMM),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_work_that_nothing_replaces_is_counted(name: str) -> None:
    function, shapes, left = SKIPPED[name]
    assert flops(of(function, *shapes)) == left


@pytest.mark.parametrize("widths", [(64, 64, 64), (64, 8, 64), (8, 64, 8), (64, 16, 128)])
def test_a_chain_of_layers_is_never_above_its_best_association(widths: tuple[int, int, int]) -> None:
    """x·A·B as x·(A·B), with a constant A·B, or as it is written."""
    first, middle, last = widths
    work = of(lambda x, a, b: x @ a @ b, (first, middle), (middle, last), inputs=(torch.randn(M, first),))
    assert flops(work) <= 2 * M * min(first * last, middle * (first + last))
    if (first, last) == (64, 64):
        assert flops(work) > 0


def test_a_causal_mask_leaves_half_of_an_attention_and_any_other_mask_nothing() -> None:
    shape = (2, 4, 16, 8)
    q, k, v = (torch.randn(shape) for _ in range(3))
    whole = 2 * 2 * 4 * 16 * 16 * 8  # of one of both products
    attend = F.scaled_dot_product_attention
    assert flops(of(attend, inputs=(q, k, v))) == 2 * whole
    assert flops(of(lambda q, k, v: attend(q, k, v, is_causal=True), inputs=(q, k, v))) == whole
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    assert flops(of(lambda q, k, v: attend(q, k, v, mask), inputs=(q, k, v))) == 0


def test_sparse_data_counts_nothing() -> None:
    sparse = torch.randn(M, K) * (torch.rand(M, K) < 0.5)
    assert flops(of(lambda x, w: F.gelu(x @ w), (K, N), inputs=(sparse,))) == 0
    model = Of(lambda x, w: F.gelu(x @ w), (K, N))
    model.weights[0].data[::2] = 0  # a pruned model
    assert flops(fake_work(program(model), (torch.randn(M, K),))) == 0


def test_a_training_step_reads_and_writes_all_of_its_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
    numbers = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    step = program(
        model, "train", optimizer=optimizer, targets=1, loss=lambda output, batch: F.mse_loss(output, batch[-1])
    )
    prime(step)
    work = fake_work(step, (torch.randn(M, K), torch.randn(M, K)))
    assert work.kept_bytes == pytest.approx(4 * 3 * numbers, abs=64)
    assert 3 * GEMM < flops(work) <= 5 * GEMM  # two forward, two for weights, one back: as far as none is merged
    assert model[0].weight.grad is None  # the program itself did nothing


@pytest.mark.parametrize("ignored", [False, True])
def test_rows_without_a_label_may_be_skipped(ignored: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
    labels = torch.randint(K, (M,))
    labels[0] = -100 if ignored else labels[0]
    loss = program(model, "forward_backward", targets=1, loss=lambda y, batch: F.cross_entropy(y, batch[-1]))
    work = fake_work(loss, (torch.randn(M, K), labels))
    assert (flops(work) > 3 * GEMM) is not ignored


def test_rows_of_a_table_count_nothing() -> None:
    tokens = torch.randint(1000, (M,))
    work = of(lambda t, table: F.embedding(t, table), (1000, 16), inputs=(tokens,))
    assert work.kept_bytes == 4 * M * 16  # what it writes


@pytest.mark.parametrize(
    "workload",
    [
        "mlp", "mlp workload.mode=train", "mlp workload.mode=forward_backward", "lenet5 workload.mode=train", "add",
        "matmul", "gelu", "softmax workload.mode=forward_backward", "layernorm_linear", "linear_gelu", "branches",
        "changing_shapes", "elementwise", "training",
    ],
)  # fmt: skip
def test_workloads_have_a_bound_below_what_they_do(workload: str) -> None:
    """Never more flops than torch counts while the plain step runs."""
    from torch.utils.flop_counter import FlopCounterMode

    chosen = resolve(compose([*f"workload={workload}".split(), "device=cpu"], {}, {})).workload.resolve("cpu")
    plain = chosen.build(CPU, torch.float32, 0)
    batch = chosen.batches(torch.Generator().manual_seed(0), 1)[0]
    batch = plain.feed.bring(batch) if chosen.name != "training" else batch
    work = fake_work(plain, batch)
    with FlopCounterMode(display=False) as counter:
        plain.step(plain, batch)
    assert work.input_bytes + work.kept_bytes > 0
    assert flops(work) <= counter.get_total_flops()


def arm(plain: Program, *batch: Tensor) -> Bounded:
    """An arm that holds a program."""
    made = Bounded()
    made.program, made.part, made.device, made.batches = plain, Identity("bare", []), CPU, [batch]
    made.restore = lambda *_: None  # type: ignore[method-assign]
    return made


def asks_for_a_value(x: Tensor, w: Tensor) -> Tensor:
    return x @ w if x.sum().item() > 0 else x @ w.abs()


def test_the_reason_stands_in_words_where_fake_tensors_cannot_run_the_step() -> None:
    refused = arm(program(Of(asks_for_a_value, (K, N))), torch.randn(M, K)).step_work()
    assert refused.reason.startswith("fake tensors have no values")
    assert not refused.flops

    @torch.library.custom_op("optexp_test::opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return x.clone()

    without = arm(program(Of(lambda x, w: opaque(x) @ w, (K, N))), torch.randn(M, K)).step_work()
    assert "opaque" in without.reason
    known = arm(program(Of(lambda x, w: x @ w, (K, N))), torch.randn(M, K)).step_work()
    assert known.reason == ""
    assert known.cache_bytes == cache_bytes(CPU) > 0
