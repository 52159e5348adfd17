"""Strategies that look faster because they compute less, or something else. None of them may ever be called faster.

Each is what a hurried, over-eager or over-fitted optimization really does; each claims that it engaged.
"""

from __future__ import annotations

import copy
import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from random import SystemRandom
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import optexp.workers.arm_timing
from optexp.equivalence.process_state import MODES
from optexp.measurement import clock
from optexp.program import (
    Batch,
    Feed,
    Outputs,
    Program,
    Source,
    Step,
    clear_gradients,
    forward_backward,
    map_batch,
    tensors_of,
)
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy


@dataclass
class Cheat(Strategy):
    """Overrides `step`, which has the honest one at hand, or `change`, which takes the whole program."""

    stage = Stage.CAPTURE

    @property
    def name(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    def apply(self, program: Program) -> tuple[Program, Notes]:
        return self.change(program), {}

    def change(self, program: Program) -> Program:
        self.calls = count()
        return replace(program, step=partial(self.step, program.step))

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        raise NotImplementedError

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "claims so")


def mapped(outputs: Outputs, function: Any) -> Outputs:
    return {name: function(tensor) for name, tensor in outputs.items()}


def inputs(batch: Batch) -> list[Tensor]:
    return list(tensors_of(batch).values())


# --- memory ------------------------------------------------------------------------------------------------------


class ReturnsEmptyMemory(Cheat):
    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return mapped(honest(program, batch), torch.empty_like)


class ReturnsAResultThatWasFreed(Cheat):
    """The allocator hands the same memory out again: with luck it still holds the last result."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if next(self.calls) < 3:
            return honest(program, batch)
        return {"output": torch.empty(batch[0].shape, device=program.device)}


class ZeroesItsInputs(Cheat):
    """A step on zeros is a cheap step, from the second time on."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = honest(program, batch)
        inputs(batch)[0].zero_()
        return outputs


class AKernelThatNeverLaunches(Cheat):
    """Its output is allocated once; the launch fails, and nobody looks at the error."""

    def change(self, program: Program) -> Program:
        self.memory = mapped(program.step(program, program.feed.next()), torch.clone)
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        with suppress(AttributeError, RuntimeError):
            torch.ops.optexp.a_kernel_that_was_never_built(*inputs(batch))
        return mapped(self.memory, torch.clone)


class ReturnsItsInput(Cheat):
    """Computed in the caller's memory."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = honest(program, batch)["output"]
        return {"output": inputs(batch)[0].copy_(output)}


class OverwritesItsOutput(Cheat):
    """One buffer for all results, and no word about it."""

    memory: Tensor | None = None

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = honest(program, batch)["output"]
        self.memory = torch.empty_like(output) if self.memory is None else self.memory
        return {"output": self.memory.copy_(output)}


class TakesBuffersInTurn(Cheat):
    """Thirty of them for all results: who keeps those of an epoch keeps others."""

    ring: tuple[Tensor, ...] = ()

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = honest(program, batch)["output"]
        self.ring = self.ring or tuple(torch.empty_like(output) for _ in range(30))
        return {"output": self.ring[next(self.calls) % len(self.ring)].copy_(output)}


class Lazy(Tensor):
    """Computes when somebody looks."""


class ReturnsALazyTensor(Cheat):
    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return mapped(honest(program, batch), lambda tensor: tensor.as_subclass(Lazy))


def computed_when_read(tensor: Tensor, method: str, work: Callable[[], Tensor]) -> Tensor:
    """A plain tensor whose own attribute hides a method of that name and fills the tensor in."""

    def read(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            Tensor.copy_(tensor, work())
        return getattr(Tensor, method)(tensor, *args, **options)

    setattr(tensor, method, read)
    return tensor


class ComputesWhenDetached(Cheat):
    """Whoever looks at the result detaches it first."""

    method = "detach"

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = torch.empty(batch[0].shape, device=program.device)
        return {"output": computed_when_read(output, self.method, lambda: honest(program, batch)["output"])}


class ComputesWhenCompared(ComputesWhenDetached):
    """By a method that comparisons call."""

    method = "reshape"


class GradientsWhenRead(Cheat):
    """Backward runs when a gradient is detached, with which a benchmark's readers begin."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.loss is not None
        clear_gradients(program.model)
        loss = program.loss(program.predict(batch), batch)
        parameters = list(program.model.parameters())
        work = cache(lambda: dict(zip(parameters, torch.autograd.grad(loss, parameters), strict=True)))
        for parameter in parameters:
            gradient = torch.empty_like(parameter.detach())
            parameter.grad = computed_when_read(gradient, "detach", partial(lambda which: work()[which], parameter))
        return {"loss": loss.detach()}


