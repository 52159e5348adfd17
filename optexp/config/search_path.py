"""Where configuration comes from: this project's, the working folder's, and that of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path, PurePath

from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig

import optexp

CONF = next(Path(folder) / "conf" for folder in optexp.__path__ if (Path(folder) / "conf" / "config.yaml").is_file())


class Studies(FileConfigSource):
    """The `experiments` folder of a folder, and nothing else of it.

    Hydra lists every group below a search path; in a checkout that would be environments, caches and old results.
    """

    @staticmethod
    def scheme() -> str:
        return "studies"

    def available(self) -> bool:
        return self.is_group("experiments")

    def is_group(self, config_path: str) -> bool:
        return self._inside(config_path) and bool(super().is_group(config_path))

    def is_config(self, config_path: str) -> bool:
        return self._inside(config_path) and bool(super().is_config(config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if PurePath(config_path).parts:
            return list(super().list(config_path, results_filter))
        return [] if results_filter == ObjectType.CONFIG else ["experiments"]

    @staticmethod
    def _inside(path: str) -> bool:
        return PurePath(path).parts[:1] in ((), ("experiments",))


class SearchPath(SearchPathPlugin):
    """Adds studies (`experiments/`), the working folder's own `conf/` and `experiments/`, and third parties'."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        here = Path.cwd()
        for folder in dict.fromkeys([CONF.parent, here]):  # a checkout is both
            if (folder / "experiments").is_dir():
                search_path.append("optexp", f"studies://{folder}")
        if (here / "conf").is_dir() and here / "conf" != CONF:
            search_path.append("optexp", f"file://{here / 'conf'}")
        for name, location in _installed(*sys.path):
            search_path.append(name, f"file://{location}")


@lru_cache(maxsize=1)
def _installed(*path: str) -> list[tuple[str, str]]:
    """Name and folder of configurations that packages bring, which takes a look at every package on `path`."""
    specs = [(entry.name, find_spec(entry.module)) for entry in entry_points(group="optexp.configs")]
    return [(name, place) for name, spec in specs if spec for place in spec.submodule_search_locations or ()]


def register() -> None:
    """Add the search path to Hydra, and the working folder to `sys.path`, so that a `_target_` may name its modules."""
    if SearchPath not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(Studies)
        Plugins.instance().register(SearchPath)
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as with `python -m`


def options(group: str) -> list[str]:
    """Choices of a group, from every folder on the search path, sorted."""
    with _loader() as loader:
        return sorted(loader.get_group_options(group, config_name="config", overrides=_searchpath()))


def has_package(name: str) -> bool:
    """Whether a YAML begins with the place of its keys, `# @package ...`.

    Args:
        name: Of the file below its search path, without suffix: strategy/amp.
    """
    with _loader() as loader:
        found = loader.repository.load_config(name)  # type: ignore[attr-defined]  # which reads the first line
    return found is not None and found.header.get("package") is not None


def compose(overrides: list[str]) -> DictConfig:
    """The configuration of these overrides, on the search path of the job in progress.

    Raises:
        hydra.errors.HydraException: an override is malformed or names no choice; `overrides.explain` words it.
    """
    with _loader() as loader:
        return loader.load_configuration("config", overrides + _searchpath(), run_mode=RunMode.RUN)


def in_sweep() -> bool:
    """Whether this job is one of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def typed() -> set[str]:
    """Keys that this job's command line sets; in a sweep those that are swept, too."""
    if not HydraConfig.initialized():
        return set()
    return {text.lstrip("+~").partition("=")[0] for text in HydraConfig.get().overrides.task}


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
