"""`optexp.compare(model, inputs, strategy)`: the same comparison and the same record, from Python."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from optexp.comparison import mistakes, runner
from optexp.config import Settings, search_path
from optexp.config.overrides import explain, rewrite
from optexp.errors import ConfigError
from optexp.records.folder import claim
from optexp.reporting import terminal
from optexp.result import Result
from optexp.schema import shown, suggest
from optexp.support.nvml_count import count_by_nvml
from optexp.user_code.given_objects import Given, Objects
from optexp.workers import launching

Stack = str | Mapping[str, Mapping[str, Any]] | Sequence[str | Mapping[str, Mapping[str, Any]]]
MEMBER = re.compile(r"([\w/-]+)(?:\[([^\]]*)\])?")


def compare(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    strategy: Stack = (),
    *,
    baseline: Stack = (),
    mode: str = "forward",
    loss: str | Callable[..., Tensor] | None = None,
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    train_step: Callable[..., Any] | None = None,
    labels: int | None = None,
    shapes: Sequence[Mapping[str, int]] = (),
    measurement: str = "default",
    device: str = "auto",
    dtype: str | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    output: str | Path | None = None,
    quiet: bool | None = None,
    **keys: Any,
) -> Result:
    """Compare a model under `strategy` with the model as it is: verify the results, then time both.

    Args:
        model: An nn.Module, its class, a function that makes one, or a function of the inputs.
        inputs: Examples: a tensor, or several in a tuple or, for keyword arguments, a dict; fresh batches hold the same
            values in another order. Or a function that makes such, or a DataLoader.
        strategy: "amp", ["amp", "cuda_graph"], "fusion[mode=max-autotune]" or {"fusion": {"mode": "max-autotune"}}; the
            empty stack compares the model with itself.
        baseline: The stack to compare against, likewise; the empty stack is the model as it is.
        mode: "forward", "forward_backward" or "train".
        loss: A name in torch.nn.functional or torch.nn, or a function loss(outputs, batch) with a scalar result.
        optimizer: A name in torch.optim, or a function of the list of parameters.
        train_step: train_step(model, batch, optimizer), one whole optimizer step; instead of a loss.
        labels: Number of entries at a batch's end for the loss alone.
        shapes: Arguments of the function that makes inputs, used in turn.
        measurement: "default", up to a minute, or "quick".
        device: "auto", or a device as torch names it, as in "cuda:0".
        dtype: Of parameters and real inputs; the model's own by default, else "float32".
        overrides: Other keys as on the command line: ["seed=3", "measurement.pairs=10", "tracking.enabled=false"].
        name: The model's name in the record; its class's or function's by default.
        output: Folder of the record; outputs/<date>/<time> by default.
        quiet: Print no verdict; by default true in a notebook, which shows the returned result.
        keys: Other top-level keys of the command line: verify="only", seed=3, tracking={"enabled": False}.

    Returns:
        The record. An error in the model's own code is in its `error`.

    Raises:
        ConfigError: the request cannot be met; the message is one sentence.
    """
    count_by_nvml()
    others = [f"{key}={value}" for top, given in keys.items() for key, value in _key(top, given)]
    objects = Objects(model, inputs, loss, optimizer, train_step)
    workload = Given.of(objects, mode=mode, labels=labels, shapes=shapes, name=name)
    settings = [f"measurement={measurement}", f"device={device}", f"dtype={dtype or _dtype(model)}"]
    with _our_hydra():
        config = compose([*settings, *rewrite([*others, *overrides])], members(strategy), members(baseline))
        result = _run(config, workload, output, in_notebook() if quiet is None else quiet)
    if mistake := _mistake(result):
        raise ConfigError(mistake)
    return result


def _run(config: DictConfig, workload: Given, output: str | Path | None, quiet: bool) -> Result:
    if config.isolation != "none":
        launching.launcher()  # imports torch meanwhile
    mistakes.refuse(config, workload)
    return runner.run(config, folder(output), workload, partial(_show, quiet))


def _dtype(model: Any) -> str:
    """The dtype that the model computes in, where its parameters have one."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    found = {str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point()}
    return found.pop() if len(found) == 1 else "float32"