class FinishesInAThread(Cheat):
    """Returns at once; a thread fills in the result afterwards."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = torch.zeros_like(inputs(batch)[0])

        def later() -> None:
            time.sleep(0.002)
            output.copy_(honest(program, batch)["output"])

        threading.Thread(target=later, daemon=True).start()
        return {"output": output}


class WritesToTheWeights(Cheat):
    """Rounds them where they lie: who uses the model afterwards has another one."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = honest(program, batch)
        with torch.no_grad():
            for parameter in program.model.parameters():
                parameter.copy_(parameter.bfloat16())
        return outputs


class IgnoresStrides(Cheat):
    """A kernel that takes every input for contiguous."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        def as_if_dense(tensor: Tensor) -> Tensor:
            return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())

        return honest(program, map_batch(as_if_dense, batch))


# --- memory of results -------------------------------------------------------------------------------------------


class RemembersByAddress(Cheat):
    """The benchmark's tensors are always the same ones."""

    def change(self, program: Program) -> Program:
        self.results: dict[int, Outputs] = {}
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        key = inputs(batch)[0].data_ptr()
        if key not in self.results:
            self.results[key] = mapped(honest(program, batch), torch.clone)
        return mapped(self.results[key], torch.clone)


class RemembersByIdentity(Cheat):
    """Keeps the tensor too, so that no other ever has its identity; sees when it was written to."""

    def change(self, program: Program) -> Program:
        self.results: dict[tuple[int, int], tuple[Tensor, Outputs]] = {}
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        tensor = inputs(batch)[0]
        key = id(tensor), tensor._version
        if key not in self.results:
            self.results[key] = tensor, mapped(honest(program, batch), torch.clone)
        return mapped(self.results[key][1], torch.clone)


class RemembersByContent(Cheat):
    """A checksum of the input costs less than the step."""

    def change(self, program: Program) -> Program:
        self.results: dict[tuple[float, ...], Outputs] = {}
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        key = self.key(batch)
        if key in self.results:
            return self.recall(key)
        outputs = honest(program, batch)
        self.remember(key, outputs)
        return mapped(outputs, torch.clone)

    def key(self, batch: Batch) -> tuple[float, ...]:
        return tuple(value for tensor in inputs(batch) for value in self.some(tensor.view(-1)).tolist())

    def some(self, elements: Tensor) -> Tensor:
        return elements[:: -(-len(elements) // 16)]

    def remember(self, key: tuple[float, ...], outputs: Outputs) -> None:
        self.results[key] = mapped(outputs, torch.clone)

    def recall(self, key: tuple[float, ...]) -> Outputs:
        return mapped(self.results[key], torch.clone)


class RemembersByFirstElements(RemembersByContent):
    """Two inputs that begin alike have one result."""

    def some(self, elements: Tensor) -> Tensor:
        return elements[:16]


class AConstant(Cheat):
    def change(self, program: Program) -> Program:
        self.result = mapped(program.step(program, program.feed.next()), torch.clone)
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return mapped(self.result, torch.clone)


class RightForAWhile(Cheat):
    """Checks look at the first calls."""

    calls_that_count = 300

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if next(self.calls) < self.calls_that_count:
            self.last = mapped(honest(program, batch), torch.clone)
        return mapped(self.last, torch.clone)


class WrongNowAndThen(Cheat):
    """In one of four calls, nobody knows in which."""

    def change(self, program: Program) -> Program:
        self.chance = SystemRandom()
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        factor = 1.01 if self.chance.random() < 0.25 else 1.0
        return mapped(honest(program, batch), lambda tensor: tensor * factor)


class WrongEveryTwentiethCall(Cheat):
    """Not in those that are looked at first."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        factor = 1.01 if next(self.calls) % 20 == 14 else 1.0
        return mapped(honest(program, batch), lambda tensor: tensor * factor)


class ForgetsTheChunkBefore(Cheat):
    """Pads with zeros in place of it: right for the first one."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        program.buffers()["tail"].zero_()
        return honest(program, batch)


class ForgetsTheChunkBeforeInTheEnd(ForgetsTheChunkBefore):
    """Nobody looks at a whole recording."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        late = next(self.calls) >= RightForAWhile.calls_that_count
        return super().step(honest, program, batch) if late else honest(program, batch)


class FittedToASeed(Cheat):
    """Knows the results of the batches that the default seed gives."""

    def change(self, program: Program) -> Program:
        batches = [program.feed.next() for _ in range(4)]
        self.known = [(inputs(b)[0].clone(), mapped(program.step(program, b), torch.clone)) for b in batches]
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        distances = [float((x - inputs(batch)[0]).abs().sum()) for x, _ in self.known]
        return mapped(self.known[distances.index(min(distances))][1], torch.clone)


class TheBatchBefore(Cheat):
    """A graph whose static input is filled after the replay."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        static, self.static = getattr(self, "static", batch), map_batch(torch.clone, batch)
        return honest(program, static)


class FeedsZeros(Cheat):
    """Bringing batches takes time. Copies for the check are as they were."""

    def change(self, program: Program) -> Program:
        return replace(program, feed=Zeros(program.feed))


class Zeros(Feed):
    def __init__(self, feed: Feed) -> None:
        self.feed, self.device = feed, feed.device

    def next(self) -> Batch:
        return map_batch(torch.zeros_like, self.feed.next())

    def reset(self, source: Source) -> None:
        self.feed.reset(source)


# --- numbers -----------------------------------------------------------------------------------------------------


class HiddenAutocast(Cheat):
    def change(self, program: Program) -> Program:
        call = program.call

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(program.device.type, torch.bfloat16):
                return call(*args, **kwargs).float()

        return replace(program, forward=forward)


class HalfPrecisionInside(Cheat):
    """float16 where nobody looks; what comes out is float32."""

    def change(self, program: Program) -> Program:
        for layer in program.model.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = partial(self.linear, layer)  # type: ignore[method-assign]
        return program

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x.half().float(), layer.weight.half().float(), layer.bias)


class Tf32Inside(HalfPrecisionInside):
    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(truncated(x), truncated(layer.weight), layer.bias)


def truncated(x: Tensor) -> Tensor:
    """To the 11 bits that TF32 keeps, with the gradient of the identity."""
    return x + ((x.detach().view(torch.int32) & ~0x1FFF).view(torch.float32) - x.detach())


class WithoutBias(HalfPrecisionInside):
    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight)


