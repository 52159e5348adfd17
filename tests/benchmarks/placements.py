"""How far a step's time depends on where its tensors lie in a card's memory: eager and compiled, in one process.

    python tests/benchmarks/placements.py PROBLEM.py [--places 5] [--seed N]     (on a GPU)

PROBLEM.py has Model, get_inputs and get_init_inputs, as KernelBench's files. The first place is that of a new process;
each later one follows blocks of memory of random sizes, on an emptied cache of torch's allocator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from optexp.support.card_memory import shifts
from tests.benchmarks.honest_pairs import imported

STEPS, BLOCKS, LEAD_IN = 20, 3, 4


def step_us(step: Callable[..., Any], inputs: list[Any]) -> float:
    """Of one step, the median of `BLOCKS` blocks."""
    for _ in range(LEAD_IN):
        step(*inputs)
    found = []
    for _ in range(BLOCKS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(STEPS):
            step(*inputs)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / STEPS * 1e3)
    return median(found)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", type=Path)
    parser.add_argument("--places", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    problem, random, card = imported(asked.problem), Random(asked.seed), torch.device("cuda")
    with card:
        model = problem.Model(*problem.get_init_inputs()).eval()
    compiled, blocks = torch.compile(model), list[Tensor]()
    print("| place | eager [µs] | compiled [µs] | ratio |\n|---|---|---|---|")
    for place in range(asked.places):
        with card:
            inputs = [x.to(card) if isinstance(x, Tensor) else x for x in problem.get_inputs()]
        eager_us, compiled_us = (step_us(step, inputs) for step in (model, compiled))
        print(f"| {place} | {eager_us:.0f} | {compiled_us:.0f} | {eager_us / compiled_us:.3f} |")
        del inputs
        torch.cuda.empty_cache()
        blocks += shifts(card, random)


if __name__ == "__main__":
    main()
