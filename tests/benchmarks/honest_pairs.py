"""Honest pairs: a program and a strategy that keeps what it computes. Every refusal of one is a false alarm.

Programs are the built-in workloads, the models in `zoo/`, and every third problem file of KernelBench.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from torch import nn

ZOO = Path(__file__).parent / "zoo"
PARTS = {  # of a problem file: its own name of each, and the name for one model of several
    "init_inputs": "get_init_inputs",
    "inputs": "get_inputs",
    "loader": "get_loader",
    "loss": "loss",
    "optimizer": "get_optimizer",
    "train_step": "train_step",
}
CHEAP = ("replace", "inplace", "amp", "channels_last", "fused_optimizer")
COMPILED = ("fusion", "compiled_optimizer")
COMPILED_SHARE = 4  # on a CPU, where compilation takes 20 s, one in so many pairs
LARGEST = 32  # size of a dimension in a problem file that is scaled for a CPU

WORKLOADS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {  # modes, and sizes of which ten share a machine
    "add": (("forward", "forward_backward"), {"size": 65536}),
    "bert": (("forward", "forward_backward", "train"), {"vocabulary": 256, "sequence": 16, "hidden": 64, "heads": 4}),
    "branches": (("forward", "forward_backward", "train"), {"batch_size": 32, "dim": 64, "layers": 2}),
    "causal_lm": (("forward", "train"), {"vocabulary": 256, "sequence": 16}),
    "cdist": (("forward", "forward_backward"), {}),
    "changing_shapes": (("forward", "forward_backward", "train"), {"batch_size": 4, "dim": 32, "layers": 2}),
    "elementwise": (("forward", "forward_backward"), {"rows": 256, "columns": 256}),
    "gelu": (("forward", "forward_backward"), {"size": 256}),
    "graph_break": (("forward", "forward_backward", "train"), {"batch_size": 32, "dim": 64, "layers": 2}),
    "layernorm_linear": (("forward", "forward_backward"), {}),
    "lenet5": (("forward", "forward_backward", "train"), {"batch_size": 32}),
    "linear_gelu": (("forward", "forward_backward"), {}),
    "matmul": (("forward", "forward_backward"), {}),
    "mlp": (("forward", "forward_backward", "train"), {"dim": 128, "layers": 3}),
    "pipeline": (("forward",), {}),
    "sleep": (("forward",), {"ms": 1}),
    "softmax": (("forward", "forward_backward"), {"rows": 256, "columns": 256}),
    "training": (("forward_backward", "train"), {"batch_size": 16}),
    "vision": (("forward", "train"), {}),
    "workspace": (("forward",), {}),
}
FROZEN = {  # a captured graph repeats the Python of one call, and is refused rightly
    "AnnealedVAE",  # counts its calls
    "RegisteredMean",  # registers a buffer in its first call, and assigns it anew in each later one
}
NEEDS = {"bert": "transformers", "causal_lm": "transformers", "vision": "torchvision"}


@dataclass(frozen=True)
class Pair:
    """A program (`overrides` say it to the command line) and one strategy.

    cost:  0 where nothing is compiled; cheaper pairs are run first
    """

    program: str
    strategy: str
    overrides: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()
    cost: int = 0

    @property
    def id(self) -> str:
        return f"{self.program} × {self.strategy}"

    @property
    def half(self) -> str:
        return "ab"[fingerprint(self.id) % 2]

    @property
    def order(self) -> tuple[int, int]:
        """Cheap ones first; within them no file is before another, so that any number of pairs is a fair sample."""
        return self.cost, fingerprint(f"order of {self.id}")


def fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def pairs(device: str, kernelbench: Path | None, scratch: Path) -> list[Pair]:
    """All of them on a "cpu" or "cuda" device. `scratch` gets the scaled copies of KernelBench's files."""
    found = [*workload_pairs(device), *zoo_pairs(device)]
    if kernelbench is not None:
        found += kernelbench_pairs(device, kernelbench, scratch)
    return sorted(found, key=lambda pair: pair.order)


# --- workloads -------------------------------------------------------------------------------------------------


def workload_pairs(device: str) -> Iterator[Pair]:
    for name, (modes, sizes) in WORKLOADS.items():
        if name in NEEDS and not find_spec(NEEDS[name]):
            continue
        scaled = [f"workload.{key}={value}" for key, value in sizes.items()]
        for mode in modes:
            overrides = f"workload={name}", f"workload.mode={mode}", *scaled
            images = name in ("lenet5", "vision", "training")
            for strategy in strategies(device, f"{name} {mode}", mode, images, second=False):
                yield Pair(f"{name} {mode}", strategy, overrides, cost=cost(strategy))


