"""Streams: which branches a graph has, and that whoever needs a value waits for it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optexp.errors import Unsupported
from optexp.program import flatten, forward
from optexp.strategies.amp import Amp
from optexp.strategies.inplace import Inplace
from optexp.strategies.streams import Streams
from optexp.trace import Copy, Kernel, Span, Trace
from optexp.transforms import chunked
from optexp.transforms.branches import cut, trace
from optexp.transforms.chunked import Overlapped, Split, evenly, halved_ends, joined, split
from optexp.transforms.stream_parallel import Lanes, side_by_side
from optexp.workloads.branches import Branches
from optexp.workloads.mlp import Mlp
from optexp.workloads.pipeline import Pipeline

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOWERS = Branches(towers=3, dim=8, layers=2, batch_size=4)


class Inception(nn.Module):
    """Branches of different depth, one that begins with a pooling, in-place activations, normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.deep = nn.Sequential(
            nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 8, 1))
        self.wide = nn.Conv2d(8, 8, 5, padding=2)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.stem(x))
        out = torch.cat([self.deep(x), self.pooled(x), self.wide(x)], 1)
        return self.head(out.mean((2, 3)))


def pieces_of(model: nn.Module, *inputs: Tensor, limit: int = 4):
    return cut(trace(model, {}), list(inputs), limit)


# --- which branches there are


def test_towers_are_branches_and_their_sum_waits_for_them():
    pieces = pieces_of(TOWERS.model(), torch.randn(4, 8))
    assert [piece.lane for piece in pieces] == [0, 1, 2, 0, 0]
    assert [len(piece.nodes) for piece in pieces] == [4, 4, 4, 1, 1]
    assert [piece.waits for piece in pieces] == [[], [], [], [1], [2]]


def test_branches_begin_with_what_leads_to_a_product():
    pieces = pieces_of(Inception(), torch.randn(2, 1, 6, 6))
    lanes = {node.name: piece.lane for piece in pieces for node in piece.nodes}
    assert len({lanes[name] for name in ("deep_0", "pooled_0", "wide")}) == 3
    assert lanes["pooled_0"] == lanes["pooled_1"]
    assert lanes["head"] == 0


def test_no_more_lanes_than_allowed():
    assert {piece.lane for piece in pieces_of(TOWERS.model(), torch.randn(4, 8), limit=2)} == {0, 1}


class Scratch(nn.Module):
    """Cannot be traced, and works in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.memory = torch.zeros(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            self.memory.copy_(x)
        return self.linear(self.memory)


class Shared(nn.Module):
    """Two branches that meet in memory: in what one overwrites, in statistics that both count, or in scratch memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b, self.norm = how, nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.kept = Scratch()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "overwritten":
            y = x + 1
            view = y.view(-1)
            left = self.a(y)
            view.add_(1)
            return left + self.b(y)
        if self.how == "kept":
            return self.kept(self.a(x)) + self.kept(self.b(x))
        return self.norm(self.a(x)) + self.norm(self.b(x))


class Sized(nn.Module):
    """What crosses lanes is a number, and parts of a tensor; one weight serves both."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 2 * size)

    def forward(self, x: Tensor) -> Tensor:
        rows, parts = x.shape[0], x.chunk(2, 1)
        return self.linear(parts[0]).view(rows, -1) + self.linear(parts[1]).view(rows, -1)


@pytest.mark.parametrize(
    ("how", "first", "then"), [("overwritten", "a", "add_"), ("counted", "norm", "norm_1"), ("kept", "kept", "kept_1")]
)
def test_what_meets_in_memory_keeps_its_order(how: str, first: str, then: str):
    pieces = pieces_of(Shared(how), torch.randn(4, 8))
    at = {node.name: index for index, piece in enumerate(pieces) for node in piece.nodes}
    before, after = at[first], at[then]
    assert before == after or pieces[before].lane == pieces[after].lane or before in pieces[after].waits
    if how == "overwritten":
        assert pieces[at["b"]].lane == pieces[at["add_"]].lane or at["add_"] in pieces[at["b"]].waits


class Formula(nn.Module):
    """What inplace rewrites to a function of its own, in both branches; and a device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + 1).exp() + (self.b(x) + 2).exp().to(torch.device("cpu"))


