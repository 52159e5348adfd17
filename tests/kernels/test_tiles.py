"""Every config gives the same: pieces of any size; groups of rows with sums added up, or one program for all rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from optexp.kernelkit import elementwise
from optexp.kernelkit.elementwise import ALONE, BROAD, FEW, GROUPINGS, Grouping, sharing
from optexp.kernelkit.kernel import kernels
from optexp.kernels import layernorm_linear
from optexp.kernels._layernorm_gradients import backward_of_rows
from optexp.kernels.add import add
from optexp.kernels.bias_gelu import _backward as bias_gelu_gradients
from optexp.kernels.bias_gelu import bias_gelu, bias_gelu_backward, bias_gelu_forward
from optexp.kernels.gelu import gelu, gelu_forward
from optexp.kernels.relu import relu, relu_forward
from optexp.kernels.relu_bias_dropout import relu_bias_dropout
from optexp.kernels.relu_bias_scale import relu_bias_scale

SUMMED = {
    "bias_gelu": partial(bias_gelu, approximate="tanh"),
    "relu_bias_scale": partial(relu_bias_scale, scale=2.0),
    "relu_bias_dropout": partial(relu_bias_dropout, p=0.4),
}
ELEMENTWISE = {
    **SUMMED,
    "add": add,
    "relu": relu,
    "gelu": gelu,
    "gelu (tanh)": partial(gelu, approximate="tanh"),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(1)  # of dropout's mask
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    y = function(*leaves)
    return torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))


def choose(config: object, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """This of the configs, where it is one of them, else the first. Returns where all that are offered will stand."""
    offered: list[object] = []

    def fastest(what: str, key: object, configs: list[object], run: object, device: torch.device) -> object:
        offered.extend(configs)
        return config if config in configs else configs[0]

    monkeypatch.setattr(elementwise, "fastest", fastest)
    return offered


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(30, 70), (3, 1031)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_piece_gives_the_same(
    name: str, dtype: torch.dtype, shape: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout's mask, too, is a matter of the position alone. With bits and without."""
    torch.manual_seed(0)
    x, bias = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1], device=device).to(dtype)
    given = (x, x.roll(1, 0)) if name == "add" else (x, bias) if name in SUMMED else (x,)
    monkeypatch.setattr(elementwise, "multiprocessors", lambda device: 1)
    offered = choose(None, monkeypatch)
    ELEMENTWISE[name](*given)
    assert len(offered) >= 4
    found = []
    for many in (0, x.numel() + 1):
        monkeypatch.setattr("optexp.kernelkit.bitmask.BITS_FROM", many)
        for config in offered:
            choose(config, monkeypatch)
            dx, *_ = gradients(ELEMENTWISE[name], *given)
            torch.manual_seed(1)
            found.append((ELEMENTWISE[name](*given), dx))
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


