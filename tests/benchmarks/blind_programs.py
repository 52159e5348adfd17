"""Programs with one cause of slowness each, beside the same program without it, and the name of that cause."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], object]
Make = Callable[[torch.device, bool], Step]  # the step on a device, with the cause or without it


@dataclass(frozen=True)
class Program:
    """A program and its cause.

    make:    builds the step
    label:   the bottleneck that a diagnosis must name first;  words: that its sentence must hold
    account: the account that an explanation of the pair must name first
    on_cpu:  the cause exists on a CPU too
    or_label, or_account: others that are as true, each label with its words
    """

    name: str
    make: Make
    label: str
    words: str
    account: str
    on_cpu: bool = False
    or_label: tuple[tuple[str, str], ...] = ()
    or_account: tuple[str, ...] = ()

    def names(self, label: str, sentence: str) -> bool:
        """Whether a bottleneck is this program's cause."""
        return any(label == right and words in sentence for right, words in ((self.label, self.words), *self.or_label))

    def explains(self, account: str) -> bool:
        """Whether an account is the one that the cause changes most."""
        return account in (self.account, *self.or_account)


def known_in(
    programs: list[Program],
    label: str,
    words: str,
    account: str,
    on_cpu: bool = False,
    or_label: tuple[tuple[str, str], ...] = (),
    or_account: tuple[str, ...] = (),
) -> Callable[[Make], Make]:
    """Append a program to a list, by its function's name."""

    def known(make: Make) -> Make:
        programs.append(Program(make.__name__, make, label, words, account, on_cpu, or_label, or_account))
        return make

    return known


PROGRAMS: list[Program] = []
program = partial(known_in, PROGRAMS)


def size(device: torch.device, large: int, small: int) -> int:
    return large if device.type == "cuda" else small


def layers(device: torch.device, count: int = 8, width: int = 1024) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count)).to(device)


def rows(device: torch.device, count: int = 2048, width: int = 1024) -> Tensor:
    return torch.randn(count, width, device=device)


def in_each_layer(device: torch.device, extra: Callable[[Tensor], object]) -> Step:
    """A chain of layers, and something after each of them."""
    chain, x = layers(device), rows(device)

    @torch.no_grad()
    def step() -> Tensor:
        y = x
        for layer in chain:
            y = layer(y).relu()
            extra(y)
        return y

    return step


def nothing(_: Tensor) -> None:
    return


# --- the GPU waits for the host ----------------------------------------------------------------------------------


@program("cpu_bottleneck", "after a synchronisation", "synchronisation")
def item_in_each_layer(device: torch.device, injected: bool) -> Step:
    def guard(y: Tensor) -> None:
        if y[0, 0].item() > 1e30:
            raise ValueError("diverged")

    return in_each_layer(device, guard if injected else nothing)


@program("cpu_bottleneck", "after a synchronisation", "synchronisation")
def selection_by_a_mask(device: torch.device, injected: bool) -> Step:
    return in_each_layer(device, lambda y: y[y > 0.5] if injected else y.clamp(0.5))


@program("cpu_bottleneck", "after a synchronisation", "synchronisation")
def synchronize_after_each_layer(device: torch.device, injected: bool) -> Step:
    return in_each_layer(device, lambda _: torch.cuda.synchronize() if injected else None)


def loading(device: torch.device, work_s: float, workers: int = 0) -> Step:
    x = torch.randn(64 * 512, 64)

    def collate(items: list[tuple[Tensor]]) -> Tensor:
        end = time.perf_counter() + work_s
        while time.perf_counter() < end:
            pass
        return torch.stack([item for (item,) in items[:256]])

    def batches() -> Iterator[Tensor]:
        while True:
            yield from DataLoader(TensorDataset(x), batch_size=512, collate_fn=collate, num_workers=workers)

    chain, given = layers(device, 4), batches()
    inputs = rows(device)

    @torch.no_grad()
    def step() -> Tensor:
        batch = next(given).to(device)
        y = inputs + batch.mean()
        for layer in chain:
            y = layer(y).relu()
        return y

    return step


@program("cpu_bottleneck", "for data", "data_loading")
def slow_collate(device: torch.device, injected: bool) -> Step:
    return loading(device, 0.02 if injected else 0.0)


@program("cpu_bottleneck", "for data", "data_loading")
def slow_workers(device: torch.device, injected: bool) -> Step:
    return loading(device, 0.03 if injected else 0.0, workers=1)


def beside(device: torch.device, work: Callable[[], object]) -> Step:
    """A chain of layers, and work of the host before it."""
    chain, x = layers(device, 4), rows(device)

    @torch.no_grad()
    def step() -> Tensor:
        work()
        y = x
        for layer in chain:
            y = layer(y).relu()
        return y

    return step


