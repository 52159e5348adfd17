"""Every study can be run, and what it leaves answers its question."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from optexp.comparison import runner
from optexp.config import overrides, resolve
from optexp.errors import ConfigError
from optexp.profiling.roofline import matrix_flop
from optexp.records.profile import ArmProfile, Calibration, ProfileRecord
from optexp.reporting import ranking, summary, terminal
from optexp.result import ArmSummary, Result, Speedup, Verdict, worst_status
from optexp.sweeps import sweep
from optexp.sweeps.exit_status import answering
from optexp.sweeps.figures import FIGURES, Point
from optexp.sweeps.study import Study, completed, points
from optexp.sweeps.study_table import markdown, remarks, table
from optexp.trace import Op, Span, Trace

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted(path.stem for path in (ROOT / "experiments").glob("*.yaml"))
SETTINGS = ["tracking.enabled=false", "isolation=none"]
Jobs = list[dict[str, Any]]
IN_PLACE = "workload.variant=relu_bias_{} strategy=inplace"  # and nothing that compiles


@pytest.fixture
def plan(command_line: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Jobs]:
    """The jobs that a command line would run: each one's settings, its step as `step`. Nothing is measured."""
    jobs: Jobs = []

    def run(config: DictConfig, output: Path, **_: Any) -> Result:
        job = resolve(config)
        step = OmegaConf.select(config, "study.step")
        jobs.append({**job.resolved, "step": step})
        labels = [strategy.label for strategy in job.strategies]
        verdict = Verdict.PROFILED if job.mode == "profile" else Verdict.SAME
        result = Result(verdict, "", job.workload.name, labels, "cpu", 0, config=job.resolved)
        output.mkdir(parents=True, exist_ok=True)
        result.write(output / "result.json")
        return result

    def call(*arguments: str) -> Jobs:
        jobs.clear()
        assert command_line(*arguments, *SETTINGS) == 0
        return jobs

    monkeypatch.setattr(runner, "run", run)
    return call


def study(**values: Any) -> Study:
    node = {"question": "Which?", "x": "workload.size", "y": "step_us", **values}
    found = Study.of(OmegaConf.create({"study": node}))
    assert found is not None
    return found


# --- every study -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_several_jobs_that_have_what_it_names(name: str, plan: Callable[..., Jobs], tmp_path: Path) -> None:
    jobs = plan(f"experiments={name}")
    assert len(jobs) == len({str(job) for job in jobs}) > 1
    declared = Study.of(OmegaConf.load(ROOT / "experiments" / f"{name}.yaml"))  # type: ignore[arg-type]
    assert declared is not None
    assert set(declared.columns) <= {*FIGURES, *jobs[0]}
    for key in jobs[0].keys() & declared.x:
        assert len({str(job[key]) for job in jobs}) > 1
    assert {job["measurement"] for job in jobs} == {"quick"}
    (page,) = tmp_path.glob("multirun/*/*/study.md")
    assert declared.question in page.read_text()
    assert "no job has" not in page.read_text()


@pytest.mark.parametrize("name", STUDIES)
def test_its_file_says_what_it_asks_and_how_to_try_it(name: str) -> None:
    head = (ROOT / "experiments" / f"{name}.yaml").read_text().partition("defaults:")[0]
    assert "?" in head
    assert f"experiments={name}" in head


# --- which jobs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plus_makes_no_difference(plan: Callable[..., Jobs]) -> None:
    assert plan("+experiments=gelu_five_ways") == plan("experiments=gelu_five_ways")


@pytest.mark.parametrize("key", ["workload.size", "++workload.size"])
def test_the_command_line_replaces_what_a_study_sweeps(key: str, plan: Callable[..., Jobs]) -> None:
    jobs = plan("experiments=matmul_scaling", f"{key}=32,64", "dtype=float32")
    assert [(job["dtype"], job["workload.size"]) for job in jobs] == [("float32", 32), ("float32", 64)]


def test_steps_run_one_after_the_other_and_build_on_each_other(plan: Callable[..., Jobs]) -> None:
    jobs = plan("experiments=training_loop", "workload.batch_size=8")
    assert [job["step"] for job in jobs] == ["plain", "workers", "pinned", "prefetch", "amp", "optimizer", "graph"]
    assert [job["workload.workers"] for job in jobs] == [0, *[8] * 6]
    assert [job["strategy"] for job in jobs][:3] == ["baseline", "baseline", "pinned_memory"]
    assert {job["workload.batch_size"] for job in jobs} == {8}


def test_a_job_that_steps_have_in_common_runs_once(plan: Callable[..., Jobs]) -> None:
    jobs = plan("experiments=mlp_scaling", "workload.layers=2", "workload.dim=16")
    # Where layers and width are given, those two steps are the same single job.
    assert [job["step"] for job in jobs] == ["passes"] * 4 + ["layers"] + ["batch"] * 3


