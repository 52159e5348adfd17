"""torch.compile's structured log (`TORCH_TRACE`) of this process, kept in a folder that `tlparse` reads.

Workers are forked from a process that has imported torch, so that the environment variable would come too late: the
same handler is attached through torch's logging. It records every compilation from then on, and nothing of steps that
compile nothing. Inductor writes its IR before and after fusion, and why it skips CUDA graphs, to other loggers, without
the graph's number: here they become artifacts of the same log.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch._logging import _internal, trace_structured

IR = {  # torch's loggers, by the name of the artifact
    "optexp_ir_before_fusion": "torch._inductor.debug.__ir_pre_fusion",
    "optexp_ir_after_fusion": "torch._inductor.debug.__ir_post_fusion",
}
SKIPS = "torch._inductor.cudagraph_utils.__cudagraphs"
SKIP = "optexp_cudagraph_skip"


def keep(folder: Path) -> None:
    """Write the structured log of everything that is compiled from now on into `folder`."""
    log = _internal.trace_log
    idle = _internal.LOG_TRACE_HANDLER
    if idle is not None and idle.root_dir is None:
        log.removeHandler(idle)  # torch's own without a folder, which would leave the list in the middle of a record
    handler = _internal.LazyTraceHandler(str(folder))
    handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
    log.addHandler(handler)
    for artifact, name in IR.items():
        _forward(name, artifact, logging.INFO)
    _forward(SKIPS, SKIP, logging.WARNING)


def overhead_s() -> float:
    """Seconds that structured logging has cost this process so far."""
    return float(sum(_internal.structured_logging_overhead.values()))


class _Forwarded(logging.Handler):
    """Records of another logger as artifacts of the structured log."""

    def __init__(self, artifact: str, level: int) -> None:
        super().__init__(level)
        self.artifact = artifact

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        metadata = {"name": self.artifact, "encoding": "string"}
        trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=lambda: text, expect_trace_id=False)


def _forward(name: str, artifact: str, level: int) -> None:
    """Forward what a logger of torch's says from `level` on; it says no more elsewhere than it did."""
    log = logging.getLogger(name)
    if not log.isEnabledFor(level) or level < logging.WARNING:
        log.propagate = False
    log.setLevel(min(level, log.level or level))
    log.addHandler(_Forwarded(artifact, level))
