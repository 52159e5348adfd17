"""The structured log of torch.compile, as torch 2.11 and 2.13 wrote it for one program, and counts of its texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from optexp.profiling import compiled_text as text
from optexp.profiling.compiler_log import CompilerLog, events, parse, read
from optexp.records.compiler import GraphBreak, Recompile

LOGS = Path(__file__).parent / "logs"
VERSIONS = ["2.11", "2.13"]


def recorded(version: str) -> list[str]:
    """A log of six steps: linear, GELU and layer norm, two graph breaks, and a counter that recompiles, limit 3."""
    with gzip.open(LOGS / f"torch_{version}.log.gz", "rt") as lines:
        return list(lines)


@pytest.fixture(params=VERSIONS)
def log(request: pytest.FixtureRequest) -> CompilerLog:
    return parse(events(recorded(request.param)))


def test_graph_breaks_have_their_line_their_cause_and_their_code(log: CompilerLog) -> None:
    assert log.breaks == [
        GraphBreak("net.py:11", "branch on the value of a tensor", 1, True, "if x.sum() > 1e9:"),
        GraphBreak("net.py:13", "call of print", 1, True, 'print(end="")'),
    ]


OF_TORCH = """\
V1128 17:28:32.767000 21510 torch/_dynamo/convert.py:5098] {"artifact": {"name": "dynamo_graph_break_reason"}, %(id)s}
\tGraph break in user code at /env/lib/python3.11/site-packages/torch/optim/optimizer.py:79
\tGraph Break Reason: Call to `torch._dynamo.graph_break()`
V1128 17:28:32.867000 21510 torch/_dynamo/utils.py:2350] {"compilation_metrics": %(metrics)s, %(id)s}
"""


@pytest.mark.parametrize(
    ("file", "found"),
    [("/env/lib/python3.11/site-packages/torch/optim/adamw.py", []), ("/home/me/net.py", ["optimizer.py:79"])],
)
def test_graph_breaks_of_torchs_own_functions_are_no_ones_to_mend(file: str, found: list[str]) -> None:
    metrics = json.dumps({"co_filename": file, "co_name": "step", "co_firstlineno": 3})
    lines = OF_TORCH % {"id": '"frame_id": 0, "frame_compile_id": 0', "metrics": metrics}
    assert [ended.place for ended in parse(events(lines.splitlines(keepends=True))).breaks] == found


def test_a_recompilation_has_its_guards_and_the_limit(log: CompilerLog) -> None:
    guards = [f"self.calls == {value}" for value in range(3)]
    after = "forward, from line 13 on (net.py)"
    assert log.recompiles == [Recompile(after, "value of self.calls", "net.py:14", 2, guards, limited=True)]


def test_graphs_have_all_stages_in_both_directions(log: CompilerLog) -> None:
    graphs = {(graph.id, graph.direction): graph for graph in log.evidence("compiler/candidate").graphs}
    assert set(graphs) == {(number, way) for number in ("0/0", "2/0") for way in ("forward", "backward")}
    for graph in graphs.values():
        assert list(graph.files) == ["captured", "transformed", "ir_before", "ir_after", "generated"]
        assert not graph.cached
    forward, backward = graphs["0/0", "forward"], graphs["0/0", "backward"]
    assert forward.function == "forward (net.py:9)"
    assert forward.files["ir_after"] == "compiler/candidate/0_0-forward/ir_after_fusion.txt"
    assert forward.captured_ops == 4  # linear, GELU, layer norm, sum; the comparison is Python's
    assert (forward.kernels, forward.library_calls) == (1, 1)
    assert forward.ir_before > forward.ir_after
    assert forward.bytes_unfused > forward.bytes_before > forward.bytes_after
    assert backward.aten_ops > forward.aten_ops
    assert "tangents" in next(s for s in log.sections if s.direction == "backward").texts["captured"]


def test_stages_are_written_as_text_files(log: CompilerLog, tmp_path: Path) -> None:
    log.write(tmp_path)
    for graph in log.evidence(str(tmp_path)).graphs:
        for file in graph.files.values():
            assert Path(file).read_text().strip()
    assert "BEFORE FUSION" in (tmp_path / "0_0-forward" / "ir_before_fusion.txt").read_text()
    assert "async_compile" in (tmp_path / "0_0-backward" / "generated.py").read_text()


def test_a_log_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    lines = recorded("2.13")
    (tmp_path / "dedicated_log_torch_trace_1.log").write_text(
        "".join(lines[: len(lines) // 2]) + 'V1127 1:2 3 a.py:1] {"artifact": {"na'
    )
    found = read(tmp_path)
    assert found.breaks
    assert found.sections
    assert read(tmp_path / "nothing").sections == []


def header(kind: str, compile_id: str = "0/0") -> str:
    frame, variant = compile_id.split("/")
    return f'V1127 02:20:00.000000 42 torch/a.py:1] {{{kind}, "frame_id": {frame}, "frame_compile_id": {variant}}}\n'


def test_a_back_end_that_generates_no_code_has_its_graphs_all_the_same() -> None:
    lines = [header('"dynamo_output_graph": {}'), "\tclass GraphModule:\n", header('"aot_forward_graph": {}'), "\tf\n"]
    lines += [header('"aot_backward_graph": {}'), "\tb\n", header('"dynamo_output_graph": {}', "1/0"), "\tclass G:\n"]
    graphs = parse(events(lines)).sections
    assert [(g.compile_id, g.direction, list(g.texts)) for g in graphs] == [
        ("0/0", "forward", ["captured", "transformed"]),
        ("0/0", "backward", ["transformed"]),
        ("1/0", "inference", ["captured"]),
    ]


def test_skipped_cuda_graphs_are_counted_by_reason() -> None:
    skip = header('"artifact": {"name": "optexp_cudagraph_skip", "encoding": "string"}')
    said = "\tskipping cudagraphs due to mutated inputs (1 instances). Found from :\n\t   File a.py\n"
    other = "\tCUDAGraph supports dynamic shapes by recording a new graph for each distinct input size.\n"
    found = parse(events([skip, said, skip, said, skip, other]))
    assert dict(found.skips) == {"skipping cudagraphs due to mutated inputs (1 instances). Found from :": 2}


def test_code_from_the_cache_says_so() -> None:
    lines = [header('"inductor_output_code": {"filename": "/tmp/a.py"}'), "\t# AOT ID: ['3_inference']\n"]
    lines += [header('"artifact": {"name": "fx_graph_cache_hit", "encoding": "json"}')]
    (section,) = parse(events(lines)).sections
    assert (section.direction, section.cached) == ("inference", True)


GRAPH = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[64, 16][16, 1]cuda:0", primals_2: "bf16[16][1]cuda:0"):
        # File: /a/net.py:3 in forward, code: y = x.t() * b
        permute: "f32[16, 64][1, 16]cuda:0" = torch.ops.aten.permute.default(primals_1, [1, 0]);  primals_1 = None
        mul: "f32[16, 64][64, 1]cuda:0" = torch.ops.aten.mul.Tensor(permute, 2)
        var_mean = torch.ops.aten.var_mean.correction(mul, [1], correction = 0, keepdim = True);  mul = None
        getitem: "f32[16, 1][1, 1]cuda:0" = var_mean[0]
        getitem_1: "f32[16, 1][1, 1]cuda:0" = var_mean[1];  var_mean = None
        add: "f32[16, 1][1, 1]cuda:0" = torch.ops.aten.add.Tensor(getitem, primals_2);  primals_2 = None
        return (add, getitem_1)
"""


