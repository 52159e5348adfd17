"""The checklist follows from the profile: done, worth trying, not indicated or not applicable, each with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from optexp.comparison import runner
from optexp.comparison.checklist import LEVELS, judged, level, properties
from optexp.comparison.suggestions import installed
from optexp.config import search_path
from optexp.records.profile import Bottleneck, CheckStatus
from optexp.reporting import report
from optexp.result import Result
from optexp.strategies.amp import Amp
from optexp.strategies.cuda_graph import CudaGraph
from optexp.strategies.fusion import Fusion
from optexp.trace import Span, Trace

EMPTY = Trace((Span("optexp.step", 0.0, 1.0),))
SMALL = Bottleneck("many_small_kernels", 0.5, "45 kernels a step", ("strategy=cuda_graph", "in words"), ("many",))


def test_a_member_of_the_stack_is_done() -> None:
    assert judged(CudaGraph(), "", EMPTY, None, [SMALL], [CudaGraph()]) == (CheckStatus.DONE, "in the stack")


def test_a_refusal_is_quoted() -> None:
    found = judged(CudaGraph(), "CUDA Graphs need a CUDA device", EMPTY, None, [SMALL], [])
    assert found == (CheckStatus.NOT_APPLICABLE, "CUDA Graphs need a CUDA device")


def test_a_remedy_of_a_bottleneck_is_worth_trying() -> None:
    assert judged(CudaGraph(), "", EMPTY, None, [SMALL], []) == (CheckStatus.WORTH_TRYING, "45 kernels a step")


def test_without_a_bottleneck_it_is_not_indicated() -> None:
    assert judged(Fusion(), "", EMPTY, None, [SMALL], [])[0] is CheckStatus.NOT_INDICATED
    status, why = judged(Amp(), "", EMPTY, None, [], [])
    assert (status, why) == (CheckStatus.NOT_INDICATED, "this profile leaves it nothing to gain")


def test_every_strategy_but_another_model_has_a_level() -> None:
    assert {strategy.name for strategy in installed() if not level(strategy)} == {"replace"}
    assert {level(strategy) for strategy in installed()} - {""} == {*LEVELS}


@pytest.mark.parametrize(
    ("term", "name"),
    [
        ("data_loading", "batches in time"),
        ("synchronisation", "no waiting for the GPU"),
        ("allocation", "no allocation in steady steps"),
        ("exposed_copies", "copies behind kernels"),
    ],
)
def test_a_property_is_lost_where_its_term_is_large(term: str, name: str) -> None:
    terms = ("data_loading", "synchronisation", "allocation", "exposed_copies")
    metrics = {"gpu_busy": 0.5} | {f"share_{other}": 0.3 if other == term else 0.0 for other in terms}
    found = {check.name: check for check in properties(metrics)}
    assert [check.name for check in found.values() if check.status is CheckStatus.WORTH_TRYING] == [name]
    assert "30%" in found[name].why
    assert sum(check.status is CheckStatus.DONE for check in found.values()) == 3


def test_a_cpu_has_no_properties_of_a_gpu() -> None:
    assert [check.name for check in properties({"share_matrix": 0.9})] == []


def test_a_profile_keeps_and_shows_its_checklist(tmp_path: Path) -> None:
    search_path.register()
    small = ["workload=mlp", "workload.dim=64", "workload.layers=2", "workload.batch_size=16", "device=cpu"]
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*small, "mode=profile", "isolation=none", "tracking.enabled=false"])
    runner.run(config, tmp_path, show=lambda *_: None)
    result = Result.read(tmp_path / "result.json")
    found = {check.name: check for check in result.profile.checklist}
    assert found["cuda_graph"].status is CheckStatus.NOT_APPLICABLE
    assert "CUDA Graphs need a CUDA device" in found["cuda_graph"].why
    assert found["fusion"].status in (CheckStatus.WORTH_TRYING, CheckStatus.NOT_INDICATED)
    page = report.render(result)
    assert "Checklist" in page
    assert "CUDA Graphs need a CUDA device" in page