MULTIPROCESSORS = 132


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Tensor], tuple[object, list[dict[str, Any]]]]:
    """The key of a race, and what each of its configs would launch, of an operation with results like a tensor."""
    launched: list[dict[str, Any]] = []
    keys: list[object] = []

    def fastest(what: str, key: object, configs: list[Any], run: Callable[[Any], None], device: torch.device) -> object:
        keys.append((what, key))
        for config in configs[1:]:
            run(config)
        return configs[0]  # which is run last

    monkeypatch.setattr(elementwise, "multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(elementwise, "fastest", fastest)
    monkeypatch.setattr(
        elementwise, "launch", lambda kernel, programs, *args, **how: launched.append({"programs": programs, **how})
    )

    def asked(form: str, x: Tensor) -> tuple[object, list[dict[str, Any]]]:
        launched.clear()
        keys.clear()
        result, bias = torch.empty_like(x), x[0]
        if form.startswith("gelu"):
            elementwise.over_vector(gelu_forward, result, x, TANH=form == "gelu tanh")
        elif form.startswith("relu"):
            elementwise.over_vector(relu_forward, result, x, bits=[result if form == "relu bits" else None])
        else:
            elementwise.over_tiles(bias_gelu_forward, result, x, bias, TANH=form == "bias_gelu tanh")
        (key,) = keys
        return key, [*launched[-1:], *launched[:-1]]

    return asked


def like(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


FORMS = ["gelu", "gelu tanh", "relu", "relu bits", "bias_gelu", "bias_gelu tanh"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [5, 70, 1024, 5000, 2**24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_two_configs_are_the_same_launch(form: str, columns: int, dtype: torch.dtype, races: Any) -> None:
    """And the first, which a graph captures, has 4 KiB, or a tile of 1024 elements, for four warps."""
    _, launched = races(form, like(max(1, 2**21 // columns), columns, dtype))
    assert len({tuple(how.items()) for how in launched}) == len(launched) >= (4 if columns < 2**24 else 3)
    assert launched[0]["num_warps"] == 4
    block, rows = launched[0]["BLOCK"], launched[0].get("ROWS")
    assert (block * dtype.itemsize == 4096) if rows is None else (block * rows == 1024)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_small_or_in_float64_has_one_way(form: str, races: Any) -> None:
    few = MULTIPROCESSORS * 1024
    assert len(races(form, like(1, few))[1]) == 1
    assert len(races(form, like(1, few + 1))[1]) > 1
    assert len(races(form, like(16, few, torch.float64))[1]) == 1
    assert races("gelu", like(1, few // 4))[1][0]["programs"] == MULTIPROCESSORS


def test_calls_share_a_race_where_they_launch_the_same(races: Any) -> None:
    tensors = [like(4000, 1024), like(4000, 1024, torch.float16), like(8000, 1024), like(4000, 1032)]
    keys = [races(form, x)[0] for form in FORMS for x in tensors[:3]] + [races("bias_gelu", tensors[3])[0]]
    assert len(set(keys)) == len(keys) == 19
    assert races("bias_gelu", like(4001, 1024))[0] in keys


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 21, 300])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("name", SUMMED)
def test_every_way_sums_the_same(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(rows, 70, device=device).to(dtypes[0]), torch.randn(70, device=device).to(dtypes[1])
    found = []
    monkeypatch.setattr(elementwise, "multiprocessors", lambda device: 2)  # so that programs go through many tiles
    for config in (*ALONE, *GROUPINGS, BROAD):
        choose(config, monkeypatch)
        found.append(gradients(SUMMED[name], x, bias))
    monkeypatch.setattr("optexp.kernelkit.bitmask.BITS_FROM", 0)
    for config in (*ALONE, *GROUPINGS, BROAD):
        choose(config, monkeypatch)
        found.append(gradients(SUMMED[name], x, bias))
    near = 4 * torch.finfo(dtypes[1]).eps
    for dx, dbias in found[1:]:
        assert torch.equal(dx, found[0][0])
        torch.testing.assert_close(dbias, found[0][1], rtol=near, atol=near * rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 21, 300])
def test_every_config_gives_a_gemm_s_bias_its_gradient(
    rows: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dy = torch.randn(rows, 70, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
    monkeypatch.setattr(elementwise, "multiprocessors", lambda device: 2)  # so that programs go through many tiles
    for config in (*ALONE, *GROUPINGS, BROAD):
        choose(config, monkeypatch)
        sums = elementwise.summed(layernorm_linear.bias_gradient, dtype, dy)
        torch.testing.assert_close(sums, dy.double().sum(0).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("results", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("groups", "columns"), [(1, 1), (3, 700), (70, 70), (129, 70), (528, 33), (132, 4097), (792, 1024)]
)
def test_groups_are_added_up(groups: int, columns: int, dtype: torch.dtype, results: int, device: str) -> None:
    sums = torch.randn(groups, results, columns, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(device)
    found = torch.full((results, columns + 32), 7.0, dtype=dtype, device=device)
    elementwise.add_up(sums, *(row[:columns] for row in found))
    near = 8 * groups**0.5 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[:, :columns], sums.double().sum(0).to(dtype), rtol=near, atol=near)
    assert (found[:, columns:] == 7).all()


@pytest.mark.gpu
def test_gradients_right_behind_each_other() -> None:
    """Each is launched while what adds up the sums of the one before still runs, and that while its gradient does."""
    x, dy = torch.randn(2, 2048, 1024, device="cuda").bfloat16()
    bias, weight = torch.randn(2, 1024, device="cuda").bfloat16()
    mean, scale = torch.randn(2048, device="cuda"), torch.ones(2048, device="cuda")

    def steps(between: Callable[[], None]) -> list[Tensor]:
        found, arrives = [], dy
        for _ in range(4):
            arrives, *sums = bias_gelu_gradients(arrives, x, bias, "tanh")
            between()
            arrives, *more = backward_of_rows(arrives, x, weight, mean, scale, 1024, dy.dtype)
            between()
            found += [arrives, *sums, *more]
        return found

    expected = steps(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps(lambda: None)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("name", ["relu", "relu_bias_scale", "relu_bias_dropout"])
def test_of_many_elements_a_bit_of_each_is_kept(
    name: str, bits: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for what is no number, too, the gradient is torch's."""
    monkeypatch.setattr("optexp.kernelkit.bitmask.BITS_FROM", 3 * 100 if bits else 3 * 100 + 1)
    x, bias = torch.randn(3, 100, device=device), torch.zeros(100, device=device)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    args = {"relu": (), "relu_bias_scale": (bias, 2.0), "relu_bias_dropout": (bias, 0.0)}[name]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        leaf = x.clone().requires_grad_()
        y = kernels()[name].function(leaf, *args)
    assert kept[0].dtype == (torch.int32 if bits else torch.float32)
    assert kept[0].numel() == (300 if not bits else 3 * 4 if args else 10)
    (ours,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    (theirs,) = torch.autograd.grad(kernels()[name].reference(leaf, *args), leaf, torch.ones_like(y))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


MORE: dict[str, tuple[Any, ...]] = {"relu": (), "relu_bias_scale": (2.0,), "relu_bias_dropout": (0.0,)}


class Layer(torch.nn.Module):
    """Of 40 columns."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function, self.more, self.bias = kernels()[name].function, MORE[name], torch.nn.Parameter(torch.zeros(40))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(*((x, self.bias, *self.more) if self.more else (x,)))
        return y


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_a_size_that_is_not_known_stays_unknown(name: str, strict: bool) -> None:
    shapes = {"x": {0: torch.export.Dim("rows")}}
    exported = torch.export.export(Layer(name), (torch.randn(8, 40),), dynamic_shapes=shapes, strict=strict)
    x = torch.randn(9, 40)
    torch.testing.assert_close(exported.module()(x), torch.relu(x) * (2 if name == "relu_bias_scale" else 1))
    compiled = torch.compile(Layer(name), backend="aot_eager", fullgraph=True)
    torch._dynamo.decorators.mark_unbacked(x.requires_grad_(), 0)
    compiled(x).sum().backward()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_compiled_code_keeps_bits_only_for_gradients(name: str, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optexp.kernelkit.bitmask.BITS_FROM", 0)
    said: list[object] = []

    def watch(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        said.extend(node.args[-1] for node in graph.graph.nodes if str(node.target).startswith("optexp."))
        return graph.forward

    with torch.set_grad_enabled(learns):
        torch.compile(Layer(name), backend=watch, fullgraph=True)(torch.randn(4, 40, requires_grad=True))
    assert said == [learns]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", MORE)
def test_of_bits_a_gradient_does_not_depend_on_x(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dropout's, of its mask, does not; of x as it is torch has zeros, and so have we."""
    x = torch.randn(4, 40, requires_grad=True)
    for limit in (0, 10**6):
        monkeypatch.setattr("optexp.kernelkit.bitmask.BITS_FROM", limit)
        (gradient,) = torch.autograd.grad(Layer(name)(x).sum(), x, create_graph=True)
        assert gradient.requires_grad == (limit > 0)
        if limit:
            assert not torch.autograd.grad(gradient.square().sum(), x)[0].any()


@pytest.mark.parametrize(
    ("number", "most", "fewest", "expected"),
    [
        pytest.param(8192, 264, 132, 256, id="32 turns, as 264 would take"),
        pytest.param(4096, 132, 132, 132, id="128 would do, and four multiprocessors idle"),
        pytest.param(5, 132, 132, 5, id="a tile each"),
        pytest.param(0, 132, 132, 1, id="nothing to do, and sums of it to write"),
        pytest.param(100, 1, 1, 1, id="alone"),
    ],
)
def test_no_more_programs_share_tiles_than_it_takes(number: int, most: int, fewest: int, expected: int) -> None:
    assert sharing(number, most, fewest) == expected


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [1, FEW, FEW + 1])
def test_few_rows_are_summed_in_one_launch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the first config, for that is what a graph captures."""
    offered = []
    monkeypatch.setattr(
        elementwise, "fastest", lambda what, key, configs, run, on: offered.append(configs[0]) or configs[0]
    )
    added = []
    monkeypatch.setattr(elementwise, "add_up", lambda *sums: added.append(sums))
    monkeypatch.setattr(elementwise, "multiprocessors", lambda device: 132)
    gradients(SUMMED["bias_gelu"], torch.randn(rows, 16), torch.randn(16))
    assert (offered[1:] == ALONE[:1]) == (rows <= FEW)  # after the forward pass, which has its own
    assert (added == []) == (rows <= FEW)


def test_offsets_within_a_tile_fit_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows that are very wide, groups of some are summed: a tile of all would reach too far."""
    offered, reached = [], []
    monkeypatch.setattr(
        elementwise, "fastest", lambda what, key, configs, run, on: offered.append(configs) or configs[0]
    )
    monkeypatch.setattr(elementwise, "launch", lambda *args, **how: reached.append(how.get("ROWS", 1) * columns))
    for columns in (2**24 - 1, 2**24, 2**30):
        wide = torch.empty(1, dtype=torch.bfloat16).expand(FEW, columns)
        with torch.device("meta"):
            result = torch.empty(FEW, columns, dtype=wide.dtype)
            elementwise.over_columns(bias_gelu_backward, result, torch.float32, wide, TANH=True)
    assert [configs[0] == ALONE[0] for configs in offered] == [True, False, False]
    assert max(reached) < 2**31


@pytest.mark.parametrize(
    ("columns", "config", "programs"),
    [
        pytest.param(1024, Grouping(8192, 1, 4), 132, id="one each"),
        pytest.param(8192, Grouping(8192, 2, 4), 264, id="two each"),
        pytest.param(50257, Grouping(4096, 2, 4), 250, id="5 groups of 50 column blocks, and not 4"),
        pytest.param(151936, BROAD, 745, id="more column blocks than multiprocessors"),
    ],
)
def test_every_multiprocessor_has_work(
    columns: int, config: Grouping, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr(elementwise, "fastest", lambda what, key, configs, run, on: run(config) or config)
    monkeypatch.setattr(elementwise, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(elementwise, "launch", lambda kernel, programs, *args, **how: launched.append(programs))
    monkeypatch.setattr(elementwise, "add_up", lambda *sums: None)
    result = torch.empty(16384, columns, dtype=torch.bfloat16, device="meta")
    elementwise.over_columns(bias_gelu_backward, result, torch.float32, result, TANH=True)
    assert launched[0] == programs


@pytest.mark.parametrize(("rows", "columns", "alone"), [(1, 2**31 - 1, True), (1, 2**31, False), (FEW + 1, 16, False)])
def test_a_program_s_number_is_its_column_block_where_32_bits_count_columns(
    rows: int, columns: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(elementwise, "fastest", lambda what, key, configs, run, on: configs[0])
    monkeypatch.setattr(elementwise, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(elementwise, "launch", lambda *args, **how: found.append(how))
    result = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    elementwise.over_columns(bias_gelu_backward, result, torch.float32, result, TANH=True)
    assert found[0]["ALONE"] is alone
