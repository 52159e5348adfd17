"""Where configuration comes from: this project's, the working folder's, and that of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig

import optexp

CONF = next(Path(folder) / "conf" for folder in optexp.__path__ if (Path(folder) / "conf" / "config.yaml").is_file())


class SearchPath(SearchPathPlugin):
    """Adds studies (`experiments/`), the working folder's own `conf/` and `experiments/`, and third parties'."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        here = Path.cwd()
        folders = [CONF.parent]  # `experiments` is a folder beside `conf`
        folders += [here] if (here / "experiments").is_dir() else []
        folders += [here / "conf"] if (here / "conf").is_dir() else []
        for folder in dict.fromkeys(folders):
            if folder != CONF:
                search_path.append("optexp", f"file://{folder}")
        for entry in entry_points(group="optexp.configs"):
            spec = find_spec(entry.module)
            for location in (spec.submodule_search_locations if spec else None) or ():
                search_path.append(entry.name, f"file://{location}")


def register() -> None:
    """Tell Hydra about the search path. The working folder's modules may be named by a `_target_`."""
    if SearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(SearchPath)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as with `python -m`


def options(group: str) -> list[str]:
    """The choices of a group, from every folder on the search path."""
    with _loader() as loader:
        return sorted(loader.get_group_options(group, config_name="config", overrides=_searchpath()))


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that these overrides give, with the search path of the job in progress."""
    with _loader() as loader:
        return loader.load_configuration("config", overrides + _searchpath(), run_mode=RunMode.RUN)


def in_sweep() -> bool:
    """Whether this is one job of several."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _searchpath() -> list[str]:
    extra = [f"'{path}'" for path in HydraConfig.get().searchpath] if HydraConfig.initialized() else []
    return [f"hydra.searchpath=[{','.join(extra)}]"] if extra else []


@contextmanager
def _loader() -> Iterator[ConfigLoader]:
    if GlobalHydra.instance().is_initialized():
        yield GlobalHydra.instance().config_loader()
    else:
        register()
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            yield GlobalHydra.instance().config_loader()
