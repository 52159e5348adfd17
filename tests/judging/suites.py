"""Small suites for tests, written as their authors write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SUM = """\
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x).sum(1)

def get_inputs():
    return [torch.randn(16, 256)]

def get_init_inputs():
    return []
"""
RIGHT = """\
from torch import nn

class ModelNew(nn.Module):
    def forward(self, x):
        return x.clamp(min=0).sum(1)
"""
WRONG = RIGHT.replace(".sum(1)", ".sum(1) * 1.001")
ONCE = RIGHT.replace("class", "KEPT = []\n\nclass").replace(
    "        return x.clamp(min=0).sum(1)",
    "        if not KEPT:\n            KEPT.append(x.clamp(min=0).sum(1))\n        return KEPT[0].clone()",
)
BY_ADDRESS = RIGHT.replace("class", "KEPT = {}\n\nclass").replace(
    "        return x.clamp(min=0).sum(1)",
    "        if x.data_ptr() not in KEPT:\n            KEPT[x.data_ptr()] = x.clamp(min=0).sum(1)\n"
    "        return KEPT[x.data_ptr()].clone()",
)
CRASHING = RIGHT.replace("        return", "        import os; os.kill(os.getpid(), 11)\n        return")
BROKEN = "import no_such_package\n\nclass ModelNew:\n    pass\n"

NORM = """\
import torch

def run(x, weight, residual, rows, eps):
    wide = x.to(torch.float32)
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    return norm[rows.long()].to(x.dtype), (wide + residual).sum(-1)


def rows_of(axes, device):
    return {"rows": torch.randint(axes["tokens"], (axes["half"],), device=device).int()}
"""
SOLVED = """\
import torch

from .parts.inner import normed

def solve(x, weight, residual, rows, eps, out, total):
    assert x.dtype is out.dtype is torch.bfloat16 and residual.dtype is total.dtype is torch.float32
    assert type(eps) is float
    wide = x.float()
    out.copy_(normed(wide, weight, eps)[rows.long()])
    total.copy_((wide + residual).sum(-1))
"""
INNER = """\
import torch

def normed(wide, weight, eps):
    return torch.nn.functional.rms_norm(wide, wide.shape[-1:], weight, eps)
"""


def files(folder: Path, **sources: str) -> Path:
    """Python files by name; a double underscore separates folders."""
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def definition(**changes: Any) -> dict[str, Any]:
    """A problem with two dtypes, an index, a number and an axis by an expression."""
    tensor = {
        "x": (["tokens", "hidden"], "bfloat16"),
        "weight": (["hidden"], "float32"),
        "residual": (["tokens", "hidden"], "float32"),
        "rows": (["half"], "int32"),
        "eps": (None, "float32"),
        "out": (["half", "hidden"], "bfloat16"),
        "total": (["tokens"], "float32"),
    }
    specs = {name: {"shape": shape, "dtype": dtype, "description": None} for name, (shape, dtype) in tensor.items()}
    inputs = {name: specs[name] for name in ("x", "weight", "residual", "rows", "eps")}
    axes = {
        "tokens": {"type": "var", "description": "of the batch"},
        "hidden": {"type": "const", "value": 64},
        "half": {"type": "expr", "expression": "tokens // 2"},
    }
    return {
        "name": "gathered_norm",
        "op_type": "rmsnorm",
        "axes": axes,
        "inputs": inputs,
        "outputs": {name: specs[name] for name in ("out", "total")},
        "reference": NORM,
        "custom_inputs_entrypoint": "rows_of",
        "hf_id": None,
        **changes,
    }


def case(tokens: int = 16, **changes: Any) -> dict[str, Any]:
    """A workload of it."""
    sources: dict[str, Any] = {name: {"type": "random"} for name in ("x", "weight", "residual")}
    sources |= {"rows": {"type": "custom"}, "eps": {"type": "scalar", "value": 1e-5}}
    return {"uuid": f"case-{tokens}", "axes": {"tokens": tokens}, "inputs": sources, **changes}


def solution(main: str = SOLVED, passes_outputs: bool = True, **spec: Any) -> dict[str, Any]:
    """A solution of it, in two files."""
    return {
        "name": "by_parts",
        "definition": "gathered_norm",
        "author": "somebody",
        "spec": {
            "languages": ["pytorch"],
            "target_hardware": ["LOCAL"],
            "entry_point": "main.py::solve",
            "destination_passing_style": passes_outputs,
            **spec,
        },
        "sources": [{"path": "main.py", "content": main}, {"path": "parts/inner.py", "content": INNER}],
    }


def problem_folder(folder: Path, *cases: dict[str, Any], **changes: Any) -> Path:
    """A problem as SOL-ExecBench writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "definition.json").write_text(json.dumps(definition(**changes)))
    (folder / "workload.jsonl").write_text("\n".join(json.dumps(one) for one in cases or (case(),)) + "\n")
    return folder


def trace_set(folder: Path, *cases: dict[str, Any], solutions: tuple[dict[str, Any], ...] = ()) -> Path:
    """The same as flashinfer-bench writes it."""
    name = definition()["name"]
    traced = [{"definition": name, "solution": None, "workload": one, "evaluation": None} for one in cases or (case(),)]
    contents = {
        f"definitions/rmsnorm/{name}.json": json.dumps(definition()),
        f"workloads/rmsnorm/{name}.jsonl": "\n".join(map(json.dumps, traced)),
        **{f"solutions/{name}/{one['name']}.json": json.dumps(one) for one in solutions},
    }
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return folder
