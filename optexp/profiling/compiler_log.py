"""torch.compile's structured log (`TORCH_TRACE`), read: graphs by stage, graph breaks, recompiles, CUDA graph skips.

A record of the log is a JSON line that names its kind, and a payload: lines that begin with a tab. Torch 2.11 and
2.13 write the same kinds. `optexp.kernelkit.structured_log` adds the IR and the skips.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optexp.kernelkit.dynamo_words import cause, guard, last_frame, place, varied
from optexp.profiling import compiled_text as text
from optexp.records.compiler import CompiledGraph, CompilerEvidence, CudaGraphSkip, GraphBreak, Recompile

STAGES = {  # file names, in the order of compilation
    "captured": "captured.py",
    "transformed": "transformed.py",
    "ir_before": "ir_before_fusion.txt",
    "ir_after": "ir_after_fusion.txt",
    "generated": "generated.py",
}
_HEADER = re.compile(r"^V\d{4} [\d:.]+ \d+ \S+\] (\{.*)$")
_IGNORED = ('{"chromium_event"', '{"describe_', '{"str"')
_ARTIFACTS = {"inductor_post_grad_graph": "transformed", "optexp_ir_before_fusion": "ir_before",
              "optexp_ir_after_fusion": "ir_after"}  # fmt: skip
_KINDS = {
    "dynamo_output_graph": "captured",
    "inductor_post_grad_graph": "transformed",
    "inductor_output_code": "generated",
}
_AOT = {"aot_forward_graph": "forward", "aot_backward_graph": "backward", "aot_inference_graph": "inference"}
_BREAK = re.compile(
    r"Graph break in user code at (.+):(\d+)\nGraph Break Reason: (.*?)(?:\nUser code traceback:|\Z)", re.DOTALL
)
_WRAPPED = re.compile(r"^(?:Encountered graph break when|Failed to handle graph break gracefully).*?\n\n", re.DOTALL)
_TORCH_OWN = "(external_utils.py:"
_IN_TORCH = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch[/\\]")  # in a path
_UNRESUMED = "Failed to handle graph break gracefully"


@dataclass(frozen=True)
class Event:
    """A record of the log.  compile_id: "0/1", "" where it belongs to no compilation"""

    kind: str
    metadata: Any
    compile_id: str
    payload: str


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Records of a log, without records of times and of tensors' storages."""
    head: dict[str, Any] | None = None
    body: list[str] = []
    for line in lines:
        if line.startswith("\t"):
            if head is not None:
                body.append(line[1:])
            continue
        if head is not None:
            yield _event(head, "".join(body))
        head, body = None, []
        found = _HEADER.match(line)
        if found and not found[1].startswith(_IGNORED):
            try:
                head = json.loads(found[1])
            except ValueError:
                continue  # cut off: the process was killed
    if head is not None:
        yield _event(head, "".join(body))


def _event(head: Mapping[str, Any], payload: str) -> Event:
    kind, metadata = next(iter(head.items()))
    numbers = head.get("frame_id"), head.get("frame_compile_id")
    compile_id = "" if None in numbers else f"{numbers[0]}/{numbers[1]}"
    if kind == "artifact":
        kind = f"artifact:{metadata['name']}"
    return Event(kind, metadata, compile_id, payload.rstrip("\n"))


@dataclass
class Section:
    """Texts of one graph and direction, by stage.  cached: Inductor's cache had the result, so it did not run"""

    compile_id: str
    direction: str
    texts: dict[str, str] = field(default_factory=dict)
    cached: bool = False


@dataclass
class CompilerLog:
    """The content of a log: graphs with their texts, and the facts of each compilation."""

    sections: list[Section] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    functions: dict[str, str] = field(default_factory=dict)

    def evidence(self, folder: str = "", log: str = "") -> CompilerEvidence:
        """The log as evidence for a record.  folder: the folder of `write`, as the record names it"""
        graphs = [
            replace(graph_of(section, self.functions.get(section.compile_id, "")), files=self._files(section, folder))
            for section in self.sections
        ]
        skips = [CudaGraphSkip(reason, count) for reason, count in self.skips.items()]
        return CompilerEvidence(graphs, self.breaks, self.recompiles, skips, log=log)

    def write(self, folder: Path) -> None:
        """Each stage of each graph as a text file of its own."""
        for section in self.sections:
            place_ = folder / _name(section)
            place_.mkdir(parents=True, exist_ok=True)
            for stage, content in section.texts.items():
                (place_ / STAGES[stage]).write_text(content + "\n")

    def _files(self, section: Section, folder: str) -> dict[str, str]:
        return {s: f"{folder}/{_name(section)}/{STAGES[s]}" for s in STAGES if s in section.texts} if folder else {}


