"""Ceilings of this device (bandwidth, flop/s, launch time), measured once and cached; datasheets are never used."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import torch

from optexp.measurement import clock
from optexp.records.profile import Calibration
from optexp.support.cache import kept
from optexp.support.card_memory import free_bytes, shifts

PLACES = 16  # of tensors in a card's memory, for its bandwidth
CROWDED = 0.1  # share of a CPU's calibration without a core, from which its figures are no ceilings
_VERSION = 3  # of the measurement's method: cache entries of another version are not read


def calibrate(device: torch.device, anew: bool = False, keep: bool = True) -> Calibration:
    """The device's ceilings, under 1.5 s on a GPU and 0.3 s on a CPU.

    A GPU's ceilings are cached. A CPU's are measured each time: the cache would keep the effect of other programs.

    anew:  measure even if the cache holds ceilings
    keep:  write the cache; False while another program on the card makes it seem slower than it is
    """
    if device.type != "cuda":
        return _measure_cpu()
    path = _cache_file(device)
    if not anew and (known := cached(path)):
        return known
    measured = _measure_gpu(device)
    if keep:
        write(path, measured)
    return measured


def cached(path: Path) -> Calibration | None:
    """The calibration in a file; None where it cannot be read."""
    try:
        return Calibration.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def of_device(name: str) -> Calibration | None:
    """The latest calibration in this user's cache of a device with this name; None without one."""
    files = sorted(kept("calibration").parent.glob("calibration-*.json"), key=lambda file: file.stat().st_mtime)
    found = (cached(file) for file in reversed(files))
    return next((ceilings for ceilings in found if ceilings is not None and ceilings.device == name), None)


def write(path: Path, measured: Calibration) -> None:
    """Write a calibration for `cached`. A file that cannot be written is skipped: each run then measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(measured.to_dict(), indent=2) + "\n")
        unfinished.replace(path)  # atomically: several arms may calibrate at the same time


def _cache_file(device: torch.device) -> Path:
    properties = torch.cuda.get_device_properties(device)
    facts: list[object] = [_VERSION, torch.__version__, platform.node(), properties.name]
    facts += [str(getattr(properties, "uuid", "")), _driver()]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return kept(f"calibration-{key}.json")


def _driver() -> int:
    return int(getattr(torch._C, "_cuda_getDriverVersion", int)())


def _measure_cpu() -> Calibration:
    device = torch.device("cpu")
    source = torch.zeros(8 * 2**20)  # 32 MiB: beyond most caches, and cheap to fill
    target = torch.empty_like(source)
    before, begin = clock.account(os.getpid()), clock.now()
    bandwidth = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    matrix = {
        "float32": _matrix_rate(768, torch.float32, device),
        "bfloat16": _matrix_rate(256, torch.bfloat16, device),  # smaller, for it may be emulated
    }
    after, seconds = clock.account(os.getpid()), clock.now() - begin
    cores = len(os.sched_getaffinity(0))
    queued = clock.share_taken(before, after, seconds, cores) if before and after else 0.0
    return Calibration("cpu", bandwidth, matrix, doubt=crowded(queued))


def crowded(queued: float) -> str:
    """Why a CPU's figures are no ceilings; empty where the cores were free.

    queued: share of the calibration for which the process had no core
    """
    if queued < CROWDED:
        return ""
    return f"other programs ran while this machine's ceilings were measured (no core for {queued:.0%} of that time)"


def _measure_gpu(device: torch.device) -> Calibration:
    torch.cuda.empty_cache()
    free = free_bytes(device)
    bandwidth = max(_copy_rates(min(512 * 2**20, free // 8), device))

    host = torch.zeros(min(32 * 2**20, free // 8), dtype=torch.uint8)
    pinned = _upload_rate(host.pin_memory(), device)
    pageable = _upload_rate(host, device)

    side = 8192 if free > 2**30 else 2048
    with _tf32(enabled=False):
        matrix = {"float32": _matrix_rate(side // 2, torch.float32, device)}
    with _tf32(enabled=True):
        matrix["tf32"] = _matrix_rate(side, torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        matrix[str(dtype).removeprefix("torch.")] = _matrix_rate(side, dtype, device)

    # `_sleep(0)` is the emptiest kernel that torch can launch: no tensor, no dispatcher.
    launches = min(clock.time_block(lambda: torch.cuda._sleep(0), 500, device).wall_s for _ in range(3))
    return Calibration(torch.cuda.get_device_name(device), bandwidth, matrix, launches * 1e6, pinned, pageable)


def _copy_rates(size: int, device: torch.device) -> Iterator[float]:
    """B/s of a copy of `size` bytes, read and written, in several places of the card's memory.

    A copy takes a tenth longer in some places than in others, and longer in any block that torch has cached.
    """
    random = Random(0)
    for _ in range(PLACES):
        aside = shifts(device, random)
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        yield 2 * size / _seconds(partial(target.copy_, source), device, calls=20)
        del aside, source, target
        torch.cuda.empty_cache()


def _upload_rate(host: torch.Tensor, device: torch.device) -> float:
    slot = torch.empty_like(host, device=device)
    return host.nbytes / _seconds(lambda: slot.copy_(host, non_blocking=True), device)


def _matrix_rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    """flop/s of a square GEMM of random numbers; zeros would draw less power and run faster than real work."""
    a = torch.rand(side, side, device=device).to(dtype)
    result = torch.empty_like(a)
    return 2 * side**3 / _seconds(lambda: torch.mm(a, a, out=result), device)


def _seconds(work: Callable[[], object], device: torch.device, calls: int = 3) -> float:
    """Seconds of one call, the best of three blocks: a ceiling is the rate of an undisturbed device."""
    work()
    return min(clock.device_step_s(work, calls, device) for _ in range(3))


@contextmanager
def _tf32(enabled: bool) -> Iterator[None]:
    """Switch TensorFloat-32 in GEMMs on or off inside the block."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if enabled else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
