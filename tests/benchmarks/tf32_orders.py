"""How far the loss of a small network in `channels_last` errs, in errors of runs whose operands are taken in TF32.

python tests/benchmarks/tf32_orders.py [--seeds N]     (on a GPU)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from optexp.equivalence import tf32_operands
from optexp.equivalence.reassociation import RUNS, Reassociated

zoo = import_module("tests.benchmarks.zoo.generative")  # models as users write them, without types

LIMIT = 3.0  # times the largest error of the baseline's runs, which a loss may err by
OF_RUNS: dict[str, Sequence[Sequence[Callable[[Tensor], Tensor]]]] = {  # of each run, functions of an operand
    "all runs round to nearest": ((tf32_operands.nearest,),) * RUNS,
    "by run and layer": tf32_operands.BY_RUN,
}


@torch.no_grad()
def ratios(seed: int) -> dict[str, float]:
    """The candidate's error over the largest of the baseline's, by how runs take operands."""
    torch.manual_seed(seed)
    model = zoo.Discriminator().cuda().eval()
    real, fake = torch.randn(2, 3, 3, 16, 16, device="cuda").unbind()
    exact = float(deepcopy(model).double()(real.double(), fake.double()))

    def error() -> float:
        return abs(float(model(real, fake)) - exact)

    found, plain = dict[str, float](), error()
    for name, operands in OF_RUNS.items():
        tf32_operands.BY_RUN, errors = operands, [plain]
        for run in range(1, RUNS + 1):
            with Reassociated(run):
                errors.append(error())
        found[name] = max(errors)
    last: Any = {"memory_format": torch.channels_last}
    model, real, fake = model.to(**last), real.to(**last), fake.to(**last)
    return {name: error() / largest for name, largest in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=150)
    seeds = parser.parse_args().seeds
    rows = [ratios(seed) for seed in range(seeds)]
    for name in OF_RUNS:
        values = torch.tensor([row[name] for row in rows])
        beyond = int((values > LIMIT).sum())
        print(
            f"{name}: median {values.median():.2f}, at most {values.max():.2f}, above {LIMIT:g} in {beyond} of {seeds}"
        )
