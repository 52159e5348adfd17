"""Chrome traces as torch.profiler writes them on a GPU, built event by event; times in µs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optexp.records.profile import Calibration
from optexp.trace import STEP, TIMED, Trace

ORIGIN = 4_407_266_484_475.04  # real traces count from a distant past


class ChromeTrace:
    """A host and a GPU: `host` and `gpu` are where each has got to."""

    def __init__(self, timed_us: float | None = None, driver: bool = False) -> None:
        self.events: list[dict[str, Any]] = []
        self.host = self.gpu = 0.0
        self.id = 0
        self.launch_name, self.launch_kind = (
            ("cuLaunchKernelEx", "cuda_driver") if driver else ("cudaLaunchKernel", "cuda_runtime")
        )
        self.metadata = {} if timed_us is None else {TIMED: timed_us}

    def event(self, category: str, name: str, start: float, duration: float, **args: Any) -> None:
        thread = 7 if category.startswith(("kernel", "gpu")) else 4242
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": ORIGIN + start, "dur": duration}
            | {"args": args}
        )

    def spend(self, category: str, name: str, duration: float, **args: Any) -> None:
        """Something the host does."""
        self.event(category, name, self.host, duration, **args)
        self.host += duration

    def op(self, name: str, host_us: float, gpu_us: float, kernel: str = "k", grid: int = 1024, **args: Any) -> None:
        """An operator that launches one kernel: half of its host time before the launch."""
        self.id += 1
        correlation, start = 10_000 + self.id, self.host
        self.event("cpu_op", name, start, host_us, **{"External id": self.id}, **args)
        launched = start + host_us / 2
        self.event(self.launch_kind, self.launch_name, launched, host_us / 4, correlation=correlation)
        self.host = start + host_us
        self.gpu = max(self.gpu, launched + 3.0)
        shape = {"stream": 7, "grid": [grid, 1, 1], "block": [128, 1, 1], "correlation": correlation}
        self.event("kernel", kernel, self.gpu, gpu_us, **{"External id": self.id}, **shape)
        self.gpu += gpu_us

    def graph(
        self, kernels: int, kernel_us: float, host_us: float = 8.0, kernel: str = "void gemm", grid: int = 16
    ) -> None:
        """One launch of a graph of kernels."""
        self.id += 1
        correlation = 10_000 + self.id
        self.gpu = max(self.gpu, self.host + 6.0)
        self.spend("cuda_runtime", "cudaGraphLaunch", host_us, correlation=correlation)
        for node in range(kernels):
            args = {"stream": 7, "correlation": correlation, "graph node id": node + 1}
            args |= {"grid": [grid, 1, 1], "block": [128, 1, 1]}
            self.event("kernel", kernel, self.gpu, kernel_us, **args)
            self.gpu += kernel_us + 0.5

    def copy(self, name: str, gpu_us: float, size: int) -> None:
        self.id += 1
        correlation = 10_000 + self.id
        self.gpu = max(self.gpu, self.host + 2.0)
        self.spend("cuda_runtime", "cudaMemcpyAsync", 4.0, correlation=correlation)
        self.event("gpu_memcpy", name, self.gpu, gpu_us, correlation=correlation, stream=7, bytes=size)
        self.gpu += gpu_us

    def synchronise(self) -> None:
        self.spend("cuda_runtime", "cudaStreamSynchronize", max(self.gpu - self.host, 0.0) + 2.0, correlation=1)

    def steps(self, step: Callable[[], None], count: int = 5) -> Trace:
        """The trace of `count` marked steps, with noise around it that must be left out."""
        self.event("kernel", "from_before", -50.0, 20.0, correlation=3, stream=7)
        for _ in range(count):
            start = self.host
            step()
            self.event("user_annotation", STEP, start, self.host - start)
            self.event("gpu_user_annotation", STEP, start, self.host - start)
        self.host += 1.0
        self.spend("cuda_runtime", "cudaDeviceSynchronize", max(self.gpu - self.host, 0.0) + 5.0, correlation=2)
        return self.read()

    def read(self) -> Trace:
        return Trace.parse(
            {"deviceProperties": [{"id": 0, "numSms": 132}], "traceEvents": self.events, **self.metadata}
        )


@pytest.fixture
def card() -> Calibration:
    return Calibration("card", bandwidth=4e12, matrix={"float32": 50e12, "tf32": 380e12, "bfloat16": 700e12})


@pytest.fixture
def chrome() -> type[ChromeTrace]:
    return ChromeTrace


def small_kernels(chrome: ChromeTrace, kernels: int = 45, **args: Any) -> Callable[[], None]:
    """A step of many kernels of 2 µs, each 15 µs after the last, because the host needs that long."""

    def step() -> None:
        for _ in range(kernels):
            chrome.op("aten::add", host_us=15.0, gpu_us=2.0, kernel="void add<4>", grid=16, **args)

    return step


@pytest.fixture
def eager(chrome: type[ChromeTrace]) -> Trace:
    build = chrome()
    return build.steps(small_kernels(build))


@pytest.fixture
def captured(chrome: type[ChromeTrace]) -> Trace:
    build = chrome()
    return build.steps(lambda: build.graph(kernels=45, kernel_us=2.0))


MATRICES = {"Input type": ["float", "float"], "Input Dims": [[4096, 4096], [4096, 4096]]}
LONG_VECTOR = {"Input type": ["float", "float"], "Input Dims": [[2**26], [2**26]]}


@pytest.fixture
def products(chrome: type[ChromeTrace]) -> Trace:
    """Matrix products at 45 Tflop/s, issued far ahead of the GPU."""
    build = chrome()
    return build.steps(lambda: build.op("aten::mm", 20.0, 2 * 4096**3 / 45e6, "sm90_xmma_gemm_f32", **MATRICES))


@pytest.fixture
def passes(chrome: type[ChromeTrace]) -> Trace:
    """Additions that move 3 × 256 MiB at 3.6 TB/s."""
    build = chrome()
    return build.steps(lambda: build.op("aten::add", 20.0, 3 * 2**28 / 3.6e6, "void add<4>", **LONG_VECTOR))


@pytest.fixture
def feeding(chrome: type[ChromeTrace]) -> Trace:
    """A training loop that waits for its DataLoader, copies from pageable memory, and reads its loss."""
    build = chrome()

    def step() -> None:
        build.spend("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 400.0)
        build.copy("Memcpy HtoD (Pageable -> Device)", 100.0, 2**20)
        build.op("aten::mm", 20.0, 300.0, "gemm")
        build.spend("cuda_runtime", "cudaMalloc", 50.0, correlation=5)
        build.op("aten::relu", 20.0, 100.0, "relu")
        build.synchronise()

    return build.steps(step)
