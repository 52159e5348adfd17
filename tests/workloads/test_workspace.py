"""Convolutions as products: the same numbers as torch's, in memory of their own."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace
from torch.fx.proxy import TraceError

from optexp.workloads.workspace import Unfolded, Workspace

CPU = torch.device("cpu")


def test_a_product_over_patches_is_a_convolution():
    layer, x = Unfolded(3), torch.randn(2, 3, 5, 6)
    with torch.no_grad():
        layer.bias.normal_()
        expected = F.conv2d(x, layer.weight.view(3, 3, 3, 3), layer.bias.flatten(), padding=1)
        torch.testing.assert_close(layer(x), expected)


def test_each_layer_keeps_its_workspace_until_shapes_change():
    workload = Workspace(layers=2).resolve("cpu")
    program = workload.build(CPU, torch.float32, seed=0)
    program.feed.reset([workload.batch(torch.Generator().manual_seed(0))])
    program.run()
    first, second = (program.model[i].workspace for i in (0, 2))
    assert first.shape == second.shape == (2, 8 * 9, 16 * 16)
    assert first.data_ptr() != second.data_ptr()
    program.run()
    assert program.model[0].workspace is first
    program.step(program, (torch.randn(1, 8, 4, 4),))
    assert program.model[0].workspace.shape == (1, 72, 16)


def test_what_is_kept_is_no_part_of_a_graph():
    model = Workspace(layers=1).resolve("cpu").model()
    with pytest.raises(TraceError):
        symbolic_trace(model)
    assert model(torch.randn(2, 8, 4, 4)).shape == (2, 8, 4, 4), "the attempt left no trace"
