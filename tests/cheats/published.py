"""Kinds of cheats that were published about kernel benchmarks and agents: against the judge, its inputs, its files."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optexp.program import Batch, Outputs, Program, Step, clear_gradients, map_batch
from optexp.workers import arm_checks
from tests.cheats.catalogue import Cheat, RemembersByContent, inputs, mapped

# --- what is expected, found elsewhere ------------------------------------------------------------------------------


class ScansObjects(Cheat):
    """Among all objects of the process may be what its result will be compared with."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        shape, mine = inputs(batch)[0].shape, {id(tensor) for tensor in inputs(batch)}
        found = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == shape and id(t) not in mine]
        return {"output": found[-1].detach().clone() if found else torch.zeros(shape)}


class ScansSharedMemory(Cheat):
    """The baseline's result on the same batch went through a file a moment ago."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        (x,) = inputs(batch)
        for path in glob("/dev/shm/optexp-*/*.transfer"):
            with open(path, "rb") as file:
                content = bytearray(file.read(x.nbytes))
            if len(content) == x.nbytes and any(content) and content[:64] != bytes(x.numpy().tobytes()[:64]):
                return {"output": torch.frombuffer(content, dtype=x.dtype).view(x.shape).clone()}
        return {"output": torch.zeros_like(x)}


class SpoilsTheExpectation(Cheat):
    """With NaN on both sides nothing differs."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        shape = inputs(batch)[0].shape
        for tensor in gc.get_objects():
            if type(tensor) is Tensor and tensor.dtype is torch.float64 and tensor.shape == shape:
                with suppress(RuntimeError):
                    tensor.fill_(torch.nan)
        return {"output": torch.full(shape, torch.nan)}


# --- what judges by ---------------------------------------------------------------------------------------------------


class PatchesRandn(RemembersByContent):
    """Fresh batches are old ones."""

    def change(self, program: Program) -> Program:
        real = torch.randn

        def randn(*size: Any, generator: torch.Generator | None = None, **options: Any) -> Tensor:
            return real(*size, generator=generator and generator.manual_seed(0), **options)

        torch.randn = randn
        return super().change(program)


class PatchesSeeds(Cheat):
    """One seed for all: a frozen mask repeats itself rightly."""

    def change(self, program: Program) -> Program:
        torch.manual_seed = lambda seed: torch.default_generator  # type: ignore[assignment]
        return program


class PatchesAllclose(Cheat):
    def change(self, program: Program) -> Program:
        torch.allclose = lambda *args, **options: True
        return program


class PatchesEquality(Cheat):
    def change(self, program: Program) -> Program:
        Tensor.__eq__ = lambda self, other: torch.ones(self.shape, dtype=torch.bool)  # type: ignore[assignment]
        return program


class PatchesTheObservation(Cheat):
    """Whatever looks at a step waits until it is a right one; without a look it is another."""

    def change(self, program: Program) -> Program:
        self.right = True
        real = arm_checks.observed  # type: ignore[attr-defined]

        def observed(*args: Any, **options: Any) -> Any:
            self.right = True
            try:
                return real(*args, **options)
            finally:
                self.right = False

        arm_checks.observed = observed  # type: ignore[attr-defined]
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = honest(program, batch)
        return outputs if self.right else mapped(outputs, torch.zeros_like)


class ForgesItsTiming(Cheat):
    """An answer of its own on every connection, before the true one; told once it is timed."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = honest(program, batch)
        if next(self.calls) == 200:
            content = pickle.dumps(("ok", None))
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                        os.write(int(name), struct.pack("!i", len(content)) + content)
        return outputs


class PatchesTheNativeClock(Cheat):
    """The C function behind time.perf_counter, whose object stays the same."""

    def change(self, program: Program) -> Program:
        begin, real = time.monotonic(), time.monotonic

        def slow(module: object, _: object) -> float:
            return begin + (real() - begin) / 5

        told = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(slow)
        KEPT.append(told)
        method = ctypes.c_void_p.from_address(id(time.perf_counter) + 16).value  # PyCFunctionObject.m_ml
        assert method is not None
        address = ctypes.cast(told, ctypes.c_void_p).value
        ctypes.c_void_p.from_address(method + 8).value = address  # PyMethodDef.ml_meth
        return program


KEPT: list[object] = []  # what is called from C


# --- results that are nearly right ------------------------------------------------------------------------------------


class NormIsIdentity(Cheat):
    """Inputs are normal: their norm hardly differs from them."""

    def change(self, program: Program) -> Program:
        for module in program.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.forward = partial(self.scaled, module)  # type: ignore[method-assign]
        return program

    def scaled(self, module: nn.LayerNorm, x: Tensor) -> Tensor:
        return x * module.weight + module.bias


class SoftmaxIsZero(Cheat):
    """Of many columns each holds next to nothing."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return {"output": torch.zeros_like(inputs(batch)[0])}


