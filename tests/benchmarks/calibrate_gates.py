"""False alarms of honest strategies and detection of mutants, by arithmetic: are the gates' constants right here?

    python tests/benchmarks/calibrate_gates.py [--device cuda] [--seconds 200] [--seeds 20]

Prints two Markdown tables. "Most of a limit" is the largest error that an honest strategy had, as a share of what is
allowed: constants are too tight where it nears 100 %, too lax where it stays far below on everything.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from optexp import discovery
from optexp.arm import Arm, Reference, Spec
from optexp.config import build
from optexp.equivalence.protocol import Plan, Verification, verify
from optexp.insight.trace import Trace
from optexp.program import Program
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, Unsupported, contract, label
from optexp.workers.processes import Failure, InProcess
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
COLUMNS = ("arithmetic", "strategy", "workloads", "verifications", "alarms", "most of a limit", "of")


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
    node = discovery.compose([f"strategy=[{name}]"]).strategy[name]
    made: Strategy = build({**node, **dict(pair.split("=") for pair in options.split(",") if pair)}, f"strategy.{name}")
    return made


def verifications(
    workload: Workload, stack: list[Strategy], device: str, dtype: str, seeds: int
) -> Iterator[Verification]:
    """One for each seed, on the same arms; the first of them with mutants."""
    promise = contract(stack)
    spec = Spec(workload, stack, device, dtype, seed=0, contract=promise)
    arms = [
        InProcess(role(), name) for role, name in ((Reference, "reference"), (Arm, "yardstick"), (Arm, "candidate"))
    ]
    bare = replace(spec, strategies=())
    for arm, own in zip(arms, (bare, replace(bare, autocast=promise.dtype), spec), strict=True):
        arm.call("setup", packed=own.pack())
    steps = 3 if workload.mode == "train" else 1
    overwrites = any(member.overwrites for member in stack)
    for seed in range(1, 1 + seeds):
        plan = Plan([1000, 1] if seed == 1 else [seed], steps, overwrites=overwrites, power=seed == 1)
        yield verify(arms[0], arms[1], arms[2], plan, promise)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    discovery.register()
    begin, honest = time.monotonic(), defaultdict[tuple[str, str], Counter[str]](Counter)
    most: dict[tuple[str, str], tuple[float, str]] = {}
    mutants = defaultdict[tuple[str, str], Counter[str]](Counter)
    jobs = [(names, workload) for names in STACKS for workload in workloads()]
    for done, (names, workload) in enumerate(jobs):
        if time.monotonic() - begin > options.seconds:
            print(f"out of time after {done} of {len(jobs)} combinations", file=sys.stderr)
            break
        if "fusion" in names and not isinstance(workload, COMPILED):
            continue
        workload = workload.resolve(torch.device(options.device).type)
        stack = [strategy(name) for name in names]
        arithmetic = contract(stack).dtype or "float32"
        key = arithmetic, label(stack)
        try:
            for found in verifications(workload, stack, options.device, "float32", options.seeds):
                honest[key]["verifications"] += 1
                honest[key]["alarms"] += not found.ok
                tensor, share = found.worst.get("tensor", ""), found.worst.get("used", 0.0)
                if isfinite(share) and share > most.get(key, (0.0, ""))[0]:
                    most[key] = share, f"{tensor}, {workload.name} {workload.mode}"
                if not found.ok:
                    print(f"{label(stack)} on {workload.name} {workload.mode}: {found.headline}", file=sys.stderr)
                for name, row in found.mutants.items():
                    mutants[name, arithmetic] += Counter(caught=row["caught"], tried=row["tried"])
            honest[key]["workloads"] += 1
        except Unsupported:
            continue
        except Failure as reason:
            print(f"{label(stack)} on {workload.name} {workload.mode}: {reason}", file=sys.stderr)
        finally:
            torch._dynamo.reset()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()

    table(
        COLUMNS, [[*key, *(honest[key][c] for c in COLUMNS[2:5]), f"{most[key][0]:.0%}", most[key][1]] for key in most]
    )
    print()
    kinds = sorted({arithmetic for _, arithmetic in mutants})
    names = list(dict.fromkeys(name for name, _ in mutants))
    cells = [[mutants[name, kind] for kind in kinds] for name in names]
    texts = [[f"{cell['caught']} of {cell['tried']}" if cell else "–" for cell in row] for row in cells]
    table(("mutant caught", *kinds), [[name, *row] for name, row in zip(names, texts, strict=True)])


def table(head: tuple[str, ...], rows: list[list[Any]]) -> None:
    for cells in (head, ["---"] * len(head), *rows):
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