@pytest.mark.parametrize("named", ["plain,amp", "plain, amp", "'plain','amp'"])
def test_some_steps_of_a_study(named: str, plan: Callable[..., Jobs]) -> None:
    assert [job["step"] for job in plan("experiments=training_loop", f"study.step={named}")] == ["plain", "amp"]


def test_a_job_of_a_step_is_repeated_by_what_it_was_given(plan: Callable[..., Jobs], tmp_path: Path) -> None:
    jobs = list(plan("experiments=training_loop"))
    for job in (0, 3):
        (overrides,) = tmp_path.glob(f"multirun/*/*/{job}/.hydra/overrides.yaml")
        given = [str(text) for text in OmegaConf.load(overrides)]  # type: ignore[union-attr]
        folder = f"hydra.sweep.dir={tmp_path}/again{job}"
        assert plan(*given, folder) == [jobs[job]]


def test_a_study_of_ones_own_needs_no_plus(plan: Callable[..., Jobs], tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [override /measurement: quick]\n"
        "study: {question: 'Wide?', x: workload.dim, y: step_us}\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {workload.dim: '8,16'}}}\n"
    )
    assert [job["workload.dim"] for job in plan("experiments=mine")] == [8, 16]
    assert [job["workload.dim"] for job in plan("experiments=mine", "workload.dim=4,5,6")] == [4, 5, 6]


def test_a_plain_sweep_has_no_step(plan: Callable[..., Jobs]) -> None:
    jobs = plan("-m", "workload=mlp", "workload.dim=8,16")
    assert [(job["workload.dim"], job["step"]) for job in jobs] == [(8, None), (16, None)]


def test_a_step_that_there_is_not(plan: Callable[..., Jobs], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        plan("experiments=training_loop", "study.step=optimiser")
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("optexp: study.step=optimiser is not a step of this study (did you mean optimizer?")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": None}, "study.x"),
        ({"log": "z"}, "study.log=z is not allowed"),
        ({"shw": "kernels"}, "did you mean show?"),
    ],
)
def test_a_mistake_in_a_study_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")) as raised:
        study(**given)
    assert overrides.explain(raised.value) == str(raised.value)


# --- the answer --------------------------------------------------------------------------------------------------


def compared(size: int, strategy: str, before: float, after: float, verdict: Verdict = Verdict.FASTER) -> Result:
    ratio = before / after
    return Result(
        verdict, f"{verdict}: because", "gelu", [strategy], "cpu", 0,
        speedup=Speedup(ratio, ratio * 0.9, ratio * 1.1, 0.99, 1) if verdict.measured else None,
        baseline=ArmSummary(step_us=before, throughput=1e6 / before),
        candidate=ArmSummary(step_us=after, throughput=1e6 / after) if verdict.measured else ArmSummary(),
        config={"workload.size": size, "baseline": "baseline", "strategy": strategy, "measurement": "quick"},
    )  # fmt: skip


def profiled(size: int, step_us: float, flop: float, ceiling: float) -> Result:
    return Result(
        Verdict.PROFILED, "PROFILED: memory_bound", "matmul", [], "cpu", 0,
        baseline=ArmSummary(step_us=step_us, throughput=1e6 / step_us),
        profile=ProfileRecord(
            ArmProfile({"matrix_flop": flop, "share_matrix": 0.75, "share_other": 0.25}),
            calibration=Calibration("cpu", 1.0, {"float32": ceiling}),
        ),
        config={"workload.size": size, "dtype": "float32", "baseline": "baseline", "measurement": "quick"},
    )  # fmt: skip


def test_a_baseline_stands_beside_what_was_compared_with_it_once() -> None:
    asked = study(by="arm", show=["speedup", "gain"])
    jobs = [compared(8, "amp", 100, 50), compared(8, "fusion", 101, 25), compared(16, "amp", 200, 100)]
    names, rows = table(asked, points(asked, [(job, "") for job in jobs]))
    assert names == ["size", "strategy", "time/step", "speedup", "× first row", "verdict"]
    assert [row[:3] for row in rows] == [
        ["8", "baseline", "100 µs"], ["8", "amp", "50 µs"], ["8", "fusion", "25 µs"],
        ["16", "baseline", "200 µs"], ["16", "amp", "100 µs"],
    ]  # fmt: skip
    assert rows[1][3:] == ["2.00× (1.80 to 2.20)", "2.00×", "FASTER"]
    assert [rows[0][3], rows[0][5]] == ["", ""]  # a baseline is no finding