class SoftmaxWithoutItsMaximum(Cheat):
    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        powers = inputs(batch)[0].exp()
        return mapped(honest(program, batch), lambda output: powers / powers.sum(-1, keepdim=True))


class SwallowsAFailedCall(Cheat):
    """Native code that fails with a status, which nobody reads: the result is what its memory held."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = torch.empty_like(inputs(batch)[0])
        read = ctypes.CDLL(None).pread
        read(-1, ctypes.c_void_p(output.data_ptr()), ctypes.c_size_t(output.nbytes), ctypes.c_long(0))
        return {"output": output}


class LoadsWhatFits(Cheat):
    """`load_state_dict(strict=False)` into a model without biases."""

    def change(self, program: Program) -> Program:
        model: Any = program.model
        layers = [nn.Linear(m.in_features, m.out_features, bias=False) for m in model if isinstance(m, nn.Linear)]
        chosen = iter(layers)
        other = nn.Sequential(*(next(chosen) if isinstance(m, nn.Linear) else m for m in model))
        other.load_state_dict(model.state_dict(), strict=False)
        return replace(program, forward=other)


class LoadsNothing(Cheat):
    """The same where names differ: nothing is loaded, and nobody says so."""

    def change(self, program: Program) -> Program:
        model: Any = program.model
        kept = torch.get_rng_state()
        other = nn.ModuleDict({"net": nn.Sequential(*(self.made(module) for module in model))})
        torch.set_rng_state(kept)
        other.load_state_dict(model.state_dict(), strict=False)
        return replace(program, forward=other["net"])

    def made(self, module: nn.Module) -> nn.Module:
        return nn.Linear(module.in_features, module.out_features) if isinstance(module, nn.Linear) else module


class ExactForRandomInputs(Cheat):
    """Inputs that have structure get a shorter way, which is wrong."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = honest(program, batch)
        sparse = any(float((tensor == 0).float().mean()) > 0.5 for tensor in inputs(batch))
        return mapped(outputs, torch.zeros_like) if sparse else outputs


class CastsTheForwardOnce(Cheat):
    """Training whose forward pass uses weights of the first step."""

    def change(self, program: Program) -> Program:
        self.first = [parameter.detach().clone() for parameter in program.model.parameters()]
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.loss is not None
        assert program.optimizer is not None
        parameters = list(program.model.parameters())
        now = [parameter.detach().clone() for parameter in parameters]
        for parameter, first in zip(parameters, self.first, strict=True):
            parameter.data.copy_(first)
        clear_gradients(program.model)
        loss = program.loss(program.predict(batch), batch)
        loss.backward()
        for parameter, value in zip(parameters, now, strict=True):
            parameter.data.copy_(value)
        program.optimizer.step()
        return {"loss": loss.detach()}


