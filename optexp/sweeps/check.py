"""All jobs of a sweep, looked at before the first one starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write

from optexp.errors import ConfigError
from optexp.schema import shown, unknown
from optexp.sweeps.start import without_hydra


def prepared(
    configs: Sequence[DictConfig], job_overrides: Sequence[Sequence[str]]
) -> dict[tuple[str, ...], DictConfig]:
    """The jobs' configurations by their overrides, each without the keys that its workload lacks and another's has.

    What was left out is said.

    Raises:
        ConfigError: a job's configuration has a mistake, such as a key that no workload of the sweep has.
    """
    lacking = [set(unknown(config.workload, "workload")) for config in configs]
    both = list(zip(configs, lacking, strict=True))
    taken = {key for config, lacks in both for key in config.workload if key not in lacks}
    for config, lacks in both:
        _leave_out(config, sorted(lacks & taken))
    for note in dict.fromkeys(note for config in configs for note in config.sweep.left_out):
        print(f"optexp: {note}", file=sys.stderr)
    for config, overrides in zip(configs, job_overrides, strict=True):
        _refuse(config, overrides)
    return {tuple(overrides): config for config, overrides in zip(configs, job_overrides, strict=True)}


def _leave_out(config: DictConfig, keys: Sequence[str]) -> None:
    """Take keys out of the job's workload, and note it in its configuration."""
    name = config.hydra.runtime.choices.get("workload")
    with read_write(config), open_dict(config):
        for key in keys:
            value = config.workload.pop(key)
            config.sweep.left_out.append(f"workload.{key}={shown(value)} does not apply to {name}: ignored")


def _refuse(config: DictConfig, overrides: Sequence[str]) -> None:
    from optexp.comparison import mistakes

    with job_of_a_sweep(config):
        try:
            mistakes.refuse(without_hydra(config), elsewhere=True)
        except ConfigError as mistake:
            typed = (text.lstrip("+") for text in overrides)
            job = " ".join(text for text in typed if not text.startswith(("sweep.", "tracking.")))
            raise ConfigError(f"{mistake}, in the job {job}; none was started") from None
        except Exception:  # in the user's code: the job meets it again, and shows it
            return


@contextmanager
def job_of_a_sweep(config: DictConfig) -> Iterator[None]:
    """Inside, the configuration is read as one of several."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before
