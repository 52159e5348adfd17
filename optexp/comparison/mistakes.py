"""PARENT: mistakes in a request, found before anything is written or started."""

from __future__ import annotations

import torch
from omegaconf import DictConfig, OmegaConf

from optexp.comparison.machine import choose_device
from optexp.comparison.suggestions import require_installed
from optexp.config import resolve
from optexp.user_code.named_files import require_syntax
from optexp.workload import Workload


def refuse(config: DictConfig, workload: Workload | None = None, elsewhere: bool = False) -> None:
    """Return where the configuration describes an experiment.

    Args:
        config: As Hydra composes it, without the node `hydra`.
        workload: An object instead of the configuration's.
        elsewhere: The job may run on another machine: its device need not be here.

    Raises:
        ConfigError: a key, a value, a strategy or a file is not as it must be; one sentence.
    """
    require_syntax(OmegaConf.to_container(config))
    experiment = resolve(config, workload)
    asked = experiment.device
    device = asked if elsewhere and asked.startswith("cuda") else choose_device(asked)
    experiment.workload.resolve(torch.device(device).type)
    if experiment.mode == "auto":
        require_installed(experiment.auto)
    for strategy in (*experiment.strategies, *experiment.baseline):
        strategy.check_options()
