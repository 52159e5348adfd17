"""Learning rates of a schedule in more steps than any check runs:
another milestone or another length shows in none of the first."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from optexp.equivalence.schedules import STEPS, TOGETHER

GROUPS = 64  # of more, each step takes long


def later_rates(schedule: LRScheduler) -> Sequence[float] | Sequence[Tensor]:
    """Means of the least and of the largest rate of all groups, over `TOGETHER` steps each.

    Empty of a class of the user's own, whose steps may do more. Shorter where it ends, as a schedule of so many steps
    does. Tensors of float32 where rates are tensors.
    """
    optimizer: Optimizer = schedule.optimizer
    if not type(schedule).__module__.startswith("torch.") or len(optimizer.param_groups) > GROUPS:
        return []
    twin = _twin(optimizer)
    found: list[tuple[float, float]] = []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of steps of a schedule before those of its optimizer
        try:
            alone = copy.deepcopy(schedule, {id(optimizer): twin})
            for _ in range(STEPS):
                alone.step()
                rates = [float(group["lr"]) for group in twin.param_groups]
                found.append((min(rates), max(rates)))
        except Exception:  # it has ended, or needs what only a step knows
            pass
    parts = [found[start : start + TOGETHER] for start in range(0, len(found), TOGETHER)]
    means = [fmean(rates) for part in parts for rates in zip(*part, strict=True)]
    return torch.tensor(means).unbind() if _in_tensors(optimizer) else means


def _twin(optimizer: Optimizer) -> SGD:
    """An optimizer with the same numbers, and parameters of one element."""
    twin = SGD([torch.zeros(1)])
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    twin.param_groups = [{**copy.deepcopy(group), "params": [torch.zeros(1)]} for group in groups]
    twin.defaults = dict(optimizer.defaults)
    return twin


def _in_tensors(optimizer: Optimizer) -> bool:
    return any(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups)
