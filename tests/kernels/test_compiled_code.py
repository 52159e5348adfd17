"""Machine code for an H100, made without one: memory is accessed 16 bytes at a time, products run on tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from optexp.kernel import kernels

SCRIPT = Path(__file__).with_name("compile_without_a_gpu.py")
PRODUCTS = {"linear_gelu_forward", "layernorm_linear_forward"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(kernels()))
def test_compiles_well(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(SCRIPT), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr
    variants = [json.loads(line) for line in done.stdout.splitlines()]
    assert variants
    best: dict[tuple[str, str], int] = {}
    for code in variants:
        kind = (code["name"], str(code["pointers"]))
        best[kind] = min(best.get(kind, code["spills"]), code["spills"])
        made = code["instructions"]
        if code["name"] in PRODUCTS:
            assert {"HGMMA", "UTMALDG"} <= made.keys(), code
        elif code["name"] == "column_sums":  # 16 columns a program: of half precision, less than 16 bytes a thread
            assert made.get("LDG.128"), code
        elif code["name"] == "relu_bias_scale_backward" and code["constants"][2:] in ([1, 16], [1, 32]):
            assert made.get("LDG"), code  # few rows' columns a program: fewer than its threads
        else:
            assert made.get("LDG.128") or made.get("LDGSTS"), code
            assert made.get("STG.128"), code
    assert not any(best.values()), best  # of each kernel there is a way that spills nothing
