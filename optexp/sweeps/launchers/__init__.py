"""Engines that run the jobs of a sweep, one file each. Hydra chooses one by `hydra/launcher=`."""

from __future__ import annotations

from importlib import import_module

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

# By the name that a configuration has for it: Hydra takes plugins from packages of two names alone.
ENGINES = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher": "optexp.sweeps.launchers.basic.Basic",
    "hydra_plugins.optexp.Joblib": "optexp.sweeps.launchers.local_workers.Joblib",
    "hydra_plugins.optexp.Ray": "optexp.sweeps.launchers.ray_cluster.Ray",
    "hydra_plugins.optexp.Slurm": "optexp.sweeps.launchers.slurm.Slurm",
}
# Hydra would check these of ours against the schemas of published plugins, where such are installed.
SHADOWED = {"launcher": ("joblib.yaml", "ray.yaml"), "sweeper": ("optuna.yaml",)}


def register() -> None:
    """Let Hydra find our launchers, its own name for the basic one included. For the command line alone: Hydra keeps
    plugins for the whole process, in which a caller of `optexp.compare` may use its own."""
    for name, place in ENGINES.items():
        module, _, engine = place.rpartition(".")
        Plugins.instance().class_name_to_class[name] = getattr(import_module(module), engine)
    groups = ConfigStore.instance().repo.get("hydra", {})
    for group, files in SHADOWED.items():
        for file in files:
            groups.get(group, {}).pop(file, None)