class Moody(nn.Module):
    """Cannot be traced: it looks at its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


class TwoMoody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Moody(), Moody()

    def forward(self, x: Tensor, scale: float = 2.0, mask: Tensor | None = None) -> dict[str, Tensor]:
        if mask is not None:
            x = x * mask
        return {"both": (self.a(x) + self.b(x)) * scale, "x": x}


def test_towers_that_cannot_be_traced_stay_whole(streams):
    found = side_by_side(TwoMoody(), (torch.randn(4, 8),), {}, 4)
    lanes = {node.name: piece.lane for piece in found.pieces for node in piece.nodes}
    assert (lanes["a"], lanes["b"]) == (0, 1)


# --- running them, without a GPU


MODELS = {
    "towers": (TOWERS.model, lambda: (torch.randn(4, 8),), {}),
    "each": (replace(TOWERS, combine="none").model, lambda: (torch.randn(4, 8),), {}),
    "inception": (Inception, lambda: (torch.randn(2, 1, 6, 6),), {}),
    "overwritten": (lambda: Shared("overwritten"), lambda: (torch.randn(4, 8),), {}),
    "counted": (lambda: Shared("counted"), lambda: (torch.randn(4, 8),), {}),
    "sized": (Sized, lambda: (torch.randn(4, 8),), {}),
    "formula": (Formula, lambda: (torch.randn(4, 8),), {}),
    "moody": (TwoMoody, lambda: (torch.randn(4, 8),), {"scale": 3.0}),
}


@pytest.mark.parametrize("case", MODELS)
def test_the_same_values_gradients_and_statistics(case: str, streams):
    make, inputs, options = MODELS[case]
    model, given = make(), inputs()
    found = side_by_side(model, given, options, 4)
    plain = make()
    plain.load_state_dict(model.state_dict())
    model.forward = found
    results = []
    for one in (model, plain):
        x = given[0].clone().requires_grad_(case != "overwritten")
        output = one(x + 0, **options)
        outputs = list(flatten(output).values())
        if x.requires_grad:
            sum(o.square().sum() for o in outputs).backward()
        results.append([*outputs, *one.buffers(), *(t.grad for t in (x, *one.parameters()) if t.grad is not None)])
    assert len(results[0]) == len(results[1]) >= 4
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", ["towers", "inception", "counted"])
def test_nothing_is_read_before_it_is_there(case: str, streams):
    make, inputs, _ = MODELS[case]
    found = side_by_side(make(), inputs(), {}, 4)
    made: dict[str, int] = {}
    for piece in found.pieces:
        plain = piece.run

        def logged(*values, piece=piece, plain=plain):
            work = streams.work()
            for node in piece.inputs:
                assert node.name not in made or made[node.name] in work.after, f"{node} is read too early"
            made.update({node.name: work.at for node in piece.outputs})
            return plain(*values)

        piece.run = logged
    begun = streams.work().at
    streams.log.clear()
    found(*inputs())
    lanes = len({piece.lane for piece in found.pieces})
    assert lanes > 1
    assert streams.log.count("side waits for main") == streams.log.count("main waits for side") == lanes - 1
    assert {begun, *made.values()} <= streams.current.seen, "all lanes are joined at the end"


def test_a_split_batch_and_chunks_are_put_together_again(streams, build):
    workload = Pipeline(rows=10, dim=4, layers=1, chunks=2)
    program = build(workload)
    expected = program.run()["output"]
    program.feed.reset(program.feed.batches)
    split_up, notes = Streams(mode="split", streams=3).apply(replace(program, step=forward))
    assert (notes["streams"], type(split_up.step)) == (3, Split)
    torch.testing.assert_close(split_up.step(split_up, program.feed.batches[0])["output"], expected)
    chunked, notes = Streams(chunks=4).apply(program)
    assert (notes["streams"], notes["chunks"], type(chunked.step)) == (4, 4, Overlapped)
    stays = replace(chunked.step, home=False)
    streams.log.clear()
    torch.testing.assert_close(stays(program, program.feed.batches[0])["output"], expected)
    assert streams.log.count("side waits for main") == streams.log.count("main waits for side") == 4


@pytest.mark.parametrize("case", MODELS)
def test_the_recipe_of_branches_computes_the_same(case: str, streams):
    make, inputs, options = MODELS[case]
    model, given = make(), inputs()
    found = side_by_side(model, given, options, 4)
    names = {"torch": torch, "model": model, "device": torch.device("cpu")}
    exec(found.listing(), names)
    model.forward = names["side_by_side"]
    streams.log.clear()
    for ours, theirs in zip(
        flatten(model(*given, **options)).values(), flatten(found(*given, **options)).values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert streams.log.count("side waits for main") == streams.log.count("main waits for side") > 0


def test_the_recipe_of_branches_has_what_another_strategy_put_in(streams, build):
    plain = build(Mlp(mode="forward", dim=8, batch_size=4))
    program = replace(plain, model=Formula())
    rewritten, _ = Inplace().apply(program)
    _, notes = Streams().apply(rewritten)
    assert "from optexp.strategies.inplace import unless_autocast" in Streams().recipe(notes)
    names = {"torch": torch, "model": program.model}
    exec(Streams().recipe(notes), names)
    batch = plain.feed.batches[0]
    assert torch.equal(names["side_by_side"](*batch), Formula.forward(program.model, *batch))


@pytest.mark.parametrize("mode", ["split", "chunks"])
def test_the_recipe_of_pieces_computes_the_same(mode: str, streams, build):
    plain = build(Mlp(mode="forward", dim=8, batch_size=10, source="host"))
    expected, batch = plain.run()["output"], plain.feed.batches[0]
    _, notes = Streams(mode=mode, streams=3, chunks=4).apply(plain)
    names = {"torch": torch, "device": CPU, "predict": lambda batch: plain.model(*batch)}
    exec(Streams().recipe(notes), names)
    torch.testing.assert_close(names["step"](batch), expected)
    assert streams.log.count("main waits for side") == 3


@pytest.mark.parametrize("lanes", [3, 4, 5])
def test_chunks_wait_for_each_other_where_they_must(lanes: int, streams, build, monkeypatch):
    """Work for its chunk, copies out for the work, and whoever takes memory again for whoever used it last."""
    program = build(Pipeline(rows=26, dim=4, layers=1))
    overlapped = Overlapped(Lanes(CPU, lanes), 13, home=True)
    logged: dict[str, list] = {"in": [], "work": [], "out": []}

    def logging(what: str, plain):
        return lambda *args, **kwargs: (logged[what].append(streams.work(what)), plain(*args, **kwargs))[1]

    monkeypatch.setattr(chunked, "map_batch", logging("in", chunked.map_batch))  # type: ignore[attr-defined]
    monkeypatch.setattr(chunked, "send_home", logging("out", chunked.send_home))
    monkeypatch.setattr(chunked, "split", lambda batch, sizes: ((part,) for part in batch[0].split(sizes)))
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, empty=torch.empty, **k: empty(*a, **k))
    predict = logging("work", program.predict)
    overlapped(SimpleNamespace(device=CPU, predict=predict), program.feed.batches[0])
    came, worked, left = logged.values()
    assert len(came) == len(worked) == len(left) == 15
    assert len({moment.stream for moment in worked}) == lanes - 2
    assert not {moment.stream for moment in came + left} & {moment.stream for moment in worked}
    ahead = 2 * (lanes - 2)
    for index in range(15):
        assert came[index].at in worked[index].after
        assert worked[index].at in left[index].after
        if index + ahead < 15:
            assert worked[index].at in came[index + ahead].after
            assert left[index].at in worked[index + ahead].after
            assert worked[index].stream is worked[index + ahead].stream
        if index + 2 * ahead < 15:
            assert left[index].at in came[index + 2 * ahead].after
    assert worked[0].at not in came[ahead - 1].after, "copies in run ahead of the work"
    assert {moment.at for moment in left} <= streams.current.seen


def test_the_first_and_the_last_chunk_come_in_halves():
    assert halved_ends([4, 4, 4]) == [2, 2, 4, 2, 2]
    assert halved_ends([5, 3]) == [3, 2, 2, 1]
    assert halved_ends([3]) == [2, 1]
    assert halved_ends([1, 1]) == [1, 1]


def test_batches_are_taken_apart_by_name_too():
    parts = list(split({"x": torch.arange(5), "y": torch.arange(10).view(5, 2)}, [3, 2]))
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert joined(parts)["y"].shape == (5, 2)


def test_pieces_are_torchs():
    for count in range(1, 40):
        for pieces in range(1, 12):
            batch = (torch.arange(count),)
            ours = [piece.tolist() for (piece,) in split(batch, evenly(count, pieces))]
            assert ours == [piece.tolist() for piece in batch[0].chunk(pieces)]


def test_chunks_have_a_size_that_keeps_copies_fast(streams, build):
    program = build(Pipeline(rows=4096, dim=1024, chunks=2, layers=1))
    assert Streams().apply(program)[1]["chunks"] == 2
    program.feed.reset([(torch.zeros(32 * 2**20 // 4, 4),)])
    program.feed.batches[0] = (torch.zeros(2**20 * 8, 2),)
    program = replace(program, model=nn.Identity())
    assert Streams().apply(program)[1]["chunks"] == 4


def test_results_without_rows_cannot_be_put_together(streams, build):
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    program = replace(build(Mlp(mode="forward", dim=8, batch_size=16)), model=Mean())
    with pytest.raises(Unsupported, match="no row for each row of the batch"):
        Streams(mode="split").apply(program)


def test_a_model_of_one_size_cannot_be_given_a_part(streams, build):
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(16, 8)

    program = replace(build(Mlp(mode="forward", dim=8, batch_size=16)), model=Fixed())
    with pytest.raises(Unsupported, match=r"does not take a part of a batch .*: write its forward"):
        Streams(mode="split").apply(program)


# --- reasons and evidence


@pytest.mark.parametrize(
    ("workload", "mode", "words"),
    [
        (Mlp(dim=4), "split", "use workload.mode=forward"),
        (Mlp(dim=4, mode="forward"), "chunks", "workload.source=host"),
        (Pipeline(rows=8, dim=4), "split", "use mode=chunks"),
    ],
)
def test_reasons_say_what_to_do(workload, mode: str, words: str, build):
    assert words in Streams(mode=mode).unsupported(build(workload), CUDA)
    assert "use device=cuda" in Streams(mode=mode).unsupported(build(workload), CPU)


def test_chunks_need_a_stream_of_each_kind(build):
    program = build(Pipeline(rows=8, dim=4))
    assert "needs 3 streams" in Streams(streams=2).unsupported(program, CUDA)
    assert Streams(streams=3).unsupported(program, CUDA) is None


def test_a_model_without_branches_and_one_that_cannot_be_traced_say_so(streams, build):
    with pytest.raises(Unsupported, match="no branches: no two of its products are independent"):
        Streams().apply(build(Mlp(mode="forward", dim=8, batch_size=4)))
    with pytest.raises(Unsupported, match=r"torch.fx cannot trace this model .*mode=split"):
        Streams().apply(replace(build(Mlp(mode="forward", dim=8, batch_size=4)), model=Moody()))


@pytest.mark.parametrize("count", [0, 1])
def test_one_stream_is_a_mistake(count: int):
    with pytest.raises(ValueError, match=f"streams={count} must be at least 2"):
        Streams(streams=count)


def kernels(*spans: tuple[float, float]) -> Trace:
    return Trace((Span("step", 0.0, 20.0),), kernels=tuple(Kernel("k", start, length) for start, length in spans))


def test_evidence_is_kernels_at_once():
    notes = {"mode": "branches", "pieces": 3, "streams": 2}
    apart, beside = kernels((0, 4), (5, 4)), kernels((0, 4), (1, 4))
    evidence = Streams().evidence(apart, beside, notes, {})
    assert evidence.engaged
    assert evidence.text == "3 pieces on 2 streams: 1.60 kernels at a time on average, where there are any"
    assert "add cuda_graph" in Streams().evidence(apart, apart, notes, {}).text
    assert not Streams().evidence(beside, beside, notes, {}).engaged


def test_evidence_of_chunks_is_copies_beside_kernels():
    notes = {"mode": "chunks", "chunks": 8, "streams": 3}
    trace = replace(kernels((5, 10)), copies=(Copy("in", 0, 10, kind="HtoD"), Copy("out", 10, 10, kind="DtoH")))
    evidence = Streams().evidence(trace, trace, notes, {})
    assert evidence.engaged
    assert "kernels run during 50% of the time with copies" in evidence.text
    assert "takes 50% of a profiled step" in evidence.text
    apart = replace(trace, kernels=(Kernel("k", 30, 10),))
    assert "before the host has dispatched the next" in Streams().evidence(trace, apart, notes, {}).text
    waiting = replace(apart, copies=(Copy("in", 0, 10, kind="HtoD", pageable=True),))
    assert "add pinned_memory" in Streams().evidence(trace, waiting, notes, {}).text


# --- with what wraps the model


@pytest.mark.slow
def test_pieces_of_a_compiled_model_are_compiled_one_by_one(streams, build):
    graphs = []

    def backend(graph, inputs):
        graphs.append(streams.current.name)
        return graph

    program, plain = build(TOWERS), build(TOWERS)
    program = replace(program, forward=torch.compile(program.model, backend=backend))
    program, _ = Streams().apply(program)
    batch = plain.feed.batches[0]
    torch.testing.assert_close(program.step(program, batch)["output"], plain.step(plain, batch)["output"])
    assert graphs[:3] == ["main", "side", "side"]


def test_whatever_wraps_the_model_finds_its_branches(streams, build):
    plain, (program, _) = build(TOWERS, Amp()), Streams().apply(build(TOWERS, Amp()))
    batch = plain.feed.batches[0]
    streams.log.clear()
    output = program.step(program, batch)["output"]
    assert streams.log.count("side waits for main") == 2
    torch.testing.assert_close(output, plain.step(plain, batch)["output"])


class Casts(TorchDispatchMode):
    """On which streams autocast lowered something that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].is_leaf and args[0].shape == (8, 4):
            self.streams.append(torch.cuda.current_stream())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [False, True])
def test_lanes_do_not_share_what_autocast_made_on_one_of_them(streams, recipe: bool):
    model, x = Sized(), torch.randn(4, 8)
    found = side_by_side(model, (x,), {}, 4)
    names = {"torch": torch, "model": model}
    exec(found.listing(), names)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        (names["side_by_side"] if recipe else found)(x)
        assert torch.is_autocast_cache_enabled()
    assert len(casts.streams) == len(set(casts.streams)) == 2
