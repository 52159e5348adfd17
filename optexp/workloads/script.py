"""A training or inference script as it is: `python -m optexp.run strategy=amp train.py -- --its arguments`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from optexp.errors import ConfigError, NotCovered
from optexp.export.patch import applied_at, behind_class, patch
from optexp.program import (
    Batch,
    Feed,
    NotCalled,
    Program,
    ResidentFeed,
    keeping,
    map_batch,
    placed,
    preserved,
    tensors_of,
)
from optexp.program.feeds import LoaderFeed
from optexp.records.patch import Patch
from optexp.strategy import Notes, Strategy, UserFile
from optexp.support.float64 import InFloat64
from optexp.user_code import inner_optimizer
from optexp.user_code.adapters import Maker, Then, at_home, endless, kind, leading_size, seed_all
from optexp.user_code.block_batches import varied
from optexp.user_code.drawn_alike import compiled_code_draws_alike, draws
from optexp.user_code.find_marks import require_mark
from optexp.user_code.given_batches import GivenBatches
from optexp.user_code.importing import require_file
from optexp.user_code.left_gradients import follow, learn
from optexp.user_code.loose_tensors import LOOSE, LooseTensors
from optexp.user_code.misplaced_mark import misplaced
from optexp.user_code.own_optimizers import steps_alone
from optexp.user_code.own_program import OwnProgram
from optexp.user_code.parameter_attributes import attributes, follow_attributes
from optexp.user_code.parts import Parts
from optexp.user_code.script_batches import BatchForm
from optexp.user_code.script_run import Reached, run
from optexp.user_code.script_step import Body, FirstCall, Inference, first_call, unreached
from optexp.user_code.starts_from import starts_from
from optexp.user_code.step_modules import move
from optexp.user_code.step_state import TrackedStepState
from optexp.user_code.train_step import Beginning, TrainStep
from optexp.workload import Workload

if TYPE_CHECKING:
    from optexp.export.inlining import Inliner
    from optexp.export.repro import Source

UNCHANGING = (
    "the data of the marked block never change: each batch has their real numbers smaller by random factors from 0.9 to"
    " 1, so that results kept from other batches show"
)
RECORDED = 64  # batches of a source that is no DataLoader and no function


@dataclass
class Script(Workload):
    """path:  of the script, which marks its loop with `optexp.steps` or `optexp.step`
    arguments: of the script
    """

    families = ("normal", "integers", "corners", "large", "small", "offset")
    tails_may_be_refused = True

    path: str | None = None
    arguments: list[str] = field(default_factory=list)

    def resolve(self, device: str) -> Self:
        if self.path is None:
            raise ConfigError("workload=script: give workload.path=train.py, or use `python -m optexp.run train.py`")
        require_file(self.file, "workload.path")
        require_mark(self.file)
        return self

    @property
    def file(self) -> Path:
        return Path(self.path or "").expanduser()

    @property
    def name(self) -> str:
        return self.file.stem

    def code(self) -> list[bytes]:
        return super().code() + ([self.file.read_bytes()] if self.file.is_file() else [])

    def anew(self) -> Self:
        found = copy.copy(self)
        found.forget()
        return found

    def forget(self) -> None:
        """Run the script once more when it is needed next."""
        for made in ("reached", "source", "given", "form"):
            self.__dict__.pop(made, None)

    def notes(self) -> list[str]:
        return list(dict.fromkeys(self.remarks))

    # --- the script at its mark ---------------------------------------------------------------------------------

    @cached_property
    def reached(self) -> Reached:
        return run(self.file, self.arguments)

    @property
    def learns(self) -> bool:
        return self.reached.mark.optimizer is not None or self.by_hand

    @property
    def by_hand(self) -> bool:
        """Whether the body updates the model without the mark's optimizer, if it trains at all."""
        return self.reached.mark.optimizer is None and self.mode == "train"

    @cached_property
    def source(self) -> DataLoader[Any] | None:
        """A loader that is part of the step; None where batches are taken beforehand."""
        given, every = self.reached.mark.source, self.reached.mark.every
        if given is None or (not isinstance(given, DataLoader) and not callable(given)):
            return None
        given = plain_loader(given) if isinstance(given, DataLoader) else given
        return given if isinstance(given, DataLoader) and every == 1 else DataLoader(Grouped(given, every), None)

    @cached_property
    def given(self) -> GivenBatches:
        maker = Maker(self.model, (), {}, "the model of the mark")
        if self.source is not None:
            return GivenBatches(Parts(maker, loader=lambda: self.source), [])
        taken: Any = self.taken
        return GivenBatches(Parts(maker, loader=lambda: DataLoader(taken, 1, collate_fn=only)), [])

    @cached_property
    def taken(self) -> list[Any]:
        """Batches of a source that is no part of the step."""
        mark = self.reached.mark
        if mark.source is None:
            return [list(group) for group in grouped(self.reached.drawn, 1)]
        if not isinstance(mark.source, Iterable):
            raise ConfigError(f"optexp.steps(...) is given {kind(mark.source)}: it must give batches")
        found = [list(group) for group, _ in zip(grouped(mark.source, mark.every), range(RECORDED), strict=False)]
        if not found:
            raise ConfigError(f"{self.path}: the marked loop goes over nothing")
        self.remarks.append(f"{len(found)} batches are taken before the clock starts: making them is no part of a step")
        return found

    @property
    def unchanging(self) -> bool:
        """Whether the script has the same data at each step."""
        return self.reached.mark.source is None and self.reached.unchanging

    @cached_property
    def form(self) -> BatchForm:
        if held := self.reached.held:
            return BatchForm([held], held=True)
        return BatchForm(self._items(self.given.give(torch.Generator().manual_seed(0), 1)[0]))

    def _items(self, given: Any) -> list[Any]:
        """The items of the loop for one step."""
        mark = self.reached.mark
        return [given] if mark.every == 1 and isinstance(mark.source, DataLoader) else given

    # --- a workload ---------------------------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        return self.leading

    def model(self) -> nn.Module:
        found: Any = self.reached.mark.model
        if found is None:
            raise ConfigError(f"{self.path}: the mark names no model: write optexp.steps(..., model=...)")
        if not isinstance(found, nn.Module):
            raise ConfigError(f"optexp.steps(model=...) is {kind(found)}: it must be an nn.Module")
        return found

    def batch(self, generator: torch.Generator) -> Batch:
        return self.batches(generator, 1)[0]

    def batches(self, generator: torch.Generator, count: int) -> list[Batch]:
        packed = [self._packed(given) for given in self.given.give(generator, count)]
        if self.unchanging:
            drawn = torch.Generator().manual_seed(torch.initial_seed())  # `give` has seeded it by the generator
            packed = [map_batch(partial(varied, generator=drawn), batch) for batch in packed]
        self.leading = max(leading_size({"": tensor}) for tensor in tensors_of(packed[0]).values())
        return [map_batch(lambda tensor: at_home(tensor, generator.device), batch) for batch in packed]

    def remainder(self, generator: torch.Generator) -> Batch | None:
        given = self.given.remainder(generator)
        return None if given is None else map_batch(lambda t: t.to(generator.device), self._packed(given))

    def _packed(self, given: Any) -> Batch:
        return self.form.pack(self._items(given))

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        if self.source is None:
            return ResidentFeed(device)
        loader = copy.copy(self.source)
        loader.collate_fn = Then(loader.collate_fn, self._packed)
        return LoaderFeed(loader, device, dtype, non_blocking=loader.pin_memory)

    def listing(self, program: Program, batch: Batch, inliner: Inliner) -> Source:
        raise NotCovered("a script is its own source: optimized.patch changes it")

    def patch(self, program: Program, stack: Sequence[Strategy], notes: Mapping[str, Notes]) -> Patch | None:
        """A block behind the class of the model, where the script defines it."""
        kind, device = type(self.model()), program.device.type
        file = Path(self.reached.path)
        if kind.__qualname__ != kind.__name__ or kind.__module__ != "__main__":
            return Patch(applied_at(file), reason=f"the model's class {kind.__name__} is not defined in the script")
        missing = {
            "optimizer": "the script makes its optimizer by itself: change that line",
            "loader": "the script makes its loader by itself: change that line",
        }
        name = kind.__name__
        described = UserFile(device, self.mode, name, f"{name}.forward", train_step="train_step", missing=missing)
        return patch(file, described, stack, notes, True, behind_class)

    def build(self, device: torch.device, dtype: torch.dtype, seed: int) -> Program:
        self.remarks: list[str] = []
        self.forget()
        seed_all(seed)
        self.beginning = Beginning()
        function, own = self.reached.function, self.model()
        if self.learns and self.mode != "train":
            raise ConfigError(f"{self.path}: the mark has an optimizer: set workload.mode=train")
        model = placed(own, device, dtype)
        optimizer = NotCalled() if self.by_hand else self.reached.optimizer
        given = attributes(model)
        had = {n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None}
        if optimizer is not None and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # which brings its tensors to those of the model
        move(function, model, device, dtype)
        program = self._program(Body(self.reached), model, optimizer, device, dtype)
        batch = self.in_dtype(self.batch(torch.Generator(device).manual_seed(0)), dtype)
        with InFloat64() if dtype is torch.float64 else nullcontext():
            program = self._primed(program, batch, device, dtype)
        optimizer = program.optimizer
        if isinstance(optimizer, NotCalled) and not steps_alone(program, batch):
            raise ConfigError(
                f"{self.path}: the mark names no optimizer, and its step calls none: write optexp.steps(...,"
                " optimizer=...), or set workload.mode=forward for a step that has none"
            )
        with InFloat64() if dtype is torch.float64 else nullcontext():
            first = first_call(program, lambda: self._try_first(program, batch, had))
            names = ", ".join(name for name, _ in model.named_parameters())
            loose = isinstance(model, LooseTensors)
            self.remarks += [LOOSE.format(names)] if loose else unreached(program, first)
            if draws(lambda: self._tried(program, batch), device):
                self.remarks.append(compiled_code_draws_alike())
                program = self._program(Body(self.reached, draws=True), model, optimizer, device, dtype)
        if self.learns and (note := follow(program, self.reached.function, had)):
            self.remarks.append(note)
        if isinstance(program.step_state, TrackedStepState):
            follow_attributes(program.step_state, model, given)
        self.remarks += [UNCHANGING] if self.unchanging else []
        if already := starts_from(self.reached, first or FirstCall()):
            self.remarks.append(f"the script starts from {', '.join(already)}, in both arms")
        return keeping(replace(program, called_with=None if first is None else (first.args, first.kwargs)))

    def _primed(self, program: OwnProgram, batch: Batch, device: torch.device, dtype: torch.dtype) -> OwnProgram:
        """A program whose optimizer has its state; see `inner_optimizer.primed`."""

        def around(_: torch.optim.Optimizer, name: str) -> OwnProgram:
            self.reached = replace(self.reached, inner=name)
            return self._program(Body(self.reached), program.model, self.reached.optimizer, device, dtype)

        own = program.optimizer is self.reached.mark.optimizer
        return inner_optimizer.primed(program, around if own else None, lambda: batch)

    def _program(
        self, body: Body, model: nn.Module, optimizer: Any, device: torch.device, dtype: torch.dtype
    ) -> OwnProgram:
        return OwnProgram(
            model=model,
            step=self._train_step(body) if self.learns else Inference(body, self.form.unpack),
            feed=self.feed(device, dtype),
            optimizer=optimizer,
            step_state=self._tracked(optimizer),
        )

    def _train_step(self, body: Body) -> TrainStep:
        told = partial(misplaced, self.reached)
        return TrainStep(body, self.form.unpack, beginning=self.beginning, miscounted=told)

    def _try_first(self, program: Program, batch: Batch, had: Mapping[str, Tensor]) -> None:
        if isinstance(program.step, TrainStep):
            learn(program.step, program, batch, self.reached.function, had)
        else:
            self._tried(program, batch)

    def _tried(self, program: Program, batch: Batch) -> None:
        with preserved(program):
            program.step(program, batch)

    def _tracked(self, optimizer: torch.optim.Optimizer | None) -> TrackedStepState:
        """Variables of the script that its body changes."""
        found = TrackedStepState(self.reached.function, self.model(), optimizer, aside=(self.reached.mark.optimizer,))
        if found.lost:
            self.remarks.append(f"the step keeps what cannot be put back from step to step: {', '.join(found.lost)}")
        return found


class Grouped(torch.utils.data.IterableDataset[Any]):
    """Batches of a loader or a function, without end, in lists of as many as a step takes."""

    def __init__(self, given: Any, every: int) -> None:
        self.given, self.every = given, every

    def __iter__(self) -> Iterator[list[Any]]:
        given = self.given
        batches = endless(given) if isinstance(given, DataLoader) else iter(lambda: Made(given()), None)
        while True:
            group = [next(batches) for _ in range(self.every)]
            yield [one.batch if isinstance(one, Made) else one for one in group]


def plain_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of torch's own class: Accelerate's tells its state to objects that no other arm has."""
    if type(loader) is DataLoader or loader.batch_sampler is None:
        return loader
    return DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )


@dataclass(frozen=True)
class Made:
    """A batch of a function."""

    batch: Any


def grouped(batches: Iterable[Any], every: int) -> Iterator[tuple[Any, ...]]:
    """Consecutive batches, as many as a step takes."""
    return zip(*[iter(batches)] * every, strict=False)


def only(items: list[Any]) -> Any:
    """The only entry of a list."""
    return items[0]
