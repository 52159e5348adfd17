"""The start of a single run: a mistake ends the command at once, and every run gets a folder of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from optexp.errors import ConfigError


class Start(Callback):
    """Hydra calls it before it writes anything."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the configuration, then claim the folder.

        Raises:
            SystemExit: the request has a mistake. Hydra would make a warning of any other exception.
        """
        HydraConfig.instance().set_config(config)  # what is checked reads it, as the job does later
        try:
            _refuse(config)
            own_folder(config, "run")
        except ConfigError as mistake:
            print(f"optexp: {mistake}", file=sys.stderr)
            sys.exit(1)
        except Exception:  # in the user's code: the job meets it again, and shows it
            own_folder(config, "run")


def _refuse(config: DictConfig) -> None:
    from optexp.config import read_settings
    from optexp.user_code.named_files import require_syntax
    from optexp.workers import launching

    asked = without_hydra(config)
    read_settings(asked)
    require_syntax(OmegaConf.to_container(asked))  # before a process starts, and before torch is imported
    if config.get("isolation") != "none":
        launching.launcher()  # imports torch while this process does
    from optexp.comparison import mistakes

    mistakes.refuse(asked)


def without_hydra(config: DictConfig) -> DictConfig:
    """The configuration as a job sees it."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])


def own_folder(config: DictConfig, kind: str) -> None:
    """Replace `hydra.<kind>.dir` by a new folder that no other process has, unless the user has named one.

    Args:
        kind: run or sweep.

    Raises:
        ConfigError: no folder can be made there.
    """
    from optexp.records.folder import claim, require_room

    key = f"hydra.{kind}.dir"
    wanted = Path(OmegaConf.select(config, key))
    if any(text.startswith(f"{key}=") for text in config.hydra.overrides.hydra):
        require_room(wanted)
        return
    folder = claim(wanted)
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra[kind].dir = str(folder)
