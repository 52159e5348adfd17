"""Results and effects of one step, as named tensors: taken outside the clock, the same way in every arm.

out/<name>             what the step returned
input/<name>           what the step left there, of those that it changed
grad/<parameter>       unscaled, where the program trains
buffer/<name>          after the step
before/, after/<name>  of `Program.state()`, where there is an optimizer (buffers only before)
before/buffer/<name>, before/param/<name>, param/<name>
                       where there is none: only what is no longer as it was at first, the last one after the step
changed/<name>         of `Program.state()`, where there is none: only what the step changed
memory/<name>          of `Program.step_state`, packed, before: only what is no longer as it was at first
remembers/<name>       of `Program.step_state`, packed, before and after: only what the step changed
keeps/<name>           of `Program.keeps`, packed, before: only what is no longer as it was at first
moves/<name>           of `Program.keeps`, packed, before and after: only what the step changed
names                  of what another model than the baseline's kept in Python before the step, in lines
rule                   of the optimizer after the step (see `optexp.equivalence.rule`)
rule called            of the optimizer as it was called, where that is known
flag/inputs_intact     1 where the step left its batch as it was
flag/plain             1 where outputs and gradients are plain tensors, without attributes
flag/device            for each output, by name: 1 where it lies on the program's device
flag/aliases           for each output, by name: the first one it shares memory with, −1 for an input, −2 for state, −3
                       where several of its own elements lie in one place
flag/finished          1 where outputs no longer change after the step's own stream has computed them
flag/random            1 where the step drew random numbers
flag/host_random       where it drew from Python's or numpy's generator, a checksum of both; else 0
flag/noisy             1 with noise, whose value is the seed. Of after/, it has at most after/param/ (a user's step)
flag/another_model     1 where the model is another one than the baseline's
flag/apart             1 where the whole program was written apart from the baseline's
flag/reassociated      how many operators took another order; −1 in a run that was asked for none. Of after/,
                       such a run has the same, and everything of an optimizer whose class is the user's own
flag/ties              how many elements of selections took the place of equal ones there; 0 in other runs
flag/coarsest          the largest eps that it met of an arithmetic; 0 in other runs
flag/finest            the least eps of a dtype that got noise; 1 without
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from optexp.equivalence import randomness
from optexp.equivalence.checksums import compact
from optexp.equivalence.noise import noisy
from optexp.equivalence.poison import hold, poison, scribble
from optexp.equivalence.process_state import unlike
from optexp.equivalence.reassociation import Reassociated
from optexp.equivalence.rule import CALLED, RULE, Rule, calls
from optexp.equivalence.tensor_math import alike, identical
from optexp.program import Batch, Outputs, Packed, Program, Remembered, Snapshot, gradients, tensors_of
from optexp.python_state.records import Table
from optexp.support import random_state, sparse
from optexp.support.overlap import overlap, overlaps_itself
from optexp.support.pausing import Used
from optexp.support.reading import read, read_all

Observation = dict[str, Tensor]
NAMES = "names"  # of an observation, of attributes
OUTLIVED, OUTLIVED_S = (4, 64), 0.25  # least and most steps after which outputs are what they were; seconds of them


def observe(program: Program, batch: Batch, noise: int | None = None) -> Observation:
    """One step on a copy of `batch`, brought as the feed brings its own (the caller's stays what it was)."""
    return observed(program, program.feed.bring(batch), noise)


def observed(
    program: Program,
    given: Batch,
    noise: int | None = None,
    forward: bool = False,
    initial: Mapping[str, Tensor] | None = None,
    order: int | None = None,
) -> Observation:
    """One step on a batch that is the program's to use, under the names of the module's docstring. What it returns is
    overwritten afterwards.

    forward: leave out grad/ and after/
    initial: the state that earlier steps began with; None where there were none
    order:   number of a reassociated run (see `optexp.equivalence.reassociation`)
    """
    start = _Start.of(program, given)
    seen = start.differs_from(program, start.state if initial is None else initial)
    poison(program.device)
    hold(program.device)
    noise_added = nullcontext(set[torch.dtype]()) if noise is None else noisy(program.model, noise)
    reassociates = nullcontext() if order is None else Reassociated(order)
    with noise_added as met, reassociates as reassociated, calls(program) as called:
        answer = program.step(program, given)
    found = dict(answer.items())  # a dict of another type is reported elsewhere
    plain, outputs = not unlike(found, program), read_all(found)
    returned = {f"out/{name}": _copy(tensor) for name, tensor in outputs.items()}
    seen |= returned
    if program.trains and not forward:
        seen |= {name: _copy(tensor) for name, tensor in gradients(program).items()}
    seen |= {f"buffer/{name}": _copy(tensor) for name, tensor in program.buffers().items()}
    in_full = not forward and noise is None and (order is None or program.own_optimizer)
    in_part = not forward and not in_full
    seen |= _state_after(program, start, initial, called, in_full, in_part)
    if program.device.type == "cuda":
        torch.cuda.synchronize(program.device)
    written = start.written()
    flags = {
        "inputs_intact": torch.tensor(not written, dtype=torch.uint8),
        "plain": torch.tensor(plain, dtype=torch.uint8),
        **_of_outputs(program, outputs, returned, start.used),
        **_of_process(program, start),
        **_of_run(noise, met, reassociated),
    }
    _overwrite(program, outputs, start.used)
    return seen | written | {f"flag/{name}": value for name, value in flags.items()}


@dataclass(frozen=True)
class _Start:
    """A program and its batch before the step.

    used, kept: tensors of the batch, and what they hold;  state: a copy of `Program.state()`
    step_state: of `Program.step_state`;  table: of `Program.keeps`
    generators, host: states of random generators of torch, and of Python and numpy
    """

    used: dict[str, Tensor]
    kept: dict[str, Tensor]
    state: dict[str, Tensor]
    step_state: Remembered
    table: Table
    generators: list[Tensor]
    host: tuple[Any, Any]

    @classmethod
    def of(cls, program: Program, given: Batch) -> _Start:
        used = read_all(tensors_of(given))
        return cls(
            used=used,
            kept=compact(used, copy=True),
            state={name: _copy(tensor) for name, tensor in program.state().items()},
            step_state=program.step_state.read() if program.step_state is not None else {},
            table=program.keeps.read() if program.keeps is not None else Table(),
            generators=randomness.state(program.device),
            host=random_state.of_host(),
        )

    def differs_from(self, program: Program, initial: Mapping[str, Tensor]) -> Observation:
        """before/, memory/ and keeps/."""
        earlier = self.state if program.optimizer is not None else carried(self.state, initial)
        seen = {f"before/{name}": tensor for name, tensor in earlier.items()}
        if program.step_state is not None:
            seen |= _packed("memory", program.step_state.news(self.step_state))
        return seen | (_packed("keeps", program.keeps.news(self.table)) if program.keeps is not None else {})

    def written(self) -> Observation:
        """input/: what the step left in its batch."""
        left = compact(self.used)
        return {
            f"input/{name}": _copy(self.used[name]) for name in self.kept if not identical(left[name], self.kept[name])
        }


def _state_after(
    program: Program,
    start: _Start,
    initial: Mapping[str, Tensor] | None,
    called: Sequence[Mapping[str, Any]],
    in_full: bool,
    in_part: bool,
) -> Observation:
    """after/, param/, changed/, remembers/, moves/ and names.

    called:  hyperparameters that the optimizer was called with, by group
    in_full: with after/
    in_part: with after/param/ where the step is a user's own
    """
    seen: Observation = {}
    if program.optimizer is None:
        now = program.state()
        parameters = {name: tensor for name, tensor in now.items() if name.startswith("param/")}
        seen |= {name: _copy(tensor) for name, tensor in carried(parameters, initial or start.state).items()}
        changed = [name for name, tensor in start.state.items() if not identical(_copy(now[name]), tensor)]
        seen |= {f"changed/{name}": torch.tensor(1, dtype=torch.uint8) for name in changed}
    elif in_full:
        after = {name: tensor for name, tensor in program.state().items() if not name.startswith("buffer/")}
        seen |= {f"after/{name}": _copy(tensor) for name, tensor in after.items()} | {RULE: Rule.of(program).packed()}
        seen |= {CALLED: Rule.of(program, called).packed()} if called else {}
    elif in_part and program.own_step:
        after = {name: tensor for name, tensor in program.state().items() if name.startswith("param/")}
        seen |= {f"after/{name}": _copy(tensor) for name, tensor in after.items()}
    if program.step_state is not None:
        seen |= _packed("remembers", program.step_state.changed(start.step_state, program.step_state.read()))
    if program.keeps is None:
        return seen
    if program.apart or program.keeps.another:
        lines = "\n".join(["", *start.table.named(), ""])
        seen[NAMES] = torch.tensor(list(lines.encode()), dtype=torch.uint8)
    return seen | _packed("moves", program.keeps.moves(start.table))


def _of_outputs(program: Program, outputs: Outputs, returned: Observation, used: dict[str, Tensor]) -> Observation:
    """Flags of the outputs as objects.

    returned: copies of the outputs, made by the step's own stream
    """
    here = [outputs[name].device.type == program.device.type for name in sorted(outputs)]
    finished = all(identical(_dense(outputs[name.removeprefix("out/")]), copy) for name, copy in returned.items())
    return {
        "device": torch.tensor(here, dtype=torch.uint8),
        "aliases": torch.tensor(_aliases(outputs, used, program), dtype=torch.int64),
        "finished": torch.tensor(finished, dtype=torch.uint8),
    }


def _drawn_on_host(start: _Start) -> int:
    """A checksum of the generators of Python and numpy where the step drew from them; else 0. `step_state` holds them
    where a step is the user's own."""
    now = random_state.of_host()
    return 0 if all(map(random_state.same_states, start.host, now)) else crc32(pickle.dumps(now))


def _of_process(program: Program, start: _Start) -> Observation:
    """Flags of what the step changes beside its results."""
    keeps = program.keeps
    return {
        "random": torch.tensor(randomness.drawn(start.generators, program.device), dtype=torch.uint8),
        "host_random": torch.tensor(0 if program.step_state is not None else _drawn_on_host(start)),
        "another_model": torch.tensor(program.apart or (keeps is not None and keeps.another), dtype=torch.uint8),
        "apart": torch.tensor(program.apart, dtype=torch.uint8),
    }


def _of_run(noise: int | None, met: set[torch.dtype], reassociated: Reassociated | None) -> Observation:
    """Flags of how the step was run.

    met: dtypes that got noise
    """
    return {
        "noisy": torch.tensor(noise is not None, dtype=torch.uint8),
        "reassociated": torch.tensor(reassociated.changed if reassociated else -1, dtype=torch.int64),
        "ties": torch.tensor(reassociated.ties if reassociated else 0, dtype=torch.int64),
        "coarsest": torch.tensor(reassociated.coarsest if reassociated else 0.0, dtype=torch.float64),
        "finest": torch.tensor(min((torch.finfo(dtype).eps for dtype in met), default=1.0), dtype=torch.float64),
    }


def _overwrite(program: Program, outputs: Outputs, used: dict[str, Tensor]) -> None:
    """Scribble over outputs and gradients: a step that goes on from them shows.

    An output that is state too, as a hidden state that is returned and kept for the next step, stays.
    """
    slopes = [read(p.grad) for p in program.model.parameters() if p.grad is not None]
    # Numbers may be fixed.
    own = [t for t in outputs.values() if t.device == program.device or t.is_pinned()]
    scribble([*own, *slopes], spared=[*used.values(), *program.state().values(), *program.python_tensors()])


def carried(state: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> Observation:
    """Buffers and parameters that earlier steps changed or registered: those that are only read need not travel,
    however large they are."""
    held = {n: t.detach().to_dense() for n, t in state.items() if n.startswith(("buffer/", "param/"))}
    same = alike(held, {name: initial[name].to_dense().to(t) for name, t in held.items() if name in initial})
    return {name: tensor for name, tensor in held.items() if name not in same}


def overwritten(program: Program, first: Batch, second: Batch) -> list[str]:
    """The outputs of a step that one of the next `OUTLIVED` steps writes over: rings of buffers have few of them."""
    outputs = read_all(program.step(program, program.feed.bring(first)))
    kept, used, (least, most) = compact(outputs, copy=True), Used(), OUTLIVED
    for step in range(most):
        if step >= least and used.seconds() > OUTLIVED_S:
            break
        program.step(program, program.feed.bring(second))
    left = compact(outputs)
    return [name for name, tensor in kept.items() if not identical(left[name], tensor)]


def repeats(program: Program, batch: Batch, snapshot: Snapshot, times: int) -> bool:
    """Whether `times` further steps from the same state and batch give the same bits as the first."""
    snapshot.restore(program)
    first = compact(tensors(observe(program, batch)))
    for _ in range(times):
        snapshot.restore(program)
        again = compact(tensors(observe(program, batch)))
        if not again.keys() == first.keys() == alike(again, first):
            return False
    return True


def tensors(seen: Observation) -> Observation:
    """Without what is packed, of which equal values need not be equal bytes."""
    return {name: tensor for name, tensor in seen.items() if not name.startswith(("keeps/", "moves/", NAMES, RULE))}


def _packed(kind: str, packed: Packed) -> Observation:
    return {f"{kind}/{name}": torch.frombuffer(bytearray(bits), dtype=torch.uint8) for name, bits in packed.items()}


def unpacked(kind: str, observation: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The bytes that an observation has of that kind, by name."""
    found = {n.removeprefix(f"{kind}/"): t for n, t in observation.items() if n.startswith(f"{kind}/")}
    return {name: tensor.cpu().numpy().tobytes() for name, tensor in found.items()}


def _copy(tensor: Tensor) -> Tensor:
    tensor = read(tensor)
    return tensor.clone() if tensor.layout is torch.strided else tensor.to_dense()


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _aliases(outputs: Outputs, inputs: dict[str, Tensor], program: Program) -> list[int]:
    given = {sparse.place(tensor) for tensor in inputs.values()}
    own = {sparse.place(tensor) for tensor in program.state().values()} - given
    met: dict[int, list[int]] = {}
    classes, found = [], [outputs[name] for name in sorted(outputs)]
    for position, output in enumerate(found):
        storage = sparse.place(output)
        others = met.setdefault(storage, [])
        first = next((other for other in others if overlap(found[other], output)), position)
        shared = -1 if storage in given else -2 if storage in own else first
        classes.append(-3 if shared == position and overlaps_itself(output) else shared)
        others.append(position)
    return classes
