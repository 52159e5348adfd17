"""What is dropped: the right share, anew each time, the same in backward, and the same again from the same seed."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from optexp.kernels.relu_bias_dropout import philox, relu_bias_dropout

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
on_each = pytest.mark.parametrize("device", DEVICES)

ROWS, COLUMNS = 24, 1037


def dropped(device: str, p: float, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Which elements of a constant were dropped."""
    x, bias = torch.ones(rows, columns, device=device), torch.ones(columns, device=device)
    return relu_bias_dropout(x, bias, p) == 0


@triton.jit
def draw(seed_ptr, words_ptr):
    """Words by our generator, and by Triton's with as many rounds."""
    position = tl.arange(0, 64)
    seed, zero = tl.load(seed_ptr), tl.zeros([64], tl.int32)
    ours, theirs = philox(seed, position, position * 3), tl.philox(seed, position, position * 3, zero, zero, n_rounds=7)
    for word in tl.static_range(4):
        tl.store(words_ptr + word * 64 + position, ours[word].to(tl.int64))
        tl.store(words_ptr + (4 + word) * 64 + position, theirs[word].to(tl.int64))


@on_each
def test_numbers_are_philox(device: str) -> None:
    """The first, with a seed of zero, as the generator's authors have it (Random123, kat_vectors)."""
    for seed in (0, 0x123456789ABCDEF0):
        words = torch.zeros(2, 4, 64, dtype=torch.int64, device=device)
        draw[(1,)](torch.tensor([seed], device=device), words)
        assert torch.equal(words[0], words[1])
        if seed == 0:
            assert words[0, :, 0].tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@on_each
def test_what_is_not_finite_is_not_hidden(device: str) -> None:
    """As where torch drops: times zero."""
    torch.manual_seed(0)
    y = relu_bias_dropout(torch.full((64, 64), float("inf"), device=device), torch.zeros(64, device=device), 0.5)
    assert y.isinf().any()
    assert y[~y.isinf()].isnan().all()


@pytest.mark.slow
@on_each
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_in_every_part(p: float, device: str) -> None:
    torch.manual_seed(0)
    gone = dropped(device, p).double()
    deviation = (p * (1 - p)) ** 0.5
    for part in (gone, gone[::2], gone[:, ::2], gone[:, 1::8], gone[:, 1024:], gone[:3]):
        assert abs(part.mean() - p) < 4.5 * deviation / part.numel() ** 0.5


@pytest.mark.slow
@on_each
def test_elements_are_independent(device: str) -> None:
    """Of their neighbours near and far, across rows and columns; |correlation| of n pairs is below 4.5/√n."""
    torch.manual_seed(1)
    gone = dropped(device, 0.5).double() * 2 - 1
    for rows, columns in ((0, 1), (0, 2), (0, 4), (0, 8), (0, 1024), (1, 0), (2, 0), (4, 0), (8, 0), (1, 1)):
        a, b = gone[rows:, columns:], gone[: ROWS - rows, : COLUMNS - columns]
        assert abs((a * b).mean()) < 4.5 / a.numel() ** 0.5, (rows, columns)


@on_each
def test_what_stays_is_scaled_so_that_the_mean_is_kept(device: str) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(5, 100, device=device), torch.randn(100, device=device)
    y = relu_bias_dropout(x, bias, 0.25)
    stays = y != 0
    torch.testing.assert_close(y[stays], ((torch.relu(x) + bias) / 0.75)[stays])
    assert 0 < stays.sum() < y.numel()


@pytest.mark.slow
@on_each
def test_backward_drops_what_forward_dropped(device: str) -> None:
    torch.manual_seed(0)
    x, bias = (torch.rand(*s, device=device).add(0.1).requires_grad_() for s in ((ROWS, COLUMNS), (COLUMNS,)))
    y = relu_bias_dropout(x, bias, 0.5)
    y.sum().backward()
    stays = (y != 0).float()
    torch.testing.assert_close(x.grad, stays * 2)
    torch.testing.assert_close(bias.grad, stays.sum(0) * 2)


@pytest.mark.slow
@on_each
def test_the_same_seed_reproduces_and_each_call_differs(device: str) -> None:
    torch.manual_seed(3)
    first, second = dropped(device, 0.5), dropped(device, 0.5)
    torch.manual_seed(3)
    assert torch.equal(dropped(device, 0.5), first)
    assert not torch.equal(first, second)
    # Fewer rows see the beginning of the same mask: a number belongs to its position.
    torch.manual_seed(3)
    assert torch.equal(dropped(device, 0.5, rows=7), first[:7])


@on_each
def test_compiled_code_draws_anew(device: str) -> None:
    compiled = torch.compile(dropped, backend="aot_eager", fullgraph=True)
    assert not torch.equal(compiled(device, 0.5, 8, 64), compiled(device, 0.5, 8, 64))


@pytest.mark.gpu
def test_replays_of_a_graph_draw_different_masks_and_a_seed_reproduces_them() -> None:
    x, bias = torch.ones(64, 64, device="cuda"), torch.ones(64, device="cuda")
    relu_bias_dropout(x, bias, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = relu_bias_dropout(x, bias, 0.5)
    masks = []
    for seed in (None, None, 7, 7):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        masks.append(y.clone())
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[2], masks[3])
