"""A mark whose step makes none or several optimizer steps: what it marks instead, and where it belongs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from optexp.user_code.marked_loop import BACKWARD
from optexp.user_code.script_run import Reached

LOOPS = (ast.For, ast.While)


def misplaced(reached: Reached, steps: int) -> str:
    """Why a marked body is no training step.

    Args:
        steps: Optimizer steps that it made, not 1.
    """
    loop, every = reached.loop, reached.mark.every
    kind = "block" if reached.mark.source is None else "loop"
    place = f"{Path(reached.path).name}:{loop.line}"
    if steps == 0 and _conditional(loop.body):
        told = f"{every} turns make" if every > 1 else "one turn makes"
        return (
            f"{told} no optimizer step at the mark of {place}, where the step stands under a condition: let every="
            " say how many turns make one, and let a loop go on for any number of steps"
        )
    if steps == 0:
        return f"the {kind} of {place} makes no optimizer step: mark the training loop, or leave out optimizer="
    if every > 1:
        return (
            f"{every} turns of {place} make {steps} optimizer steps: every= is the number of turns that make one,"
            " where gradients accumulate"
        )
    told = f"one turn of {place} makes {steps} optimizer steps"
    inner = next(_inner_loops(loop.body), None)
    if inner is None:
        return f"{told}: mark the loop whose turn makes one"
    return f"{told}: the mark is on an outer loop; put it on the loop of line {inner.lineno}"


def _conditional(body: Sequence[ast.stmt]) -> bool:
    branches = (node for part in body for node in ast.walk(part) if isinstance(node, ast.If))
    return any(_calls(branch, ("step",)) for branch in branches)


def _inner_loops(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Loops that learn, and that hold no other such loop."""
    for part in body:
        for node in ast.walk(part):
            if isinstance(node, LOOPS) and _learns(node) and not any(map(_learns, _loops_inside(node))):
                yield node


def _loops_inside(loop: ast.For | ast.While) -> Iterator[ast.AST]:
    return (node for part in loop.body for node in ast.walk(part) if isinstance(node, LOOPS))


def _learns(node: ast.AST) -> bool:
    return _calls(node, (*BACKWARD, "step"))


def _calls(tree: ast.AST, methods: Sequence[str]) -> bool:
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Attribute) and function.attr in methods for function in called)
