"""All tables of one arm's trace, as a record holds them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from optexp.profiling.device_tables import api_calls, copies, launches
from optexp.profiling.operators import by_name, by_path, call_tree
from optexp.profiling.regions import phases, regions
from optexp.records.profile import ArmProfile
from optexp.records.ranges import Ranges
from optexp.trace import Trace

MOST_TOP = 10  # rows of the tables of kernels and operators without details
LIGHTEST = 0.005  # of a step: branches of the call tree with less time are left out
EVERY = 10**6


def tables(
    metrics: Mapping[str, float], trace: Trace, by_module: Trace | None = None, rows: int = EVERY, top: int = EVERY
) -> ArmProfile:
    """Tables of a trace.

    Args:
        metrics: Figures of the breakdown and of memory.
        by_module: The trace that has a range around each module's call; None where modules were not marked.
        rows, top: Most rows of each table; `top`: of the tables of kernels and operators with most time.
    """
    tree = call_tree(trace)
    return ArmProfile(
        dict(metrics),
        trace.top_kernels(top),
        trace.top_ops(top),
        by_name(trace)[:rows],
        by_path(by_module)[:rows] if by_module is not None else [],
        list(islice(tree.flattened(LIGHTEST * max(tree.host_us, tree.device_us)), rows)),
        api_calls(trace)[:rows],
        copies(trace),
        launches(trace)[:rows],
        ranges=Ranges(phases=phases(trace), regions=regions(trace)[:rows]),
    )
