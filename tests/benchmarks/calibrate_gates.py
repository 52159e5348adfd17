"""False alarms of honest strategies and detection of mutants, by arithmetic: are the gates' constants right here?

    python tests/benchmarks/calibrate_gates.py [--device cuda] [--seconds 200] [--seeds 20] [--processes 1]
                                                [--record FOLDER]

Prints two Markdown tables. "Most of a limit" is the largest error that an honest strategy had, as a share of what is
allowed: constants are too tight where it nears 100 %, too lax where it stays far below on everything.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from math import isfinite
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn

from optexp.config import search_path
from optexp.errors import Failure, Unsupported
from optexp.pages.blocks import keep
from optexp.pages.machine import here
from optexp.pages.record import Record
from optexp.program import Program
from optexp.records.verification import Verification
from optexp.schema import build
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, contract, label
from optexp.trace import Trace
from optexp.verification.trial import Plan
from optexp.verification.verify import verify
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec
from optexp.workload import Workload
from optexp.workloads.bert import Bert
from optexp.workloads.elementwise import Elementwise
from optexp.workloads.gelu import Gelu
from optexp.workloads.layernorm_linear import LayerNormLinear
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.matmul import Matmul
from optexp.workloads.mlp import Mlp
from optexp.workloads.softmax import Softmax
from optexp.workloads.vision import Vision

STACKS = (  # the slow ones last
    ("split_k",), ("channels_last",), ("fused_optimizer",), ("cuda_graph",), ("inplace",), ("amp", "split_k"),
    ("amp[dtype=float16]", "split_k"), ("amp", "cuda_graph"), ("channels_last", "amp"), ("fusion",), ("amp", "fusion"),
)  # fmt: skip
COMPILED = (Gelu, Mlp, Softmax)  # by fusion, which takes long


def workloads() -> Iterator[Workload]:
    modes = ("forward", "forward_backward", "train")
    yield from (Mlp(mode=mode, activation=activation) for mode in modes for activation in ("gelu", "relu"))
    yield from (LeNet5(mode=mode) for mode in modes)
    yield from (Gelu(size=1024, mode=mode) for mode in modes[:2])
    yield from (Softmax(rows=1024, columns=1024, mode=mode) for mode in modes[:2])
    yield from (LayerNormLinear(rows=1024, features=512, out=512, mode=mode) for mode in modes[:2])
    yield Elementwise(rows=1024, columns=1024)
    yield Matmul(size=1024)
    if find_spec("transformers"):
        size = {"batch_size": 4, "sequence": 128, "layers": 2, "hidden": 256, "heads": 4, "vocabulary": 1024}
        yield from (Bert(mode=mode, **size) for mode in modes)  # type: ignore[arg-type]
    if find_spec("torchvision"):
        yield from (Vision(mode=mode, batch_size=8, image=64, architecture="resnet50") for mode in modes)


class SplitK(Strategy):
    """Linear layers as two products: the same sums in another order, wherever there is a sum."""

    stage = Stage.REWRITE
    name = "split_k"

    def apply(self, program: Program) -> tuple[Program, Notes]:
        for layer in program.model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = partial(split, layer)  # type: ignore[method-assign]
        return program, {}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "")


def split(layer: nn.Linear, x: Tensor) -> Tensor:
    half = layer.in_features // 2
    result = x[..., :half] @ layer.weight[:, :half].T + x[..., half:] @ layer.weight[:, half:].T
    return result if layer.bias is None else result + layer.bias


def strategy(written: str) -> Strategy:
    if written == "split_k":
        return SplitK()
    name, _, options = written.rstrip("]").partition("[")
    node = search_path.compose([f"strategy=[{name}]"]).strategy[name]
    made: Strategy = build({**node, **dict(pair.split("=") for pair in options.split(",") if pair)}, f"strategy.{name}")
    return made


def verifications(
    workload: Workload, stack: list[Strategy], device: str, dtype: str, seeds: int, first: int = 1
) -> Iterator[Verification]:
    """One for each seed from `first` on, on the same arms; seed 1 with mutants."""
    promise = contract(stack)
    spec = Spec(workload, stack, device, dtype, seed=0, contract=promise)
    bare = replace(spec, strategies=())
    reference, yardstick = InProcess(Reference(), "reference"), InProcess(Arm(), "yardstick")
    candidate = InProcess(Arm(), "candidate")
    reference.call(Reference.setup, packed=bare.pack())
    yardstick.call(Arm.setup, packed=replace(bare, autocast=promise.dtype).pack())
    candidate.call(Arm.setup, packed=spec.pack())
    steps = 3 if workload.mode == "train" else 1
    overwrites = any(member.overwrites for member in stack)
    for seed in range(first, first + seeds):
        plan = Plan([1000, 1] if seed == 1 else [seed], steps, overwrites=overwrites, power=seed == 1)
        yield verify(reference, yardstick, candidate, plan, promise)


@dataclass
class Found:
    """The outcome of one stack on one workload; `lines` are for the terminal."""

    key: tuple[str, str]
    honest: Counter[str] = field(default_factory=Counter)
    most: tuple[float, str] = (0.0, "")
    mutants: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    lines: list[str] = field(default_factory=list)


def examined(names: tuple[str, ...], workload: Workload, device: str, seeds: int) -> Found | None:
    """In a process of its own; None where the workload has nothing to do for this stack."""
    warnings.simplefilter("ignore")
    search_path.register()
    workload = workload.resolve(torch.device(device).type)
    stack = [strategy(name) for name in names]
    found = Found((contract(stack).dtype or "float32", label(stack)))
    where = f"{label(stack)} on {workload.name} {workload.mode}"
    try:
        for seen in verifications(workload, stack, device, "float32", seeds):
            found.honest += Counter(verifications=1, alarms=not seen.ok)
            share, tensor = (seen.worst.used, seen.worst.tensor) if seen.worst else (0.0, "")
            if isfinite(share):
                found.most = max(found.most, (share, f"{tensor}, {workload.name} {workload.mode}"))
            if not seen.ok:
                found.lines.append(f"{where}: {seen.headline}")
            for name, row in seen.mutants.items():
                found.mutants[name] += Counter(caught=row.caught, tried=row.tried)
    except Unsupported:
        return None
    except Failure as reason:
        found.lines.append(f"{where}: {reason}")
    finally:
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1, help="nothing is timed here")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    options = parser.parse_args()
    end, results = time.monotonic() + options.seconds, list[Found]()
    jobs = [
        (names, workload)
        for names in STACKS
        for workload in workloads()
        if "fusion" not in names or isinstance(workload, COMPILED)
    ]
    reached = len(jobs)
    # Sessions of their own, as Inductor's compilers outlive the process that began them by a minute.
    with ProcessPoolExecutor(options.processes, get_context("spawn"), initializer=os.setsid) as pool:
        futures = [pool.submit(examined, *job, options.device, options.seeds) for job in jobs]
        try:
            for future in as_completed(futures, timeout=end - time.monotonic()):
                if found := future.result():
                    results.append(found)
                    print(*found.lines, sep="\n", end="\n" if found.lines else "", file=sys.stderr, flush=True)
        except TimeoutError:
            reached = sum(future.done() for future in futures)  # those that are killed count as done, too
            print(f"out of time after {reached} of {len(jobs)} combinations", file=sys.stderr)
            for process in pool._processes.values():
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGKILL)
    if results:
        rows = record(results, here(options.device), (reached, len(jobs)))
        print(rows.text())
        if options.record:
            keep(rows, "gates" if options.device.startswith("cuda") else "gates.cpu", options.record)


def record(results: list[Found], machine: str, reached: tuple[int, int]) -> Record:
    """A row for each stack on one workload, in the order of STACKS."""
    order = {label: n for n, label in enumerate(dict.fromkeys(found.key for found in results))}
    rows = [
        {
            "arithmetic": found.key[0],
            "strategy": found.key[1],
            "verifications": found.honest["verifications"],
            "alarms": found.honest["alarms"],
            "used": round(found.most[0], 4),
            "of": found.most[1],
            "mutants": {name: [count["caught"], count["tried"]] for name, count in found.mutants.items()},
        }
        for found in sorted(results, key=lambda found: order[found.key])
    ]
    return Record("gates", machine, rows, {"reached": list(reached)})


if __name__ == "__main__":
    main()