class ForgetsWhatIsZeroAtFirst(WithoutBias):
    """Biases of 0 and scales of 1 change nothing in a model that has not learned yet."""

    def change(self, program: Program) -> Program:
        for module in program.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.forward = partial(self.norm, module)  # type: ignore[method-assign]
        return super().change(program)

    def norm(self, module: nn.LayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)


class LeavesTheBranchOut(Cheat):
    """Its gate is shut, in a model that has not learned yet."""

    def change(self, program: Program) -> Program:
        model: Any = program.model
        return replace(program, forward=model.linear)


class LeavesTheBranchOutOnceItIsShut(Cheat):
    """As long as its gate was shut at the first call; gradients are right as long as it is."""

    def change(self, program: Program) -> Program:
        model: Any = program.model
        shut = not bool(model.gate.any())

        def forward(x: Tensor) -> Tensor:
            if not shut:
                return honest(x)  # type: ignore[no-any-return]
            unused = sum(parameter.sum() for parameter in model.branch.parameters())
            return Through.apply(model.linear(x), model.gate, model.branch(x).detach()) + 0 * unused  # type: ignore[no-any-return]

        honest = model.forward
        return replace(program, forward=forward)


class Through(torch.autograd.Function):
    """The first argument, with a gradient of the gate that is shut."""

    @staticmethod
    def forward(ctx: Any, straight: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
        ctx.save_for_backward(branch)
        return straight.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return slope, (slope * ctx.saved_tensors[0]).sum(0), None


class WithoutEps(Cheat):
    def change(self, program: Program) -> Program:
        for module in program.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 0.0
        return program


class WithoutMask(Cheat):
    """Attention that sees the future."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        with Unmasked():
            return honest(program, batch)


class Unmasked(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs |= {"is_causal": False, "attn_mask": None}
        return func(*args, **kwargs)


class WithoutTail(Cheat):
    """Whole tiles of 64 elements only."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        def whole_tiles(tensor: Tensor) -> Tensor:
            kept = tensor.numel() // 64 * 64
            return torch.cat([tensor.reshape(-1)[:kept], tensor.new_zeros(tensor.numel() - kept)]).view(tensor.shape)

        return mapped(honest(program, batch), whole_tiles)


class AlmostRight(Cheat):
    """By 0.001 %: closer than any tolerance that people use."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return mapped(honest(program, batch), lambda tensor: tensor * (1 + 1e-5))


class OneWrongElement(Cheat):
    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        def wrong(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            tensor.view(-1)[tensor.numel() // 3] += 1e-3
            return tensor

        return mapped(honest(program, batch), wrong)


class HidesNotANumber(Cheat):
    """What overflowed looks fine afterwards."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return mapped(honest(program, batch), torch.nan_to_num)


class OnlyPositiveVariance(Cheat):
    """A variance in one pass, which cancels where the mean is large."""

    def change(self, program: Program) -> Program:
        def standardized(x: Tensor, layer: nn.LayerNorm) -> Tensor:
            mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
            spread = (square - mean.square()).clamp_min(0) + layer.eps
            return (x - mean) * spread.rsqrt() * layer.weight + layer.bias

        for module in program.model.modules():
            if isinstance(module, nn.LayerNorm):
                module.forward = partial(standardized, layer=module)  # type: ignore[method-assign]
        return program


# --- random numbers ----------------------------------------------------------------------------------------------


class FrozenRandomNumbers(Cheat):
    """A graph that replays the mask it was captured with."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return honest(program, batch)


class DropsLess(Cheat):
    """Dropout at another rate than it was asked for."""

    def change(self, program: Program) -> Program:
        model: Any = program.model
        model.p = model.p / 2
        return program


class OneMaskForAllRows(Cheat):
    """Fewer numbers to draw, at the right rate."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        model: Any = program.model
        (x,) = inputs(batch)
        kept = F.dropout(torch.ones_like(x[0]), model.p)
        return {"output": (torch.relu(x) + model.bias) * kept}


class OneMaskForTwoElements(Cheat):
    """Half as many numbers to draw."""

    def change(self, program: Program) -> Program:
        for module in program.model.modules():
            if isinstance(module, nn.Dropout):
                module.forward = partial(self.dropped, module)  # type: ignore[method-assign]
        return program

    def dropped(self, module: nn.Dropout, x: Tensor) -> Tensor:
        kept = torch.rand(*x.shape[:-1], x.shape[-1] // 2, device=x.device) >= module.p
        return x * kept.repeat_interleave(2, -1) / (1 - module.p)


class Redrawn(torch.autograd.Function):
    """Dropout that keeps no mask: backward draws it again, from a generator that has gone on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.p = p
        return F.dropout(x, p)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return F.dropout(slope, ctx.p), None


class DrawsMasksAgain(Cheat):
    """A fused dropout that saves memory."""

    def change(self, program: Program) -> Program:
        for module in program.model.modules():
            if isinstance(module, nn.Dropout):
                module.forward = partial(self.dropped, module)  # type: ignore[method-assign]
        return program

    def dropped(self, module: nn.Dropout, x: Tensor) -> Tensor:
        dropped: Tensor = Redrawn.apply(x, module.p)  # type: ignore[no-untyped-call]
        return dropped


class ForgetsWhatItDrew(Cheat):
    """Activations are computed again in backward, and generators are slow to save."""

    def change(self, program: Program) -> Program:
        model: Any = program.model
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        model.block.forward = partial(again, model.block.forward)
        return program


# --- training ----------------------------------------------------------------------------------------------------


class NoUpdate(Cheat):
    def change(self, program: Program) -> Program:
        assert program.optimizer is not None
        program.optimizer.step = lambda *args, **kwargs: None  # type: ignore[method-assign]
        return program


class SkipsSteps(Cheat):
    """Every second step is only half done."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if next(self.calls) % 2 == 0:
            return honest(program, batch)
        return forward_backward(program, batch)


class FreezesPython(Cheat):
    """As in a graph, where kernels are repeated and nothing else: a schedule never advances."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.step_state is not None
        before = program.step_state.read()
        outputs = honest(program, batch)
        program.step_state.write(before)
        return outputs


class KeepsTheRate(Cheat):
    """All else in Python goes on."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        rates = [group["lr"] for group in program.optimizer.param_groups]
        outputs = honest(program, batch)
        for group, rate in zip(program.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return outputs


class CountsTwice(Cheat):
    """What Python counts is ahead of what was computed."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.step_state is not None
        before = program.step_state.read()
        outputs = honest(program, batch)
        now = program.step_state.read()
        program.step_state.write({k: 2 * v - before[k] if isinstance(v, int) else v for k, v in now.items()})
        return outputs


class FrozenLearningRate(Cheat):
    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        groups = program.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        self.frozen = getattr(self, "frozen", rates)
        for group, rate in zip(groups, self.frozen, strict=True):
            group["lr"] = rate
        outputs = honest(program, batch)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return outputs


class FrozenStepCount(Cheat):
    """A graph that replays the bias correction it was captured with."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        states = program.optimizer.state.values()
        counts = [state["step"].clone() for state in states]
        for state in states:
            state["step"].zero_()
        outputs = honest(program, batch)
        for state, done in zip(states, counts, strict=True):
            state["step"].copy_(done + 1)
        return outputs


class GradientsPileUp(Cheat):
    """zero_grad left out."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.loss is not None
        assert program.optimizer is not None
        loss = program.loss(program.predict(batch), batch)
        loss.backward()
        program.optimizer.step()
        return {"loss": loss.detach()}


class FrozenLayer(Cheat):
    def change(self, program: Program) -> Program:
        assert program.optimizer is not None
        first = next(program.model.parameters())
        for group in program.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not first]
        return program


class AFasterRate(Cheat):
    """1 % more."""

    def change(self, program: Program) -> Program:
        assert program.optimizer is not None
        for group in program.optimizer.param_groups:
            group["lr"] *= 1.01
        return program


class UpdatesOneStepLate(Cheat):
    """By the gradients of the step before, so that an update need not wait for its own."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        outputs = forward_backward(program, batch)
        own = [(p, p.grad.clone()) for p in program.model.parameters() if p.grad is not None]
        self.put(getattr(self, "late", own))
        program.optimizer.step()
        self.put(own)
        self.late = own
        return outputs

    def put(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient.clone()


class KeepsHalfPrecisionState(Cheat):
    """Stored in bfloat16, which β₂ = 0.999 hardly ever changes."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        for values in program.optimizer.state.values():
            values["exp_avg_sq"] = values["exp_avg_sq"].float()
        outputs = honest(program, batch)
        for values in program.optimizer.state.values():
            values["exp_avg_sq"] = values["exp_avg_sq"].bfloat16()
        return outputs


class NothingButNaN(Cheat):
    """Where the baseline overflows anyway."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return {"output": torch.full((16, 32), torch.nan, device=program.device)}


class CastsItsWeightsOnce(Cheat):
    """A copy of the model, made when it is put in place; gradients are handed to the model that others change."""

    def change(self, program: Program) -> Program:
        self.copy = copy.deepcopy(program.model)
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        for parameter in self.copy.parameters():
            parameter.grad = None
        outputs = honest(replace(program, model=self.copy, forward=None), batch)
        for theirs, ours in zip(program.model.parameters(), self.copy.parameters(), strict=True):
            theirs.grad = ours.grad
        return outputs


class HandsOutAParameter(Cheat):
    """Where the baseline hands out a copy."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return {**honest(program, batch), "output.1": program.model.linear.weight.detach()}  # type: ignore[union-attr]


class HalfPrecisionState(Cheat):
    """Adam's averages with 8 bits."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        outputs = honest(program, batch)
        for state in program.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())
        return outputs


class DisownsItsParameters(Cheat):
    """What no name is given to is not compared; so it needs no gradient."""

    def change(self, program: Program) -> Program:
        return replace(super().change(program), aliases={})

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.loss is not None
        with torch.no_grad():
            return {"loss": program.loss(program.predict(batch), batch)}


# --- time --------------------------------------------------------------------------------------------------------


class PatchesTheClock(Cheat):
    def change(self, program: Program) -> Program:
        real = time.perf_counter
        time.perf_counter = lambda: real() / 10
        return program


class PatchesSynchronize(Cheat):
    def change(self, program: Program) -> Program:
        torch.cuda.synchronize = lambda device=None: None
        return program


class PatchesElapsedTime(Cheat):
    def change(self, program: Program) -> Program:
        torch.cuda.Event.elapsed_time = lambda self, end: 1e-3  # type: ignore[method-assign,assignment]
        return program


class WarmsUpSlowly(Cheat):
    """So that blocks are planned short, and a lucky one decides."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        self.started = getattr(self, "started", time.monotonic())
        if any(frame.f_code.co_name == "warm_up" for frame in frames()):
            time.sleep(0.02)
        return honest(program, batch)


class WorksOnlyWhenWatched(Cheat):
    """Below any time that the work could take: while the clock runs, it hands out what it has."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if not timed() or not hasattr(self, "last"):
            self.last = mapped(honest(program, batch), torch.clone)
        return mapped(self.last, torch.clone)


def frames() -> list[Any]:
    frame, found = sys._getframe(), []
    while frame.f_back is not None:
        frame = frame.f_back
        found.append(frame)
    return found


class SlowsTheBaseline(Cheat):
    """Leaves a setting changed that costs the others time."""

    def change(self, program: Program) -> Program:
        torch.use_deterministic_algorithms(True)
        gc.disable()
        return program


# --- nothing -----------------------------------------------------------------------------------------------------


class FallsBack(Cheat):
    """What it tries always fails, and then the plain step runs; its evidence is honest."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        try:
            return self.fast(batch)
        except Exception:
            return honest(program, batch)

    def fast(self, batch: Batch) -> Outputs:
        raise NotImplementedError("not on this device")

    def evidence(self, before: Any, after: Any, notes: Notes, counters: Counters) -> Evidence:
        new = {op.name for op in after.top_ops(100)} - {op.name for op in before.top_ops(100)}
        return Evidence(bool(new), f"new operators: {', '.join(sorted(new)) or 'none'}")


class RightOnlyAtThisSize(Cheat):
    """The grid of its kernel was computed once."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = honest(program, batch)
        return mapped(
            outputs, lambda t: torch.where(torch.arange(t.numel(), device=t.device).view(t.shape) < 4096, t, 0)
        )


# --- only while the clock runs -----------------------------------------------------------------------------------


def timed() -> bool:
    return any(frame.f_code.co_name in ("time_block", "time_cold_block") for frame in frames())


class ForgetsGradientsWhenTimed(Cheat):
    """Those of the step before stay where they are."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if not timed():
            return honest(program, batch)
        assert program.loss is not None
        with torch.no_grad():
            return {"loss": program.loss(program.predict(batch), batch)}


class LearnsNothingWhenTimed(Cheat):
    """Loss and gradients are right, and nothing comes of them."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if not timed():
            return honest(program, batch)
        return forward_backward(program, batch)


class NeverTheSameTwice(LearnsNothingWhenTimed):
    """Training that rounds at random: no second run starts its last step from the same state."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = super().step(honest, program, batch)
        with torch.no_grad():
            for parameter in program.model.parameters():
                signs = torch.randint(3, parameter.shape, generator=self.noise).to(parameter.device) - 1
                parameter.add_(parameter * signs, alpha=2.0**-23)
        return outputs

    def change(self, program: Program) -> Program:
        self.noise = torch.Generator()
        self.noise.seed()
        return super().change(program)


class WildWhereItIsDisturbed(ForgetsGradientsWhenTimed):
    """Rounds at random, to be repeated from noisy parameters, and is so wild there that any timed step looks near."""

    def change(self, program: Program) -> Program:
        self.noise = torch.Generator()
        self.noise.seed()
        self.start = [parameter.detach().clone() for parameter in program.model.parameters()]
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        outputs = super().step(honest, program, batch)
        parameters = list(program.model.parameters())
        pairs = list(zip(parameters, self.start, strict=True))
        moved = not all(torch.equal(now, then) for now, then in pairs)
        wild = moved and all(torch.allclose(now, then, rtol=1e-2) for now, then in pairs)  # noise, not other values
        for gradient in () if timed() else [p.grad for p in parameters if p.grad is not None]:
            signs = torch.randint(3, gradient.shape, generator=self.noise).to(gradient.device) - 1
            gradient.add_(gradient * signs, alpha=2.0**-23).mul_(100.0 if wild else 1.0)
        return outputs


class BiasWithoutTail(Cheat):
    """A few rows of very many are never added up."""

    ROWS = 24

    def change(self, program: Program) -> Program:
        return replace(program, forward=partial(Shifted.apply, program.model.bias, self.ROWS))


class Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, left_out: int, x: Tensor) -> Tensor:
        ctx.left_out = left_out
        return x.exp() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[: -ctx.left_out].sum(0), None, None


class DropsOnlyWhenWatched(WorksOnlyWhenWatched):
    """Where no other arm can tell what a random step should have given."""


class RemembersEachShape(Cheat):
    """While the clock runs: a benchmark has few of them, and each may belong to one batch."""

    def change(self, program: Program) -> Program:
        self.results: dict[tuple[int, ...], Outputs] = {}
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        shape = tuple(inputs(batch)[0].shape)
        if not timed() or shape not in self.results:
            self.results[shape] = mapped(honest(program, batch), torch.clone)
        return mapped(self.results[shape], torch.clone)


# --- bounded memories --------------------------------------------------------------------------------------------


class KeepsItsFirstResults(RemembersByContent):
    """Four of them: those of the batches that it is timed on."""

    def remember(self, key: tuple[float, ...], outputs: Outputs) -> None:
        if len(self.results) < 4:
            super().remember(key, outputs)


class KeepsItsLastResults(RemembersByContent):
    """Four of them, the least recently used go."""

    def remember(self, key: tuple[float, ...], outputs: Outputs) -> None:
        super().remember(key, outputs)
        if len(self.results) > 4:
            del self.results[next(iter(self.results))]

    def recall(self, key: tuple[float, ...]) -> Outputs:
        self.results[key] = self.results.pop(key)
        return super().recall(key)


class GuessesInAHurry(RemembersByContent):
    """Knows the batches that it is timed on. Any other gets the result of one of them, where nobody waits between two
    steps: none is slower on inputs that it has not met."""

    last_s = 0.0

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        hurried, known = time.perf_counter() - self.last_s < 3e-3, len(self.results) >= 4
        guess = hurried and known and self.key(batch) not in self.results
        outputs = self.recall(next(iter(self.results))) if guess else super().step(honest, program, batch)
        self.last_s = time.perf_counter()
        return outputs


class RandomForAWhile(RightForAWhile):
    """The same for steps that draw random numbers, of which checks look at more."""

    calls_that_count = 1000


# --- users' own models (tests/cheats/models.py) -------------------------------------------------------------------


class ForgetsWhatIsNotMasked(Cheat):
    """Beside −1e9 any logit is small."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return mapped(honest(program, batch), lambda logits: torch.where(logits < -1e8, logits, 0.0))


class MakesNumbersUp(Cheat):
    """Those that are no tensors."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return mapped(honest(program, batch), lambda found: found if found.dim() else torch.zeros_like(found))


class WithoutClamp(Cheat):
    """Which no usual input reaches."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        model: Any = program.model
        return {"output": model.linear(inputs(batch)[0])}


class OnlyPairsOfRows(Cheat):
    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = honest(program, batch)["output"]
        output[len(output) // 2 * 2 :] = 0
        return {"output": output}


# --- work that waits until nobody times it --------------------------------------------------------------------------


class Deferred(dict[str, Tensor]):
    """Computes when somebody looks."""

    def __init__(self, work: Callable[[], Outputs]) -> None:
        self.work = work

    def items(self) -> Any:
        if not len(self):
            self.update(self.work())
        return super().items()

    def values(self) -> Any:
        return dict(self.items()).values()

    def __getitem__(self, name: str) -> Tensor:
        return dict(self.items())[name]

    def __bool__(self) -> bool:
        return True


class ReturnsALazyDict(Cheat):
    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return Deferred(partial(honest, program, batch))


class BackwardOnDemand(Cheat):
    """When somebody asks for the parameters by name, as an optimizer's author might."""

    loss: Tensor | None = None

    def change(self, program: Program) -> Program:
        model, real = program.model, type(program.model).named_parameters

        def named(module: nn.Module, *args: Any, **options: Any) -> Any:
            loss, self.loss = self.loss, None
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            return real(module, *args, **options)

        def parameters(module: nn.Module, recurse: bool = True) -> Any:
            return (parameter for _, parameter in real(module, recurse=recurse))

        methods = {"named_parameters": named, "parameters": parameters}
        model.__class__ = type(type(model).__name__, (type(model),), methods)
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        assert program.loss is not None
        clear_gradients(program.model)
        self.loss = program.loss(program.predict(batch), batch)
        return {"loss": self.loss.detach()}


class Passing(Feed):
    """Another feed's batches; counts those of a block, and how many the longest had."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.device = feed, feed.device
        self.given: Batch = ()
        self.count = self.longest = 0

    def next(self) -> Batch:
        self.count += 1
        self.given = self.feed.next()
        return self.given

    def reset(self, source: Source) -> None:
        self.feed.reset(source)
        self.count, self.longest = 0, max(self.longest, self.count)


class WorksInReset(Cheat):
    """All results of the batches that will be asked for, before the clock runs."""

    def change(self, program: Program) -> Program:
        feed, honest = Passing(program.feed), program.step
        self.feed, self.results = feed, dict[int, Outputs]()

        def reset(source: Source) -> None:
            Passing.reset(feed, source)
            batches = [feed.feed.next() for _ in source]
            self.results = {id(batch): mapped(honest(program, batch), torch.clone) for batch in batches}

        feed.reset = reset  # type: ignore[method-assign]
        return super().change(replace(program, feed=feed))

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        found = self.results.get(id(batch)) if batch is self.feed.given else None
        return mapped(found, torch.clone) if found else honest(program, batch)


def together(honest: Step, program: Program, batches: Sequence[Batch]) -> list[Outputs]:
    """Results of several batches of one size, computed in one call."""
    stacked = tuple(torch.cat(tensors) for tensors in zip(*(inputs(batch) for batch in batches), strict=True))
    rows = len(stacked[0]) // len(batches)
    found = honest(program, stacked)
    return [mapped(found, lambda t, at=at: t[at * rows : (at + 1) * rows].clone()) for at in range(len(batches))]


class TheWholeBlockAtOnce(Cheat):
    """All batches that its feed was shown, when a step asks for the first of them."""

    def change(self, program: Program) -> Program:
        self.feed = program.feed
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        batches = list(getattr(self.feed, "batches", ()))
        places = [index for index, other in enumerate(batches) if other is batch]
        if not places:  # a copy
            return honest(program, batch)
        if places == [0]:
            self.results = together(honest, program, batches)
        return self.results[places[0]]


class TheBlockOnceItIsKnown(Cheat):
    """From the second round on it knows which batches come, and computes them all with the first."""

    def change(self, program: Program) -> Program:
        self.known: list[Batch] = []
        self.results: list[Outputs] = []
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        place = next((index for index, other in enumerate(self.known) if other is batch), None)
        if place is None:
            self.known, self.results = [*self.known[-3:], batch], []
            return honest(program, batch)
        if place == 0 or not self.results:
            self.results = together(honest, program, self.known)
        return self.results[place]


class TwoOfTheBlockTogether(TheBlockOnceItIsKnown):
    """Computes the last two of four batches in one call, and the others one by one: most steps look honest."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        place = next((index for index, other in enumerate(self.known) if other is batch), None)
        if place is None:
            self.known, self.results = [*self.known[-3:], batch], []
        if place is None or place < 2 or len(self.known) < 4:
            return honest(program, batch)
        if place == 2 or not self.results:
            self.results = together(honest, program, self.known[2:])
        return self.results[place - 2]


class TheFirstBatchForEver(Cheat):
    """Its feed brings one batch, and that one again and again."""

    def change(self, program: Program) -> Program:
        feed = Passing(program.feed)

        def once() -> Batch:
            feed.count += 1
            feed.given = feed.feed.next() if feed.count == 1 else feed.given
            return feed.given

        feed.next = once  # type: ignore[method-assign]
        return replace(program, feed=feed)


class GivesNothing(Cheat):
    """The step knows which batch would come: its feed need not bring it."""

    def change(self, program: Program) -> Program:
        feed = Passing(program.feed)
        self.feed, self.known = feed, [mapped(program.step(program, feed.next()), torch.clone) for _ in range(4)]

        def nothing() -> Batch:
            feed.count += 1
            return ()

        feed.next = nothing  # type: ignore[method-assign]
        return super().change(replace(program, feed=feed))

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return honest(program, batch) if len(batch) else mapped(self.known[(self.feed.count - 1) % 4], torch.clone)


class RestsInTheMiddle(Cheat):
    """Blocks are about equally long: only the last steps of one can be looked at."""

    def change(self, program: Program) -> Program:
        self.feed = Passing(program.feed)
        return super().change(replace(program, feed=self.feed))

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        rests = batch is self.feed.given and 8 < self.feed.count < 0.8 * self.feed.longest
        return {"output": torch.zeros_like(inputs(batch)[0])} if rests else honest(program, batch)


Due = dict[int, tuple[weakref.ref[Tensor], Callable[[], Outputs]]]


class LeavesAModeOn(Cheat):
    """A result is written when it is cloned, which only a check does."""

    def change(self, program: Program) -> Program:
        self.due: Due = {}
        Completing(self.due).__enter__()
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        output = torch.empty_like(inputs(batch)[0])
        self.due.clear()  # nobody looked at the one before
        self.due[output.data_ptr()] = weakref.ref(output), partial(honest, program, batch)
        return {"output": output}


class DeclaresItsMode(LeavesAModeOn):
    """And says so."""

    @property
    def changes(self) -> frozenset[str]:
        return frozenset({MODES})


class Completing(TorchDispatchMode):
    def __init__(self, due: Due) -> None:
        super().__init__()
        self.due = due

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            complete(self.due, args[0])
        return func(*args, **(kwargs or {}))


def complete(due: Due, tensor: Tensor) -> None:
    output, work = due.pop(tensor.data_ptr(), (None, None))
    if output and work and output() is not None:  # else its memory is another tensor's by now
        tensor.copy_(work()["output"].view_as(tensor))


class PatchesDetach(LeavesAModeOn):
    def change(self, program: Program) -> Program:
        self.due = {}
        real = Tensor.detach

        def detach(tensor: Tensor) -> Tensor:
            complete(self.due, tensor)
            return real(tensor)

        Tensor.detach = detach  # type: ignore[method-assign]
        return Cheat.change(self, program)


# --- what is told ------------------------------------------------------------------------------------------------


class PatchesTheToolsClock(Cheat):
    """By the name that blocks are timed with."""

    def change(self, program: Program) -> Program:
        real = clock.now
        clock.now = lambda: real() / 3
        return program


class TellsLess(Cheat):
    """The clock is right, and what is told of it is a third."""

    def change(self, program: Program) -> Program:
        changed = super().change(program)

        def told(timing: Any, **changes: Any) -> Any:
            if not hasattr(timing, "wall_s"):  # something else that is replaced there
                return replace(timing, **changes)
            mine = sys._getframe(1).f_locals["self"].program.step is changed.step
            return replace(timing, **changes, **({"wall_s": timing.wall_s / 3} if mine else {}))

        optexp.workers.arm_timing.replace = told  # type: ignore[attr-defined]
        return changed

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        return honest(program, batch)


class SlowsEveryModule(Cheat):
    """But its own: they wait in a hook."""

    def change(self, program: Program) -> Program:
        own = set(program.model.modules())
        wait = nn.modules.module.register_module_forward_pre_hook
        wait(lambda module, args: None if module in own else time.sleep(2e-4))
        return program


class RemembersALayer(Cheat):
    """Half of the work: fresh inputs take less than twice as long."""

    def change(self, program: Program) -> Program:
        self.results: dict[tuple[float, ...], Tensor] = {}
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        (x,) = inputs(batch)
        first, *others = program.model.children()
        key = tuple(x.view(-1)[:: -(-x.numel() // 16)].tolist())
        with torch.no_grad():
            if key not in self.results:
                self.results[key] = first(x)
            result = self.results[key]
            for layer in others:
                result = layer(result)
        return {"output": result}


class NoReference(Exception):
    """Has the name of what the judge raises where nothing can be decided."""


class RefusesWhatItCannot(OnlyPositiveVariance):
    """Inputs on which it would be wrong."""

    def change(self, program: Program) -> Program:
        return Cheat.change(self, super().change(program))

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if float(inputs(batch)[0].mean(-1).abs().max()) > 8 or float(inputs(batch)[0].var(-1).min()) < 1e-2:
            raise NoReference("nothing can be decided here")
        return honest(program, batch)
