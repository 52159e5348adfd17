"""torch.compile through the stack: right numbers, graph breaks told, and reasons where it cannot run."""

import inspect
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from optexp.errors import Unsupported
from optexp.export.repro import Script
from optexp.kernelkit import dynamo_words, kernel, toolchain
from optexp.program import Program
from optexp.strategies import fusion
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.strategies.inplace import Inplace
from optexp.strategies.memory_pool import MemoryPool
from optexp.strategies.streams import Streams
from optexp.strategy import compose
from optexp.trace import Call, Kernel, Op, Span, Trace, record
from optexp.transforms.torchscript import Scripted
from optexp.workloads.elementwise import Elementwise
from optexp.workloads.gelu import Gelu
from optexp.workloads.layernorm_linear import LayerNormLinear
from optexp.workloads.mlp import Mlp
from optexp.workloads.softmax import Softmax
from tests.export.test_repro import executed

CPU = torch.device("cpu")
SKIPS = "inductor/cudagraph_skips"


def profile(regions: int = 0, launches: int = 0, kernels: tuple[str, ...] = ()) -> Trace:
    """A trace of one step that called this many compiled regions, launched this many graphs, and ran these kernels."""
    return Trace(
        steps=(Span("step", 0.0, 9.0),),
        ops=(Op("Torch-Compiled Region: 0/0", 0.0, 1.0),) * regions,
        api=(Call("cudaGraphLaunch", 0.0, 1.0),) * launches,
        kernels=tuple(Kernel(name, 0.0, 1.0) for name in kernels),
    )


@pytest.mark.slow
def test_training_with_amp_compiled_computes_the_same(build, observe):
    workload = Mlp(mode="train", dim=32, layers=2, batch_size=16)
    compiled = observe(build(workload, Fusion(fullgraph=True), Amp()))
    for ours, plain in zip(compiled, observe(build(workload)), strict=True):
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(ours[name].float(), value, atol=3e-2, rtol=3e-2)
    # The optimizer saw compiled gradients: parameters moved.
    assert not torch.equal(compiled[0]["param/0.weight"], compiled[1]["param/0.weight"])


@pytest.mark.slow
def test_formula_compiled_after_rewriting_in_place(build, observe, tmp_path):
    program, unfused = build(Gelu(size=64), Inplace(), Fusion(fullgraph=True)), build(Gelu(size=64))
    for ours, plain in zip(observe(program), observe(unfused), strict=True):
        torch.testing.assert_close(ours["output"], plain["output"])
    traces = []
    for name, arm in (("before", unfused), ("after", program)):
        record(arm.run, 2, tmp_path / f"{name}.json.gz", CPU)
        traces.append(Trace.read(tmp_path / f"{name}.json.gz"))
    counters = {"stats/unique_graphs": 1.0}
    assert Fusion().evidence(*traces, {"captures": False}, counters).text == "1 graph compiled, 1 call a step"
    assert not Fusion().evidence(*reversed(traces), {"captures": False}, counters).engaged


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1


BREAK = inspect.getsourcelines(Broken)[1] + 3


def test_fullgraph_refuses_a_graph_break_and_says_where_it_is(build):
    plain = build(Gelu(size=4))
    program = Program(model=Broken(), step=plain.step, feed=plain.feed)
    with pytest.raises(Unsupported, match=rf"\(test_fusion.py:{BREAK} .*fullgraph=false"):
        Fusion(backend="kernels", fullgraph=True).apply(program)


def test_graph_breaks_are_told_with_their_lines(build):
    plain = build(Gelu(size=4))
    program, _ = Fusion(backend="kernels").apply(Program(model=Broken(), step=plain.step, feed=plain.feed))
    program.run()
    told = f", 1 graph break: test_fusion.py:{BREAK} (call of torch._dynamo.graph_break())"
    assert fusion.graph_breaks(toolchain.counted()) == told


