"""An optimizer's part of a step, and the most that one kernel for all parameters can save of it."""

from __future__ import annotations

from optexp.profiling.bounds import Bound
from optexp.profiling.intervals import Union
from optexp.profiling.predicting import TRACED_US, Parts

UPDATE = "Optimizer.step"  # beginning of the name of torch's range around an update


def in_one_kernel(step: Parts) -> Bound | None:
    """The bound of a step whose update is one kernel without host time; None where the trace has no update."""
    host = on_host_us(step)
    if host is None:
        return None
    if step.on_gpu:
        text = f"an update takes no longer than its longest kernel, and the host no time for it ({step.share(host)})"
        return step.less(text, device=saved_us(step), waiting=host)
    saved = host - longest_operator_us(step)
    return step.less(f"an update takes no longer than its longest operator: less {step.share(saved)}", waiting=saved)


def spans(step: Parts) -> Union:
    """When the host was inside an optimizer's step."""
    return Union(span.interval for span in step.trace.annotations if span.name.startswith(UPDATE))


def on_host_us(step: Parts) -> float | None:
    """Host time of the updates per step; None where the trace has no update."""
    found = spans(step).total
    return found / len(step.trace.steps) if found else None


def least_on_host_us(step: Parts) -> float:
    """`on_host_us` minus the most that tracing may have added; 0 where the trace has no update."""
    inside = spans(step)
    operators = sum(inside.holds(op.start) for op in step.trace.ops) / len(step.trace.steps)
    return max((on_host_us(step) or 0.0) * step.scale - TRACED_US * operators, 0.0)


def saved_us(step: Parts) -> float:
    """Most device time that one kernel for all updates saves: it takes at least as long as the longest kernel now."""
    updates = [piece for piece in step.pieces if piece.account == "optimizer"]
    longest = max((piece.longest for piece in updates), default=0.0)
    return max(sum(piece.us for piece in updates) / len(step.trace.steps) - longest, 0.0)


def longest_operator_us(step: Parts) -> float:
    """µs of the longest operator in an update, on a CPU."""
    inside = spans(step)
    return max((op.self_us for op in step.trace.ops if inside.holds(op.start)), default=0.0)


def is_fused_when_captured(step: Parts) -> bool:
    """Whether graph capture may replace this update by a fused one: it does for SGD, and beside a GradScaler."""
    inside = spans(step)
    roots = any("sqrt" in op.name for op in step.trace.ops if inside.holds(op.start))  # Adam and relatives use roots
    return not roots or any("_amp_foreach" in op.name for op in step.trace.ops)
