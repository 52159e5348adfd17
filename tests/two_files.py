"""A comparison of two files of a user's training step, in this process and without timing."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir

from optexp.comparison import runner
from optexp.config import search_path
from optexp.result import Result

TRAINS = ["workload=module", "workload.mode=train", "strategy=replace", "device=cpu", "isolation=none"]
VERIFY_ONLY = ["verify=only", "measurement=quick", "profile.details=false", "tracking.enabled=false"]


def compared(folder: Path, first: str, second: str, *overrides: str) -> Result:
    """The result of a second file's text in place of the first one's."""
    files = {name: folder / f"{name}.py" for name in ("first", "second")}
    files["first"].write_text(first)
    files["second"].write_text(second)
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        given = [f"workload.path={files['first']}", f"strategy.replace.target={files['second']}"]
        config = compose("config", overrides=[*TRAINS, *VERIFY_ONLY, *given, *overrides])
    return runner.run(config, folder / "record")
