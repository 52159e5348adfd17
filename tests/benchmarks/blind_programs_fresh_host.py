"""Fresh programs in which the GPU waits: for the host, for data, for memory, or for copies."""

from __future__ import annotations

import gc
import io
import zlib
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.benchmarks.blind_programs import Program, Step, known_in, size

PROGRAMS: list[Program] = []
program = partial(known_in, PROGRAMS)

SYNCHRONISED = ("cpu_bottleneck", "after a synchronisation")
FETCHED = (("copies_to_the_host", "copies to the host"),)
VALUES = ("copies to the host", "pageable copies to the host")  # accounts of numbers that are read one by one


def mlp(device: torch.device, width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]).to(device)


# --- logging and checks ------------------------------------------------------------------------------------------


@program(*SYNCHRONISED, "synchronisation", or_label=FETCHED, or_account=VALUES)
def a_loss_logged_for_each_sample(device: torch.device, injected: bool) -> Step:
    head = nn.Linear(512, 100, device=device)
    x, target = torch.randn(256, 512, device=device), torch.randint(100, (256,), device=device)

    @torch.no_grad()
    def evaluate() -> Tensor:
        losses = F.cross_entropy(head(x), target, reduction="none")
        meter = 0.0
        for loss in losses if injected else ():
            meter += loss.item()
        return losses.sum()

    return evaluate


@program(*SYNCHRONISED, "synchronisation")
def averages_checked_for_nan(device: torch.device, injected: bool) -> Step:
    count, width = size(device, 32, 4), size(device, 3072, 64)
    averages = {f"ema.{i}": torch.randn(2048, width, device=device) for i in range(count)}

    def check() -> Tensor:
        flags = []
        for name, average in averages.items():
            bad = torch.isnan(average).any()
            if injected and bad:
                raise ValueError(f"{name} is not a number")
            flags.append(bad)
        return torch.stack(flags).any()

    return check


@program(
    *SYNCHRONISED,
    "synchronisation",
    or_label=FETCHED,
    or_account=VALUES,
)
def printed_activations(device: torch.device, injected: bool) -> Step:
    width, log = size(device, 1024, 64), io.StringIO()
    model, x = mlp(device, width, 4), torch.randn(width, width, device=device)

    @torch.no_grad()
    def step() -> Tensor:
        hidden = x
        log.seek(0)
        for index, block in enumerate(model):
            hidden = block(hidden)
            if injected:
                print("block", index, hidden, file=log)
        return hidden

    return step


# --- data and the host -------------------------------------------------------------------------------------------


class Images(Dataset[Tensor]):
    """Packed images of [3, 160, 160], unpacked when they are asked for, or once."""

    def __init__(self, packed: list[bytes], once: bool) -> None:
        self.packed = packed
        self.ready = [self.unpack(each) for each in packed] if once else None

    @staticmethod
    def unpack(packed: bytes) -> Tensor:
        return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8).view(3, 160, 160)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: int) -> Tensor:
        return self.ready[index] if self.ready is not None else self.unpack(self.packed[index])


@program("cpu_bottleneck", "for data", "data_loading")
def images_unpacked_one_by_one(device: torch.device, injected: bool) -> Step:
    batch = size(device, 64, 4)
    raw = torch.randint(0, 12, (2 * batch, 3, 160, 160), dtype=torch.uint8)
    images = Images([zlib.compress(image.numpy().tobytes(), 1) for image in raw], once=not injected)
    stem = nn.Conv2d(3, 32, 8, stride=8, device=device)

    def batches() -> Iterator[Tensor]:
        while True:
            yield from DataLoader(images, batch_size=batch)

    given = batches()

    @torch.no_grad()
    def step() -> Tensor:
        pooled: Tensor = stem(next(given).to(device).float().div(255)).relu().mean((2, 3))
        return pooled

    return step


def edits(ours: str, theirs: str) -> int:
    """Levenshtein's distance."""
    above = list(range(len(theirs) + 1))
    for row, letter in enumerate(ours, 1):
        here = [row]
        for column, other in enumerate(theirs, 1):
            here.append(min(above[column] + 1, here[-1] + 1, above[column - 1] + (letter != other)))
        above = here
    return above[-1]