def test_what_else_was_swept_gets_a_column_of_its_own() -> None:
    asked = study(by="arm", show="speedup")

    def job(size: int, dtype: str, seed: int) -> tuple[Result, str]:
        made = compared(size, "amp", 100 * size, 50)
        return replace(made, config={**made.config, "dtype": dtype, "workload.half": size // 2, "seed": seed}), ""

    jobs = [job(8, "float32", 0), job(8, "bfloat16", 1), job(16, "float32", 2)]
    whole = completed(asked, jobs)
    assert whole.x == ["workload.size", "dtype"]  # the rest goes with one of them
    names, rows = table(whole, points(whole, jobs))
    assert names[:3] == ["size", "dtype", "strategy"]
    assert [row[1:3] for row in rows[:4]] == [
        ["float32", "baseline"], ["float32", "amp"], ["bfloat16", "baseline"], ["bfloat16", "amp"],
    ]  # fmt: skip
    assert completed(asked, [jobs[0], jobs[2]]).x == ["workload.size"]


def test_rows_of_different_jobs_come_with_what_noise_is() -> None:
    asked = study(show="gain")
    itself = replace(compared(8, "", 100, 95, Verdict.INCONCLUSIVE), strategy=[])
    jobs = [(itself, ""), (compared(8, "amp", 104, 96), ""), (compared(8, "fusion", 100, 50), "")]
    found = points(asked, jobs)
    (remark,) = remarks(asked, found)
    assert "no interval" in remark
    assert "differed by up to 9.5%" in remark  # 104 and 95 µs of one program
    assert [point.cell("gain") for point in found] == ["1.00×", "undecided, 0.99×", "1.90×"]
    (remark,) = remarks(asked, points(asked, [(compared(8, "amp", 100, 50), "")]))
    assert "stays unknown" in remark


def test_baselines_of_other_jobs_are_no_measure() -> None:
    asked = study(by="arm", show="speedup")
    jobs = [(compared(8, "amp", 100, 50), ""), (compared(8, "fusion", 200, 100), "")]
    (remark,) = remarks(asked, points(asked, jobs))
    assert "up to 2.00× apart" in remark
    assert remarks(asked, points(asked, jobs[:1])) == []


def test_what_is_undecided_is_no_ratio() -> None:
    (point,) = points(study(), [(compared(8, "amp", 100, 95, Verdict.INCONCLUSIVE), "")])
    assert point.cell("speedup") == "undecided, 0.947 to 1.16"
    assert point.doubtful("step_us")
    assert not point.doubtful("peak_mib")


def test_times_and_rates_have_the_interval_of_their_ratio() -> None:
    (point,) = points(study(), [(compared(8, "amp", 100, 50), "")])  # 2× (1.80 to 2.20)
    assert point.interval("step_us") == pytest.approx((100 / 2.2, 100 / 1.8))
    assert point.interval("throughput") == pytest.approx((2e4 * 0.9, 2e4 * 1.1))
    assert point.interval("kernels") is None
    alone = profiled(8, 10.0, 2e6, 4e11)
    alone.baseline = replace(alone.baseline, p5_us=9.0, p95_us=12.0)
    (point,) = points(study(), [(alone, "")])
    assert point.interval("step_us") == (9.0, 12.0)


def test_what_lines_are_told_apart_by_is_no_axis() -> None:
    asked = study(by="dtype")
    jobs = [(replace(profiled(size, 10.0, 2e6, 4e11)), "") for size in (8, 16)]
    jobs += [(replace(job, config={**job.config, "dtype": "bfloat16"}), "") for job, _ in jobs]
    assert completed(asked, jobs).x == ["workload.size"]


def test_a_figure_that_no_job_has_gives_way_to_what_varies() -> None:
    asked = study(x="kernels", by="arm")
    jobs = [(compared(size, "amp", 10.0 * size, 5), "") for size in (8, 16)]
    assert completed(asked, jobs).x == ["workload.size"]
    for number, (job, _) in enumerate(jobs):
        job.candidate = replace(job.candidate, kernels=float(number))
    assert completed(asked, jobs).x == ["kernels"]


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [("PROFILED NOT_ENGAGED", 0), ("SAME UNSUPPORTED NOT_ENGAGED", 0), ("NOT_ENGAGED", 4), ("SAME INVALID", 3)],
)
def test_nothing_to_do_is_an_answer(verdicts: str, status: int) -> None:
    assert worst_status(answering([*map(Verdict, verdicts.split())])) == status


def test_no_figure_stands_where_none_may_be_shown() -> None:
    asked = study(show=["speedup"])
    wrong = compared(8, "amp", 100, 50, Verdict.NOT_EQUIVALENT)
    names, rows = table(asked, points(asked, [(wrong, ""), (compared(16, "amp", 100, 50), "")]))
    assert rows[0] == ["8", "", "", "NOT_EQUIVALENT: because"]
    assert names[-1] == "verdict"


def test_rates_of_products_against_the_ceiling() -> None:
    asked = study(y=["flops", "of_ceiling"], show="shares")
    found = points(asked, [(profiled(8, 10.0, 2e6, 4e11), "")])  # 2e6 in 10 µs: 0.2 TFLOP/s
    _, ((_, rate, ceiling, shares),) = table(asked, found)
    assert (rate, ceiling, shares) == ("0.2 TFLOP/s", "50%", "matrix 75%, other 25%")
    assert remarks(asked, found) == []


def test_a_ceiling_that_cannot_be_right_is_said_and_not_hidden() -> None:
    asked = study(y="of_ceiling")
    found = points(asked, [(profiled(8, 10.0, 2e6, 1e11), "")])
    page = markdown("products", asked, found)
    assert "200%" in page
    assert "The measured ceiling is too low" in page


def test_a_name_that_no_job_has_is_said() -> None:
    asked = study(show="step_uss")
    (remark,) = remarks(asked, points(asked, [(compared(8, "amp", 2, 1), "")]))
    assert "'step_uss'" in remark
    assert "did you mean step_us?" in remark


def test_a_page_survives_what_jobs_say() -> None:
    asked = study()
    broken = replace(compared(8, "amp", 2, 1, Verdict.ERROR), headline="ERROR: a | b\nand more")
    lines = markdown("x", asked, points(asked, [(broken, "")])).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "a \\| b and more" in rows[-1]


def test_an_error_bar_is_the_interval() -> None:
    point = Point(compared(8, "amp", 100, 50), "candidate")
    assert point.value("speedup") == 2
    assert point.cell("speedup") == "2.00× (1.80 to 2.20)"


def test_products_are_counted_and_other_operators_are_not() -> None:
    product = Op("aten::mm", 0.0, 1.0, inputs=(("float32", (4, 8)), ("float32", (8, 16))))
    addition = Op("aten::add", 1.0, 1.0, inputs=(("float32", (4, 16)), ("float32", (4, 16))))
    steps = (Span("step", 0.0, 2.0), Span("step", 2.0, 2.0))
    assert matrix_flop(Trace(steps, ops=(product, addition, product, addition))) == 2 * 4 * 8 * 16


def test_profiles_are_listed_in_their_order_with_time_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    results = [profiled(size, 10.0 * size, 2e6, 4e11) for size in (8, 2, 4)]
    assert summary.ranked(results) == results
    terminal.output().print(terminal.sweep_table(ranking.rows(results)))
    lines = capsys.readouterr().out.splitlines()
    assert "estimate" not in lines[0]
    assert [line.split()[:3] for line in lines[1:4]] == [["PROFILED", f"{10 * s}", "µs"] for s in (8, 2, 4)]
    assert all("memory_bound" in line for line in lines[1:4])


def test_job_2_comes_before_job_10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_started", 0.0)
    monkeypatch.setattr(sweep, "_expected", [])  # of a sweep that ran here before
    for number in range(11):
        (tmp_path / str(number) / ".hydra").mkdir(parents=True)
        (tmp_path / str(number) / ".hydra" / "config.yaml").touch()
    assert [job.name for job in sweep.jobs(tmp_path)] == [str(number) for number in range(11)]


# --- for real ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "rows"),
    [
        pytest.param(
            "matmul_scaling",
            ["workload.size=32,64", "dtype=float32"],
            ["| 32 | float32 |", "| 64 | float32 |"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "elementwise",
            [
                "workload.rows=64",
                "workload.columns=64",
                "study.step=scale",
                f"study.steps.scale='{IN_PLACE.format('scale')}'",
            ],
            ["| relu_bias_scale | baseline |", "| relu_bias_scale | inplace |"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_study_leaves_its_answer(name: str, sizes: list[str], rows: list[str], tmp_path: Path) -> None:
    quick = ["warmup_s=0.2", "block_ms=2", "pairs=10", "process_s=1", "verification_seeds=1", "profile_steps=2"]
    settings = ["isolation=none", "device=cpu", *(f"measurement.{value}" for value in quick)]
    done = subprocess.run(
        [sys.executable, "-m", "optexp", f"+experiments={name}", *sizes, *settings],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = tmp_path.glob("multirun/*/*/study.md")
    found = [line for line in page.read_text().splitlines() if line.startswith("|")][2:]
    assert [line.startswith(row) for line, row in zip(found, rows, strict=True)] == [True] * len(rows)
    question = page.read_text().splitlines()[2]
    assert question in done.stdout
    assert (page.parent / "plots" / f"{name}.png").stat().st_size > 5000

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.info.run_name == name
    assert parent.info.status == "FINISHED"
    assert question in parent.data.tags["mlflow.note.content"]
    logged = {file.path for folder in (None, "plots") for file in client.list_artifacts(parent.info.run_id, folder)}
    assert {"study.md", "sweep.json", f"plots/{name}.png"} <= logged
    assert len(runs) == 1 + len(list(page.parent.glob("*/result.json")))
