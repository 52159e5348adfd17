"""A script, run as `python script.py` runs it, in a thread that waits at the mark: what it has opened stays open."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import CellType, FrameType, FunctionType
from typing import Any

import torch

from optexp.errors import ConfigError
from optexp.python_state.variables import INSTALLED, contents
from optexp.support.marks import Mark, stopping_at
from optexp.user_code.before_turns import BeforeTurns
from optexp.user_code.block_batches import batch_names, read_by
from optexp.user_code.implied_parts import with_implied
from optexp.user_code.importing import spoken
from optexp.user_code.marked_loop import FACTORY, FUNCTION, INDEX, MarkedLoop, Span, marked_loop
from optexp.user_code.once_only import several_times

INTEGRATIONS = str(Path(__file__).parents[1] / "integrations")  # has marked loops itself
YIELD_FROM = (dis.opmap["GET_YIELD_FROM_ITER"], dis.opmap["SEND"])
LOOK_AHEAD = 16  # batches that are taken from a script without a loader


@dataclass(frozen=True)
class Ambient:
    """Modes that torch keeps for each thread, at the beginning of the loop."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def now(cls) -> Ambient:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        dtypes = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dtypes)

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same modes in this thread."""
        with ExitStack() as held:
            if self.inference:
                held.enter_context(torch.inference_mode())
            elif self.grad != torch.is_grad_enabled():
                held.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                held.enter_context(torch.autocast(kind, dtype))
            yield


@dataclass(frozen=True)
class Reached:
    """A script at its mark.

    function: the body, as a function of a list of batches, that returns its variables
    ambient:  modes of `with` blocks around the loop
    path:     of the file with the mark
    drawn:    batches of a mark without a loader
    held:     where those are what the loop learns, the values of the script, which a step finds a batch in
    inner:    the attribute of the mark's optimizer that holds the one which makes the update
    """

    mark: Mark
    loop: MarkedLoop
    function: FunctionType
    ambient: Ambient
    path: str
    drawn: Sequence[tuple[Any, ...]] = ()
    held: tuple[Any, ...] = ()
    inner: str | None = None

    @property
    def optimizer(self) -> Any:
        """torch's optimizer that makes the update: inside one of Accelerate's, Lightning's or the user's."""
        given = self.mark.optimizer
        found = getattr(given, self.inner or "optimizer", None)
        return found if isinstance(found, torch.optim.Optimizer) else given

    @property
    def unchanging(self) -> bool:
        """Whether all batches of a mark without a loader are the same."""
        return all(one is other for turn in self.drawn for one, other in zip(turn, self.drawn[0], strict=True))


def run(path: Path, arguments: Sequence[str]) -> Reached:
    """Run a script up to its mark.

    Args:
        arguments: Of the script.

    Raises:
        ConfigError: there is no such file, it ends before a mark, or the mark is at no loop.
        Exception: of the script.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file below {Path.cwd()}")
    script = _Script(path.resolve())
    sys.argv = [str(path), *arguments]
    if str(script.path.parent) not in sys.path:
        sys.path.insert(0, str(script.path.parent))
    with stopping_at(script.at_mark) as made, _no_signals(), several_times():
        script.start()
        script.stopped.wait()
    if isinstance(script.error, SystemExit):
        said = spoken(script.error)
        raise ConfigError(f"{path} ended by sys.exit before its mark{f': {said}' if said else ''}") from None
    if script.error is not None:
        raise script.error
    if script.reached is None and made:
        raise ConfigError(
            f"{made[0]} calls optexp.steps, and no loop went over what it returns: write it into the loop, as in"
            " `for batch in optexp.steps(loader, model=model, optimizer=optimizer):`"
        )
    if script.reached is None:
        raise ConfigError(
            f"{path} ran to its end and reached no mark: mark its loop, as in"
            " `for batch in optexp.steps(loader, model=model, optimizer=optimizer):`"
        )
    if script.before is not None:
        script.before.put_back()
        script.before = None  # copies of all that learns
    return script.reached


