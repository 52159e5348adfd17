"""The command line: composes jobs, runs each, and turns what came out into an exit status."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Any, NoReturn

import hydra
from omegaconf import DictConfig, OmegaConf

from optexp.config import overrides, search_path
from optexp.support import bytecode
from optexp.support.interrupting import INTERRUPTED, raise_when_interrupted
from optexp.support.nvml_count import count_by_nvml
from optexp.sweeps import exit_status, sweep

LOST = 120  # as Python's own, where the output could not be written


def job(config: DictConfig) -> None:
    """One comparison, or one of a sweep; whatever goes wrong in it is in its result."""
    from optexp.sweeps.job import task

    task(config)


def main() -> None:
    """The command line in `sys.argv`.

    Raises:
        SystemExit: always, with the exit status.
    """
    raise_when_interrupted("optexp: interrupted; ending what was started")
    count_by_nvml()
    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed as tracebacks
    sys.argv[1:] = overrides.rewrite(sys.argv[1:])
    search_path.register()  # Hydra imports its plugins now, anew if they were imported: ours must derive from these
    from optexp.sweeps import sweeper

    sweeper.register()
    OmegaConf.register_new_resolver("optexp.options", lambda group: ", ".join(search_path.options(group)), replace=True)
    try:
        hydra.main(version_base="1.3", config_path=str(search_path.CONF), config_name="config")(job)()
    except KeyboardInterrupt:
        sweep.abort()
        sys.exit(INTERRUPTED)
    except Exception as error:
        sweep.abort("FAILED")
        message = overrides.explain(error)
        if wants_traceback or message is None:
            raise
        print(f"optexp: {message}", file=sys.stderr)
        sys.exit(1)
    sys.exit(exit_status.status())


def command() -> NoReturn:
    """`main` in a process of its own, which ends at once: taking torch and MLflow down takes up to two seconds."""
    status: Any = 0
    bytecode.keep()
    try:
        main()
    except SystemExit as ended:
        status = ended.code
    if status is not None and not isinstance(status, int):  # a sentence, which Python prints
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    status = status or 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BrokenPipeError:  # its reader has ended
            pass
        except OSError:  # as of a full disk: what was said is lost
            status = status or LOST
    os._exit(status)


if __name__ == "__main__":
    command()
