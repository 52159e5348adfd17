"""torch.compile's graph breaks, recompilations and skipped CUDA graphs in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from optexp.records.compiler import CompilerEvidence, GraphBreak, Recompile


def problems(found: CompilerEvidence) -> Iterator[tuple[str, str]]:
    """Obstacles to one graph that is compiled once: the place, and a sentence that names it."""
    for ended in found.breaks:
        yield ended.place, f"torch.compile: {broken(ended)}"
    for again in found.recompiles:
        if again.limited or again.times > 1:
            yield again.place or again.function, f"torch.compile: {recompiled(again)}"
    for skip in found.skips:
        yield skip.reason, f"torch.compile: {counted(skip.graphs, 'graph')} not replayed as a CUDA graph: {skip.reason}"


def broken(ended: GraphBreak) -> str:
    """A graph break in words."""
    if not ended.resumed:
        return f"function not compiled for a graph break at {ended.place} that cannot be resumed ({ended.cause})"
    often = f", in each of {ended.graphs} graphs" if ended.graphs > 1 else ""
    return f"graph break at {ended.place} ({ended.cause}){often}"


def recompiled(again: Recompile) -> str:
    """A recompilation in words."""
    where = f" ({again.place})" if again.place and again.place not in again.function else ""
    if not again.times:
        return f"{again.function} not compiled for another {again.varied}{where}: torch's limit is reached"
    limit = "; torch's limit is reached, and it runs uncompiled since" if again.limited else ""
    return f"{again.function} compiled anew {counted(again.times, 'time')}, for each {again.varied}{where}{limit}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