def strategies(device: str, program: str, mode: str, images: bool, second: bool) -> Iterator[str]:
    """Those that may have something to do. `second`: the model can be replaced by another instance of its class."""
    yield from ("amp", "inplace")
    yield "replace" if second else "baseline"
    if images:
        yield "channels_last"
    if mode == "train":
        yield "fused_optimizer"
    if device == "cuda":
        yield "cuda_graph"
    for strategy in COMPILED:
        few = device == "cpu" and fingerprint(f"compile {program} {strategy}") % COMPILED_SHARE
        if not few and (strategy == "fusion" or mode == "train"):
            yield strategy


def cost(strategy: str) -> int:
    return int(strategy in COMPILED)


# --- models as people write them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One model of a file in the zoo, and what the file calls its parts."""

    path: Path
    model: str
    modes: tuple[str, ...]
    images: bool
    names: dict[str, str]


def entries(path: Path) -> Iterator[Entry]:
    """Every `nn.Module` of a file that has inputs: `UNet` has `u_net_inputs`, or shares the file's `get_inputs`.

    MODES of the file names the modes of models that do not have the usual ones.
    """
    module = imported(path)
    modes: dict[str, tuple[str, ...]] = getattr(module, "MODES", {})
    for name, value in list(vars(module).items()):
        made = isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
        if not (made and any(hasattr(module, f"{snake(name)}_{part}") for part in ("inputs", "loader"))):
            continue
        own = {part: f"{snake(name)}_{part}" for part in PARTS}
        names = {part: own[part] if hasattr(module, own[part]) else shared for part, shared in PARTS.items()}
        given = getattr(module, names["init_inputs"], list)()
        images = any(isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)) for layer in value(*given).modules())
        learns = any(hasattr(module, own[part]) for part in ("loss", "optimizer", "train_step", "loader"))
        usual = ("forward", "train") if learns else ("forward", "forward_backward")
        yield Entry(path, name, modes.get(name, usual), images, {"model": name, **names})


def zoo_pairs(device: str) -> Iterator[Pair]:
    for path in sorted(ZOO.glob("*.py")):
        for entry in entries(path):
            named = [f"workload.names.{part}={name}" for part, name in entry.names.items()]
            for mode in entry.modes:
                program = f"{path.stem}.{entry.model} {mode}"
                overrides = "workload=module", f"workload.path={path}", f"workload.mode={mode}", *named
                for strategy in strategies(device, program, mode, entry.images, second=True):
                    if strategy == "cuda_graph" and entry.model in FROZEN:
                        continue
                    options = (("target", f"{path}:{entry.model}"),) if strategy == "replace" else ()
                    yield Pair(program, strategy, overrides, options, cost(strategy))


def snake(name: str) -> str:
    """UNet: u_net; SqueezeExcite: squeeze_excite; GRUTagger: gru_tagger."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})", "_", name).lower()


def imported(path: Path) -> ModuleType:
    spec = spec_from_file_location(f"zoo_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- KernelBench -----------------------------------------------------------------------------------------------


def kernelbench_pairs(device: str, folder: Path, scratch: Path) -> Iterator[Pair]:
    """A third of the files of levels 1 to 3. On a CPU they are scaled; what does not run then is left out."""
    for path in sorted(folder.glob("level[123]/*.py")):
        name = f"{path.parent.name}/{path.stem.partition('_')[0]}"
        if fingerprint(name) % 3:
            continue
        file, text = path, path.read_text()
        if device == "cpu":
            file = scratch / path.parent.name / path.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(scaled(text))
        overrides = "workload=module", f"workload.path={file}", "workload.mode=forward"
        images = bool(re.search(r"Conv(Transpose)?2d", text))
        for strategy in strategies(device, name, "forward", images, second=True):
            options = (("target", f"{file}:Model"),) if strategy == "replace" else ()
            yield Pair(f"KernelBench {name}", strategy, overrides, options, cost(strategy))


def scaled(source: str) -> str:
    """The same problem with smaller sizes: each number of a module's constants is halved until it is small, which
    keeps what divides it. Batches are of four."""
    tree = ast.parse(source)
    for statement in tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        batch = any(isinstance(t, ast.Name) and t.id in ("batch_size", "B") for t in statement.targets)
        for node in ast.walk(statement.value):
            if isinstance(node, ast.Constant) and type(node.value) is int:
                node.value = min(node.value, 4) if batch else halved(node.value)
    return ast.unparse(tree)


def halved(size: int) -> int:
    while size > LARGEST:
        size = (size + 1) // 2
    return size
