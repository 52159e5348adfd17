"""What one step did, as named tensors: taken outside the clock, the same way in every arm."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from optexp.equivalence.gates import identical
from optexp.equivalence.noise import noisy
from optexp.program import Batch, Outputs, Program, Snapshot, gradients, map_batch, tensors_of

Observation = dict[str, Tensor]


def observe(program: Program, batch: Batch, noise: int | None = None) -> Observation:
    """One step on a copy of `batch`, brought as the feed brings its own (the caller's stays what it was).

    out/<name>             what the step returned
    grad/<parameter>       unscaled, where the program trains
    buffer/<name>          after the step
    before/, after/<name>  of `Program.state()`, where there is an optimizer (buffers only before)
    flag/inputs_intact     1 where the step left its batch as it was
    flag/plain             1 where outputs are plain tensors
    flag/device            for each output, by name: 1 where it lies on the program's device
    flag/aliases           for each output, by name: the first one it shares memory with, −1 for an input
    flag/random            1 where the step drew random numbers
    flag/noisy             1 with noise, whose value is the seed; a noisy run leaves out after/
    """
    given = program.feed.bring(batch)
    kept, used = tensors_of(map_batch(torch.clone, given)), tensors_of(given)
    states = program.optimizer is not None
    seen = {f"before/{name}": _copy(tensor) for name, tensor in program.state().items()} if states else {}
    dice = _dice(program.device)
    with nullcontext() if noise is None else noisy(program.model, noise):
        outputs = program.step(program, given)
    seen |= {f"out/{name}": _copy(tensor) for name, tensor in outputs.items()}
    if program.trains:
        seen |= {name: _copy(tensor) for name, tensor in gradients(program).items()}
    seen |= {f"buffer/{name}": _copy(tensor) for name, tensor in program.model.named_buffers()}
    if states and noise is None:
        after = {name: tensor for name, tensor in program.state().items() if not name.startswith("buffer/")}
        seen |= {f"after/{name}": _copy(tensor) for name, tensor in after.items()}
    intact = all(identical(used[name], tensor) for name, tensor in kept.items())
    plain = all(type(t) is Tensor for t in outputs.values())
    here = [outputs[name].device.type == program.device.type for name in sorted(outputs)]
    flags = {
        "inputs_intact": torch.tensor(intact, dtype=torch.uint8),
        "plain": torch.tensor(plain, dtype=torch.uint8),
        "device": torch.tensor(here, dtype=torch.uint8),
        "aliases": torch.tensor(_aliases(outputs, used), dtype=torch.int64),
        "random": torch.tensor(not all(map(torch.equal, dice, _dice(program.device))), dtype=torch.uint8),
        "noisy": torch.tensor(noise is not None, dtype=torch.uint8),
    }
    return seen | {f"flag/{name}": value for name, value in flags.items()}


def repeats(program: Program, batch: Batch, snapshot: Snapshot, times: int) -> bool:
    """Whether `times` further steps from the same state and batch give the same bits as the first."""
    snapshot.restore(program)
    first = observe(program, batch)
    for _ in range(times):
        snapshot.restore(program)
        again = observe(program, batch)
        if again.keys() != first.keys() or not all(identical(again[name], first[name]) for name in first):
            return False
    return True


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.layout is torch.strided else tensor.to_dense()


def _aliases(outputs: Outputs, inputs: dict[str, Tensor]) -> list[int]:
    given = {_storage(tensor) for tensor in inputs.values()}
    first: dict[int, int] = {}
    classes = []
    for position, name in enumerate(sorted(outputs)):
        storage = _storage(outputs[name])
        classes.append(-1 if storage in given else first.setdefault(storage, position))
    return classes


def _storage(tensor: Tensor) -> int:
    # An empty tensor has no memory to share.
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _dice(device: torch.device) -> list[Tensor]:
    """The states of the generators that a step would draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
