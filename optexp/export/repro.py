"""`repro.py`: the optimized program as one file of plain PyTorch, to take home. It does not import optexp.

    imports ── the workload's model, batches, loss, optimizer, step ── each strategy's recipe ── a timed loop

The workload says what it is made of (`Source`), strategies what they change (`Strategy.recipe`).
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate

from optexp.errors import NotCovered
from optexp.export.inlining import Inliner, bound_by, flat_class, literal, uses
from optexp.program import STEPS, Batch, Program, ResidentFeed, is_training, mixes_precisions, pullback, tensors_of
from optexp.program.feeds import HostFeed, LoaderFeed
from optexp.records import filenames
from optexp.strategy import Notes, Strategy, compose, environment, label

if TYPE_CHECKING:
    from optexp.workload import Workload

USERCODE = "optexp.user_code.adapters"
USUAL = {"itertools": "import itertools", "F": "import torch.nn.functional as F"}  # imported where they are used

# What recipes work on (see `Strategy.recipe`), and what else the file defines.
NAMES = (
    "device", "dtype", "model", "forward", "predict", "loss_fn", "optimizer", "scaler", "step", "pool",
    "batches", "loader", "loader_options", "bring", "deliver", "workload", "user", "arguments", "synchronize",
    "microseconds",
)  # fmt: skip


@dataclass
class Source:
    """The parts of a workload, as source. All of it may use what `lines` define, and what `usercode` has.

    model:      an expression: a new model on the CPU
    batch:      an expression: one batch, its tensors in a tuple, made with `generator`
    loss:       an expression: loss_fn(output, batch)
    optimizer:  an expression, of `model`
    loader:     an expression: a DataLoader, where batches come from one
    packed:     an expression: the tensors of `made`, which the loader gave, in a tuple
    step:       lines that define step(batch), where the workload has a step of its own
    files:      what must lie beside repro.py
    """

    lines: str
    model: str
    batch: str
    loss: str = "None"
    optimizer: str = "None"
    loader: str | None = None
    packed: str = "tuple(made)"
    step: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)


def of_class(workload: Workload, program: Program, batch: Batch, inliner: Inliner) -> Source:
    """Source of a workload whose code is its own class, as those of optexp.

    Raises:
        NotCovered: a part has no source that could be copied, or batches reach the device in another way.
    """
    entries = ["model", "batch"]
    entries += ["loss"] if program.loss is not None else []
    entries += ["optimizer"] if program.optimizer is not None else []
    named = isinstance(batch, Mapping)
    given = f"dict(zip({list(batch)}, batch))" if named else "batch"
    source = Source(
        lines="",
        model="workload.model()",
        batch="tuple(workload.batch(generator).values())" if named else "workload.batch(generator)",
        loss=f"lambda output, batch: workload.loss(output, {given})" if named else "workload.loss",
        optimizer="workload.optimizer(model)",
        packed="tuple(made.values())" if named else "tuple(made)",
    )
    if isinstance(program.feed, LoaderFeed):
        if not hasattr(workload, "loader"):
            raise NotCovered(f"{workload.name} has no loader() to copy")
        entries.append("loader")
        source.loader = "workload.loader()"
    elif type(program.feed) not in (ResidentFeed, HostFeed):
        raise NotCovered(f"{workload.name} brings batches its own way ({type(program.feed).__name__})")
    source.lines = f"{flat_class(workload, entries, inliner)}\n\n\nworkload = {type(workload).__name__}()"
    return source


class Script:
    """The file for one workload and one stack.

    program, batch:  the plain one, and a batch of it
    dtype:           of parameters and real inputs
    notes:           what each strategy's `apply` returned
    """

    def __init__(
        self,
        workload: Workload,
        program: Program,
        batch: Batch,
        dtype: str,
        seed: int,
        stack: Sequence[Strategy],
        notes: Mapping[str, Notes],
    ) -> None:
        self.workload, self.program, self.batch, self.dtype, self.seed = workload, program, batch, dtype, seed
        self.stack = compose(stack)
        self.notes, self.inliner = notes, Inliner({type(part).__module__ for part in (workload, *stack)}, NAMES)

    def files(self) -> dict[str, bytes]:
        """Files by name; where a part has no source, a file that names the reason."""
        title = f"{self.workload.name} · {label(self.stack)}"
        try:
            source = self.workload.listing(self.program, self.batch, self.inliner)
            return {filenames.REPRO: self.text(title, source).encode(), **source.files}
        except NotCovered as reason:
            sentence = f"{title} cannot be written as a file that runs without optexp: {reason}."
            return {filenames.REPRO: f'"""{sentence}"""\n\nraise SystemExit({sentence!r})\n'.encode()}

    def text(self, title: str, source: Source) -> str:
        for line in ("import sys", "import time", "import torch", "from torch import nn"):
            self.inliner.add_import(line)
        sections = [heading(f"{self.workload.name}, as it is"), *self.plain(source)]
        silent = []
        for strategy in self.stack:
            module = type(strategy).__module__
            lines = self.inliner.lines(self.recipes[strategy.name], module)
            if not lines:
                silent.append(strategy.name)
                lines = "# It does not say what it does in plain PyTorch: missing here."
            sections += [heading(f"{strategy.name}: {first_line(module)}"), self.inliner.take(), lines]
        missing = f" Missing: {', '.join(silent)}." if silent else ""
        head = f'"""{title}, in plain PyTorch: `python repro.py [seconds]` runs and times it.{missing}"""\n\n'
        head += "from __future__ import annotations\n\n"
        if variables := environment(self.stack):
            head += f"import os\n\nos.environ.update({variables!r})  # before torch is imported\n\n"
        for used, line in USUAL.items():
            if any(re.search(rf"\b{used}\.", section) for section in sections):
                self.inliner.add_import(line)
        parts = [head + self.inliner.imports(), *sections, heading("run"), RUN]
        return "\n\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n"

    # --- the plain program --------------------------------------------------------------------------------------

    def plain(self, source: Source) -> list[str]:
        """Sections that define `NAMES`, as far as the step or a recipe uses them."""
        program = self.program
        device = f'torch.device("{program.device.type}")'
        complex_ = any(tensor.is_complex() for tensor in (*program.model.parameters(), *program.model.buffers()))
        real = "._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)"  # `to` would cut imaginary parts off
        placed = f".to(device){real}" if complex_ else ".to(device, dtype)"
        if mixes_precisions(program.model):
            placed = ".to(device)"
        named = {
            "device": device,
            "dtype": f"torch.{self.dtype}",
            "model": f"{source.model}{placed}.{'train' if is_training(program.model) else 'eval'}()",
            "forward": "model",
            "loss_fn": source.loss if program.loss is not None else "None",
            "optimizer": source.optimizer if program.optimizer is not None else "None",
            "scaler": "None",
            "pool": "None",
        }
        optional = {name for name in ("loss_fn", "optimizer", "scaler", "pool") if named[name] == "None"}
        made = [f"{name} = {value}" for name, value in named.items() if name not in optional or name in self.read]
        made.insert(2, f"torch.manual_seed({self.seed})")
        predict = f"def predict(batch):\n    return {self.call()}"
        step = source.step or self.step()
        feed = self.feed(source)
        lines = self.inliner.lines(source.lines, USERCODE)
        rest = ["\n".join(made), predict, step, *feed]
        self.inliner.lines("\n".join([lines, *rest]), USERCODE)
        return [self.inliner.take(), lines, *rest]

    @cached_property
    def recipes(self) -> dict[str, str]:
        return {s.name: s.recipe(self.notes.get(s.name, {})).strip("\n") for s in self.stack}

    @cached_property
    def read(self) -> set[str]:
        """Names that recipes read."""
        return set().union(*(uses(ast.parse(recipe).body) for recipe in self.recipes.values()))

    @property
    def scaled(self) -> bool:
        """Whether a recipe makes a gradient scaler, and does not wrap an existing one."""
        bodies = [ast.parse(recipe).body for recipe in self.recipes.values()]
        return any("scaler" not in uses(body) and any("scaler" in bound_by(node) for node in body) for body in bodies)

    def call(self) -> str:
        """`forward` called with what of a batch is meant for the model."""
        program, names = self.program, list(tensors_of(self.batch))
        inputs = names[: len(names) - program.targets]
        if not program.constants and all(name.isdigit() for name in names):
            return f"forward(*batch[:{len(inputs)}])" if program.targets else "forward(*batch)"
        given = {name: f"batch[{index}]" for index, name in enumerate(inputs)}
        given |= {name: literal(value, f"the argument {name}") for name, value in program.constants.items()}
        positional = [given.pop(name) for name in sorted((n for n in given if n.isdigit()), key=int)]
        return f"forward({', '.join([*positional, *(f'{name}={value}' for name, value in given.items())])})"

    def step(self) -> str:
        """Source of one step, as in `optexp.program`.

        Raises:
            NotCovered: the workload has a step of its own, without source.
        """
        plain = self.program.step
        if hasattr(plain, "listing"):
            return str(plain.listing())
        if plain is STEPS["forward"]:
            return FORWARD
        if plain is pullback:
            return PULLBACK
        if plain not in (STEPS["forward_backward"], STEPS["train"]):
            raise NotCovered(f"{self.workload.name} has a step of its own")
        backward = "scaler.scale(loss).backward()" if self.scaled else "loss.backward()"
        update = "scaler.step(optimizer)\n    scaler.update()" if self.scaled else "optimizer.step()"
        update = f"\n    {update}" if plain is STEPS["train"] else ""
        return BACKWARD.format(backward=backward, update=update)

    def feed(self, source: Source) -> list[str]:
        """Source of the batches' way to the device."""
        feed, count = self.program.feed, -(-4 // self.workload.variety) * self.workload.variety
        if isinstance(feed, LoaderFeed):
            moved = f"t.to(device, dtype if t.is_floating_point() else t.dtype, non_blocking={feed.non_blocking})"
            bring = f"def bring(made):\n    return tuple({moved} for t in {source.packed})"
            loader = f"given = {source.loader}\n{loader_options(feed)}\nloader = DataLoader(**loader_options)"
            return [loader, bring, DELIVER]
        seeded = f"generator = torch.Generator(device).manual_seed({self.seed})\n"
        seeded = seeded if "generator" in source.batch else ""
        cast = CAST if self.dtype != "float32" else ""
        made = f"[{'cast(' * bool(cast)}{source.batch}{')' * bool(cast)} for _ in range({count})]"
        if isinstance(feed, HostFeed):
            host = f"tensor.cpu(){'.pin_memory()' if feed.pin_memory else ''}"
            moved = f"tuple(tensor.to(device, non_blocking={feed.non_blocking}) for tensor in batch)"
            bring = f"def bring(batch):\n    return {moved if feed.delivers else 'batch'}"
            return [cast, f"{seeded}loader = [tuple({host} for tensor in batch) for batch in {made}]", bring, DELIVER]
        return [cast, f"{seeded}batches = itertools.cycle({made})"]


def loader_options(feed: LoaderFeed) -> str:
    """Source of the arguments that make a loader like that of the feed, which the file names `given`."""
    loader = feed.loader
    options = {"dataset": "given.dataset", "num_workers": str(feed.workers)}
    if feed.workers:
        options |= {"prefetch_factor": str(feed.prefetch), "persistent_workers": "True"}
    options["pin_memory"] = str(feed.pin_memory)
    plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in (RandomSampler, SequentialSampler)
    if plain:
        options |= {"batch_size": str(loader.batch_size), "shuffle": str(type(loader.sampler) is RandomSampler)}
        options["drop_last"] = str(loader.drop_last)
    elif loader.batch_sampler is not None:
        options["batch_sampler"] = "given.batch_sampler"
    else:
        options["batch_size"] = "None" if loader.batch_size is None else str(loader.batch_size)
    if loader.collate_fn is not default_collate:
        options["collate_fn"] = "given.collate_fn"
    if loader.worker_init_fn is not None:
        options["worker_init_fn"] = "given.worker_init_fn"
    lines = "\n".join(f'    "{name}": {value},' for name, value in options.items())
    return f"loader_options = {{\n{lines}\n}}"


def heading(text: str) -> str:
    return f"# --- {text} ".ljust(120, "-").rstrip()


def first_line(module: str) -> str:
    """First line of a module's docstring."""
    return (inspect.getdoc(sys.modules[module]) or "as below").splitlines()[0].rstrip(".")


FORWARD = """\
def step(batch):
    with torch.no_grad():
        return predict(batch)
"""

BACKWARD = """\
def step(batch):
    model.zero_grad(set_to_none=True)
    loss = loss_fn(predict(batch), batch)
    {backward}{update}
    return loss.detach()
"""

PULLBACK = """\
def step(batch):
    model.zero_grad(set_to_none=True)
    *inputs, arriving = batch  # the last is the gradient that arrives at the output
    inputs = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    output = predict((*inputs, arriving))
    output.backward(arriving.to(output.dtype))
    return output.detach()
"""

CAST = """\
def cast(batch):
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch)
"""

DELIVER = """\
def deliver():
    while True:
        for batch in loader:
            yield bring(batch)


batches = deliver()
"""

RUN = """\
def synchronize():
    if device.type == "cuda":
        torch.cuda.synchronize()


def microseconds(steps):
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(next(batches))
    synchronize()
    return (time.perf_counter() - start) / steps * 1e6


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    microseconds(5)  # what happens only at first: compilation, autotuning, caches
    steps = max(5, round(seconds * 1e6 / microseconds(5)))
    print(f"{microseconds(steps):.1f} µs a step")
"""