def test_operators_and_bytes_of_a_printed_graph() -> None:
    assert text.targets(GRAPH)[1] == "torch.ops.aten.mul.Tensor"
    assert text.aten_ops(GRAPH) == 3  # the permutation is a view
    mul, var_mean, add = 2 * 4096, 4096 + 2 * 64, 64 + 32 + 64
    assert text.bytes_unfused(GRAPH) == mul + var_mean + add
    assert text.bytes_unfused(GRAPH.replace("[16, 64][64", "[s0, 64][64")) is None


IR = """AFTER FUSION
op0_op1: FusedSchedulerNode(SchedulerNode,SchedulerNode)
op0_op1.writes = [MemoryDep('buf0', c0, {c0: 512}), MemoryDep('buf1', c0, {c0: 512})]
op0_op1.unmet_dependencies = []
op0_op1.met_dependencies =
    [   MemoryDep('arg0_1', c0, {c0: 512}),
        MemoryDep('arg1_1', c1, {c0: 8, c1: 64})]
op0_op1.outputs = [
    buf0: ComputedBuffer
    buf0.layout = FixedLayout('cuda:0', torch.float32, size=[8, 64], stride=[64, 1])
    buf0.users = [NodeUser(node=SchedulerNode(name='op1'), can_inplace=True, is_weak=False)]
    buf1: ComputedBuffer
    buf1.layout = FixedLayout('cuda:0', torch.bfloat16, size=[8, 64], stride=[64, 1])
    buf1.users = [
        NodeUser(node=ExternKernelSchedulerNode(name='op2'), can_inplace=False, is_weak=False),
        NodeUser(node=OUTPUT, can_inplace=False, is_weak=False),
    ]
]
op0_op1.snodes[0] =
op0: SchedulerNode(ComputedBuffer)
op0.writes = [MemoryDep('buf0', c0, {c0: 512})]
op0_op1.snodes[1] =
op1: SchedulerNode(ComputedBuffer)
op1.writes = [MemoryDep('buf1', c0, {c0: 512})]


op2: ExternKernelSchedulerNode(ExternKernelOut)
op2.writes = [StarDep(name='buf2', mode=None)]
op2.unmet_dependencies = [StarDep(name='buf1', mode=None)]
op2.met_dependencies = []
op2.outputs = [
    buf2: ExternKernelOut
    buf2.layout = FixedLayout('cuda:0', torch.float32, size=[8], stride=[1])
    buf2.users = [NodeUser(node=OUTPUT, can_inplace=False, is_weak=False)]
]


op3: NopKernelSchedulerNode(ConcatKernel)
op3.writes = [StarDep(name='buf3', mode=None)]
"""


