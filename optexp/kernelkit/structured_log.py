"""torch.compile's structured log (`TORCH_TRACE`) of this process, kept in a folder that `tlparse` reads.

Workers are forked from a process that has imported torch, when the environment variable comes too late: the same
handler is attached through torch's logging. It records every later compilation; steps without compilation write
nothing. Inductor logs its IR before and after fusion, and its reasons for skipping CUDA graphs, to other loggers: here
they become artifacts of the same log. Code from Inductor's cache has no IR, so the IR is stored beside the cached code.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path

from torch._guards import CompileContext
from torch._logging import _internal
from torch._logging._internal import trace_structured

IR = {  # torch's loggers, by the name of the artifact
    "optexp_ir_before_fusion": "torch._inductor.debug.__ir_pre_fusion",
    "optexp_ir_after_fusion": "torch._inductor.debug.__ir_post_fusion",
}
SKIPS = "torch._inductor.cudagraph_utils.__cudagraphs"
SKIP = "optexp_cudagraph_skip"
BESIDE = ".optexp_ir.json"  # suffix of the file beside Inductor's generated code


def keep(folder: Path) -> None:
    """Write the structured log of all later compilations into `folder`."""
    log = _internal.trace_log
    idle = _internal.LOG_TRACE_HANDLER
    if idle is not None and idle.root_dir is None:
        log.removeHandler(idle)  # torch's own without a folder, which would leave the list in the middle of a record
    handler = _internal.LazyTraceHandler(str(folder))
    handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
    ir = _KeptIR()
    log.addHandler(ir)  # before the file's handler, so that cached IR precedes its code in the file
    log.addHandler(handler)
    for artifact, name in IR.items():
        _forward(name, _Forwarded(artifact, logging.INFO, ir))
    _forward(SKIPS, _Forwarded(SKIP, logging.WARNING))


def overhead_s() -> float:
    """Seconds that structured logging has taken in this process so far."""
    return float(sum(_internal.structured_logging_overhead.values()))


def _artifact(name: str, text: str) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


class _KeptIR(logging.Handler):
    """Stores the IR of generated code beside the code, and reads it when the code comes from Inductor's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[object, dict[str, str]] = {}  # by the id of the compilation

    def add(self, artifact: str, text: str) -> None:
        self.waiting.setdefault(CompileContext.current_compile_id(), {})[artifact] = text

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", {})
        code = metadata.get("inductor_output_code")
        if not isinstance(code, dict) or not code.get("filename"):
            return
        beside = Path(code["filename"]).with_suffix(BESIDE)
        with suppress(OSError, ValueError):  # without a usable cache, the IR is missing
            if texts := self.waiting.pop(CompileContext.current_compile_id(), {}):
                beside.write_text(json.dumps(texts))
            elif beside.is_file():
                for artifact, text in json.loads(beside.read_text()).items():
                    _artifact(artifact, text)


class _Forwarded(logging.Handler):
    """Records of another logger as artifacts of the structured log."""

    def __init__(self, artifact: str, level: int, ir: _KeptIR | None = None) -> None:
        super().__init__(level)
        self.artifact, self.ir = artifact, ir

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        _artifact(self.artifact, text)
        if self.ir is not None:
            self.ir.add(self.artifact, text)


def _forward(name: str, handler: _Forwarded) -> None:
    """Forward a logger's records from the handler's level on; records below a warning go nowhere else."""
    log = logging.getLogger(name)
    if handler.level < logging.WARNING:
        log.propagate = False
    if not log.isEnabledFor(handler.level):
        log.setLevel(handler.level)
    log.addHandler(handler)
