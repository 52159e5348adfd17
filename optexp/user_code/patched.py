"""A user's file as strategies see it that write themselves into it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from optexp.errors import NotCovered
from optexp.strategy import UserFile
from optexp.user_code.adapters import Iterated, Maker, by_label

if TYPE_CHECKING:
    from optexp.user_code.workload import UserWorkload


def user_file(own: UserWorkload, names: Mapping[str, str], device: str) -> UserFile:
    """The parts of the file that a step uses, by their names.

    Args:
        own: The workload whose parts are the file's.
        names: Of the parts in the file, by part (`optexp.workloads.module.Names`).
        device: Type of the device.

    Raises:
        NotCovered: the model can get no other `forward` by a line of the file.
    """
    found, missing = dict[str, str](), dict[str, str]()
    for part in ("loss", "optimizer", "loader", "train_step"):
        reason = why_not(own, part, names[part])
        if reason is None:
            found[part] = names[part]
        else:
            missing[part] = reason
    if "loss" in found and isinstance(own.parts.loss, nn.Module):
        found["loss"] = f"{found['loss']}.forward"
    model = names["model"]
    return UserFile(device, own.mode, model, runs(own.parts.model, model), **found, missing=missing)


def runs(maker: Maker, name: str) -> str:
    """The function that a call of the model runs, as an expression that a line can bind anew.

    Raises:
        NotCovered: it is neither a class's method nor a function.
    """
    given = getattr(maker, "given", None)
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"{name}.forward"
    if given is None or maker.makes:
        raise NotCovered(f"{name} is no class of a model and no function: name the class by workload.names.model=")
    return name


def defined_in(maker: Maker, path: Path) -> bool:
    """Whether a model's class or function is defined in this file."""
    try:
        return Path(inspect.getfile(maker.given)).resolve() == path.resolve()
    except (TypeError, OSError):  # written in C
        return False


def why_not(own: UserWorkload, part: str, name: str) -> str | None:
    """The reason why a step does not use this part of the file; None where it does."""
    if getattr(own.parts, part) is None:
        return f"the file has no {name}"
    if part in ("loss", "optimizer") and getattr(own, part) is not None:
        return f"workload.{part}= takes the place of the file's {name}"
    loss = own.parts.loss
    if part == "loss" and loss is not None and by_label(loss) and not isinstance(loss, nn.Module):
        return f"{name} is torch's own function: write it as `def {name}(outputs, batch)`"
    if part == "loader" and isinstance(own.given.loader.dataset, Iterated):
        return f"{name}() returns no DataLoader"
    if part in ("train_step", "optimizer") and own.mode != "train":
        return f"mode={own.mode} uses no {name}"
    return None
