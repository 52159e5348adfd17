"""State of a program: restored in place, created before the first step, read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from optexp.errors import NoReference
from optexp.program import counters
from optexp.program.counters import is_counted
from optexp.program.first_values import first, is_own, noted
from optexp.program.not_called import NotCalled
from optexp.program.program import Program
from optexp.program.rates import rate_of
from optexp.python_state.model_state import ModelState
from optexp.python_state.records import Table
from optexp.support import sparse, wrapped
from optexp.support.reading import read

# --- state, gradients, batches ---------------------------------------------------------------------------------


NO_STEP = (
    "{}.step() is not implemented, and an update is checked as one call of step() on given gradients: an optimizer"
    " with other methods in its place, as SAM has, needs an attribute that holds the optimizer which makes the update"
)
TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad)  # optimizers that take sparse and dense gradients
FAINT = 2.0**-100  # a gradient beside which every other is large; zero in float16


BEGIN_AS_ONE, BEGIN_AS_RATE = {"mu_product", "mu"}, {"eta", "step_size"}  # optimizer state that does not begin as 0


def keeping(program: Program) -> Program:
    """The same program, with the present Python state of its model in `keeps`."""
    if program.keeps is None or program.keeps.model is not program.model:
        before, keeps = program.keeps, _python_state(program)
        keeps.another = before is not None and not {*before.model.modules()} & {*program.model.modules()}
        return replace(program, keeps=keeps)
    program.keeps.optimizer = program.optimizer
    program.keeps.begin()
    return program


def _python_state(program: Program) -> ModelState:
    return ModelState(program.model, program.loss, program.optimizer)


class Snapshot:
    """A copy of a program's state that is restored in place, so that captured addresses stay valid."""

    def __init__(self, program: Program) -> None:
        self.values = {name: tensor.clone() for name, tensor in program.state().items()}
        self.elsewhere = program.step_state.read() if program.step_state is not None else {}
        self.model, self.kept = program.model, Table()
        self.remember(program)

    def remember(self, program: Program) -> None:
        """Make the model's present Python state the one to restore, with buffers that the baseline lacks."""
        self.model = program.model
        self.unnamed = {name: buffer.clone() for name, buffer in program.unnamed_buffers().items()}
        known = program.keeps is not None and program.keeps.model is program.model
        self.kept = (program.keeps if known and program.keeps else _python_state(program)).read()

    @torch.no_grad()
    def restore(self, program: Program, attributes: bool = True) -> None:
        """Copy the state back; without `attributes`, the model's Python state stays as earlier steps left it.

        Optimizer state that was created after the snapshot gets its initial values. Other state that a strategy added
        since (a loss scale, a learning rate on the device) gets its values at the first call of `restore`.
        """
        if attributes:
            self.restore_attributes(program)  # first: a reassigned buffer may have another shape
        for name, tensor in program.state().items():
            if name not in self.values and not is_counted(name):
                lazy = name.startswith("optimizer/") and not name.endswith("/lr")
                self.values[name] = _at_first(program, name, tensor) if lazy else tensor.clone()
        program.put(self.values)
        for name, buffer in program.unnamed_buffers().items():
            if name in self.unnamed and buffer.shape == self.unnamed[name].shape:
                buffer.copy_(self.unnamed[name])
        if program.step_state is not None:
            program.step_state.write(self.elsewhere)

    def restore_attributes(self, program: Program) -> None:
        """Put the model's Python state back, and nothing else."""
        if program.model is self.model:
            self.kept.restore()


def _at_first(program: Program, name: str, tensor: Tensor) -> Tensor:
    """The initial value of an optimizer's entry of `Program.state`."""
    optimizer = program.optimizer
    assert optimizer is not None
    _, _, path = name.partition("/")
    owner, _, key = path.rpartition("/")
    found = next(((alias, p) for alias, p in program.parameters() if alias.name == owner), None)
    rates = {p: rate_of(group) for group in optimizer.param_groups for p in group["params"]}
    if found is None or found[1] not in rates:
        return first_value(key, tensor, 0.0)
    alias, parameter = found
    begun = first(optimizer, parameter, key)
    if begun is None:
        return first_value(key, tensor, rates[parameter])
    return torch.as_tensor(alias(begun) if isinstance(begun, Tensor) else begun).to(tensor, copy=True)


