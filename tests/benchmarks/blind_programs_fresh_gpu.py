"""Fresh programs in which the GPU itself does too much, too little at a time, or one thing after the other."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.benchmarks.blind_programs import Program, Step, known_in, size

PROGRAMS: list[Program] = []
program = partial(known_in, PROGRAMS)

BFLOAT16 = torch.bfloat16


# --- passes over memory ------------------------------------------------------------------------------------------


@program("layout_copies", "copies of tensors", "layout copies", on_cpu=True)
def channels_last_and_back(device: torch.device, injected: bool) -> Step:
    side = size(device, 64, 16)
    first = torch.randn(32, 128, side, side, device=device)
    last = first.permute(0, 2, 3, 1).contiguous()
    norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(4)).to(device)

    @torch.no_grad()
    def step() -> Tensor:
        y = first if injected else last
        for norm in norms:
            y = norm(y.permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2).contiguous() if injected else norm(y)
        return y if injected else y.permute(0, 3, 1, 2)

    return step


@program(
    "memory_bound",
    "move data through memory",
    "indexing and concatenation",
    or_label=(("layout_copies", "copies of tensors"),),
    or_account=("layout copies", "copies on the device"),
)
def a_sequence_grown_by_cat(device: torch.device, injected: bool) -> Step:
    chunk, chunks = torch.randn(16, size(device, 128, 4), 1024, device=device), size(device, 40, 4)

    def step() -> Tensor:
        made, y = [chunk], chunk
        for _ in range(chunks):
            y = y.tanh()
            made = [torch.cat([*made, y], 1)] if injected else [*made, y]
        return torch.cat(made, 1)

    return step


@program("fills", "fills of memory", "fills", on_cpu=True)
def pillars_on_an_empty_canvas(device: torch.device, injected: bool) -> Step:
    cells, count = size(device, 2**22, 2**16), size(device, 20_000, 500)
    where, pillars = torch.randperm(cells, device=device)[:count], torch.randn(count, 64, device=device)
    canvas = torch.zeros(cells, 64, device=device)

    def step() -> Tensor:
        drawn = torch.zeros_like(canvas) if injected else canvas
        drawn.index_add_(0, where, pillars)
        seen = drawn.index_select(0, where.flip(0))
        if not injected:
            canvas.index_fill_(0, where, 0)
        return seen

    return step


@program("memory_bound", "move data through memory", "elementwise")
def layer_norm_by_hand(device: torch.device, injected: bool) -> Step:
    x = torch.randn(size(device, 16_384, 64), 2048, device=device)
    scale, shift = torch.rand(2048, device=device), torch.randn(2048, device=device)

    def by_hand(x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * scale + shift

    def step() -> Tensor:
        y = x
        for _ in range(3):
            y = by_hand(y) if injected else F.layer_norm(y, (2048,), scale, shift)
        return y

    return step


# --- dtypes and products -----------------------------------------------------------------------------------------


@program("casts", "casts between dtypes", "casts")
def autocast_of_float32_weights(device: torch.device, injected: bool) -> Step:
    width, depth = size(device, 8192, 128), size(device, 6, 2)
    model = nn.Sequential(*[nn.Linear(width, width, device=device) for _ in range(depth)])
    x = torch.randn(8, width, device=device, dtype=BFLOAT16)
    if not injected:
        model = model.to(BFLOAT16)

    @torch.no_grad()
    def generate() -> Tensor:
        with torch.autocast(device.type, dtype=BFLOAT16):
            y: Tensor = model(x)
        return y

    return generate


@program("double_precision", "in float64", "convolutions")
def sensors_in_float64(device: torch.device, injected: bool) -> Step:
    batch, side = size(device, 32, 2), size(device, 64, 16)
    readings = torch.from_numpy(np.random.default_rng(0).standard_normal((batch, 64, side, side)))
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(3)]).to(device)
    x = readings.to(device) if injected else readings.float().to(device)
    if injected:
        model = model.double()

    @torch.no_grad()
    def step() -> Tensor:
        y: Tensor = model(x)
        return y

    return step


@program("compute_bound", "near this card's limit", "matrix products")
def an_embedding_as_a_product(device: torch.device, injected: bool) -> Step:
    words, width = size(device, 32_000, 500), size(device, 1024, 32)
    table = torch.randn(words, width, device=device)
    tokens = torch.randint(words, (size(device, 4096, 16),), device=device)
    return lambda: F.one_hot(tokens, words).float() @ table if injected else F.embedding(tokens, table)


# --- attention ---------------------------------------------------------------------------------------------------


@program(
    "unfused_attention",
    "attention by",
    "attention",
    or_label=(("memory_bound", "move data through memory"),),
    or_account=("elementwise", "activation"),
)
def causal_attention_by_hand(device: torch.device, injected: bool) -> Step:
    length = size(device, 1024, 32)
    q, k, v = (torch.randn(8, 16, length, 64, device=device, dtype=BFLOAT16) for _ in range(3))
    future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)

    def by_hand() -> Tensor:
        scores = q @ k.transpose(-2, -1) * 64**-0.5
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ v

    return by_hand if injected else lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


@program("unfused_attention", "explicit mask", "attention")
def a_causal_mask_of_booleans(device: torch.device, injected: bool) -> Step:
    heads, length = size(device, 16, 2), size(device, 2048, 64)
    q, k, v = (torch.randn(4, heads, length, 128, device=device, dtype=BFLOAT16) for _ in range(3))
    past = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def step() -> Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=past if injected else None, is_causal=not injected)

    return step


# --- launches, blocks and streams --------------------------------------------------------------------------------


@program("many_small_kernels", "kernels a step", "matrix products", or_account=("dispatch",))
def an_lstm_cell_by_cell(device: torch.device, injected: bool) -> Step:
    length = size(device, 128, 8)
    lstm, cell = nn.LSTM(256, 256).to(device), nn.LSTMCell(256, 256).to(device)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in lstm.state_dict().items()})
    x = torch.randn(length, 32, 256, device=device)

    @torch.no_grad()
    def step() -> Tensor:
        if not injected:
            encoded: Tensor = lstm(x)[0]
            return encoded
        h = c = torch.zeros(32, 256, device=device)
        outputs = []
        for token in x:
            h, c = cell(token, (h, c))
            outputs.append(h)
        return torch.stack(outputs)

    return step


@program("many_small_kernels", "kernels a step", "reduction", or_account=("elementwise", "dispatch"))
def gradients_clipped_one_by_one(device: torch.device, injected: bool) -> Step:
    count = size(device, 250, 10)
    adapters: list[Tensor] = [nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(count)]
    received = [torch.randn(64, 64, device=device) for _ in adapters]
    gradients = [torch.zeros_like(adapter) for adapter in adapters]
    for adapter, gradient in zip(adapters, gradients, strict=True):
        adapter.grad = gradient

    @torch.no_grad()
    def step() -> Tensor:
        torch._foreach_copy_(gradients, received)
        torch.nn.utils.clip_grad_norm_(adapters, 1.0, foreach=not injected)
        torch._foreach_add_(adapters, gradients, alpha=-1e-2)
        return adapters[-1].sum()

    return step


@program("optimizer_by_parameter", "one parameter after the other", "optimizer")
def a_transformer_and_adamw_by_parameter(device: torch.device, injected: bool) -> Step:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, size(device, 6, 2), enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=True, foreach=not injected)
    x, target = torch.randn(2, 8, 32, 128, device=device)

    def step() -> Tensor:
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@program("small_grids", "multiprocessors", "normalization")
def a_norm_over_whole_images(device: torch.device, injected: bool) -> Step:
    side = size(device, 512, 16)
    images = torch.randn(2, 32, side, side, device=device)

    def by_parts() -> Tensor:
        variance, mean = torch.var_mean(images, (1, 2, 3), correction=0, keepdim=True)
        return (images - mean) * torch.rsqrt(variance + 1e-5)

    return lambda: F.layer_norm(images, images.shape[1:]) if injected else by_parts()


@program("streams_in_turn", "never run side by side", "overlap")
def encoders_on_three_streams(device: torch.device, injected: bool) -> Step:
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    inputs = [
        torch.randn(68, 2**17, device=device) for _ in streams
    ]  # 68 small blocks: three of them find room together

    def step() -> None:
        current = torch.cuda.current_stream(device)
        start = ready = current.record_event()
        for stream, y in zip(streams, inputs, strict=True):
            stream.wait_event(ready if injected else start)
            with torch.cuda.stream(stream):
                for _ in range(4):
                    F.layer_norm(y, y.shape[1:])
            ready = stream.record_event()
            current.wait_event(ready)

    return step


# --- training ----------------------------------------------------------------------------------------------------


@program("recomputation", "computes again", "recomputation", on_cpu=True)
def checkpoints_in_checkpoints(device: torch.device, injected: bool) -> Step:
    width = size(device, 2048, 128)
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()).to(device)
        for _ in range(6)
    ]
    for block in blocks:
        block.requires_grad_(False)  # only the prompt is tuned
    prompt, x = torch.zeros(width, device=device, requires_grad=True), torch.randn(width, width, device=device)
    optimizer = torch.optim.SGD([prompt], lr=1e-2)

    def each(y: Tensor) -> Tensor:
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False) if injected else block(y)
        return y

    def step() -> Tensor:
        y = x + prompt
        loss = (checkpoint(each, y, use_reentrant=False) if injected else each(y)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