def test_nodes_and_bytes_of_a_printed_ir() -> None:
    fused, library = text.ir_nodes(IR)
    assert (fused.kind, fused.members) == ("FusedSchedulerNode", {"op0", "op1"})
    assert dict(fused.reads) == {"arg0_1": 512, "arg1_1": 512}
    assert dict(library.reads) == {"buf1": None}
    # buf0 stays inside; arg1_1 is broadcast, and read once.
    first, second = 2048 + 256 + 512 * 2, 512 * 2 + 8 * 4
    assert text.ir_bytes(IR, {"arg0_1": 2048, "arg1_1": 256}) == first + second
    assert text.ir_bytes(IR, {"arg0_1": 2048}) is None


TRITON = """# AOT ID: ['0_inference']
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
@triton.jit
def triton_poi_fused_add_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')


class Runner:
    def call(self, args):
        # Topologically Sorted Source Nodes: [add], extern_kernels.mm(
        triton_poi_fused_add_0.run(arg0_1, buf0, 64, stream=stream0)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        buf2 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf1, buf1, buf1)
        triton_poi_fused_add_0.run(arg2_1, buf3, 64, stream=stream0)
        return (buf3, )
"""


def test_launches_of_generated_code() -> None:
    assert text.launches(TRITON) == (2, 2)
    assert text.DIRECTION.search(TRITON)[1] == "inference"
