"""Machine code for an H100, made without one: memory is accessed 16 bytes at a time, GEMMs run on tensor cores."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optexp.kernelkit.kernel import kernels

SCRIPT = Path(__file__).with_name("compile_without_a_gpu.py")
GEMMS = {"linear_gelu_forward", "layernorm_linear_forward", "float32_gemm"}

# Whose programs may have less than 16 bytes for each thread: of small tensors, so that more multiprocessors take part,
# and of large ones, where that may be quicker.
SMALL = {"add_forward", "gelu_forward", "gelu_backward", "relu_forward", "relu_backward", "relu_bias_scale_backward"}
SMALL |= {"relu_bias_scale_forward", "relu_bias_dropout_forward", "bias_gelu_forward"}
# Of these what adds sums up may begin at once, which itself lets nobody begin. In machine code PREEXIT lets the next
# kernel begin, and ACQBULK waits for the one before.
SUMMED = {"bias_gelu_backward", "relu_bias_scale_backward", "relu_bias_dropout_backward", "bias_gradient"}

NARROW = {8: "G.64", 4: "G"}  # how so many bytes are accessed at once


def bytes_of_a_thread(code: dict[str, Any]) -> int:
    """Of a tile of one operand."""
    elements = math.prod(constant for constant in code["constants"] if type(constant) is int)
    threads = 32 * code["options"].get("num_warps", 4)
    return elements * (4 if code["pointers"][0] == "*fp32" else 2) // threads


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
        made, order = code["instructions"], code["order"]
        if code["options"].get("launch_pdl"):
            assert set(order[: order.index("ACQBULK")]) <= {"PREEXIT"}, code
        if code["name"] in SUMMED:
            assert order[0] == "PREEXIT", code
        elif code["name"] == "column_sums":
            assert "PREEXIT" not in order, code
        if code["name"] in GEMMS:
            assert {"HGMMA", "UTMALDG"} <= made.keys(), code
        elif code["name"] == "column_sums":  # few columns a program: of half precision, less than 16 bytes a thread
            assert made.get("LDG.128"), code
        elif code["name"] == "bias_gradient":  # which writes sums alone
            assert made.get("LDG.128") or made.get("LDGSTS"), code
        elif code["name"] in SMALL and (narrow := NARROW.get(bytes_of_a_thread(code))):
            assert made.get(f"LD{narrow}"), code
            assert made.get(f"ST{narrow}"), code
        else:
            assert made.get("LDG.128") or made.get("LDGSTS"), code
            assert made.get("STG.128"), code
    assert not any(best.values()), best  # of each kernel there is a config that spills nothing
