"""On a GPU: tables beside torch's own profiler and beside events around modules, and terms that add up."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from optexp.api import compose
from optexp.config import resolve
from optexp.profiling.breakdown import breakdown
from optexp.profiling.operators import by_name, by_path
from optexp.program import Program
from optexp.strategy import Composed
from optexp.strategy import compose as fold
from optexp.trace import MODULE, STEP, Trace

pytestmark = pytest.mark.gpu

STEPS = 5
PROGRAMS = [
    "mlp", "mlp workload.mode=train", "gelu workload.size=4096", "elementwise", "layernorm_linear", "softmax",
    "lenet5 workload.mode=train", "branches", "bert workload.layers=2", "causal_lm", "vision workload.mode=train",
    "training", "pipeline", "matmul", "linear_gelu", "mlp +cuda_graph", "mlp +fusion",
    "lenet5 workload.mode=train +amp", "bert workload.layers=2 +fusion", "bert workload.layers=2 +amp+cuda_graph",
]  # fmt: skip


def built(words: str) -> Program:
    first, *rest = words.split()
    names = [name for word in rest if word.startswith("+") for name in word[1:].split("+")]
    options = [word for word in rest if not word.startswith("+")]
    experiment = resolve(compose([f"workload={first}", *options, "device=cuda"], {name: {} for name in names}, {}))
    device, workload = torch.device("cuda"), experiment.workload.resolve("cuda")
    program = workload.build(device, getattr(torch, experiment.dtype), 0)
    batches = workload.batches(torch.Generator(device).manual_seed(0), 2)
    program.feed.reset(batches)
    for member in fold(Composed(experiment.strategies)):
        program, _ = member.apply(program)
        program.feed.reset(batches)
    return program


def traced(program: Program, path: Path) -> tuple[Trace, list[Any]]:
    def step() -> None:
        program.step(program, program.feed.next())

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        for _ in range(STEPS):
            with record_function(STEP):
                step()
        torch.cuda.synchronize()
    program.feed.pause()
    profiler.export_chrome_trace(str(path))
    return Trace.parse(json.loads(path.read_text())), list(profiler.key_averages())


@pytest.mark.parametrize("words", PROGRAMS)
def test_the_table_agrees_with_the_profilers_and_terms_add_up(words: str, tmp_path: Path) -> None:
    trace, averages = traced(built(words), tmp_path / "trace.json")
    parts = breakdown(trace)
    assert sum(parts.terms.values()) == pytest.approx(1, abs=0.01)
    assert min(parts.terms.values()) >= 0
    theirs = defaultdict[str, Counter[str]](Counter)
    for row in averages:
        if "::" in row.key and row.device_type == DeviceType.CPU and not row.key.startswith(("autograd::", "cuda")):
            theirs[row.key] += Counter(
                calls=row.count, us=row.device_time_total, self_us=row.self_device_time_total, host=row.cpu_time_total
            )
    ours = {row.name: row for row in by_name(trace)}
    # The profiler's request for memory stands below an operator, with the time of a kernel that is counted twice there.
    twice = sum(row.device_time_total for row in averages if row.key == "Activity Buffer Request")
    whole = sum(row["self_us"] for row in theirs.values())
    host = sum(row["host"] for row in theirs.values())
    wrong = []
    for name, row in theirs.items():
        if name not in ours:
            wrong.append(f"{name} is missing")
            continue
        mine = ours[name]
        pairs = {
            "calls": (mine.calls * STEPS, row["calls"], 0.0),
            "host": ((mine.host_us or 0.0) * STEPS, row["host"], 1e-4 * host),
            "device": ((mine.device_us or 0.0) * STEPS, row["us"], 1e-3 * whole),
            "device self": ((mine.device_self_us or 0.0) * STEPS, row["self_us"], 1e-3 * whole),
        }
        wrong += [
            f"{name} {what}: {a:.4g} here, {b:.4g} there"
            for what, (a, b, least) in pairs.items()
            if abs(a - b) > max(0.01 * abs(b), least) and abs(a - (b - twice)) > max(0.01 * abs(b), least)
        ]
    assert not wrong, "; ".join(wrong)


def test_device_time_by_module_is_what_events_see(tmp_path: Path) -> None:
    """Events around the forward of large layers, whose kernels leave no gap between them."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8192, 8192), nn.GELU()) for _ in range(4))).cuda()
    x = torch.randn(8192, 8192, device="cuda")
    events: dict[str, list[torch.cuda.Event]] = {}
    ranges: dict[str, Any] = {}

    def before(name: str) -> None:
        ranges[name] = record_function(f"{MODULE}{name}")
        ranges[name].__enter__()
        events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[name][0].record()

    def after(name: str) -> None:
        events[name][1].record()
        ranges[name].__exit__(None, None, None)

    for name, module in net.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: before(name))
        module.register_forward_hook(lambda *_, name=name: after(name))
    with torch.no_grad():
        for _ in range(3):
            net(x)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
            torch.cuda._sleep(50_000_000)  # events measure the host's launches, too, where the host is not ahead
            with record_function(STEP):
                net(x)
            torch.cuda.synchronize()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    rows = {row.name: row for row in by_path(Trace.parse(json.loads(path.read_text())))}
    seen = {name: 1e3 * begin.elapsed_time(end) for name, (begin, end) in events.items()}
    assert rows.keys() == seen.keys()
    for name, us in seen.items():
        assert rows[name].device_us == pytest.approx(us, rel=0.03, abs=5.0), name  # two events take some µs themselves