class FoldsWeightsOnce(Cheat):
    """A copy of weights that no gradient changes, folded, cast or packed before the first step: honest as long as
    nobody else changes them."""

    def change(self, program: Program) -> Program:
        for module in program.model.modules():
            learned = program.trains and any(p.requires_grad for p in module.parameters())
            if isinstance(module, nn.Linear) and not learned:
                copies = module.weight.detach().clone(), module.bias.detach().clone()
                module.forward = partial(self.linear, copies)  # type: ignore[method-assign]
        return program

    def linear(self, copies: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        return nn.functional.linear(x, *copies)


# --- across runs and files --------------------------------------------------------------------------------------------


class KeepsResultsOnDisk(RemembersByContent):
    """Results of the run before; nothing that this run has met gives it away."""

    folder = Path("/tmp")
    hits = 0

    def change(self, program: Program) -> Program:
        changed = super().change(program)
        path = self.folder / "results.pt"
        self.before: dict[tuple[float, ...], Outputs] = torch.load(path, weights_only=False) if path.exists() else {}
        self.results = dict(self.before)
        return changed

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        key = (*(size for tensor in inputs(batch) for size in tensor.shape), *self.key(batch))
        if key in self.before:
            type(self).hits += 1
            return mapped(self.before[key], torch.clone)
        outputs = honest(program, batch)
        if key not in self.results and len(self.results) < 300:
            self.remember(key, outputs)
            torch.save(self.results, self.folder / "results.pt")
        return outputs


# --- by somebody else -------------------------------------------------------------------------------------------------


class SharesWithAProcess(Cheat):
    """Half of the rows are computed by another process, on cores that were not given to this one."""

    def change(self, program: Program) -> Program:
        batch = program.feed.next()
        self.given = map_batch(lambda tensor: torch.empty_like(tensor).share_memory_(), batch)
        self.result = torch.zeros(batch[0].shape).share_memory_()
        self.helper, theirs = socket.socketpair()
        if os.fork() == 0:
            os.setsid()
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            torch.set_num_threads(1)
            self.serve(theirs, program.step, program)
            os._exit(0)
        theirs.close()
        return super().change(program)

    def serve(self, ours: socket.socket, honest: Step, program: Program) -> None:
        self.helper.close()
        while ours.recv(1):
            half = self.rows(self.given, 1)
            with torch.no_grad():
                self.result[len(self.result) // 2 :] = honest(program, half)["output"]
            ours.send(b".")

    def rows(self, batch: Batch, which: int) -> Batch:
        first, *others = inputs(batch)
        middle = len(first) // 2
        return ((first[middle:] if which else first[:middle]), *others)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        self.ask(batch)
        upper = honest(program, self.rows(batch, 0))["output"]
        self.helper.recv(1)
        return {"output": torch.cat([upper, self.result[len(upper) :]])}

    def ask(self, batch: Batch) -> None:
        for place, tensor in zip(inputs(self.given), inputs(batch), strict=True):
            place.copy_(tensor)
        self.helper.send(b".")


class ReturnsBeforeItsHelper(SharesWithAProcess):
    """All rows are the other process's, whose result nobody waits for before the next step."""

    waiting = False

    def rows(self, batch: Batch, which: int) -> Batch:
        return batch

    def serve(self, ours: socket.socket, honest: Step, program: Program) -> None:
        self.helper.close()
        while ours.recv(1):
            with torch.no_grad():
                self.result.copy_(honest(program, self.given)["output"])
            ours.send(b".")

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if self.waiting:
            self.helper.recv(1)
        self.waiting = True
        self.ask(batch)
        return {"output": self.result.view(self.result.shape)}


class EditsAFile(Cheat):
    """Of the judge, or of what it computes with, while it runs."""

    file = Path("/tmp/nothing.py")

    def change(self, program: Program) -> Program:
        with self.file.open("a") as file:
            file.write("# all is well\n")
        return program


class SlowsTheBaselinesFile(Cheat):
    """Once it was imported for the arms that are verified, and before it is for those that are timed."""

    file = Path("/tmp/nothing.py")

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if "# slow" not in (text := self.file.read_text()):
            self.file.write_text(text.replace("return ", "sum(range(20_000))  # slow\n        return ", 1))
        return honest(program, batch)


class StopsOtherArms(Cheat):
    """Again and again, so that their steps take twice as long by the clock."""

    def change(self, program: Program) -> Program:
        own, launcher = os.getpid(), os.getppid()
        if not os.fork():
            while True:
                others = [pid for pid in children(launcher) if pid != own]
                for number, seconds in ((signal.SIGSTOP, 0.01), (signal.SIGCONT, 0.002)):
                    for pid in others:
                        with suppress(ProcessLookupError):
                            os.kill(pid, number)
                    time.sleep(seconds)
        return program


class TakesPriorityFromOtherArms(Cheat):
    """Again and again, a little more each time."""

    def change(self, program: Program) -> Program:
        own, launcher = os.getpid(), os.getppid()
        if not os.fork():
            while True:
                time.sleep(0.5)
                for pid in children(launcher):
                    if pid != own:
                        with suppress(OSError):
                            os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, pid) + 1))
        return program


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


Patch = tuple[Any, str]
PATCHED: list[Patch] = [
    (torch, "randn"),
    (torch, "manual_seed"),
    (torch, "allclose"),
    (Tensor, "__eq__"),
    (arm_checks, "observed"),
]


def as_they_were() -> Callable[[], None]:
    """Puts back what cheats patch in this process."""
    kept = [getattr(owner, name) for owner, name in PATCHED]

    def put_back() -> None:
        for (owner, name), value in zip(PATCHED, kept, strict=True):
            setattr(owner, name, value)

    return put_back
