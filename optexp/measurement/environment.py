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
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "git": _git(),
        "command": " ".join(sys.argv),
    }
    if device.type == "cuda":
        # Not the same number where CUDA_VISIBLE_DEVICES leaves some out.
        facts |= _nvml(torch.cuda._get_nvml_device_index(device))
    return facts


def _nvml(index: int) -> dict[str, Any]:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return {
            "gpu": _text(nvml.nvmlDeviceGetName(handle)),
            "gpu_uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3,
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        }
    except nvml.NVMLError as error:
        return {"nvml": str(error)}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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


def _git() -> dict[str, Any] | None:
    """Commit and dirty state of the working folder, if it is a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
