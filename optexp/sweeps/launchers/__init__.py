"""Engines that run the jobs of a sweep, one file each. Hydra chooses one by `hydra/launcher=`."""

from __future__ import annotations

from importlib import import_module

from hydra.core.plugins import Plugins

# Hydra takes plugins from packages of this name alone; engines are imported only when a sweep uses them.
PREFIX = "hydra_plugins.optexp"
ENGINES = {
    "Basic": "optexp.sweeps.launchers.basic",
    "Joblib": "optexp.sweeps.launchers.local_workers",
    "Ray": "optexp.sweeps.launchers.ray_cluster",
    "Slurm": "optexp.sweeps.launchers.slurm",
}


def register() -> None:
    """Let Hydra find the launchers of `conf/hydra/launcher/`."""
    for name, module in ENGINES.items():
        Plugins.instance().class_name_to_class[f"{PREFIX}.{name}"] = getattr(import_module(module), name)
