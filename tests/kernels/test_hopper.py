"""The GEMM in CUDA C++ that only Hopper runs: right at every edge, whatever the mean, and the same in every run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optexp.equivalence.gates import Limits, Yardstick, measure
from optexp.equivalence.tensor_math import error, name_of, rms
from optexp.kernelkit import extension, hopper
from optexp.kernels import layernorm_linear, linear_gelu
from optexp.support.tolerances import TOLERANCES
from tests.kernels.golden import exact

CUDA = torch.device("cuda", 0)
SHAPES = [
    (128, 256, 64),  # one tile, one step
    (1, 8, 8),
    (37, 88, 72),
    (257, 264, 520),
    (1000, 1032, 192),
    (300, 512, 2048),
    (128 * 140, 264, 64),  # more tiles than multiprocessors, of one step
    (128 * 140, 256, 128),  # more tiles than multiprocessors, of steps that all fit into the ring, and fewer than parts
    (4100, 2056, 1032),  # and of more steps than parts
    (128 * 140, 1000, 192),  # more tiles of the first columns than multiprocessors, and others of the same rows
    (300, 4096, 64),  # many tiles of the same rows at once
]
FEW = [
    (1, 8, 8),
    (32, 128, 512),
    (65, 136, 520),  # more than a tile each way, and more columns for one block than for the other
    (37, 88, 768),
    (128, 1024, 1024),
    (130, 1032, 1032),
    (3, 40, 1544),
    (200, 264, 2048),
]
RUNS = 20  # a race shows now and then


@pytest.fixture(autouse=True)
def _hopper(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not hopper.takes(
        linear_gelu.HOPPER_GEMM, torch.empty(8, 8, device=CUDA)
    ):
        pytest.skip("needs a Hopper GPU and a CUDA compiler")


@pytest.fixture
def normal():
    generator = torch.Generator(CUDA).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=CUDA).to(dtype)

    return normal


def normed(x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5), weight, bias)


BOTH = [partial(layernorm_linear.by_hopper, apart=apart) for apart in (True, False)]


def check_norm(*args: Tensor | None) -> None:
    """Whoever sums rows."""
    for by in BOTH:
        check_by(by, *args)


def check_by(by: Callable[..., Tensor], *args: Tensor | None) -> None:
    """As accurate as the norm and the GEMM one after the other, and the same bits in every run."""
    first = by(*args, 1e-5)
    golden = normed(*(None if arg is None else arg.double() for arg in args))
    scale = rms(golden)
    theirs, ours = (error(y, golden, scale) for y in (normed(*args), first))
    yardstick = Yardstick(theirs.rms, theirs.peak)
    finding = measure("output", ours, scale, yardstick, yardstick, Limits(TOLERANCES[name_of(first.dtype)]))
    assert finding.ok, finding.message
    assert all(torch.equal(by(*args, 1e-5), first) for _ in range(RUNS))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), FEW)
def test_the_norm_of_few_rows_before_it(m: int, n: int, k: int, dtype: torch.dtype, normal) -> None:
    """Whatever their mean; what lies between rows is not a number, and must not be read."""
    by = layernorm_linear.by_few
    x, weight = normal(m, k + 8, dtype=dtype) + 0.5, normal(n, k + 8, dtype=dtype) / k**0.5
    x[:, k:], weight[:, k:] = torch.nan, torch.nan
    x, weight = x[:, :k], weight[:, :k]
    gamma, beta, bias = normal(k, dtype=dtype) / 8 + 1, normal(k, dtype=dtype), normal(n, dtype=dtype)
    check_by(by, x, gamma, beta, weight, bias)
    check_by(by, x, None, beta, weight, None)
    check_by(by, x, gamma, None, weight, None)
    check_by(by, x, None, None, weight, bias)
    x[m // 2 :] += 40
    x[m // 3, : k // 2] -= 100
    check_by(by, x, gamma, beta, weight, bias)
    x[m // 2] = 300.0  # without any spread, also beside a block that has no columns
    constant = F.linear(beta.double(), weight.double(), bias.double())
    y = by(x, gamma, beta, weight, bias, 1e-5)
    torch.testing.assert_close(y[m // 2].double(), constant, rtol=2**-7, atol=2**-7)
    usual = by(x, gamma, beta, weight, bias, 1e-5)
    x[m // 2, k // 3] = torch.inf
    x[m // 3, k - 1] = torch.nan
    y = by(x, gamma, beta, weight, bias, 1e-5)
    broken = [m // 2, m // 3]
    others = [row for row in range(m) if row not in broken]
    assert y[broken].isnan().all()
    assert torch.equal(y[others], usual[others])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), FEW[1:])
def test_infinite_weights_of_few_rows(m: int, n: int, k: int, dtype: torch.dtype, normal) -> None:
    """They take their signs from normalised rows, and other columns keep their bits; infinite parameters leave none."""

    def check(*args: Tensor | None) -> Tensor:
        y = layernorm_linear.by_few(*args, 1e-5)
        golden = exact(*(None if arg is None else arg.double() for arg in args), 1e-5)  # type: ignore[call-arg]
        finite = golden.isfinite()
        torch.testing.assert_close(y[~finite].double(), golden[~finite], equal_nan=True)
        assert y[finite].isfinite().all()
        return y

    x, weight, bias = normal(m, k, dtype=dtype) + 0.5, normal(n, k, dtype=dtype) / k**0.5, normal(n, dtype=dtype)
    gamma, beta = normal(k, dtype=dtype), normal(k, dtype=dtype)
    x[m // 2 :] += 40
    x[0] = torch.tensor([1.0, -1.0] * (k // 2))
    x[0, 4:6], x[1] = 0.0, 3.0  # all, or there, the mean
    choices = [(gamma, beta, bias), (gamma, torch.zeros_like(beta), bias), (None, None, None)]
    usual = [layernorm_linear.by_few(x, g, b, weight, c, 1e-5) for g, b, c in choices]
    finite = weight.clone()
    weight[3, 5], weight[n - 1, k - 1] = torch.inf, -torch.inf
    weight[11, 6], weight[11, 7] = torch.inf, -torch.inf  # which cancel in some rows
    weight[12, k // 2] = torch.nan
    others = [column for column in range(n) if column not in (3, 11, 12, n - 1)]
    for (g, b, c), y in zip(choices, usual, strict=True):
        assert torch.equal(check(x, g, b, weight, c)[:, others], y[:, others])
    x[m - 1, 3] = torch.inf
    for value in (torch.inf, -torch.inf, torch.nan):
        broken = gamma.clone()
        broken[5] = value
        for w in (weight, finite):
            check(x, broken, beta, w, bias)
            check(x, gamma, broken, w, None)
    gamma[5], beta[5] = 0.0, 0.0
    check(x, gamma, beta, weight, bias)


@pytest.mark.gpu
def test_few_rows_in_a_graph_and_on_two_streams(normal) -> None:
    """Where a call may begin before the one before it ends."""
    by = layernorm_linear.by_few
    weight, inputs = normal(1024, 1024) / 32, [normal(128, 1024) for _ in range(4)]
    expected = [by(x, None, None, weight, None, 1e-5) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = inputs[0]
        for _ in range(8):
            y = by(y, None, None, weight, None, 1e-5)
    once = inputs[0]
    for _ in range(8):
        once = by(once, None, None, weight, None, 1e-5)
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(RUNS):
        graph.replay()
        assert torch.equal(y, once)
        found = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(by(x, None, None, weight, None, 1e-5))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_norm_before_it(m: int, n: int, k: int, normal) -> None:
    x, weight = normal(m, k) + 0.5, normal(n, k) / k**0.5
    gamma, beta, bias = normal(k) / 8 + 1, normal(k), normal(n)
    check_norm(x, gamma, beta, weight, bias)
    check_norm(x, None, beta, weight, None)
    check_norm(x, gamma, None, weight, None)
    check_norm(x, None, None, weight, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 1032])  # only what ends with a step is shifted by an estimate of its mean
@pytest.mark.parametrize("mean", [0.0, 1.0, 5.0, 10.0, 40.0, 100.0, -1000.0])
def test_a_large_mean(mean: float, k: int, normal) -> None:
    """Of some rows in one of several tiles, or of all; gamma is one-sided: what does not cancel would show."""
    m, n = 400, 520
    x, weight = normal(m, k), normal(n, k).abs() / 12
    x[130:141] += mean
    gamma, beta = normal(k).abs() + 1, normal(k)
    check_norm(x, gamma, beta, weight, normal(n))
    check_norm(normal(m, k) + mean, gamma, beta, weight, None)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 1032])
@pytest.mark.parametrize("first", [1, 16, 64])
@pytest.mark.parametrize(("here", "there"), [(100.0, 0.0), (0.0, 100.0), (-50.0, 50.0)])
def test_first_columns_unlike_the_rest(here: float, there: float, first: int, k: int, normal) -> None:
    """Their mean is not that of the row, for which it is taken first."""
    x, weight, gamma = normal(300, k), normal(520, k).abs() / 12, normal(k).abs() + 1
    x[:, :first] += here
    x[:, first:] += there
    check_norm(x, gamma, normal(k), weight, normal(520))
    x[20:] = normal(280, k)
    check_norm(x, None, None, weight, None)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "first"), [(768, 78), (1024, 104), (4096, 420)])
@pytest.mark.parametrize("here", [100.0, 132.0, 260.0])
def test_first_columns_that_are_just_near_enough(k: int, first: int, here: float, normal) -> None:
    """Most columns are then two to three deviations from what is taken for the mean, and are rounded there."""
    x, weight, gamma = normal(64, k), normal(520, k) / k**0.5, normal(k) / 8 + 1
    x[:, :first] += here
    check_norm(x, gamma, None, weight, None)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [128, 136])
def test_rows_without_any_spread(k: int, normal) -> None:
    x, weight, beta, bias = normal(200, k), normal(264, k) / 12, normal(k), normal(264)
    x[7], x[8], x[9] = 3.0, 0.0, -1000.0
    check_norm(x, None, None, weight, None)
    check_norm(x, normal(k), beta, weight, bias)
    y = layernorm_linear.by_hopper(x, None, beta, weight, bias, 1e-5)
    constant = F.linear(beta.double(), weight.double(), bias.double()).expand(3, -1)
    torch.testing.assert_close(y[7:10].double(), constant, rtol=2**-8, atol=2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize("k", [1024, 1032])
def test_what_is_not_a_number_stays_in_its_row(k: int, by: Callable[..., Tensor], normal) -> None:
    """And squares that overflow are those of a row without an end, whose normalised elements are zero."""
    x, weight, beta, bias = normal(300, k), normal(264, k) / 32, normal(k), normal(264)
    usual = by(x, None, beta, weight, bias, 1e-5)
    broken, huge = [3, 20, 130, 131], [40, 41]
    x[3, 5], x[20, k - 1], x[130, 700], x[131, 0] = torch.nan, torch.inf, -torch.inf, torch.inf
    x[huge] *= 1e30
    y = by(x, None, beta, weight, bias, 1e-5)
    assert y[broken].isnan().all()
    constant = F.linear(beta.double(), weight.double(), bias.double()).expand(2, -1)
    torch.testing.assert_close(y[huge].double(), constant, rtol=2**-7, atol=2**-7)
    others = [row for row in range(len(x)) if row not in broken + huge]
    assert torch.equal(y[others], usual[others])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gelu_after_it(m: int, n: int, k: int, approximate: str, dtype: torch.dtype, normal) -> None:
    x, weight, bias = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype) / k**0.5, normal(n, dtype=dtype)
    unit = torch.finfo(dtype).eps
    for given in (bias, None):
        z = F.linear(x.double(), weight.double(), None if given is None else given.double())
        first = linear_gelu.by_hopper(x, weight, given, approximate)
        torch.testing.assert_close(first.double(), F.gelu(z, approximate=approximate), rtol=unit, atol=unit)
        assert all(torch.equal(linear_gelu.by_hopper(x, weight, given, approximate), first) for _ in range(RUNS))


@pytest.mark.gpu
def test_rows_apart(normal) -> None:
    """What lies between rows is not a number, and must not be read."""
    x, weight = normal(300, 136), normal(264, 144)
    x[7] += 50  # whose tile is done again
    x[:, 120:], weight[:, 120:] = torch.nan, torch.nan
    x, weight = x[:, :120], (weight / 12)[:, :120]
    check_norm(x, None, None, weight, None)
    golden = F.gelu(F.linear(x.double(), weight.double()), approximate="tanh")
    y = linear_gelu.by_hopper(x, weight, None, "tanh")
    torch.testing.assert_close(y.double(), golden, rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
def test_in_a_graph(normal) -> None:
    """Sums over rows of w and the GEMM overlap there, too, and the second call works in the memory of the first."""
    x, weight = normal(2048, 1024), normal(1024, 1024) / 32
    expected = layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5) for _ in range(3)]
    for _ in range(RUNS):
        graph.replay()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(4096, 2048, 1024), (20000, 520, 128), (1000, 4096, 64)])
def test_nothing_is_left_of_the_call_before(m: int, n: int, k: int, normal) -> None:
    """In a graph each call finds what its tiles told each other when it was replayed last, of rows that were others."""
    x, weight = normal(m, k), normal(n, k) / k**0.5
    layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5) for _ in range(3)]
    for scale in (1.0, 3.0, 0.1, 20.0):
        x.copy_(normal(m, k) * scale + scale)
        graph.replay()
        expected = layernorm_linear.by_hopper(x.clone(), None, None, weight, None, 1e-5)
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (4096, 4096, 1024), (17000, 1024, 320), (70000, 520, 64)])
def test_whoever_sums(m: int, n: int, k: int, normal) -> None:
    """What a tile finds is what it would have summed itself: from memory, where nobody is waited for."""
    x, weight = normal(m, k) + 1, normal(n, k) / k**0.5
    gamma, beta, bias = normal(k) / 8 + 1, normal(k), normal(n)
    for given in ((x, gamma, beta, weight, bias), (x, None, None, weight, None)):
        for apart in (True, False):
            first = layernorm_linear.by_hopper(*given, 1e-5, beside=False, apart=apart)
            for beside in (True, False):
                for max_polls in (0, 1, 100):
                    y = layernorm_linear.by_hopper(*given, 1e-5, beside=beside, apart=apart, max_polls=max_polls)
                    assert torch.equal(y, first), (apart, beside, max_polls)


@pytest.mark.gpu
def test_shapes_take_turns_on_a_stream(normal) -> None:
    """They share one workspace, and none reads there what a call of another shape has left."""
    calls = []
    for m, n, k in [(4096, 4096, 256), (1000, 1000, 192), (4096, 512, 256), (300, 4096, 64), (9000, 2048, 128)]:
        calls.append((normal(m, k) * 2 + 1, normal(k), None, normal(n, k) / k**0.5, normal(n), 1e-5))
    expected = [layernorm_linear.by_hopper(*call, max_polls=0) for call in calls]
    for _ in range(RUNS):
        for call, y in zip(calls, expected, strict=True):
            for beside in (True, None):
                assert torch.equal(layernorm_linear.by_hopper(*call, beside=beside), y)


@pytest.mark.gpu
def test_graphs_at_once(normal) -> None:
    """Captured on one stream and replayed on several, each has its own workspace, also where nothing ran before."""
    weight, inputs = normal(4096, 256) / 16, [normal(4096, 256), normal(4096, 256) * 3 + 1]
    graphs, found = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append([layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5) for _ in range(4)])
        graphs.append(graph)
    expected = [layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(RUNS):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for results, y in zip(found, expected, strict=True):
        assert all(torch.equal(result, y) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("endless", ["weights", "weights, with parameters", "gamma", "beta"])
@pytest.mark.parametrize(
    ("beside", "apart", "max_polls"), [(False, False, 1000), (True, False, 0), (True, True, 1000), (False, True, 0)]
)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 512, 264), (128 * 140, 1000, 192), (100, 264, 64), (90, 512, 328), (90, 512, 1024)]
)
def test_what_is_infinite(
    m: int, n: int, k: int, beside: bool, apart: bool, max_polls: int, endless: str, normal
) -> None:
    """Is so in the result, too, with the sign that norm and GEMM one after the other give it; nothing else is."""
    x, weight = normal(m, k) + 3, normal(n, k) / k**0.5
    places = torch.tensor([0, 7, k - 1], device=CUDA)
    x[:, places] = 3 + 2 * normal(m, 3).sign()
    x[5] = 1.0  # a row that is its mean everywhere
    x[6] *= 1e20  # whose squares overflow: of it beta is left
    gamma, beta = torch.ones_like(x[0]), torch.zeros_like(x[0])
    if endless != "weights":
        gamma, beta = normal(k).sigmoid() + 0.5, normal(k).sigmoid() * 0.6 - 0.3
    if endless == "gamma":
        gamma[7] = torch.inf
    if endless == "beta":
        beta[7] = -torch.inf
    weight[2, 7] = weight[255, 0] = weight[n - 1, k - 1] = torch.inf
    weight[256, k - 1], weight[77, 3] = -torch.inf, torch.nan
    parameters = (None, None) if endless == "weights" else (gamma, beta)
    y = layernorm_linear.by_hopper(x, *parameters, weight, None, 1e-5, beside, apart, max_polls).float()
    gamma, beta, weight = gamma.double(), beta.double(), weight.double()
    expected = exact(x.double(), gamma, beta, weight, None, 1e-5)
    expected[6] = F.linear(0.0 * gamma + beta, weight)
    expected = expected.float()
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    assert torch.equal(y[y.isinf()], expected[y.isinf()])
    assert torch.allclose(y, expected, rtol=0.02, atol=0.02, equal_nan=True)


@pytest.mark.gpu
def test_graphs_that_are_gone_give_their_memory_back(normal) -> None:
    x, weight = normal(300, 64), normal(512, 64) / 8
    expected = layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5)

    def used_by(captures: int) -> int:
        free = torch.cuda.mem_get_info()[0]
        for _ in range(captures):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5)
            graph.replay()
            assert torch.equal(result, expected)
            del graph, result
        torch.cuda.synchronize()
        return free - torch.cuda.mem_get_info()[0]

    used_by(20)
    # Other processes use the card, too. Kept, they would take 39 MB each time; of more than 256 some would have none.
    assert min(used_by(60) for _ in range(3)) < 20e6


@pytest.mark.gpu
def test_two_threads_ask_on_one_stream(normal) -> None:
    weight, inputs = normal(2048, 512) / 23, [normal(2048, 512), normal(2048, 512) * 3 + 1]
    expected = [layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5) for x in inputs]

    def differ(index: int) -> int:
        results = [layernorm_linear.by_hopper(inputs[index], None, None, weight, None, 1e-5) for _ in range(200)]
        return sum(not torch.equal(result, expected[index]) for result in results)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(differ, range(2))) == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(4096, 2048, 1024), (20000, 520, 128)])
def test_on_two_streams_at_once(m: int, n: int, k: int, normal) -> None:
    weight, inputs = normal(n, k) / k**0.5, [normal(m, k), normal(m, k) * 3 + 1]
    expected = [layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(RUNS):
        for x, stream, results in zip(inputs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(layernorm_linear.by_hopper(x, None, None, weight, None, 1e-5))
    torch.cuda.synchronize()
    for results, y in zip(found, expected, strict=True):
        assert all(torch.equal(result, y) for result in results)


@pytest.mark.gpu
def test_it_is_one_of_the_configs(normal, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first, which a graph takes of calls that were never raced, where a few rows' blocks all run at once."""
    offered: list[list[object]] = []

    def fastest(what: str, key: object, configs: list[object], *_: object) -> object:
        offered.append(configs)
        return "few" if "few" in configs else "hopper"

    for module in (layernorm_linear, linear_gelu):
        monkeypatch.setattr(module, "fastest", fastest)
    weight, wide = normal(32, 64) / 8, normal(4096, 64) / 8
    x, rows = normal(40, 64), normal(layernorm_linear.FEW + 1, 64)
    for given, by in ((x, weight), (x, wide), (rows, weight)):
        y = layernorm_linear.layernorm_linear(given, (64,), None, None, by)
        torch.testing.assert_close(y, normed(given, None, None, by, None), rtol=2**-6, atol=2**-6)
    linear_gelu.linear_gelu(x, weight)
    one_wave, several, many, gelu = offered
    assert one_wave[0] == "few"
    assert several[0] == "library"
    assert several[-1] == "few"
    assert many[-1] == gelu[-1] == "hopper"


def test_only_where_it_runs_and_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows = layernorm_linear.FEW_ROWS_GEMM
    assert not hopper.takes(few_rows, torch.empty(8, 8, dtype=torch.bfloat16))

    def broken(source: extension.Source, index: int) -> None:
        raise RuntimeError("no such option")

    hopper._runs.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(extension, "why_not", lambda device: None)
    monkeypatch.setattr(extension, "library", broken)
    with pytest.warns(UserWarning, match=r"few_rows_gemm\.cu could not be built: no such option"):
        assert not hopper._runs(CUDA, few_rows)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    hopper._runs.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hopper._runs(CUDA, few_rows)
    hopper._runs.cache_clear()
