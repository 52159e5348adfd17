"""ARM: set-up of a program: built, folded over its stack, run for the first time, and what it needs found out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch

from optexp.equivalence import process_state, randomness
from optexp.equivalence.autocast import autocast
from optexp.equivalence.dropout import silence
from optexp.equivalence.observation import carried
from optexp.equivalence.perturbation import vary
from optexp.equivalence.step_digest import Digest, left_behind
from optexp.equivalence.tensor_math import finite
from optexp.equivalence.trajectory import Rates
from optexp.errors import ConfigError, NoReference, Unsupported
from optexp.kernelkit import toolchain
from optexp.measurement import clock, placement
from optexp.program import Outputs, Program, Snapshot, gradients, keeping, tensors_of
from optexp.program.counters import meet
from optexp.strategy import Composed, Notes, Strategy, captures, compose
from optexp.support import own_code, sparse
from optexp.support.memory_plan import Sizes, choose_on, give_back
from optexp.user_code.aliasing import holdings, matched
from optexp.workers import inductor_facts
from optexp.workers.arm_compiler import Compiled
from optexp.workers.arm_program import nbytes, workload_info
from optexp.workers.arm_python_state import moving_state
from optexp.workers.messages import Identity, SetUp
from optexp.workers.spec import Spec

MOST_OVERFLOWS = 40  # steps in which a loss scale may fall
BUILT_IN = ("torch.", "builtins")  # modules of optimizers that do the same in each step, and of none
HEADROOM = 4.0  # of a loss scale that no optimizer ever lets fall again: other batches have larger gradients


@dataclass(frozen=True)
class FirstSteps:
    """The first step on each kind of batch.

    random:   one of them drew random numbers
    step_s:   seconds of the fastest;  compute_s: the same without its feed
    digest_s: seconds that the digest of the first one took
    first_s:  seconds of the very first, without it
    """

    random: bool
    step_s: float
    compute_s: float
    digest_s: float
    first_s: float


class Built(Compiled):
    """A program from its specification, with what its set-up has shown."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_result = 0  # bytes
        self.own = own_code.functions()
        self.unlike: set[str] = set()  # results that may be computed when they are read
        self.firstly: Digest = {}
        self.phases: dict[str, float] = {}

    def setup(self, packed: bytes) -> SetUp:
        """Build the program, fold the stack over it, run it for the first time."""
        began = clock.now()
        spec = cloudpickle.loads(packed)  # which imports the workload's modules, and the strategies'
        self.phases = {"imports": clock.now() - began}
        return self.hold(spec)

    def hold(self, spec: Spec) -> SetUp:
        """The same of a specification that is here already."""
        start, before = clock.now(), process_state.settings()
        asked = spec.workload
        for strategy in compose(spec.strategies):
            spec = replace(spec, workload=strategy.rebuild(spec.workload))
        self._settle(spec)
        with self.quiet():
            told = self._set_up(spec, start)
        self.settings_then = before, process_state.settings()
        return replace(told, rebuilt=spec.workload is not asked)

    def _build(self, spec: Spec) -> tuple[Program, list[str]]:
        """The bare program with its snapshot and batches, and what was varied in it."""
        lap = clock.now()
        if self.device.type == "cuda":
            torch.empty(1, device=self.device)
            clock.synchronize(self.device)
            lap = self._phase("CUDA context", lap)
        frames = toolchain.counted().get("frames/total")
        program, varied = built(spec, self.device)
        if toolchain.counted().get("frames/total") != frames:
            torch._dynamo.reset()  # trial calls count against torch's limit of recompiling
        clock.synchronize(self.device)
        lap = self._phase("build", lap)
        self.initial = Snapshot(program)
        self.originals = process_state.originals()
        self.excused = set(process_state.tampered(program, self.originals))
        batch_bytes = max(map(nbytes, self.drawn_batches(spec.workload.variety)))
        self.sharing = spec.sharing
        self.plan = choose_on(self.device, Sizes(batch_bytes, 0, self._state_bytes()), self.sharing, spec.plan)
        self.batches = self.drawn_batches(self.distinct)
        self.begin(program.feed)
        placement.spare_threads()
        self._phase("batches", lap)
        return program, varied

    def _state_bytes(self) -> int:
        return sum(map(sparse.nbytes, self.initial.values.values()))

    def _set_up(self, spec: Spec, start: float) -> SetUp:
        program, varied = self._build(spec)
        lap = clock.now()
        with known_limits(spec.strategies):  # a capture takes the first steps
            program, notes = self._folded(spec, program)
        if spec.strategies:
            self._phase("strategies", lap)
        self.program, self.rates = keeping(program), Rates(program)
        self.initial.remember(self.program)
        self.restore()
        with known_limits(spec.strategies):
            first, outputs = self._first_steps()
        setup_s = clock.now() - start - first.digest_s - self.logging_s()
        inherited_s = self._first_step(first)
        carries = bool(carried(self.program.state(), self.initial.values))
        self.program.feed.pause()
        if self.device.type == "cuda":
            toolchain.end_compile_workers()
        placement.settle()
        self._settle_scale()
        require_comparable(outputs, self.program)
        sizes = list(map(nbytes, self.batches))
        shapes = {tuple(tuple(t.shape) for t in tensors_of(batch).values()) for batch in self.batches}
        result_bytes = sum(tensor.numel() for tensor in outputs.values()) * spec.torch_dtype.itemsize
        self.largest_result = max((tensor.nbytes for tensor in outputs.values()), default=0)
        del outputs
        full = Sizes(max(sizes), result_bytes, self._state_bytes())
        self.plan = choose_on(self.device, full, self.sharing, self.plan)
        told = SetUp(
            setup_s=setup_s + inherited_s,
            notes=notes,
            random=first.random,
            batch_bytes=sum(sizes) / len(sizes),
            queue=self.program.feed.queue,
            turn=self.distinct,
            sized=len(shapes),
            varied=varied,
            carries=carries,
            keeps=moving_state(self),
            plan=self.plan,
            step_s=first.step_s,
            compute_s=first.compute_s,
            workload=workload_info(spec.workload, self.initial.values),
            own_step=self.program.own_step or not type(self.program.optimizer).__module__.startswith(BUILT_IN),
            phases=self.phases,
            inherited_s=inherited_s,
        )
        if self.in_turns:
            self.rest()
        elif self.sharing > 1:
            give_back(self.device)
        return told

    def _phase(self, name: str, since: float) -> float:
        """Remember the seconds of a phase that ends now."""
        now = clock.now()
        self.phases[name] = now - since
        return now

    def _first_step(self, first: FirstSteps) -> float:
        """Split the first step into compilation and the rest; seconds of the compilation before the arm was forked."""
        compiling = min(compile_s(), first.first_s)
        before_s = inductor_facts.spent_s if compiling else 0.0
        self.phases |= {"compilation": compiling + before_s} if compiling else {}
        self.phases["first step"] = first.first_s - compiling
        return before_s

    def _folded(self, spec: Spec, program: Program) -> tuple[Program, dict[str, Notes]]:
        """The program after every strategy of the stack, and their notes by name.

        Raises Unsupported where a strategy refuses the program.
        """
        notes = {}
        program = replace(program, captured=captures(spec.strategies))
        for strategy in compose(spec.strategies):
            if reason := strategy.unsupported(program, self.device):
                raise Unsupported(f"{strategy.name}: {reason}")
            feed, aliases, held = program.feed, program.aliases, holdings(program)
            program, notes[strategy.name] = pair_of(strategy, strategy.apply(program))
            program = matched(held, program, aliases, strategy.name, self.initial.values)
            meet(program.optimizer)  # whose numbers the strategy may have set
            if not spec.dropout:
                silence(program.model)  # which may be another one
            if program.feed is not feed:
                feed.pause()
                self.begin(program.feed)
        return program, notes

    def _first_steps(self) -> tuple[FirstSteps, Outputs]:
        """Run one step on each kind of batch; what the last one returned."""
        random, digest_s, whole, alone = False, 0.0, list[float](), list[float]()
        while len(whole) < self.workload.variety:
            began = clock.now()
            batch, before = self.program.feed.next(), randomness.state(self.device)
            given = clock.now()
            # What the user's code calls is what he wrote: no strategy changed it.
            as_written = self.program.apart or not self.part.strategies
            with self.workload.first_call(self.program.model, batch) if as_written else nullcontext():
                outputs = self.program.step(self.program, batch)
            random |= randomness.drawn(before, self.device)
            self.unlike |= set(process_state.unlike(outputs, self.program))
            clock.synchronize(self.device)
            whole.append(clock.now() - began)
            alone.append(clock.now() - given)
            if len(whole) == 1:
                digest_s = self._look_at_the_first(outputs)
        return FirstSteps(random, min(whole), min(alone), digest_s, whole[0]), outputs

    def _look_at_the_first(self, outputs: Outputs) -> float:
        """Keep the digest of the first step after building; the seconds that it took."""
        clock.synchronize(self.device)
        start = clock.now()
        self.firstly = left_behind(self.program, outputs, self.initial.values)
        return clock.now() - start

    def _settle_scale(self) -> None:
        """Let the loss scale fall until no step overflows; it starts from there. A check would find skipped steps, or
        gradients that are not finite where no optimizer lets it fall: there it keeps HEADROOM below an overflow."""
        scaler = self.program.scaler
        if scaler is None:
            return
        clean, learns = 0, self.program.optimizer is not None
        if not learns:
            scaler.update(scaler.get_scale() * HEADROOM)
        for _ in range(MOST_OVERFLOWS):
            before = scaler.get_scale()
            self.run()
            if not learns and len(finite(found := gradients(self.program))) < len(found):
                scaler.update(before / HEADROOM)
            clean = clean + 1 if scaler.get_scale() >= before else 0
            if clean == len(self.batches):
                break
        if not learns:
            scaler.update(scaler.get_scale() / HEADROOM)
        self.initial.values["scaler/scale"] = self.program.state()["scaler/scale"].clone()
        self.restore()
        self.program.feed.pause()

    def _settle(self, spec: Spec) -> None:
        self.keep_compiler_log(spec.compiler_log)
        self.settle(spec.torch_device, spec.cores, spec.folders)
        self.seed, self.draws = spec.seed, spec.seed if spec.draws is None else spec.draws
        self.part = Identity(spec.name, Composed(spec.strategies).labels)
        self.dropout, self.workload, self.dtype = spec.dropout, spec.workload, spec.dtype


