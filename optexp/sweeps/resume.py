"""Which jobs an earlier sweep has done already: those of equal settings, code and versions."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import optexp
from optexp.records import filenames
from optexp.result import Result, Verdict
from optexp.sweeps.job import MARK

# They say how and where a job is run or recorded, not what it does.
NOT_COMPARED = {"hydra", "tracking", "sweep", "study"}
VERSIONS = ("torch", "triton", "numpy", "optexp")
SOURCES = {".py", ".cu", ".cuh", ".cpp"}
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[\w.]+)?")


def key(config: DictConfig) -> str:
    """Digest of a job's settings, of the code that it runs, and of the libraries' versions.

    The user's own code counts as far as the configuration names its files or modules: what these import does not.
    """
    settings: dict[Any, Any] = OmegaConf.to_container(config)  # type: ignore[assignment]
    compared = {name: value for name, value in settings.items() if name not in NOT_COMPARED}
    step = (settings.get("study") or {}).get("step")
    facts = [compared, step, _own_code(), _digests(_users_files(compared)), _versions()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _own_code() -> str:
    """Digest of this package's sources."""
    folders = [Path(optexp.__file__).parent]
    folders += [Path(folder) / name for folder in optexp.__path__ for name in ("strategies", "kernels")]
    files = {file for folder in folders for file in folder.rglob("*") if file.suffix in SOURCES}
    return _digests(sorted(files))


@cache
def _versions() -> tuple[str, ...]:
    return (sys.version.split()[0], *map(_version, VERSIONS))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digests(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _users_files(settings: Mapping[str, Any]) -> list[Path]:
    """Files that a configuration names, by path or as a module, without those of installed packages."""
    found = set[Path]()
    for text in _strings(settings):
        if text.endswith(".py") and Path(text).is_file():
            found.add(Path(text))
        elif MODULE.fullmatch(text) and not text.startswith("optexp."):
            found |= _module_file(text.partition(":")[0])
    return sorted(found)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(item)


def _module_file(name: str) -> set[Path]:
    """The file of a module, or of the module that holds the named object; nothing is imported for that."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for folder in dict.fromkeys(entry or "." for entry in sys.path):
            base = Path(folder, *parts[:length])
            if "site-packages" in base.parts:
                continue
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.is_file():
                    return {file}
    return set()


# --- an earlier sweep ----------------------------------------------------------------------------------------------


def earlier_folder(config: DictConfig) -> Path | None:
    """The folder of the newest earlier sweep with the same overrides; the one that `hydra.sweep.dir=` names, if any."""
    folder = Path(config.hydra.sweep.dir)
    if any(text.startswith("hydra.sweep.dir=") for text in config.hydra.overrides.hydra):
        return folder if folder.is_dir() else None
    wanted = _what_is_swept(config)
    earlier = sorted(folder.parent.parent.glob("*/*/multirun.yaml"), key=lambda file: file.stat().st_mtime)
    for file in reversed(earlier):
        found = OmegaConf.load(file)
        if isinstance(found, DictConfig) and "hydra" in found and _what_is_swept(found) == wanted:
            return file.parent
    return None


def _what_is_swept(config: DictConfig) -> list[str]:
    typed = [str(text) for text in config.hydra.overrides.task]
    return sorted(text for text in typed if not text.lstrip("+").startswith(("sweep.", "tracking.")))


def finished(folder: Path) -> dict[str, Path]:
    """Folders of complete jobs below `folder`, by their keys. A job that ended in an ERROR is not among them."""
    found = dict[str, Path]()
    for mark in sorted(folder.glob(f"*/{MARK}")):
        try:
            result = Result.read(mark.parent / filenames.RESULT)
            if result.verdict is not Verdict.ERROR and _same_device(result):
                found[json.loads(mark.read_text())["key"]] = mark.parent
        except (OSError, ValueError, KeyError, TypeError):
            continue  # its process was killed while it wrote
    return found


def _same_device(result: Result) -> bool:
    """Whether a record's GPU is of a model that is here; where none is, engines run jobs on other machines."""
    gpu, here = result.environment.get("gpu"), _gpus()
    return gpu is None or not here or gpu in here


@cache
def _gpus() -> frozenset[str]:
    """Models of this machine's GPUs; empty where NVML does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return frozenset(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    except pynvml.NVMLError:
        return frozenset()