def none() -> None:
    return


@program("python", "Python outside of torch", "python", on_cpu=True)
def python_loop(device: torch.device, injected: bool) -> Step:
    return beside(device, (lambda: sum(i * i for i in range(400_000))) if injected else none)


@program("python", "Python outside of torch", "python")
def collecting_garbage(device: torch.device, injected: bool) -> Step:
    kept = [[i] for i in range(400_000)] if injected else []  # objects that each collection visits

    def collect() -> int:
        gc.collect()
        return len(kept)

    return beside(device, collect if injected else none)


@program("python", "Python outside of torch", "python", on_cpu=True)
def a_hook_that_writes_text(device: torch.device, injected: bool) -> Step:
    model, x = nn.Sequential(*layers(device, 4)), rows(device)

    def describe(module: nn.Module, inputs: object, output: Tensor) -> None:
        ",".join(str(number) for number in range(20_000))

    if injected:
        for layer in model:
            layer.register_forward_hook(describe)
    return lambda: model(x)


@program("operators_on_the_host", "compute on the host", "operators on the host")
def a_table_on_the_host(device: torch.device, injected: bool) -> Step:
    table = torch.randn(400_000)
    on_gpu = table.to(device)
    return beside(device, lambda: (table if injected else on_gpu).sort())


@program("allocation", "cudaMalloc", "allocation")
def empty_cache_in_each_step(device: torch.device, injected: bool) -> Step:
    def emptied() -> None:
        for _ in range(4):
            torch.zeros(256 * 2**20, dtype=torch.uint8, device=device)
            torch.cuda.empty_cache()

    return beside(device, emptied if injected else none)


@program("compilation", "compiles anew in each step", "compilation")
def a_counter_that_recompiles(device: torch.device, injected: bool) -> Step:
    chain, x = layers(device, 4), rows(device)
    torch._dynamo.reset()
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 10_000

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.tag, self.count = chain, "0", 0

        def forward(self, y: Tensor) -> Tensor:
            scale = 0.5 if self.tag.endswith("7") else 1.0  # guarded by the whole text
            for layer in self.layers:
                y = layer(y).relu() * scale
            return y

    model = Counting()
    compiled = torch.compile(model, backend="eager")

    @torch.no_grad()
    def step() -> object:
        model.count += 1
        model.tag = str(model.count) if injected else "0"
        return compiled(x)

    return step


# --- copies ------------------------------------------------------------------------------------------------------


@program("memory_copy", "pageable memory", "pageable copies to the device")
def a_batch_from_pageable_memory(device: torch.device, injected: bool) -> Step:
    x = torch.randn(16 * 2**20)
    resident = x.to(device)
    return lambda: (x.to(device) if injected else resident).mul(2).sum()


@program("copies_to_the_host", "copies to the host", "pageable copies to the host")
def a_result_fetched_whole(device: torch.device, injected: bool) -> Step:
    x = torch.randn(16 * 2**20, device=device)

    def step() -> Tensor:
        y = x * 2
        return y.cpu() if injected else y

    return step


@program("layout_copies", "copies of tensors", "layout copies", on_cpu=True)
def clones_between_layers(device: torch.device, injected: bool) -> Step:
    x, layer = rows(device, 8192, 2048), nn.ReLU()

    def step() -> Tensor:
        y = layer(x)
        for _ in range(6):
            y = y.clone() if injected else y
        return y

    return step


@program("layout_copies", "copies of tensors", "layout copies", on_cpu=True)
def transposes_made_contiguous(device: torch.device, injected: bool) -> Step:
    x = rows(device, 8192, 2048)

    def step() -> Tensor:
        y = x.relu()
        for _ in range(4):
            y = y.t().contiguous() if injected else y.t()
        return y

    return step


@program("fills", "fills of memory", "fills", on_cpu=True)
def zeros_before_they_are_written(device: torch.device, injected: bool) -> Step:
    x = rows(device, 8192, 2048)

    def step() -> Tensor:
        out = x
        for _ in range(4):
            out = torch.zeros_like(x) if injected else torch.empty_like(x)
        return out.copy_(x)

    return step


# --- kernels -----------------------------------------------------------------------------------------------------


@program("casts", "casts between dtypes", "casts", on_cpu=True)
def casts_to_and_fro(device: torch.device, injected: bool) -> Step:
    x = rows(device, 8192, 2048)

    def step() -> Tensor:
        y = x.relu()
        for _ in range(3):
            y = y.bfloat16().float() if injected else y
        return y

    return step


