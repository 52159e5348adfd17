"""Flame graph of the host: Python functions and operators by their callers, as collapsed stacks and as an SVG."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from optexp.profiling.intervals import Union
from optexp.profiling.operators import BACKWARD
from optexp.trace import Range, Trace

WIDTH, ROW, LETTER = 1200, 17, 6.6  # pixels
THINNEST = 0.4  # pixels: thinner boxes are left out of the picture
MOST_DEPTH = 120

_OURS = re.compile(r"(^|/)(optexp/(?!workloads/)|torch/(utils/_contextlib|overrides)\.py)")
_MARKS = re.compile(r"(^|/)(optexp/support/ranges|torch/autograd/profiler)\.py")  # and everything they call is hidden
_ADDRESS = re.compile(r" of \S+ object at 0x[0-9a-f]+| object at 0x[0-9a-f]+")
_NUMBERED = re.compile(r"^(nn\.Module: .*)_\d+$")


@dataclass
class Frame:
    """A function or an operator below its callers; µs over all steps.

    kind: "user", "torch" (its Python code), "operator" or "root"
    """

    name: str
    kind: str
    us: float = 0.0
    children: dict[str, Frame] = field(default_factory=dict)

    @property
    def self_us(self) -> float:
        return max(self.us - sum(child.us for child in self.children.values()), 0.0)

    def child(self, name: str, kind: str) -> Frame:
        return self.children.setdefault(name, Frame(name, kind))


def frames(trace: Trace) -> Frame | None:
    """The tree of host stacks, without frames of optexp; None where no Python frames were recorded."""
    if not trace.frames:
        return None
    root = Frame("step", "root", sum(step.duration for step in trace.steps))
    threads = defaultdict[object, list[tuple[Range, str]]](list)
    for call in trace.frames:
        threads[call.thread].append((call, _kind(call.name)))
    main = Counter(call.thread for call in trace.frames).most_common(1)[0][0]
    for op in trace.ops:
        threads[op.thread].append((Range(op.name, op.start, op.duration, op.thread), "operator"))
    for thread, calls in threads.items():
        _nest(root if thread == main else root.child(_thread_name(calls), "root"), calls, trace)
    for child in root.children.values():
        if child.kind == "root":  # a thread besides the main one: no single call spans it
            child.us = sum(call.us for call in child.children.values())
            root.us += child.us  # beside the steps, which the main thread spans
    return root


def _thread_name(calls: list[tuple[Range, str]]) -> str:
    return "autograd thread" if any(call.name.startswith(BACKWARD) for call, _ in calls) else "another thread"


@dataclass(frozen=True)
class _Open:
    """A call that has not ended.

    kind:  of the call: a kind of `Frame`; "ours" (optexp's own code) or "marks" are not shown
    frame: of the call, or of the nearest caller that is shown
    """

    end: float
    kind: str
    frame: Frame


def _nest(root: Frame, calls: list[tuple[Range, str]], trace: Trace) -> None:
    """Put calls below their callers. Time of optexp's own calls counts for the caller's frame."""
    stack: list[_Open] = []
    steps = Union(step.interval for step in trace.steps)
    for call, kind in sorted(calls, key=lambda item: (item[0].start, -item[0].duration)):
        while stack and stack[-1].end <= call.start:
            stack.pop()
        caller = stack[-1] if stack else _Open(0.0, "root", root)
        frame, name = caller.frame, _name(call.name)
        if caller.kind == "marks":
            kind = "marks"
        elif caller.kind == "ours" and name == frame.name:
            kind = frame.kind  # called by the wrapper that marks lines, under the same name: the two calls count once
        elif caller.kind == "ours" and name.startswith("<"):
            kind = "ours"
        elif kind not in ("ours", "marks") and steps.holds(call.start):
            frame = frame.child(name, kind)
            frame.us += call.duration
        stack.append(_Open(call.end, kind, frame))


def _kind(name: str) -> str:
    if _MARKS.search(name):
        return "marks"
    if _OURS.search(name):
        return "ours"
    return "torch" if name.startswith(("torch/", "<", "nn.Module")) or "/torch/" in name else "user"


def _name(name: str) -> str:
    return _NUMBERED.sub(r"\1", _ADDRESS.sub("", name)).removeprefix(BACKWARD)


def collapsed(root: Frame) -> str:
    """One stack with its own µs per line ("outer;inner 12"); flamegraph.pl and speedscope read it."""

    def written(frame: Frame, path: tuple[str, ...]) -> Iterator[str]:
        here = (*path, frame.name.replace(";", ",").replace("\n", " "))
        if (us := round(frame.self_us)) > 0:
            yield f"{';'.join(here)} {us}"
        for child in frame.children.values():
            yield from written(child, here)

    return "".join(f"{line}\n" for line in written(root, ()))


def svg(root: Frame, title: str) -> str:
    """A self-contained SVG: a box's width is its share of the host's time; a click on a box widens it."""
    boxes: list[str] = []
    deepest = _draw(root, 0.0, 0, root.us / WIDTH if root.us else 1.0, root.us, boxes)
    height = 60 + (deepest + 1) * ROW
    heading = f"{escape(title)}: host time by caller, under a profiler that records Python"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/><text class="title" x="10" y="22">{heading}</text>'
        f'<text class="legend" x="10" y="40">orange: your code, blue: torch and the interpreter, green: operators;'
        f" a click widens, a click on the lowest row goes back</text>"
        f'<g id="boxes" transform="translate(0,50)">{"".join(boxes)}</g>'
        f"<script><![CDATA[{_SCRIPT}]]></script></svg>\n"
    )


def _draw(frame: Frame, left: float, depth: int, us_a_pixel: float, whole: float, boxes: list[str]) -> int:
    """Add the boxes of a frame and its children to `boxes`; returns the deepest row."""
    width = frame.us / us_a_pixel
    if width < THINNEST or depth > MOST_DEPTH:
        return depth - 1
    name, share = escape(frame.name), f"{frame.us / whole:.1%}" if whole else ""
    letters = int((width - 6) / LETTER)
    text = escape(frame.name[:letters]) if letters > 2 else ""
    boxes.append(
        f'<g class="{frame.kind}" data-x="{left:.2f}" data-w="{width:.2f}" data-d="{depth}">'
        f"<title>{name}: {frame.us:.0f} µs ({share})</title>"
        f'<rect x="{left:.2f}" y="{depth * ROW}" width="{width:.2f}" height="{ROW - 1}"/>'
        f'<text x="{left + 3:.2f}" y="{depth * ROW + 12}">{text}</text></g>'
    )
    deepest, at = depth, left
    for child in sorted(frame.children.values(), key=lambda child: -child.us):
        deepest = max(deepest, _draw(child, at, depth + 1, us_a_pixel, whole, boxes))
        at += child.us / us_a_pixel
    return deepest


_STYLE = (
    "text{font:11px ui-monospace,monospace;fill:#222;pointer-events:none}"
    ".title{font:600 15px system-ui,sans-serif}.legend{font:12px system-ui,sans-serif;fill:#666}"
    "g[data-d]{cursor:pointer}.user rect{fill:#f5b26b}.torch rect{fill:#a9c7ea}.operator rect{fill:#9bd3a5}"
    ".root rect{fill:#d8d8d8}g[data-d]:hover rect{stroke:#222}"
)

_SCRIPT = f"""
const boxes=[...document.querySelectorAll("g[data-d]")];
const name=b=>b.querySelector("title").textContent.replace(/: \\d+ µs .*$/,"");
for(const box of boxes)box.onclick=()=>{{
  const x=+box.dataset.x,w=+box.dataset.w,d=+box.dataset.d;
  for(const b of boxes){{
    const bx=+b.dataset.x,bw=+b.dataset.w,above=+b.dataset.d<d;
    const shown=above?bx<=x+.01&&bx+bw>=x+w-.01:bx>=x-.01&&bx+bw<=x+w+.01;
    b.style.display=shown?"":"none";
    if(!shown)continue;
    const left=above?0:(bx-x)/w*{WIDTH},width=above?{WIDTH}:bw/w*{WIDTH};
    const[rect,text]=[b.querySelector("rect"),b.querySelector("text")];
    rect.setAttribute("x",left);rect.setAttribute("width",width);
    text.setAttribute("x",left+3);
    const letters=Math.floor((width-6)/{LETTER});
    text.textContent=letters>2?name(b).slice(0,letters):"";
  }}
}};
"""
