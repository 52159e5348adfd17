"""ARM: the work that a step cannot leave out, found under fake tensors on a copy of the program."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from optexp.errors import first_line
from optexp.profiling.fake_step import Recorder
from optexp.profiling.necessary_work import Value, necessary
from optexp.program import Batch, Outputs, Program, map_batch, tensors_of
from optexp.records.roofline import StepWork
from optexp.support import sparse
from optexp.support.card_memory import l2_bytes
from optexp.support.tf32 import flags
from optexp.support.wrapped import is_wrapped
from optexp.workers.arm_program import Holder

SAMPLE = 65_536  # elements of a tensor that are looked at
FEW_ZEROS = 0.05  # of them; above, a sparse program may skip zeros
CPUS = "/sys/devices/system/cpu"
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Bounded(Holder):
    """The plain program's step under fake tensors."""

    def step_work(self) -> StepWork:
        """Work of a step that no program can leave out; the reason in words where fake tensors cannot run the step."""
        program, stack = self.program, self.part.strategies
        if program.own_step:
            return StepWork(reason="the step is the user's own, and refers to tensors that no copy of it reaches")
        self.restore()
        batch = (self.batches or self.drawn_batches(1))[0]
        if any(sparse.is_sparse(t) for t in (*tensors_of(batch).values(), *program.model.parameters())):
            return StepWork(reason="fake tensors are dense, and the program has sparse ones")
        if any(map(is_wrapped, program.model.parameters())):
            return StepWork(reason="a weight is a tensor around others, whose work is that of its own code")
        drawn = random.getstate()
        try:
            found = self._of_plain(batch) if stack else fake_work(program, batch)
            return replace(found, cache_bytes=float(cache_bytes(self.device)))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return StepWork(reason=f"fake tensors have no values, and the step asks for one: {error.func}")
        except UnsupportedOperatorException as error:
            return StepWork(reason=f"{error.func} has no implementation for fake tensors")
        except Exception as error:  # of the program, whatever it is: there is no bound, and nothing else is wrong
            return StepWork(reason=f"fake tensors cannot run the step: {type(error).__name__}: {first_line(error)}")
        finally:
            random.setstate(drawn)
            self.restore()

    def _of_plain(self, batch: Batch) -> StepWork:
        """Of the program that this arm's stack was folded over: made anew, of fake tensors."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            plain = self.workload.anew().build(self.device, getattr(torch, self.dtype), self.seed)
        return recorded(mode, plain, batch, {})


def fake_work(program: Program, batch: Batch) -> StepWork:
    """Record one step of a copy of the program whose tensors are fake.

    Raises:
        Exception: Whatever the program raises under fake tensors.
    """
    if program.forward is not None and program.forward is not program.model:
        raise TypeError("the model is called through a wrapper")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    learned = isinstance(getattr(program.loss, "__self__", program.loss), nn.Module)
    with FakeCopyMode(mode):
        model, optimizer, loss = copy.deepcopy((program.model, program.optimizer, program.loss if learned else None))
    loss = loss if learned else program.loss  # a workload's own, which may hold a whole data set
    fake = replace(program, model=model, forward=None, optimizer=optimizer, loss=loss, keeps=None)
    real = dict(zip(map(id, model.parameters()), program.model.parameters(), strict=True))
    return recorded(mode, fake, batch, real)


def recorded(mode: FakeTensorMode, fake: Program, batch: Batch, real: Mapping[int, Tensor]) -> StepWork:
    """The same of a program that is fake already.

    Args:
        real: Parameters with values, by the id of the fake ones; without, matrices count as dense.

    Raises:
        Exception: Whatever the program raises under fake tensors.
    """
    recorder = Recorder(rounded=flags()["products"] == "tf32")
    model, optimizer = fake.model, fake.optimizer
    state = [*_parameters(recorder, fake, real), *_buffers(recorder, model)]
    given = map_batch(mode.from_tensor, batch)
    inputs = list(_inputs(recorder, batch, given))
    with mode, recorder:
        outputs: Outputs = fake.step(fake, given)
    for value, owner, _ in state:
        value.selected |= owner.selected
    changed = [(value, recorder.value(tensor)) for value, _, tensor in state if recorder.value(tensor) is not value]
    for value, now in changed:
        now.selected = value.selected
    results = [recorder.read(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    left = [recorder.value(p.grad) for p in model.parameters() if p.grad is not None and optimizer is None]
    found = necessary(recorder.operations, results, left, changed, inputs)
    return StepWork(found.input_bytes, found.kept_bytes, found.flops)


State = tuple[Value, Value, Tensor]  # before the step, the parameter that it belongs to, and the fake tensor


def _parameters(recorder: Recorder, fake: Program, real: Mapping[int, Tensor]) -> Iterator[State]:
    """Parameters, and what an optimizer keeps for each. A parameter that is not trained is a constant."""
    optimizer = fake.optimizer
    groups = optimizer.param_groups if optimizer is not None else []
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter in fake.model.parameters():
        rank = _rank(real[id(parameter)]) if id(parameter) in real else inf if parameter.dim() > 1 else 0.0
        owner = recorder.leaf(parameter, "parameter", rank, id(parameter) in trained)
        yield owner, owner, parameter
        for key, tensor in (optimizer.state[parameter] if optimizer is not None else {}).items():
            if isinstance(tensor, Tensor) and tensor.dim():
                yield recorder.leaf(tensor, "state"), owner, tensor
            elif isinstance(tensor, Tensor) and key == "step":
                recorder.count(tensor)


def _buffers(recorder: Recorder, model: nn.Module) -> Iterator[State]:
    for buffer in model.buffers():
        value = recorder.leaf(buffer, "state", varies=False)
        yield value, value, buffer


def _inputs(recorder: Recorder, batch: Batch, given: Batch) -> Iterator[Value]:
    fakes = tensors_of(given)
    for name, tensor in tensors_of(batch).items():
        real = tensor.is_floating_point()
        yield recorder.leaf(fakes[name], "input", _rank(tensor) if real else 0.0)
        if not real:
            recorder.label(fakes[name], tensor)


def _rank(tensor: Tensor) -> float:
    """Infinite for dense numbers that differ, 1 for one number, 0 where zeros are among them, by a look at some."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)]
    zeros, (low, high) = int((some == 0).sum()), some.aminmax()
    return 0.0 if zeros > FEW_ZEROS * some.numel() else inf if bool(low < high) else 1.0


def cache_bytes(device: torch.device) -> int:
    """Of a GPU its L2 cache; of a machine all caches but the first level, which hold a step's data from one to the
    next.

    Raises:
        OSError, ValueError: The system does not tell.
    """
    if device.type == "cuda":
        return l2_bytes(device)
    sizes: dict[tuple[str, str], int] = {}
    for index in Path(CPUS).glob("cpu[0-9]*/cache/index*"):
        level, shared, size = ((index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        if level != "1":
            sizes[level, shared] = int(size[:-1]) * UNITS[size[-1]]
    if not sizes:
        raise ValueError("the sizes of this processor's caches are not known")
    return sum(sizes.values())
