"""ARM, REFERENCE: the usual steps: inference, both passes, training, and both passes of a single operation."""

from __future__ import annotations

import torch
from torch import Tensor

from optexp.program import taken_gradients
from optexp.program.batches import Batch, Outputs, tensors_of
from optexp.program.outputs import flatten, loss_in, others
from optexp.program.program import Program, Step
from optexp.program.state import clear_gradients


def forward(program: Program, batch: Batch) -> Outputs:
    """Inference: the model's output, flattened by name."""
    with torch.no_grad():
        output = program.predict(batch)
        tensors = flatten(output)
        return tensors | others(output) if tensors and not isinstance(output, Tensor) else tensors


def forward_backward(program: Program, batch: Batch) -> Outputs:
    """Loss and gradients, no update; gradients are left in `p.grad` (scaled where there is a scaler)."""
    clear_gradients(program.model)
    return _both_passes(program, batch)


def train(program: Program, batch: Batch) -> Outputs:
    """A whole training step: gradients cleared, forward, loss, backward, optimizer."""
    assert program.optimizer is not None
    clear_gradients(program.model)
    outputs = _both_passes(program, batch)
    if program.scaler is None:
        _, taken = taken_gradients.step(program.optimizer)
        for parameter, gradient in taken.items():
            parameter.grad = gradient
    else:
        program.scaler.step(program.optimizer)
        program.scaler.update()
    return outputs


def pullback(program: Program, batch: Batch) -> Outputs:
    """Forward and backward of a single operation, without the extra work of a loss.

    The operation has one output tensor; the batch's last tensor is the gradient of that output. Gradients of
    floating-point inputs are outputs (`input_grad.0` and so on); gradients of parameters are left in `p.grad`.
    """
    clear_gradients(program.model)
    tensors = tuple(tensors_of(batch).values())
    inputs = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in tensors[:-1])
    output: Tensor = program.predict((*inputs, tensors[-1]))
    output.backward(tensors[-1].to(output.dtype))  # type: ignore[no-untyped-call]
    grads = {f"input_grad.{i}": t.grad for i, t in enumerate(inputs) if t.grad is not None}
    return {"output": output.detach(), **grads}


def _both_passes(program: Program, batch: Batch) -> Outputs:
    """The loss and what the program shows beside it, detached; gradients are in `p.grad`.

    A parameter among the outputs is state: the optimizer changes it after the step.
    """
    assert program.loss is not None
    output = program.predict(batch)
    loss = program.loss(output, batch)
    (loss if program.scaler is None else program.scaler.scale(loss)).backward()
    found = {"loss": loss.detach()}
    if not program.shows or isinstance(output, Tensor) or loss_in(output) is not None:
        return found
    tensors = {
        name: tensor for name, tensor in flatten(output).items() if not (tensor.is_leaf and tensor.requires_grad)
    }
    return found | {name: tensor.detach() for name, tensor in tensors.items()} | others(output)


STEPS: dict[str, Step] = {"forward": forward, "forward_backward": forward_backward, "train": train}
