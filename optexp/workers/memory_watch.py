"""ARM: what memory holds, seen while steps run: tensors of the program, gradients, and tensors kept for backward."""

from __future__ import annotations

import gc
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_file

from optexp.profiling.allocations import Call, Sighting, user_line
from optexp.program import Batch, Outputs, Program, tensors_of
from optexp.support import sparse
from optexp.support.hooks import takes_hooks
from optexp.support.wrapped import parts
from optexp.workers.module_marks import markable

CALL = "_call_impl"  # the function of torch that calls a module
COMPILED = "torch/_functorch/_aot_autograd/"  # files of torch that call compiled functions
ON_THE_WAY = ("ToCopyBackward0", "TBackward0", "ViewBackward0", "TransposeBackward0")  # from a parameter to its cast
NOT_SEARCHED = (nn.Module, torch.optim.Optimizer, Program, ModuleType, type, str, bytes)
MOST_OBJECTS = 20_000  # that are searched for tensors of a step or a feed


class Watch:
    """Collects sightings.

    now: number of the allocator's events so far, or of a mark among them
    """

    def __init__(self, program: Program, device: torch.device, now: Callable[[], int]) -> None:
        self.program, self.device, self.now = program, device, now
        self.sightings: list[Sighting] = []
        self.calls: list[Call] = []
        self.paths = {id(module): _plain(path) for path, module in program.model.named_modules()}
        self.parameters = {id(p): _plain(name) for name, p in program.model.named_parameters()}
        self.busy = False

    def see(self, category: str, tensor: object, name: str = "", at: int | None = None) -> None:
        """A tensor at this moment; no tensor, or one on another device, is left out."""
        at = self.now() if at is None else at
        for address, _ in places(tensor, self.device):
            self.sightings.append(Sighting(at, address, category, name))

    def see_state(self) -> None:
        """Tensors that live between steps: the model's, gradients, the optimizer's, and those of step and feed."""
        program, at = self.program, self.now()
        for name, parameter in program.model.named_parameters():
            self.see("parameters", parameter, _plain(name), at)
            self.see("gradients", parameter.grad, _plain(name), at)
        for name, buffer in program.model.named_buffers():
            self.see("parameters", buffer, _plain(name), at)
        for optimizer in _optimizers(program):
            for owner, values in optimizer.state.items():
                of = self.parameters.get(id(owner), "")
                for key, value in values.items() if isinstance(values, dict) else ():
                    self.see("optimizer_state", value, f"{key} of {of}" if of else str(key), at)
            for group in optimizer.param_groups:
                self.see("optimizer_state", group.get("lr"), "lr", at)
        for key in ("_scale", "_growth_tracker"):
            self.see("optimizer_state", getattr(program.scaler, key, None), f"scaler{key}", at)
        for tensor in _within(program.feed):
            self.see("inputs", tensor, at=at)
        for root in (program.step, program.forward):
            for tensor in _within(root):
                self.see("static_buffers", tensor, at=at)

    def given(self, batch: Batch) -> Batch:
        """The same batch, seen."""
        for name, tensor in tensors_of(batch).items():
            self.see("inputs", tensor, f"batch[{name}]")
        return batch

    def returned(self, outputs: Outputs) -> Outputs:
        """The same outputs, seen."""
        for name, tensor in outputs.items():
            self.see("outputs", tensor, name)
        return outputs

    @contextmanager
    def watching(self, saved: bool) -> Iterator[None]:
        """Inside, gradients and calls of modules are seen, and tensors kept for backward where `saved`."""
        with ExitStack() as stack:
            for parameter in self.program.model.parameters():
                if parameter.requires_grad and parameter.is_leaf and not sparse.is_sparse(parameter):
                    handle = parameter.register_post_accumulate_grad_hook(self._accumulated)
                    stack.callback(handle.remove)
            if markable(self.program.model):
                stack.callback(self._follow_modules())
            if saved:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, _same))
            yield

    def _accumulated(self, parameter: Tensor) -> None:
        self.see("gradients", parameter.grad, self.parameters.get(id(parameter), ""))

    def _follow_modules(self) -> Callable[[], None]:
        begun: list[tuple[nn.Module, int]] = []

        def before(module: nn.Module, _: object) -> None:
            begun.append((module, self.now()))

        def after(module: nn.Module, *_: object) -> None:
            while begun:
                opened, at = begun.pop()
                self.calls.append(Call(at, self.now(), self.paths.get(id(opened), "")))
                if opened is module:
                    return

        modules = list(filter(takes_hooks, self.program.model.modules()))
        handles = [module.register_forward_pre_hook(before, prepend=True) for module in modules]
        handles += [module.register_forward_hook(after) for module in modules]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def _saved(self, tensor: Tensor) -> Tensor:
        """Autograd keeps a tensor: no tensor may be made here, as its memory would look like the program's."""
        if self.busy or torch.compiler.is_compiling():
            return tensor
        self.busy = True
        try:
            module, where, compiled = self._place(sys._getframe(1))
            name, shape = self._name(tensor), "×".join(map(str, tensor.shape)) or "scalar"
            dtype = str(tensor.dtype).removeprefix("torch.")
            at = self.now()
            for address, _ in places(tensor, self.device):
                seen = Sighting(at, address, "activations", name, module, where, shape, dtype, compiled)
                self.sightings.append(seen)
        finally:
            self.busy = False
        return tensor

    def _name(self, tensor: Tensor) -> str:
        """The operator that made it, or the parameter that it is a cast of; "" where autograd does not tell."""
        node = tensor.grad_fn
        if node is None:
            return ""
        first, made = node, _operator(node.name())
        while node is not None and node.name() in ON_THE_WAY:
            node = node.next_functions[0][0] if node.next_functions else None
        variable = getattr(node, "variable", None) if node is not None and node is not first else None
        of = self.parameters.get(id(variable), "") if variable is not None else ""
        return f"cast of {of}" if of else made

    def _place(self, frame: FrameType | None) -> tuple[str, str, bool]:
        """Path of the innermost module that is being called, line of the user's code, and whether that is compiled."""
        module: str | None = None
        frames = []
        while frame is not None:
            file = frame.f_code.co_filename
            frames.append((file, frame.f_lineno))
            if module is None and frame.f_code.co_name == CALL and file == module_file.__file__:
                module = self.paths.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return module or "", user_line(frames), any(COMPILED in file for file, _ in frames)