def test_evidence_counts_graphs_and_breaks():
    strategy, notes = Fusion(), {"captures": False}
    counters = {"stats/unique_graphs": 2.0, "graph_break/net.py:7 (call of print)": 1.0}
    engaged = strategy.evidence(profile(), profile(regions=6), notes, counters)
    assert engaged.engaged
    assert engaged.text == "2 graphs compiled, 1 graph break: net.py:7 (call of print), 6 calls a step"
    assert not strategy.evidence(profile(), profile(), notes, counters).engaged  # compiled, never run
    assert not strategy.evidence(profile(), profile(regions=6), notes, {}).engaged  # run by someone else
    # Inside a captured step only its launches are visible.
    assert strategy.evidence(profile(), profile(launches=1), notes, counters).engaged
    # A capturing mode that fell back to plain launches did not do what it says.
    skipped = strategy.evidence(profile(), profile(regions=6), {"captures": True}, {**counters, SKIPS: 2.0})
    assert not skipped.engaged
    assert "2 not captured, but none was replayed" in skipped.text
    # Nor did code that another strategy had compiled.
    assert not strategy.evidence(profile(), profile(regions=6), notes, {**counters, "claimed/0/0": 1.0}).engaged
    assert not strategy.evidence(profile(), profile(launches=1), notes, {**counters, "claimed/0/0": 2.0}).engaged


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("workload", "replaced"),
    [
        (Gelu(size=8), "1 gelu"),
        (Mlp(mode="train", dim=8, layers=2, batch_size=4), "2 linear_gelu"),
        (Elementwise(rows=8, columns=8, mode="forward_backward"), "1 relu_bias_scale"),
        (Softmax(rows=8, columns=8), "1 softmax"),
        (LayerNormLinear(rows=8, features=8, out=8), "1 layernorm_linear"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_our_kernels_in_the_place_of_patterns(build, observe, tmp_path, workload, replaced: str):
    strategy = Fusion(backend="kernels", fullgraph=True)
    program, plain = build(workload, strategy), build(workload)
    for ours, theirs in zip(observe(program), observe(plain), strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=name)
    record(program.run, 1, tmp_path / "after.json.gz", CPU)
    trace = Trace.read(tmp_path / "after.json.gz")
    counters = {
        f"{group}/{name}": n for group in ("stats", "replaced", "refused") for name, n in counted(group).items()
    }
    _, notes = strategy.apply(build(workload))
    evidence = strategy.evidence(trace, trace, notes, counters)
    assert evidence.engaged
    assert evidence.text.startswith(f"replaced: {replaced}; ")
    assert evidence.text.endswith("Triton's interpreter runs them in Python: no time counts")


def counted(group: str) -> dict[str, float]:
    return dict(torch._dynamo.utils.counters[group])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("workload", "kernels"),
    [
        (Mlp(mode="train", dim=8, layers=2, batch_size=4), ["linear_gelu"]),
        (LayerNormLinear(rows=8, features=8, out=8), ["layernorm_linear"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
def test_our_kernels_are_taken_home(
    workload, kernels: list[str], captured: bool, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    plain = replace(workload.build(CPU, torch.float32, 0), captured=captured)
    plain.feed.reset(batches := workload.batches(torch.Generator().manual_seed(1), 4))
    program, notes = Fusion(backend="kernels").apply(plain)
    expected = program.step(program, batches[0])
    assert list(notes["replaced"]) == kernels
    fresh = workload.build(CPU, torch.float32, 0)
    stack = [Fusion(backend="kernels")]
    for name, content in Script(workload, fresh, batches[0], "float32", 0, stack, {"fusion": notes}).files().items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sys, "path", [*sys.path])
    torch._dynamo.reset()
    file = executed(tmp_path / "repro.py", monkeypatch)
    file["model"].load_state_dict(fresh.model.state_dict())
    result = file["step"](batches[0])
    torch.testing.assert_close(result, next(iter(expected.values())))
    (rewriter,) = (cell.cell_contents for cell in file["put_in"].__closure__)
    assert list(rewriter.replaced) == kernels


def test_a_model_without_our_patterns_is_not_engaged(build):
    strategy = Fusion(backend="kernels")
    _, notes = strategy.apply(build(Gelu(size=4)))
    counters = {"stats/unique_graphs": 1.0, "refused/softmax: it would not pay": 1.0}
    evidence = strategy.evidence(profile(), profile(regions=1), notes, counters)
    assert not evidence.engaged
    assert "our kernels implement add, bias_gelu, gelu" in evidence.text
    assert evidence.text.endswith("left alone: softmax: it would not pay")


def test_on_a_gpu_our_kernels_must_have_been_launched(build):
    strategy = Fusion(backend="kernels")
    _, notes = strategy.apply(build(Gelu(size=4)))
    counters = {"stats/unique_graphs": 1.0, "replaced/gelu": 2.0}
    launched = profile(regions=1, kernels=("gelu_forward", "column_sums", "sgemm"))  # one of a file's own, one shared
    assert strategy.evidence(profile(), launched, notes, counters).text == (
        "replaced: 2 gelu, 2 of our kernels a step; 1 graph compiled, 1 call a step"
    )
    assert not strategy.evidence(profile(), profile(regions=1, kernels=("sgemm",)), notes, counters).engaged


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize("stack", [(), (Amp(),)], ids=["plain", "amp"])
def test_scripted_steps_compute_the_same(build, observe, mode: str, stack):
    workload = Mlp(mode=mode, dim=16, layers=2, batch_size=8)
    scripted, plain = build(workload, *stack, Fusion(backend="torchscript")), build(workload, *stack)
    for ours, theirs in zip(observe(scripted, 5), observe(plain, 5), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, atol=1e-3, rtol=1e-3, msg=name)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x).relu() * scale


def test_scripting_by_name_and_what_it_refuses(build):
    plain = build(Gelu(size=4))
    feed = replace(plain, model=Named()).feed
    feed.batches = [{"x": torch.ones(4, 4)}]
    program, _ = Fusion(backend="torchscript").apply(replace(plain, model=Named().eval()))
    torch.testing.assert_close(program.run()["output"], program.model(torch.ones(4, 4)))
    assert isinstance(program.forward, Scripted)
    assert not list(program.forward.traced.parameters())  # frozen
    with pytest.raises(Unsupported, match=r"cannot trace this model .*backend=inductor"):
        Fusion(backend="torchscript").apply(replace(plain, model=Named(), constants={"scale": 2.0}))


class HalfFrozen(Named):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        with torch.no_grad():
            x = self.layer(x)
        return self.layer(x)


def test_scripting_keeps_gradients_off_where_they_are_off(build):
    plain = build(Mlp(mode="forward_backward", dim=4, batch_size=2))
    with pytest.raises(Unsupported, match="its forward switches gradients off for a while"):
        Fusion(backend="torchscript").apply(replace(plain, model=HalfFrozen()))
    Fusion(backend="torchscript").apply(replace(plain, model=HalfFrozen(), loss=None))


def test_what_torchscript_shows(monkeypatch: pytest.MonkeyPatch, build):
    strategy, one = Fusion(backend="torchscript"), {"groups": 1}
    assert not strategy.evidence(profile(), profile(), {"groups": 0}, {}).engaged
    assert strategy.evidence(profile(), profile(), one, {}).engaged  # on a CPU, from the graph alone
    after = profile(kernels=("fused_relu_add_mul", "gemm"))
    evidence = strategy.evidence(profile(kernels=("relu", "gemm")), after, one, {})
    assert evidence.text == (
        "TorchScript made 1 fused groups, 1 fused kernels a step (fused_relu_add_mul); it is deprecated"
    )
    assert not strategy.evidence(after, after, one, {}).engaged
    assert strategy.unsupported(build(Gelu(size=4)), CPU) is None
    monkeypatch.setattr(fusion.sys, "version_info", (3, 14))
    assert "not supported on Python 3.14" in strategy.unsupported(build(Gelu(size=4)), CPU)


def test_backend_cuda_puts_in_what_cuda_has():
    names = [kernel.name for kernel in fusion.chosen("cuda")]
    assert names == ["add", "gelu", "layernorm_linear", "relu", "relu_bias_scale"]
    strategy, notes = Fusion(backend="cuda"), {"captures": False, **fusion.put_in("cuda", captured=False)[1]}
    counters = {"stats/unique_graphs": 1.0, "replaced/gelu": 1.0}
    launched = profile(regions=1, kernels=("void optexp::gelu_forward<float, 4, true>(float const*, float*, long)",))
    assert strategy.evidence(profile(), launched, notes, counters).engaged
    assert not strategy.evidence(profile(), profile(regions=1, kernels=("gemm",)), notes, counters).engaged


def test_capturing_modes_capture_once():
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(Unsupported, match="both capture"):
            compose([Fusion(mode=mode), CudaGraph()])
    assert [s.name for s in compose([CudaGraph(), Fusion(), Amp()])] == ["amp", "fusion", "cuda_graph"]


def test_reasons_say_what_to_do(build, monkeypatch: pytest.MonkeyPatch):
    program = build(Gelu(size=4))
    assert Fusion().unsupported(program, CPU) is None
    assert "strategy.fusion.mode=default" in Fusion(mode="reduce-overhead").unsupported(program, CPU)
    assert "strategy.fusion.backend=kernels" in Fusion(backend="kernels", mode="max-autotune").unsupported(program, CPU)
    monkeypatch.setattr(kernel, "INTERPRETED", True)
    assert Fusion(backend="kernels").unsupported(program, CPU) is None
    assert "CUDA C++ needs a CUDA device" in Fusion(backend="cuda").unsupported(program, CPU)
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    assert "our kernels need a CUDA device" in Fusion(backend="kernels").unsupported(program, CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler was not found" in Fusion().unsupported(program, CPU)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert "pip install triton" in Fusion().unsupported(program, torch.device("cuda"))


def test_label_shows_what_differs_from_the_default():
    assert Fusion().label == "fusion"
    assert Fusion(mode="max-autotune", fullgraph=True).label == "fusion[mode=max-autotune,fullgraph=True]"


@pytest.mark.parametrize("other", ["streams", "memory_pool"])
def test_graphs_that_share_memory_are_not_replayed_side_by_side(other: str) -> None:
    strategy = {"streams": Streams(), "memory_pool": MemoryPool()}[other]
    with pytest.raises(Unsupported, match=rf"{other} does not work with fusion\[mode=reduce-overhead\]"):
        compose([Fusion(mode="reduce-overhead"), strategy])
    compose([Fusion(), strategy])


@pytest.mark.parametrize(("backend", "part"), [("eager", "capture alone"), ("aot_eager", "AOTAutograd's part")])
def test_a_part_of_the_compiler_computes_the_same_and_says_what_it_shows(
    build, observe, tmp_path, backend: str, part: str
):
    workload, strategy = Mlp(mode="train", dim=8, layers=2, batch_size=4), Fusion(backend=backend)
    program, plain = build(workload, strategy), build(workload)
    for ours, theirs in zip(observe(program), observe(plain), strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=name)
    record(program.run, 1, tmp_path / "after.json.gz", CPU)
    trace = Trace.read(tmp_path / "after.json.gz")
    evidence = strategy.evidence(trace, trace, {"captures": False}, toolchain.counted())
    assert evidence.engaged
    assert part in evidence.text
    assert f"torch.compile(forward, backend='{backend}', fullgraph=False" in strategy.recipe({"captures": False})
    assert "one of inductor's" in Fusion(backend=backend, mode="max-autotune").unsupported(program, CPU)


class Positioned(nn.Module):
    """A row for each call, which Python counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(16, 4))
        self.position = 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows[self.position % 16] = x.mean(0)
        self.position += 1
        return x + 1


def test_what_is_compiled_anew_until_torch_gives_up_is_named():
    call = torch.compile(Positioned(), backend="eager")
    for _ in range(5):
        call(torch.randn(3, 4))
    assert fusion.given_up(toolchain.counted(), 1) == ""
    for _ in range(6):
        call(torch.randn(3, 4))
    text = fusion.given_up(toolchain.counted(), 1)
    assert re.match(
        r"; compiled anew for each value of self.position \(test_fusion.py:\d+\), up to torch's limit of 8", text
    )
    found = Fusion().evidence(profile(), profile(), {"captures": False}, toolchain.counted())
    assert not found.engaged
    assert "ran none of them; compiled anew for each value of self.position" in found.text
    engaged = Fusion().evidence(profile(), profile(regions=1), {"captures": False}, toolchain.counted())
    assert "self.position" in engaged.text


def test_sizes_that_run_uncompiled_are_counted():
    call = torch.compile(nn.Linear(4, 4), backend="eager", dynamic=False)
    batches = [(torch.randn(rows, 4),) for rows in range(2, 12)]
    for (x,) in batches:
        call(x)
    feed = Mlp(dim=4, layers=1, batch_size=2).build(CPU, torch.float32, 0).feed
    feed.reset(batches)
    kinds = fusion.kinds(Program(nn.Linear(4, 4), lambda *_: {}, feed))
    text = fusion.given_up(toolchain.counted(), kinds)
    assert "each size of" in text
    assert "2 of 10 sizes of batches run uncompiled" in text


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        ("0/7: self.position == 7         # self.rows[self.position]  # a.py:3 in forward", "value of self.position"),
        ("0/7: L['self'].net.position == 7", "value of self.net.position"),
        ("0/7: tensor 'tokens' size mismatch at index 1. expected 17, actual 18", "size of tokens"),
        ("0/7: tensor 'L['x']' size mismatch at index 0. expected 2, actual 3", "size of x"),
        ("0/7: ___check_obj_id(self.act, 140)  # what", "object self.act"),
        ("0/7: ___check_obj_id(args[0], 140), type=<class 'torch.optim.sgd.SGD'>  # what", "object args[0] (SGD)"),
        ("0/7: ___check_torch_function_mode_stack()", "___check_torch_function_mode_stack()"),
    ],
)
def test_guards_are_told_in_words(reason, named):
    assert dynamo_words.varied(reason) == named
