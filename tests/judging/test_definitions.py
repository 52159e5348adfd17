"""Kernel definitions: their files, axes, inputs and solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from optexp.errors import ConfigError, Unsupported
from optexp.judging import definition_files
from optexp.judging.job import Settings
from optexp.judging.worker import write_sources
from optexp.user_code.defined_problem import built, in_order, precision
from optexp.user_code.definitions import BuildSpec, CaseSpec, Definition, Solution, evaluated, filled, shape, sizes
from optexp.user_code.given_inputs import RULES, GivenInputs, random_values
from tests.judging.suites import case, definition, problem_folder, solution, trace_set

CPU = torch.device("cpu")


def as_definition(**changes: Any) -> Definition:
    return msgspec.convert(definition(**changes), Definition)


def as_case(**changes: Any) -> CaseSpec:
    return msgspec.convert(case(**changes), CaseSpec)


def one_input(name: str, dtype: str = "float32", by_name: bool = True, **changes: Any) -> GivenInputs:
    spec = {name: {"shape": ["tokens", "hidden"], "dtype": dtype}}
    sources = {"inputs": {name: {"type": "random"}}}
    return GivenInputs(as_definition(inputs=spec, **changes), as_case(**sources), {}, by_name)


# --- files -----------------------------------------------------------------------------------------------------------


def test_both_layouts_give_the_same_jobs(tmp_path: Path) -> None:
    cases = (case(16), case(32))
    traced = trace_set(tmp_path / "set", *cases, solutions=(solution(),))
    folder = problem_folder(tmp_path / "problem", *cases)
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "mine.json").write_text(json.dumps(solution()))
    first = definition_files.suite(traced, traced, Settings())
    second = definition_files.suite(folder, tmp_path / "solutions", Settings())
    for found in (first, second):
        assert [job.axes["half"] for job in found.jobs] == [8, 16]
        assert {(job.problem, job.candidate, job.entrant) for job in found.jobs} == {
            ("gathered_norm", "by_parts", "somebody")
        }
    assert {job.key for job in first.jobs}.isdisjoint(job.key for job in second.jobs)  # inputs are drawn in other ways


def test_workloads_are_spread(tmp_path: Path) -> None:
    folder = problem_folder(tmp_path, *map(case, range(2, 22, 2)))
    found = definition_files.suite(folder, None, Settings(strategy="fusion"), most=3)
    assert [job.axes["tokens"] for job in found.jobs] == [2, 10, 20]


def test_files_that_are_no_solutions_are_told(tmp_path: Path) -> None:
    folder = problem_folder(tmp_path)
    (folder / "solution.json").write_text(json.dumps(solution()))
    (folder / "notes.json").write_text('{"name": 3}')
    (remark,) = definition_files.suite(folder, folder, Settings()).remarks
    assert "notes.json is no solution" in remark


def test_a_workload_without_its_sizes_is_told(tmp_path: Path) -> None:
    folder = problem_folder(tmp_path, case(16), case(8, axes={}))
    found = definition_files.suite(folder, None, Settings(strategy="fusion"))
    assert [job.axes["tokens"] for job in found.jobs] == [16]
    assert found.remarks == ["gathered_norm: workload case-8 gives no size of half, tokens: not judged"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("definition.json", "{}", "definition.json is no definition"),
        ("workload.jsonl", '{"uuid": "a"}', "workload.jsonl is no casespec"),
    ],
)
def test_a_file_against_the_schema_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = problem_folder(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        definition_files.suite(folder, None, Settings(strategy="fusion"))


# --- axes ------------------------------------------------------------------------------------------------------------


def test_axes_by_value_workload_and_expression() -> None:
    known = sizes(as_definition(), as_case(tokens=10))
    assert known == {"tokens": 10, "hidden": 64, "half": 5}
    assert shape(as_definition().inputs["rows"], known) == [5]
    assert shape(as_definition().inputs["eps"], known) is None


@pytest.mark.parametrize("text", ["__import__('os')", "a.b", "[1]", "a / 2", "unknown + 1", "1 +", "a / 0", "f(a)"])
def test_an_expression_is_arithmetic_of_axes(text: str) -> None:
    with pytest.raises(ConfigError, match="axis expression"):
        evaluated(text, {"a": 3})


@pytest.mark.parametrize(
    "text", ["9 ** 9 ** 9", "(-2) ** 0.5", "(0 - a) ** (1 / 2)", "2 ** 64", "a - 9", "1 / 0", "-" * 5000]
)
def test_what_is_no_size_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="axis expression"):
        evaluated(text, {"a": 3})


def test_axes_without_a_size() -> None:
    with pytest.raises(ConfigError, match="gives no size of tokens"):
        sizes(as_definition(axes={"tokens": {"type": "var"}}), as_case(axes={}))
    with pytest.raises(ConfigError, match="gives no size of a"):
        sizes(as_definition(axes={"a": {"type": "expr", "expression": "a + 1"}}), as_case())


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int32", "bool"])
def test_random_values_of_every_kind(dtype: str) -> None:
    drawn = random_values((64, 64), getattr(torch, dtype), CPU)
    assert (drawn.dtype, drawn.shape) == (getattr(torch, dtype), (64, 64))
    assert len(drawn.float().unique()) > 1


def test_values_of_a_name() -> None:
    torch.manual_seed(0)
    (deviation,), (weights,) = (one_input(name)({}, CPU) for name in ("rstd", "routing_weights"))
    assert (deviation > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(16))
    (plain,) = one_input("rstd", by_name=False)({}, CPU)
    assert (plain < 0).any()  # flashinfer-bench's inputs mean nothing by their names
    (probabilities,) = one_input("probs", by_name=False, op_type="sampling")({}, CPU)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(16))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name.pattern)
def test_every_rule_draws_finite_values_of_the_shape(rule: Any) -> None:
    drawn: Tensor = rule.draw([4, 6], CPU)
    assert drawn.shape == (4, 6)
    assert drawn.isfinite().all()
    assert len(drawn.unique()) > 1


def test_inputs_with_a_range_of_their_own_are_known() -> None:
    inputs = GivenInputs(as_definition(), as_case(), {}, by_name=True)
    assert inputs.ranged == {"3"}  # the indices
    assert one_input("rstd").ranged == {"0"}
    assert one_input("gate_proj").ranged == set()


def test_a_tensor_of_a_file(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch", reason="pip install safetensors").save_file
    save({"key": torch.arange(64.0).view(1, 64)}, tmp_path / "stored.safetensors")
    spec = {"x": {"shape": ["tokens", "hidden"], "dtype": "float32"}}
    source = {"type": "safetensors", "path": str(tmp_path / "stored.safetensors"), "tensor_key": "key"}
    given = GivenInputs(as_definition(inputs=spec), as_case(tokens=1, inputs={"x": source}), {}, True)
    torch.testing.assert_close(given({}, CPU)[0], torch.arange(64.0).view(1, 64))
    other = GivenInputs(as_definition(inputs=spec), as_case(tokens=2, inputs={"x": source}), {}, True)
    with pytest.raises(ConfigError, match=r"\[1, 64\], and the definition says torch.float32 \[2, 64\]"):
        other({}, CPU)


def test_custom_inputs_need_their_function() -> None:
    with pytest.raises(ConfigError, match="the reference has no 'rows_of'"):
        GivenInputs(as_definition(), as_case(), {}, True)({}, CPU)
    with pytest.raises(ConfigError, match="rows_of makes no rows"):
        GivenInputs(as_definition(), as_case(), {"rows_of": lambda axes, device: {}}, True)({}, CPU)


def test_results_are_judged_at_the_coarsest_dtype() -> None:
    assert precision(as_definition()) == "bfloat16"
    assert precision(as_definition(inputs={}, outputs={"n": {"shape": [], "dtype": "int32"}})) == "float32"
    with pytest.raises(ConfigError, match="float4_e2m1 is not supported"):
        precision(as_definition(outputs={"n": {"shape": [], "dtype": "float4_e2m1"}}))


# --- solutions -------------------------------------------------------------------------------------------------------


def test_outputs_in_the_order_of_the_definition() -> None:
    assert in_order({"b": 2, "a": 1}, ["a", "b"]) == (1, 2)
    assert in_order([1], ["a"]) == 1
    with pytest.raises(ConfigError, match="3 outputs were returned"):
        in_order((1, 2, 3), ["a", "b"])
    with pytest.raises(ConfigError, match="the result has no b"):
        in_order({"a": 1}, ["a", "b"])


def test_a_binding_that_is_not_supported_is_said(tmp_path: Path) -> None:
    spec = BuildSpec("kernel.cu::run", language="cuda")
    with pytest.raises(Unsupported, match="tvm-ffi is not supported"):
        built(spec, tmp_path)


@pytest.mark.parametrize("path", ["/tmp/outside.py", "../outside.py"])
def test_sources_stay_in_their_folder(tmp_path: Path, path: str) -> None:
    raw = solution(entry_point=f"{path}::run")
    raw["sources"] = [{"path": path, "content": "x = 1"}]
    with pytest.raises(ConfigError, match="outside the solution's folder"):
        write_sources(msgspec.convert(raw, Solution), tmp_path / "inner")


def test_an_entry_point_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"entry_point=none.py::run names no file"):
        write_sources(msgspec.convert(solution(entry_point="none.py::run"), Solution), tmp_path)


def test_sources_may_lie_beside_the_solution(tmp_path: Path) -> None:
    raw = solution(entry_point="main.py::none")
    raw["sources"] = [{"path": "main.py", "content": ""}, {"path": "other.py", "content": "x = 1"}]
    (tmp_path / "main.py").write_text("def run():\n    return 3\n")
    found = filled(msgspec.convert(raw, Solution), tmp_path)
    write_sources(found, tmp_path / "written")
    assert (tmp_path / "written" / "main.py").read_text() == (tmp_path / "main.py").read_text()
    with pytest.raises(ConfigError, match=r"entry_point=main.py::none: main.py has no function 'none'"):
        built(found.spec, tmp_path / "written")
    assert built(BuildSpec("main.py::run"), tmp_path / "written")() == 3


@pytest.mark.slow
def test_a_solution_in_cpp(tmp_path: Path) -> None:
    source = """
    #include <torch/extension.h>
    void doubled(torch::Tensor x, torch::Tensor out) { out.copy_(x * 2); }
    PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("doubled", &doubled); }
    """
    spec = BuildSpec("main.cpp::doubled", language="cpp", binding="torch")
    folder = tmp_path / "cpp_solution"
    folder.mkdir()
    (folder / "main.cpp").write_text(source)
    out = torch.empty(3)
    built(spec, folder)(torch.ones(3), out)
    assert out.tolist() == [2, 2, 2]
