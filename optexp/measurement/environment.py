"""Where a result was obtained: device, driver, versions, processor, code."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from optexp.measurement.gpu import Gpu

CHECKOUT = Path(__file__).parents[2]


def describe(device: torch.device) -> dict[str, Any]:
    """Facts that the parent can read without touching CUDA."""
    facts: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "mlflow": _version("mlflow"),
        "optexp": _version("optexp"),
        "optexp_git": _git(CHECKOUT) if (CHECKOUT / ".git").exists() else None,  # a worktree has a file there
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn": {name: _cudnn(name) for name in ("benchmark", "deterministic", "allow_tf32")},
        "load": round(os.getloadavg()[0], 2),
        "git": _git(),
        "command": " ".join(sys.argv),
    }
    if device.type == "cuda":
        gpu = Gpu.open(device)
        facts |= _card(gpu) if gpu else {"nvml": "does not answer"}
    return facts


def _card(gpu: Gpu) -> dict[str, Any]:
    """The card's settings, and its state before anything was started; None for facts that it does not report."""
    nvml, reading = gpu.nvml, gpu.read()
    limit, ecc, mig = (gpu.ask(f"nvmlDeviceGet{fact}") for fact in ("PowerManagementLimit", "EccMode", "MigMode"))
    return {
        "gpu": gpu.ask("nvmlDeviceGetName"),
        "gpu_uuid": gpu.ask("nvmlDeviceGetUUID"),
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "power_limit_w": None if limit is None else limit / 1e3,
        "temperature_c": reading.temperature_c,
        "sm_clock_mhz": reading.sm_mhz,
        "memory_clock_mhz": reading.memory_mhz,
        "max_sm_clock_mhz": gpu.ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "ecc": None if ecc is None else bool(ecc[0]),
        "mig": None if mig is None else bool(mig[0]),
    }


def _cudnn(flag: str) -> bool | str:
    """A flag of cuDNN. torch raises where its newer settings differ between convolutions and RNNs."""
    try:
        return bool(getattr(torch.backends.cudnn, flag))
    except RuntimeError:
        return "differs by operation"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit and dirty state of a folder's repository (None: of the working folder's); None without a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=5)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