def attending(device: torch.device, backend: SDPBackend | None, masked: bool = False) -> Step:
    q, k, v = (torch.randn(8, 16, 1024, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.zeros(8, 1, 1024, 1024, device=device, dtype=torch.bfloat16) if masked else None
    proj = nn.Linear(64, 64, device=device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> Tensor:
        chosen: AbstractContextManager[object] = nullcontext() if backend is None else sdpa_kernel(backend)
        with chosen:
            attended: Tensor = proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return attended

    return step


@program("unfused_attention", "attention by math kernels", "attention")
def attention_one_operator_at_a_time(device: torch.device, injected: bool) -> Step:
    return attending(device, SDPBackend.MATH if injected else SDPBackend.FLASH_ATTENTION)


@program("unfused_attention", "explicit mask", "attention")
def attention_with_a_mask_of_zeros(device: torch.device, injected: bool) -> Step:
    return attending(device, SDPBackend.EFFICIENT_ATTENTION if injected else SDPBackend.FLASH_ATTENTION, injected)


@program("memory_bound", "move data through memory", "elementwise")
def an_unfused_chain(device: torch.device, injected: bool) -> Step:
    x, y = rows(device, 8192, 4096), rows(device, 8192, 4096)

    def step() -> Tensor:
        z = x + y
        for _ in range(10 if injected else 0):
            z = z * y
        return z

    return step


@program("memory_bound", "move data through memory", "elementwise")
def gelu_by_hand(device: torch.device, injected: bool) -> Step:
    x = rows(device, 8192, 4096)

    def by_hand(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

    return lambda: by_hand(x) if injected else F.gelu(x, approximate="tanh")


@program("many_small_kernels", "kernels a step", "elementwise")
def a_loop_over_rows(device: torch.device, injected: bool) -> Step:
    x, bias = rows(device, 200), torch.randn(1024, device=device)
    return lambda: torch.stack([row + bias for row in x]) if injected else x + bias


@program("small_grids", "multiprocessors", "activation")
def softmax_of_one_row(device: torch.device, injected: bool) -> Step:
    x = torch.randn(1, 8 * 2**20, device=device)
    many = x.view(4096, -1)
    return lambda: (x if injected else many).softmax(-1)


@program("streams_in_turn", "never run side by side", "overlap")
def a_stream_that_waits(device: torch.device, injected: bool) -> Step:
    sides = [torch.cuda.Stream(device) for _ in range(2)]
    xs = [torch.randn(80, 2**18, device=device) for _ in sides]  # 80 blocks: two of them find room side by side

    def step() -> None:
        current = torch.cuda.current_stream(device)
        for index, side in enumerate(sides):
            side.wait_stream(current)
            if injected and index:
                side.wait_stream(sides[index - 1])
            with torch.cuda.stream(side):
                for _ in range(4):
                    xs[index].softmax(-1)
        for side in sides:
            current.wait_stream(side)

    return step


@program("double_precision", "in float64", "matrix products", on_cpu=True)
def products_in_float64(device: torch.device, injected: bool) -> Step:
    chain, x = layers(device, 4), rows(device)
    if injected:
        chain, x = chain.double(), x.double()

    @torch.no_grad()
    def step() -> Tensor:
        y = x
        for layer in chain:
            y = layer(y).relu()
        return y

    return step


@program("compute_bound", "near this card's limit", "matrix products")
def products_without_tf32(device: torch.device, injected: bool) -> Step:
    chain, x = layers(device, 4, 4096), rows(device, 4096, 4096)

    @torch.no_grad()
    def step() -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = not injected
        try:
            y = x
            for layer in chain:
                y = layer(y)
            return y
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return step


# --- training ----------------------------------------------------------------------------------------------------


def training(
    model: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, optimizer: torch.optim.Optimizer
) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@program("recomputation", "computes again", "recomputation", on_cpu=True)
def checkpoints_everywhere(device: torch.device, injected: bool) -> Step:
    width = 2048 if device.type == "cuda" else 512
    model = nn.Sequential(*[nn.Sequential(layer, nn.GELU()) for layer in layers(device, 6, width)])
    x = rows(device, 2 * width, width)

    def forward(y: Tensor) -> Tensor:
        for block in model:
            y = checkpoint(block, y, use_reentrant=False) if injected else block(y)
        return y

    return training(model, forward, x, torch.optim.SGD(model.parameters(), lr=1e-3))


@program("optimizer_by_parameter", "one parameter after the other", "optimizer")
def adam_by_parameter(device: torch.device, injected: bool) -> Step:
    model, x = nn.Sequential(*layers(device, 60, 128)), rows(device, 64, 128)
    each = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    fused = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    return training(model, model, x, each if injected else fused)