def places(tensor: object, device: torch.device) -> list[tuple[int, int]]:
    """Addresses and bytes of the memory that a tensor on `device` lies in; none without memory that is known."""
    if not isinstance(tensor, Tensor) or tensor.device.type != device.type:
        return []
    found = []
    for part in parts(tensor).values():
        try:
            storage = part.untyped_storage()
            found.append((storage.data_ptr(), storage.nbytes()))
        except (RuntimeError, NotImplementedError):  # of a subclass, or of a fake tensor
            continue
    return [(address, size) for address, size in found if address and size]


def owned(device: torch.device) -> dict[int, str]:
    """Addresses of all tensors that Python holds, with shape and dtype."""
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor) and item.layout is torch.strided:
            for address, _ in places(item, device):
                shape = "×".join(map(str, item.shape)) or "scalar"
                found[address] = f"{shape} {str(item.dtype).removeprefix('torch.')}"
    return found


def _optimizers(program: Program) -> list[torch.optim.Optimizer]:
    """The program's, or those that a user's own step may use."""
    if program.optimizer is not None:
        return [program.optimizer]
    if not program.own_step:
        return []
    return [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]


def _within(root: object) -> list[Tensor]:
    """Tensors that an object holds in its fields, plain containers and closures, without those of modules, optimizers
    and Python's modules. Containers of other kinds are not iterated: an iterator would move on."""
    found, waiting, met = [], [root], set[int]()
    while waiting and len(met) < MOST_OBJECTS:
        item = waiting.pop()
        kind = type(item)
        if id(item) in met or issubclass(kind, NOT_SEARCHED):
            continue
        met.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, FunctionType):
            waiting += [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        elif isinstance(item, MethodType):
            waiting.append(item.__self__)
        elif kind is dict:
            waiting += item.values()  # type: ignore[attr-defined]
        elif kind in (list, tuple, set, frozenset, deque):
            waiting += item  # type: ignore[arg-type]
        elif kind.__module__ not in ("builtins", "torch"):
            waiting += getattr(item, "__dict__", {}).values()
    return found


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _operator(node: str) -> str:
    """The operator's name in the name of its backward function: "NativeLayerNormBackward0" is native_layer_norm's."""
    bare = node.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()


def _plain(path: str) -> str:
    """A path in the model without the wrapper that torch.compile puts around it."""
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")


def _same(tensor: Tensor) -> Tensor:
    return tensor
