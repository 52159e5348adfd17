"""Whether two samples are of one distribution: of numbers by their means, of draws by how alike they are in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, variance

import torch
from scipy.special import stdtr
from torch import Tensor

NEAR = 2.5  # standard deviations: what is nearer is no alarm, and its p is not computed
GRID = 256  # points at which Chernoff's bound is evaluated


def location(x: Sequence[float], y: Sequence[float], floor: float) -> float:
    """p of Welch's t-test for equal means; distances below `floor` are rounding. (Of distances from the median this
    is Brown's and Forsythe's test for equal variances.)"""
    distance = max(0.0, abs(fmean(x) - fmean(y)) - floor)
    if not distance:
        return 1.0
    of_x, of_y = variance(x) / len(x), variance(y) / len(y)
    if not of_x + of_y:
        return 0.0
    freedom = (of_x + of_y) ** 2 / (of_x**2 / (len(x) - 1) + of_y**2 / (len(y) - 1))
    return 2 * float(stdtr(freedom, -distance / sqrt(of_x + of_y)))


def alike(kernel: Tensor) -> float:
    """p that draws are as much more alike within their samples as beside the other, if labels are given at random
    (the permutation test of the maximum mean discrepancy; Gretton et al., JMLR 13, 2012). 1 where it is no alarm.

    p is Chernoff's bound of Σ λ (z² - 1), with normal z in place of labels of ±1, which scatter no wider.

    kernel: 2n × 2n, symmetric, how alike two draws are; the first n are one sample's
    """
    draws = len(kernel)
    wide = kernel.to(torch.float64)
    rows = wide.mean(0)
    wide = wide - rows - rows[:, None] + rows.mean()
    wide.fill_diagonal_(0.0)
    labels = torch.ones(draws, dtype=torch.float64, device=wide.device)
    labels[draws // 2 :] = -1.0
    statistic = float(labels @ wide @ labels + wide.sum() / (draws - 1))  # the mean over labels is taken away
    if not statistic > NEAR * sqrt(2.0) * float(torch.linalg.matrix_norm(wide)):
        return 1.0
    weights = torch.linalg.eigvalsh(wide)
    theta = torch.logspace(-5, 0, GRID, dtype=torch.float64, device=wide.device)[:-1, None] / (2 * weights.max())
    exponents = -torch.log1p(-2 * theta * weights).sum(1) / 2 - theta[:, 0] * (weights.sum() + statistic)
    return min(1.0, float(exponents.min().exp()))