def pair_of(strategy: Strategy, returned: Any) -> tuple[Program, Notes]:
    """Program and notes that `apply` returned; ConfigError where it returned something else."""
    match returned:
        case (Program() as program, Mapping() as notes):
            return program, dict(notes)
    given = type(returned).__name__
    if isinstance(returned, tuple):
        given = f"({', '.join(type(item).__name__ for item in returned)})"
    raise ConfigError(f"{strategy.name}: apply returned {given}: return the program and its notes, as in program, {{}}")


@contextmanager
def known_limits(strategies: Iterable[Strategy]) -> Iterator[None]:
    """Inside, an error that is a known limit of a strategy becomes `Unsupported`, in the strategy's words."""
    try:
        yield
    except (Unsupported, ConfigError):
        raise
    except Exception as error:
        for strategy in strategies:
            if reason := strategy.limit(error):
                raise Unsupported(f"{strategy.name}: {reason}") from error
        raise


def built(spec: Spec, device: torch.device) -> tuple[Program, list[str]]:
    """The plain program, and names of parameters that have other values than they begin with."""
    program = spec.workload.build(device, spec.torch_dtype, spec.seed)
    varied = vary(program.model, spec.seed) if spec.generic else []
    if not spec.dropout:
        silence(program.model)
    if spec.autocast is not None:
        program = autocast(program, spec.autocast)
    return keeping(program), varied


def compile_s() -> float:
    """Seconds that torch's compiler has worked in this process, where it says so."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    known = getattr(dynamo, "compilation_time_metrics", {})
    return float(sum(known.get("_compile.compile_inner", ())))


def require_comparable(outputs: Outputs, program: Program) -> None:
    """Raises NoReference where a step returns nothing to compare, or nothing that can be."""
    if not outputs and not program.trains:
        raise NoReference("the model returns no tensor: return one, or several in a tuple, a dict or a dataclass")
    for name, tensor in outputs.items():
        if tensor.layout is not torch.strided:
            raise NoReference(
                f"{name} is a {tensor.layout} tensor, of which no element can be compared: return a dense one"
            )