@program("python", "Python outside of torch", "python", on_cpu=True)
def an_error_rate_of_words(device: torch.device, injected: bool) -> Step:
    model, x = mlp(device, 256, 3), torch.randn(64, 256, device=device)
    ours, theirs = "the quick brown fox jumps " * 9, "a quick brown dog jumped over " * 8
    known = edits(ours, theirs)

    @torch.no_grad()
    def step() -> Tensor:
        rate = (edits(ours, theirs) if injected else known) / len(theirs)
        return torch.mul(model(x), rate)

    return step


@program("operators_on_the_host", "compute on the host", "operators on the host")
def images_resized_on_the_host(device: torch.device, injected: bool) -> Step:
    side = size(device, 1024, 64)
    on_host = torch.rand(8, 3, side, side)
    resident, stem = on_host.to(device), nn.Conv2d(3, 64, 7, stride=4, device=device)

    @torch.no_grad()
    def step() -> Tensor:
        images = on_host if injected else resident
        small = F.interpolate(images, size=(96, 96), mode="bicubic", antialias=True)
        features: Tensor = stem(small.to(device)).relu()
        return features

    return step


@program("allocation", "cudaMalloc", "allocation")
def workspaces_that_grow(device: torch.device, injected: bool) -> Step:
    rows, more, most = size(device, 3072, 32), size(device, 512, 8), 48  # 12 MiB of 1024 floats; 2 MiB; steps
    tokens = torch.randn(32, 1024, device=device)
    taken = 0

    def attend(room: int) -> Tensor:
        workspaces = []
        for _ in range(16):
            workspace = torch.empty(room, 1024, device=device)
            workspace[:32] = tokens
            workspaces.append(workspace)
        return workspaces[-1][:32].sum(0)

    def step() -> Tensor:
        nonlocal taken
        taken = min(taken + 1, most)
        return attend(rows + more * taken)

    gc.collect()
    torch.cuda.empty_cache()  # blocks of programs before this one would be large enough
    if not injected:
        attend(rows + more * most)  # the longest first: its blocks hold all others
    return step


@program("compilation", "compiles anew in each step", "compilation")
def lengths_compiled_one_by_one(device: torch.device, injected: bool) -> Step:
    torch._dynamo.reset()
    torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 10_000
    embedding, model = nn.Embedding(1000, 256, device=device), mlp(device, 256, 2)
    tokens, length = torch.randint(1000, (8, 512), device=device), 32

    def encode(batch: Tensor) -> Tensor:
        encoded: Tensor = model(embedding(batch)).mean(1)
        return encoded

    compiled = torch.compile(encode, backend="eager", dynamic=not injected)

    @torch.no_grad()
    def step() -> Tensor:
        nonlocal length
        length += 1
        return compiled(tokens[:, :length])

    return step


# --- copies between host and GPU ---------------------------------------------------------------------------------


@program("memory_copy", "pageable memory", "pageable copies to the device")
def non_blocking_from_pageable_memory(device: torch.device, injected: bool) -> Step:
    side = size(device, 512, 32)
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (64, 3, side, side), dtype=np.uint8))
    source = frames if injected or device.type == "cpu" else frames.pin_memory()

    def step() -> Tensor:
        batch = source.to(device, non_blocking=True)
        return batch.float().div_(255).mean((2, 3))

    return step


@program(
    "memory_copy",
    "pageable memory",
    "pageable copies to the device",
    or_label=(SYNCHRONISED,),
    or_account=("synchronisation",),
)
def a_copy_for_each_sample(device: torch.device, injected: bool) -> Step:
    samples = [torch.randn(64) for _ in range(size(device, 256, 16))]
    layer = nn.Linear(64, 64, device=device)

    @torch.no_grad()
    def step() -> Tensor:
        batch = torch.stack([sample.to(device) for sample in samples]) if injected else torch.stack(samples).to(device)
        scores: Tensor = layer(batch)
        return scores

    return step


@program(
    "copies_to_the_host",
    "copies to the host",
    "pageable copies to the host",
    or_label=(("memory_copy", "pageable memory"),),
)
def masks_fetched_for_a_metric(device: torch.device, injected: bool) -> Step:
    side = size(device, 256, 16)
    features, head = torch.randn(32, 16, side, side, device=device), nn.Conv2d(16, 8, 1, device=device)
    kept: list[Tensor] = []

    @torch.no_grad()
    def step() -> Tensor:
        masks = head(features).argmax(1)
        kept[:] = [mask.cpu() for mask in masks] if injected else masks
        return masks.sum((1, 2))

    return step
