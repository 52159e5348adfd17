"""Each ATen operator of a trace has its entry, with the function that computes it on a GPU."""

from __future__ import annotations

import pytest
import torch

from optexp.profiling.aten import entries, entry
from optexp.trace import Trace


@pytest.mark.parametrize(
    ("operator", "cuda"),
    [
        ("aten::gelu", "gelu_out_cuda"),  # delegated to its structured form
        ("aten::addmm", "addmm_out_cuda"),
        ("aten::native_layer_norm", "layer_norm_cuda"),
        ("aten::_softmax", "softmax_cuda_out"),
        ("aten::linear", ""),  # composed of others
    ],
)
def test_an_operator_has_its_entry(operator: str, cuda: str) -> None:
    found = entry(operator)
    assert found is not None
    assert found.cuda == cuda
    assert found.place.endswith(f"native_functions.yaml:{found.line}")
    assert found.schema.startswith("(Tensor ")


def test_an_entry_links_to_the_installed_version_and_to_its_cuda_source() -> None:
    found, composed = entry("aten::gelu"), entry("aten::linear")
    assert found is not None
    assert composed is not None
    version = torch.__version__.partition("+")[0]
    assert found.url.startswith(f"https://github.com/pytorch/pytorch/blob/v{version}/aten/src/ATen/native/")
    assert found.url.endswith(f"native_functions.yaml#L{found.line}")
    assert "gelu_out_cuda" in found.cuda_url
    assert composed.cuda_url == ""


def test_operators_of_other_libraries_have_none() -> None:
    assert entry("optexp::softmax") is None
    assert entry("aten::no_such_operator") is None
    assert entry("AddmmBackward0") is None


def test_the_file_is_read_whole() -> None:
    assert len(entries()) > 2000
    assert len({found.line for found in entries().values()}) == len(entries())


def test_every_aten_operator_of_a_trace_is_found(eager: Trace) -> None:
    names = {op.name for op in eager.ops if op.name.startswith("aten::")}
    assert names
    assert all(entry(name) for name in names)