def first_value(key: str, tensor: Tensor, rate: float) -> Tensor:
    """The first value of optimizer state that was not recorded: 0, except for factors and step sizes of NAdam, ASGD and
    Rprop.

    Args:
        key: Of the state.
        tensor: The state now.
        rate: Learning rate of the tensor that the state belongs to.
    """
    short = key.rpartition(".")[2]  # of an optimizer within another
    if short in BEGIN_AS_ONE:
        return torch.ones_like(tensor)
    return torch.full_like(tensor, rate) if short in BEGIN_AS_RATE else torch.zeros_like(tensor)


@contextmanager
def preserved(program: Program) -> Iterator[None]:
    """Restore the program's state in place after the block, such as after warm-up steps."""
    snapshot = Snapshot(program)
    try:
        yield
    finally:
        snapshot.restore(program)


def mixes_precisions(model: nn.Module) -> bool:
    """Whether some parameters or buffers are narrower than float32 and others are not, as a norm beside bfloat16."""
    found = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    return len(found) > 1 and not found.isdisjoint({torch.bfloat16, torch.float16})


def placed(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """`model.to(device, dtype)` that keeps the imaginary part of complex numbers, and tensors around others."""
    _place_sparse(model, device, dtype)
    if not any(tensor.is_complex() or wrapped.is_wrapped(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return model.to(device=device, dtype=dtype)
    wide = {None: None, torch.float64: torch.complex128}.get(dtype, torch.complex64)

    def moved(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.is_floating_point() else wide if tensor.is_complex() else None
        there = tensor.to(device, kind or tensor.dtype)
        lost = wrapped.is_wrapped(tensor) and type(there) is not type(tensor)  # a cast that gives its plain values
        return wrapped.rebuilt(tensor, moved) if lost else there

    made: nn.Module = model._apply(moved)  # as `to` does it
    return made


def is_training(model: nn.Module) -> bool:
    """`model.training`, which a frozen model of TorchScript does not have."""
    return bool(getattr(model, "training", False))


def set_training(model: nn.Module, training: bool) -> list[str]:
    """`model.train(training)`, but for an exported program, which has one mode and no other.

    Parts that lie in the other mode inside a model which has this one already stay there: frozen statistics of a batch
    norm, a teacher, dropout that draws in inference.

    Returns:
        The names of these parts, without those inside another one, and without those that `model.train` leaves there.
    """
    kept = _in_other_mode(model) if is_training(model) is training else {}
    with suppress(NotImplementedError):
        model.train(training)
    kept = {name: part for name, part in kept.items() if part.training is training}
    for part in kept.values():
        part.training = not training
    return [name for name in kept if name.rpartition(".")[0] not in kept]


def take_modes(old: nn.Module, new: nn.Module) -> None:
    """Give a model the mode of another one, and its parts the modes of the parts of the same names."""
    training, parts = is_training(old), dict(new.named_modules())
    set_training(new, training)
    for name in _in_other_mode(old).keys() & parts.keys():
        parts[name].training = not training


def _in_other_mode(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name whose mode is not the model's own."""
    mode = is_training(model)
    return {name: part for name, part in model.named_modules() if getattr(part, "training", mode) is not mode}


def _place_sparse(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move compressed sparse parameters, which `model.to` does not: assigning `data` of such a tensor has no effect."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.layout in sparse.COMPRESSED:
                kind = dtype if parameter.is_floating_point() else None
                moved = parameter.detach().to(device, kind or parameter.dtype)
                module._parameters[name] = made.setdefault(parameter, nn.Parameter(moved, parameter.requires_grad))


def prime(program: Program) -> None:
    """Create an optimizer's lazy state now, so that it can be captured, copied and restored.

    Raises NoReference where the optimizer's step needs a closure: it then has no update for given gradients.
    """
    if program.optimizer is None:
        return
    _take_hooks(program.optimizer)
    rows = _with_sparse_gradients(program.model, program.optimizer)

    def filled(value: float) -> Tensor:
        for parameter in program.model.parameters():
            if parameter.requires_grad:
                gradient = torch.full_like(parameter, value)
                parameter.grad = gradient.to_sparse(1) if id(parameter) in rows else gradient
        return torch.zeros(())

    own = is_own(program.optimizer)
    around = own and len([*counters.states(program.optimizer)]) > 1
    with _undone_on_failure(program) if around else nullcontext():
        if own:
            with suppress(Exception), preserved(program), noted(program.optimizer, tried=True):
                _step_once(program.optimizer, partial(filled, 1.0))
        try:
            with _undone_on_failure(program) if own else nullcontext(), preserved(program), noted(program.optimizer):
                _step_once(program.optimizer, partial(filled, 0.0))
        except Exception as error:
            if not own or isinstance(error, NoReference):
                raise
            with preserved(program), noted(program.optimizer):  # an optimizer may divide by the size of its gradients
                _step_once(program.optimizer, partial(filled, FAINT))
    clear_gradients(program.model)


@contextmanager
def _undone_on_failure(program: Program) -> Iterator[None]:
    """On an error in the block, clear state that was empty before it, and restore parameters.

    After `p.data = state["old_p"]` a parameter lies in the memory of state.
    """
    assert program.optimizer is not None
    start = Snapshot(program)
    empty = [state for _, state in counters.states(program.optimizer) if not state]
    try:
        yield
    except Exception:
        for state in empty:
            state.clear()
        start.restore(program)
        clear_gradients(program.model)
        raise


def _take_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer's step run hooks, where its class leaves out torch's constructor, as one around another does."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") and not isinstance(optimizer, NotCalled):
        torch.optim.Optimizer.__setstate__(optimizer, {})


def _step_once(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor]) -> None:
    """One step of the optimizer on gradients that `closure` sets."""
    closure()
    try:
        optimizer.step()
    except Exception as error:
        closure()
        try:
            optimizer.step(closure)  # type: ignore[arg-type]
        except Exception:
            if isinstance(error, NotImplementedError):
                raise NoReference(NO_STEP.format(type(optimizer).__name__)) from error
            raise error from None
        raise NoReference(
            f"{type(optimizer).__name__}.step() evaluates the model itself, by a closure, and an update is checked as"
            " one call of step() on given gradients: optimizers such as LBFGS cannot be compared (one like SAM needs an"
            " attribute that holds the optimizer which makes the update, of the same parameters)"
        ) from error


def _with_sparse_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of parameters with sparse gradients, unless the optimizer takes dense ones too."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return set(map(id, model.parameters()))
    modules = (module for module in model.modules() if getattr(module, "sparse", False) is True)
    return {id(getattr(module, "weight", None)) for module in modules if not isinstance(optimizer, TAKE_SPARSE)}


def clear_gradients(model: nn.Module) -> None:
    """`zero_grad(set_to_none=True)` for programs with and without an optimizer."""
    for parameter in model.parameters():
        parameter.grad = None


def gradients(program: Program) -> dict[str, Tensor]:
    """Unscaled gradients by parameter name. After an optimizer's step they are unscaled already."""
    scaled = program.scaler is not None and program.optimizer is None
    scale = program.scaler.get_scale() if scaled and program.scaler is not None else 1.0
    return {
        f"grad/{alias.name}": alias(read(p.grad) / scale if scale != 1.0 else read(p.grad))
        for alias, p in program.parameters()
        if p.grad is not None
    }