# --- the configuration -------------------------------------------------------------------------------------------


def _key(name: str, given: Any) -> Iterator[tuple[str, str]]:
    """A keyword as keys of the command line, with their values.

    Raises:
        ConfigError: there is no such key; the message has what may be meant.
    """
    known = [field.name for field in fields(Settings) if field.name not in ("mode", "device", "dtype")]
    if name not in known:
        arguments = [argument for argument in inspect.signature(compare).parameters if argument != "keys"]
        raise ConfigError(f"{name}={given!r}: there is no such key{suggest(name, [*arguments, *known])}")
    if isinstance(given, Mapping):
        for key, value in given.items():
            yield f"{name}.{key}", _typed(value)
    else:
        yield name, _typed(given)


def _typed(value: Any) -> str:
    """A value as Hydra reads it back from the command line."""
    if not isinstance(value, str):
        return shown(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def members(stack: Stack) -> dict[str, dict[str, Any]]:
    """Options of each member of a stack, by the strategy's name.

    Args:
        stack: In any form of `compare`'s `strategy`.

    Raises:
        ConfigError: the text or a member names no strategy.
    """
    if isinstance(stack, str):
        written = MEMBER.findall(stack)
        if "+".join(f"{name}[{options}]" if options else name for name, options in written) != stack.replace(" ", ""):
            raise ConfigError(f"strategy={stack!r} is no stack: write 'amp', 'amp+fusion' or 'fusion[mode=default]'")
        return {name: _options(options) for name, options in written}
    if isinstance(stack, Mapping):
        return {name: dict(options) for name, options in stack.items()}
    found: dict[str, dict[str, Any]] = {}
    for member in stack:
        if not isinstance(member, (str, Mapping)):
            raise ConfigError(f"strategy={member!r} is no stack: name strategies, as in ['amp', 'cuda_graph']")
        found |= members(member)
    return found


def _options(written: str) -> dict[str, Any]:
    pairs = [pair for pair in written.split(",") if pair]
    options: dict[str, Any] = OmegaConf.to_container(OmegaConf.from_dotlist(pairs))  # type: ignore[assignment]
    return options


def compose(
    overrides: list[str], strategy: Mapping[str, Mapping[str, Any]], baseline: Mapping[str, Mapping[str, Any]]
) -> DictConfig:
    """The configuration that Hydra composes on the command line, with options of both stacks.

    Args:
        overrides: As Hydra reads them.
        strategy: Options by member of the candidate's stack.
        baseline: The same of the baseline's.

    Raises:
        ConfigError: an override names a key or choice that does not exist.
    """
    try:
        config = search_path.compose([*overrides, f"strategy=[{','.join(strategy)}]"])
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        raise ConfigError(message) from None
    OmegaConf.set_struct(config, False)
    del config["hydra"]  # which is about how jobs are started
    for name, options in strategy.items():
        for key, value in options.items():
            OmegaConf.update(config, f"strategy.{name}.{key}", value)
    OmegaConf.update(config, "baseline", [{name: dict(options)} for name, options in baseline.items()])
    return config


@contextmanager
def _our_hydra() -> Iterator[None]:
    """The caller's program may use Hydra too, with a configuration of its own."""
    theirs, job = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().hydra, HydraConfig.instance().cfg = None, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = theirs, job


# --- where it is shown -------------------------------------------------------------------------------------------


def folder(given: str | Path | None) -> Path:
    """`given`, else a new folder outputs/<date>/<time>, numbered where another run has it."""
    if given is not None:
        return Path(given)
    now = datetime.now()
    return claim(Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}")


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, which shows values as HTML."""
    try:
        shell = get_ipython()  # type: ignore[name-defined]  # IPython's, where there is one
    except NameError:
        return False
    return bool(type(shell).__name__ == "ZMQInteractiveShell")


def _show(silent: bool, result: Result, folder: Path, run: Any = None) -> None:
    if not silent and not _mistake(result):
        terminal.show(result, folder, run)


def _mistake(result: Result) -> str:
    """The message of a ConfigError; empty of other results."""
    return result.error.message if result.error and result.error.type == "ConfigError" else ""