class _Script(threading.Thread):
    """The thread of one script; it ends with the process.

    seen:   what the marked block read at each of its turns
    before: what the script held at the first of them
    """

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True, name=path.name)
        self.path, self.stopped = path, threading.Event()
        self.seen: list[Mapping[str, Any]] = []
        self.before: BeforeTurns | None = None
        self.reached: Reached | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        except BaseException as error:
            self.error = error if self.reached is None else None
        self.stopped.set()

    def at_mark(self, mark: Mark, frame: FrameType) -> None:
        """Called in this thread at a mark; returns only where the script is to run on."""
        try:
            self.reached = self._found(mark, frame)
        except BaseException as error:  # the script must not catch it
            self.error = error
        if self.error is None and mark.source is None and len(self.seen) < LOOK_AHEAD:
            return
        self.stopped.set()
        threading.Event().wait()

    def _found(self, mark: Mark, frame: FrameType) -> Reached | None:
        while _passes_on(frame) and frame.f_back is not None:
            frame = frame.f_back
        path = frame.f_code.co_filename
        linecache.checkcache(path)
        loop = marked_loop(ast.parse("".join(linecache.getlines(path))), _span(frame), path)
        mark = with_implied(mark, frame, path, lambda: _function(loop, frame))
        if mark.source is not None:
            return Reached(mark, loop, _function(loop, frame), Ambient.now(), path)
        known = {**frame.f_globals, **frame.f_locals}
        self.seen.append(read_by(loop, _function(loop, frame), known, self.seen[-1] if self.seen else {}))
        if len(self.seen) == 1:
            self.before = BeforeTurns((mark.model, mark.optimizer, *known.values()))
            return None
        names, learned = batch_names(mark, loop, self.seen, known)
        if not names:
            raise ConfigError(
                f"{path}:{loop.line}: the marked block reads no variable with tensors that are its data:"
                " mark the loop over the batches, as in `for batch in optexp.steps(loader, model=model):`, or where the"
                " block makes its own data, the update alone, behind the lines that make it"
            )
        target = ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())
        seen_by_functions = [name for name in names if name not in (*loop.reads, *loop.shared)]
        loop = replace(loop, target=target, shared=(*loop.shared, *seen_by_functions))
        drawn = [tuple(seen[name] for name in names) for seen in self.seen]
        held = tuple(known[name] for name in names) if learned else ()
        return Reached(mark, loop, _function(loop, frame), Ambient.now(), path, drawn, held)


@contextmanager
def _no_signals() -> Iterator[None]:
    """Inside, handlers stay as they are: only a main thread may set them, and the script's runs in another."""
    before = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = before


# --- the frame at the mark ---------------------------------------------------------------------------------------


def _passes_on(frame: FrameType) -> bool:
    """Whether a frame is a progress bar's: a library's, or a generator's that gives the batches as they are."""
    path, code = frame.f_code.co_filename, frame.f_code
    installed = path.startswith(INSTALLED) and not path.startswith(INTEGRATIONS)
    if installed or not code.co_flags & inspect.CO_GENERATOR:
        return installed
    return code.co_code[frame.f_lasti] in YIELD_FROM or _gives_as_they_are(path, frame.f_lineno)


def _gives_as_they_are(path: str, line: int) -> bool:
    """Whether a generator's loop at a line yields what it goes over, and does nothing else but print."""
    loops = [node for node in ast.walk(ast.parse("".join(linecache.getlines(path)))) if isinstance(node, ast.For)]
    here = [loop for loop in loops if loop.lineno == line]
    given = {name.id for loop in here for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
    body = [ast.unparse(statement) for loop in here for statement in loop.body]
    yields = [text for text in body if text in {f"yield {name}" for name in given}]
    return len(yields) == 1 and all(text in yields or text.startswith("print(") for text in body)


def _span(frame: FrameType) -> Span:
    """The place in the source that a frame is at."""
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    line, last_line, column, last_column = (place or 0 for place in positions)
    return line, column, last_line, last_column


def _function(loop: MarkedLoop, frame: FrameType) -> FunctionType:
    """The body as a function over the script's own variables."""
    code, scope = frame.f_code, frame.f_globals
    at_top = frame.f_locals is scope
    own = set() if at_top else {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    held = [name for name in dict.fromkeys((*loop.reads, *loop.shared)) if name in own]
    values = dict(frame.f_locals)
    if loop.indexed:
        start = loop.first and compile(ast.Expression(loop.first), code.co_filename, "eval")
        values[INDEX] = eval(start, scope, values) if start else 0
        held += [INDEX] * (not at_top)
    if loop.indexed and at_top:
        scope[INDEX] = values[INDEX]
    made: dict[str, Any] = {}
    exec(compile(loop.source(held), code.co_filename, "exec"), made)
    inner = made[FACTORY](*held).__code__
    cells = _cells(values)
    closure = tuple(cells.get(name) or _cell(values, name) for name in inner.co_freevars)
    return FunctionType(inner, scope, FUNCTION, None, closure)


def _cell(values: Mapping[str, Any], name: str) -> CellType:
    return CellType(values[name]) if name in values else CellType()


def _cells(values: Mapping[str, Any]) -> dict[str, CellType]:
    """Cells of the frame's variables that functions beside the loop hold: they see what the body assigns."""
    found = {}
    for function in values.values():
        if isinstance(function, FunctionType):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if name in values and contents(cell) is values[name]:
                    found[name] = cell
    return found