def _name(section: Section) -> str:
    return f"{section.compile_id.replace('/', '_')}-{section.direction}"


def read(folder: Path) -> CompilerLog:
    """All logs of a folder: one for each process that compiled; empty where there is none."""
    found = CompilerLog()
    for path in sorted(folder.glob("*.log")):
        with path.open(errors="replace") as lines:
            parse(events(lines), found)
    return found


def parse(found_events: Iterable[Event], log: CompilerLog | None = None) -> CompilerLog:
    """The graphs and facts of a log, added to `log` if one is given."""
    log = log or CompilerLog()
    parser = _Parser(log)
    for event in found_events:
        if not parser.take_graph(event):
            parser.take_fact(event)
    parser.finish()
    return log


@dataclass
class _Parser:
    """Adds a log's events to `log`; what belongs to one compilation waits here under its compile ID.

    captured: Dynamo's graph
    aot:      AOTAutograd's graphs, by direction
    waiting:  texts by stage, until generated code names their direction
    compiled: compilations that succeeded
    inside:   graph breaks at lines of torch's; foreign: compilations of torch's own functions, as an optimizer's step
    """

    log: CompilerLog
    captured: dict[str, str] = field(default_factory=dict)
    aot: dict[str, dict[str, str]] = field(default_factory=dict)
    waiting: dict[str, dict[str, str]] = field(default_factory=dict)
    breaks: list[tuple[str, GraphBreak]] = field(default_factory=list)
    recompile_reasons: dict[str, list[str]] = field(default_factory=dict)
    compiled: set[str] = field(default_factory=set)
    inside: list[tuple[str, GraphBreak]] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)

    def take_graph(self, event: Event) -> bool:
        """Take the text of a graph; False for another event."""
        compile_id, payload = event.compile_id, event.payload
        if event.kind in _AOT:
            self.aot.setdefault(compile_id, {})[_AOT[event.kind]] = payload
            return True
        artifact = event.kind.removeprefix("artifact:")
        stage = _KINDS.get(event.kind) if artifact == event.kind else _ARTIFACTS.get(artifact)
        if stage == "captured":
            self.captured[compile_id] = payload
        elif stage == "generated":
            texts = {**self.waiting.pop(compile_id, {}), "generated": payload}
            self.log.sections.append(_finished(compile_id, texts, self.captured, self.aot.get(compile_id, {})))
        elif stage is not None:
            self.waiting.setdefault(compile_id, {})[stage] = payload
        return stage is not None

    def take_fact(self, event: Event) -> None:
        """Take a fact about a compilation; ignore an event of another kind."""
        name = event.kind.removeprefix("artifact:")
        if name == "dynamo_graph_break_reason":
            if found := _graph_break(event.payload):
                torchs = _IN_TORCH.search(event.payload.partition("\n")[0])
                (self.inside if torchs else self.breaks).append((event.compile_id, found))
        elif name == "recompile_reasons":
            self.recompile_reasons[event.compile_id] = _list(event.payload)
        elif name == "optexp_cudagraph_skip":
            if "skip" in event.payload.lower():
                self.log.skips[event.payload.strip().partition("\n")[0]] += 1
        elif name == "fx_graph_cache_hit" and self.log.sections:
            self.log.sections[-1].cached = True
        elif event.kind == "compilation_metrics":
            _measured(event, self.log.functions, self.compiled)
            if _IN_TORCH.search(event.metadata.get("co_filename") or ""):
                self.foreign.add(event.compile_id)

    def finish(self) -> None:
        """Add to the log the facts that need all events."""
        log = self.log
        finished = {section.compile_id for section in log.sections}
        for compile_id in self.captured:
            if compile_id not in finished:  # its back end generates no code
                texts = self.aot.get(compile_id) or {"inference": ""}
                log.sections += [_plain(compile_id, direction, self.captured, texts) for direction in texts]
        for compile_id, function in log.functions.items():
            if _TORCH_OWN in function and (called := text.targets(self.captured.get(compile_id, ""))):
                log.functions[compile_id] = called[0]  # a library's function inside one of torch's wrappers
        met = [(compile_id, ended) for compile_id, ended in self.inside if compile_id not in self.foreign]
        log.breaks += _merged_breaks([*self.breaks, *met])  # a user can change neither line where both are torch's
        log.recompiles += _merged_recompiles(self.recompile_reasons, log.functions, self.compiled)


def _finished(compile_id: str, texts: dict[str, str], captured: Mapping[str, str], aot: Mapping[str, str]) -> Section:
    named = text.DIRECTION.search(texts["generated"])
    direction = named[1] if named else "inference"
    first = aot.get("backward") if direction == "backward" else captured.get(compile_id)
    ordered = {"captured": first, **texts} if first else texts
    return Section(compile_id, direction, {stage: ordered[stage] for stage in STAGES if stage in ordered})


def _plain(compile_id: str, direction: str, captured: Mapping[str, str], aot: Mapping[str, str]) -> Section:
    texts = {} if direction == "backward" else {"captured": captured[compile_id]}
    if aot[direction]:
        texts["transformed"] = aot[direction]
    return Section(compile_id, direction, texts)


def _list(payload: str) -> list[str]:
    """Reasons of a recompilation: one as text, several as a list in JSON."""
    try:
        decoded = json.loads(payload) if payload.startswith("[") else payload
    except ValueError:
        decoded = payload
    return [str(reason) for reason in decoded] if isinstance(decoded, list) else [decoded]


def _graph_break(payload: str) -> GraphBreak | None:
    found = _BREAK.search(payload)
    if not found:
        return None
    why = _WRAPPED.sub("", found[3], count=1)
    frames = re.findall(r'File "(.+?)", line (\d+), in .*\n\s+(\S.*)', payload.partition("User code traceback:")[2])
    code = next((line for file, number, line in frames if (file, number) == (found[1], found[2])), "")
    return GraphBreak(place(found[1], found[2]), cause(why), 1, _UNRESUMED not in found[3], code.strip())


def _measured(event: Event, functions: dict[str, str], compiled: set[str]) -> None:
    """The function of a compilation, and whether it succeeded."""
    metrics = event.metadata
    if metrics.get("co_filename"):
        name = re.sub(r"^torch_dynamo_resume_in_(.+)_at_(\d+)$", r"\1, from line \2 on", metrics["co_name"] or "")
        where = place(metrics["co_filename"], metrics["co_firstlineno"])
        functions[event.compile_id] = name if ", from line" in name else f"{name} ({where})"
        if ", from line" in name:
            functions[event.compile_id] = f"{name} ({place(metrics['co_filename'], '').rstrip(':')})"
    if not metrics.get("fail_reason"):
        compiled.add(event.compile_id)


def _merged_breaks(broken: Iterable[tuple[str, GraphBreak]]) -> list[GraphBreak]:
    """One entry for each line and cause, with the number of graphs that ended there."""
    graphs = dict[tuple[str, str], set[str]]()
    first = dict[tuple[str, str], GraphBreak]()
    for compile_id, ended in broken:
        key = ended.place, ended.cause
        known = first.setdefault(key, ended)
        if ended.resumed and not known.resumed:
            first[key] = ended
        graphs.setdefault(key, set()).add(compile_id)
    return [replace(ended, graphs=len(graphs[key])) for key, ended in first.items()]


def _merged_recompiles(
    reasons: Mapping[str, list[str]], functions: Mapping[str, str], compiled: set[str]
) -> list[Recompile]:
    """One entry for each function and varying value; the first reason of a recompilation is about the last variant."""
    merged = dict[tuple[str, str], Recompile]()
    for compile_id, listed in reasons.items():
        first = listed[0]
        function = functions.get(compile_id) or functions.get(f"{compile_id.partition('/')[0]}/0", "")
        key = function, varied(first)
        known = merged.get(key) or Recompile(function, key[1], last_frame(first), times=0)
        failed = guard(first)
        merged[key] = replace(
            known,
            times=known.times + (compile_id in compiled),
            guards=[*known.guards, *([failed] if failed not in known.guards else [])],
            limited=known.limited or compile_id not in compiled,
        )
    return list(merged.values())


def graph_of(section: Section, function: str) -> CompiledGraph:
    """Counts of one graph, from its texts."""
    texts = section.texts
    transformed, generated = texts.get("transformed", ""), texts.get("generated", "")
    inputs = text.tensor_bytes(transformed)
    kernels, library_calls = text.launches(generated) if generated else (None, None)
    before, after = texts.get("ir_before"), texts.get("ir_after")
    return CompiledGraph(
        section.compile_id,
        section.direction,
        function,
        captured_ops=text.captured_ops(texts["captured"]) if "captured" in texts else None,
        aten_ops=text.aten_ops(transformed) if transformed else None,
        ir_before=len(text.ir_nodes(before)) if before else None,
        ir_after=len(text.ir_nodes(after)) if after else None,
        kernels=kernels,
        library_calls=library_calls,
        bytes_unfused=text.bytes_unfused(transformed) if transformed else None,
        bytes_before=text.ir_bytes(before, inputs) if before else None,
        bytes_after=text.ir_bytes(after, inputs) if after else None,
        cached=section.cached,
    )
