"""How many processes and pairs are spent, and what company is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hydra import compose, initialize_config_dir
from pyarrow import parquet

from optexp.comparison import measure, runner
from optexp.comparison.measure import next_pairs, room_for_a_third, say_how_to_lock
from optexp.comparison.quiet import Unshared
from optexp.comparison.session import Session
from optexp.config import Experiment, resolve, search_path
from optexp.errors import Distrusted
from optexp.measurement.clock import Timing
from optexp.measurement.gpu import Gpu, Reading
from optexp.measurement.samples import COLD, MAIN, Pair, Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.records.measurement import Measurement
from optexp.records.profile import ArmProfile, ProfileRecord
from optexp.reporting import summary
from optexp.reporting.terminal import Progress
from optexp.result import Result, Verdict
from optexp.support.draws import Draws
from optexp.support.stopwatch import Stopwatch
from tests.measurement.nvml import Nvml
from tests.measurement.samples import constant, made, timing
from tests.measurement.test_controls import rounds as with_controls


def measured(session: Any, check: Callable[[measure.Timed], None] = lambda timed: None) -> measure.Timed:
    """All that is timed; `check` is the verification of the timed process."""

    def checked(timed: measure.Timed) -> bool:
        check(timed)
        return True

    return measure.measure(session, checked)


def job(folder: Path, *overrides: str) -> Result:
    fixed = ["isolation=none", "device=cpu", "tracking.enabled=false", "measurement.verification_seeds=1"]
    fixed += ["measurement.thorough=false", "measurement.warmup_s=0.3"]
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        return runner.run(compose("config", overrides=[*fixed, *overrides]), folder)


def processes(luck: float, noise: float, count: int = 4) -> list[Sample]:
    random, samples = Random(7), []
    for _ in range(count):
        own = random.gauss(0, luck)
        seconds = [1e-3 * 2.718 ** (own + random.gauss(0, noise)) for _ in range(50)]
        samples.append(Sample([Pair(timing(1e-3), timing(s), True) for s in seconds]))
    return samples


@pytest.mark.parametrize(("luck", "noise", "pairs"), [(0.02, 0.005, 10), (0.0005, 0.02, 50)])
def test_fewer_pairs_where_processes_differ_more_than_blocks(luck: float, noise: float, pairs: int) -> None:
    assert next_pairs(processes(luck, noise), MeasurementSettings()) == pairs
    assert (
        next_pairs(processes(luck, noise)[:2], MeasurementSettings()) == MeasurementSettings().pairs // 2
    )  # too early to tell
    hot, *others = processes(luck, noise)
    hot.pairs = hot.pairs[:1]  # all others were slowed: no scatter to tell anything by
    assert next_pairs([hot, *others], MeasurementSettings()) == MeasurementSettings().pairs


@pytest.mark.slow
def test_controls_run_in_the_same_rounds_and_are_recorded(tmp_path: Path) -> None:
    few = ["measurement.processes_min=2", "measurement.processes_max=2", "measurement.pairs=10"]
    result = job(tmp_path, "workload=sleep", "workload.ms=0.4", "strategy=baseline", *few)
    assert result.verdict.measured or result.verdict is Verdict.INVALID, result.headline
    found = result.measurement.controls
    assert set(found) == {"A/A", "known delay"}
    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    assert {row["kind"] for row in rows} == {"main", "same", "delayed"}
    delayed = [row["steps"] for row in rows if row["kind"] == "delayed" and row["arm"] == "candidate"]
    assert min(delayed) >= 20
    assert all(steps % 20 == 0 for steps in delayed)  # as which 21 of each 20 are told


def test_a_shared_card_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optexp.comparison.machine.Gpu.open", lambda device: object())
    monkeypatch.setattr(measure, "neighbours", lambda gpu, ours: (["process 4711 (python, 2048 MiB)"], 1))
    result = job(tmp_path, "workload=mlp", "strategy=baseline", "measurement=quick")
    assert result.verdict is Verdict.INVALID
    assert "4711" in result.headline
    assert "environment.allow_foreign=true" in result.headline
    assert any("mean nothing here" in note for note in result.notes)
    assert "arms" not in result.seconds


@pytest.mark.parametrize("preset", ["default", "quick", "rigorous", "textbook"])
def test_presets_are_what_they_are_called(preset: str) -> None:
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        settings = resolve(compose("config", overrides=[f"measurement={preset}"])).measurement
    assert settings.preset == preset
    assert (settings.trials == 3) == (preset == "textbook")
    if preset == "rigorous":
        assert (settings.processes_min, settings.processes_max, settings.half_width) == (10, 30, 0.0025)
        assert settings.cold_caches
        assert settings.l2 == "both"


def test_how_to_hold_the_clocks_is_said_and_not_done(gpu: Gpu) -> None:
    samples = made(constant(1e-3), constant(1e-3), readings=[Reading(0.0, sm_mhz=1755), Reading(1.0, sm_mhz=1980)])

    def said(card: Gpu | None, *given: Any, asked: bool = True) -> str:
        result = Result(Verdict.ERROR, "", "mlp", [], "cuda:0", 0)
        say_how_to_lock(
            SimpleNamespace(
                machine=SimpleNamespace(gpu=card), settings=MeasurementSettings(lock_clocks=asked), result=result
            ),
            *given,
        )  # type: ignore[arg-type]
        return "".join(result.notes)

    assert "1755 to 1980 MHz" in said(gpu, samples)
    assert "sudo nvidia-smi --id=GPU-1234 --lock-gpu-clocks=1755,1755" in said(gpu, samples)
    assert "an administrator holds them with" in said(gpu)  # where nothing was timed
    assert "no GPU clocks" in said(None, samples)
    assert not said(gpu, samples, asked=False)


@pytest.mark.parametrize(("free_mib", "fits"), [(4000, False), (30_000, True)])
def test_no_third_arm_where_it_does_not_fit(gpu: Gpu, nvml: Nvml, free_mib: int, fits: bool) -> None:
    nvml.free = free_mib * 2**20
    each = ArmProfile({"memory_reserved_mib": 5000.0})
    result = SimpleNamespace(profile=ProfileRecord(each, each), notes=[])
    assert room_for_a_third(SimpleNamespace(machine=SimpleNamespace(gpu=gpu), result=result)) is fits  # type: ignore[arg-type]
    assert bool(result.notes) is not fits


def test_compile_caches_begin_empty_where_asked(tmp_path: Path) -> None:
    folders: list[str] = []

    def session(*overrides: str) -> Session:
        search_path.register()
        with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
            experiment = resolve(compose("config", overrides=list(overrides)))
        made = Session(experiment, "cpu", tmp_path, Stopwatch(), Progress())
        folders.extend(made.machine.folders)
        return made

    assert session().pool.caches == {}
    asked = session("measurement.cold_caches=true")
    assert set(asked.pool.caches) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"}
    assert all(folder.startswith(asked.machine.folders[-1]) for folder in asked.pool.caches.values())
    assert session("measurement.cold_caches=true", "isolation=none").pool.caches == {}
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.slow
def test_arms_made_anew_in_one_process_are_one_process(tmp_path: Path) -> None:
    """Each had the luck of the only process there was, and said "15 processes"."""
    sizes = ["workload.dim=16", "workload.layers=2", "workload.batch_size=8"]
    result = job(tmp_path, "workload=mlp", "strategy=baseline", "measurement.process_s=0.2", *sizes)
    assert result.speedup is not None
    assert result.speedup.processes == 1
    assert "one process" in result.headline
    if result.verdict is Verdict.INCONCLUSIVE:
        assert "isolation=process looks closer" in result.headline


@pytest.mark.parametrize(
    "named", ["workload.path=mine.py", "workload.target=mine:Model", "workload.target=mine.py:Model"]
)
def test_controls_are_of_the_code_that_they_were_run_on(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experiment: Callable[..., Experiment]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for line in ("import torch", "import torch", "import torch, time"):
        (tmp_path / "mine.py").write_text(f"{line}\nModel = torch.nn.ReLU")
        asked = experiment("workload=module", named, "workload.inputs=[{shape: [4]}]")
        session = Session(asked, "cpu", tmp_path, Stopwatch(), Progress())
        session.close()
        found.append(measure.fingerprint(session))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("seen", [True, False])
def test_controls_that_found_the_delay_are_remembered_and_say_from_when(
    seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds_run = []

    def one_round(session: Any, timed: Any, index: int, pairs: int, into: list[Sample], control: bool) -> Any:
        rounds_run.append(control)
        found = with_controls(1.0, 1.05, luck=0.001 if seen else 0.1)[index]
        main = made(constant(2e-3), constant(1e-3), pairs=pairs, processes=1)[0].pairs
        into.append(replace(found, pairs=[*main, *found.pairs]))
        return into[-1], {"baseline": Mock(), "candidate": Mock()}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "one_round", one_round)
    monkeypatch.setattr(measure, "fingerprint", lambda session: "0")
    for name in ("differences", "floor", "look_at_load", "look_enough"):
        monkeypatch.setattr(measure, name, lambda *_: 0.0)
    result = Result(Verdict.ERROR, "", "mlp", [], "cuda:0", 0)
    session = SimpleNamespace(
        settings=MeasurementSettings(), result=result, experiment=SimpleNamespace(seed=0), draws=Draws("key"),
        check_identities=lambda arms: None, watch=Stopwatch(),
        progress=SimpleNamespace(update=lambda *args, **kwargs: None), isolated=False,
        pool=SimpleNamespace(homes=None), refuse_edits=Mock(), quiet=Unshared(),
        machine=SimpleNamespace(cores=[1], gpu=SimpleNamespace(free_mib=lambda: None)), output=tmp_path,
    )  # fmt: skip
    for again in (False, True):
        rounds_run.clear()
        timed = measured(session)
        assert any(rounds_run) is not (again and seen)
        said = [control.text for control in timed.controls.values()]
        assert all(f"(remembered from {date.today()})" in text for text in said) is (again and seen)
    result.measurement = Measurement(controls=timed.controls)
    assert (f"remembered from {date.today()}" in summary.measured(result)) is seen


def test_a_host_bound_result_says_so_and_what_other_cores_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def one_round(
        session: Session, timed: Any, index: int, pairs: int, into: list[Sample], control: bool = False, **more: Any
    ) -> Any:
        asked.append(more.get("bound", True))
        (found,) = made(constant(2e-3), constant(1e-3), pairs=pairs, processes=1)
        into.append(replace(found, aim=more.get("aim", "")))
        return into[-1], {"baseline": Mock(), "candidate": Mock()}

    monkeypatch.setattr(measure, "one_round", one_round)
    monkeypatch.setattr(measure, "differences", lambda arms, result: {})
    monkeypatch.setattr(measure, "look_enough", lambda *_: None)
    monkeypatch.setattr(measure, "floor", lambda session, arm: 0.0)
    result = Result(Verdict.ERROR, "", "mlp", [], "cuda:0", 0)
    result.baseline.busy_us, result.candidate.busy_us = 420.0, 950.0
    result.baseline.gpu_busy, result.candidate.gpu_busy = 0.15, 0.7  # of steps that tracing made longer
    session = SimpleNamespace(
        settings=MeasurementSettings(controls=False),
        result=result,
        experiment=SimpleNamespace(seed=0),
        draws=Draws("key"),
        check_identities=lambda arms: None,
        watch=Stopwatch(),
        progress=SimpleNamespace(update=lambda *args, **kwargs: None),
        output=tmp_path,
        isolated=True,
        pool=SimpleNamespace(homes=None),
        quiet=Unshared(),
        refuse_edits=Mock(),
        machine=SimpleNamespace(gpu=None, cores=[1], own_cores={0, 1}),
    )
    timed = measured(session)
    assert len(timed.samples) == 5
    assert asked == [True] * 5 + [False]
    assert "host-bound: the GPU is busy 21% of the baseline's step" in summary.remarks(result)
    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    assert sum(row["kind"] == "unbound main" for row in rows) == 2 * measure.FEWEST_PAIRS
    assert "free on all 2 cores it is 2.00× (2 ms and 1 ms, one process)" in timed.unbound
    session.settings = MeasurementSettings(controls=False, processes_min=1, processes_max=1)
    measured(session)
    assert asked[6:] == [True]  # a look does not look there too


@pytest.mark.parametrize(
    ("done", "spent_s", "precise", "left_s"),
    [(1, 3.0, False, 24.0), (1, 3.0, True, 12.0), (6, 12.0, False, 14.0), (6, 12.0, True, 0.0), (14, 14.0, False, 1.0),
     (7, 30.0, False, 0.0), (3, 60.0, False, 40.0)],
)  # fmt: skip
def test_the_time_to_go_is_that_of_the_budget_until_it_is_precise(
    done: int, spent_s: float, precise: bool, left_s: float
) -> None:
    assert measure.to_go_s(done, spent_s, precise, MeasurementSettings(budget_s=25.0)) == pytest.approx(left_s)


@pytest.mark.parametrize(("others", "noted"), [(0, False), (2, True)])
@pytest.mark.parametrize("outside", [True, False])
def test_processes_of_another_container_that_come_later_are_noted(
    others: int, noted: bool, outside: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From inside of one, our own arms are hidden too."""
    arms = {name: Mock(pid=100 + i) for i, name in enumerate(("baseline", "candidate"))}
    setup = Mock(queue=0, setup_s=1.0)
    seen = {} if outside else {arm.pid: None for arm in arms.values()}
    monkeypatch.setattr(gpu, "processes", lambda: seen)
    monkeypatch.setattr(measure, "sample", lambda *_: {})
    result = Result(Verdict.ERROR, "", "mlp", [], "cuda:0", 0)
    machine, settings = SimpleNamespace(gpu=gpu), MeasurementSettings()
    session: Any = Mock(machine=machine, result=result, settings=settings, working=lambda *_: nullcontext())
    starting = {name: Mock(arm=arm, setup=Mock(wait=lambda: setup)) for name, arm in arms.items()}
    session.pool.start.return_value, session.workload.variety = starting, 1
    session.neighbours.return_value, session.quiet = ([], others + 2 * outside), Unshared()
    for _ in range(2):
        measure.one_round(session, measure.Timed(Random(0)), 0, 10, [])
    assert len(result.notes) == noted


@pytest.mark.parametrize("ends", [Distrusted("x"), KeyboardInterrupt()])
def test_what_was_measured_is_written_down_however_it_ends(
    ends: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ends

    def one_round(session: Any, timed: Any, index: int, pairs: int, into: list[Sample], control: bool) -> Any:
        into.append(made(constant(1e-3), constant(1e-3))[0])
        if index == 1 and isinstance(ends, KeyboardInterrupt):  # in the middle of a process
            del into[-1].pairs[7:]
            raise ends
        return into[-1], {"baseline": Mock(), "candidate": Mock()}

    monkeypatch.setattr(measure, "one_round", one_round)
    for name in ("differences", "floor", "look_at_load", "look_enough"):
        monkeypatch.setattr(measure, name, lambda *_: 0.0)
    session = SimpleNamespace(
        settings=MeasurementSettings(controls=False, processes_min=2), draws=Draws("key"),
        check_identities=lambda arms: None,
        watch=Stopwatch(), machine=SimpleNamespace(gpu=None, cores=[1]), isolated=False,
        pool=SimpleNamespace(homes=None), refuse_edits=Mock(), quiet=Unshared(), output=tmp_path,
        result=Result(Verdict.ERROR, "", "mlp", [], "cpu", 0),
        progress=SimpleNamespace(update=lambda *args, **kwargs: None),
    )  # fmt: skip
    with pytest.raises(type(ends)):
        measured(session, fail)
    pairs = 40 + (7 if isinstance(ends, KeyboardInterrupt) else 40)
    assert parquet.read_table(tmp_path / "samples.parquet").num_rows == 2 * pairs


def test_controls_that_were_run_again_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    biased = with_controls(1.04, 1.05)

    def one_round(
        session: Any, timed: Any, index: int, pairs: int, into: list[Sample], control: bool, aim: str = ""
    ) -> Any:
        main = made(constant(1e-3), constant(1e-3), pairs=pairs, processes=1)[0].pairs
        into.append(Sample([*main, *biased[index].pairs], aim=aim))
        return into[-1], {"baseline": Mock(), "candidate": Mock()}

    monkeypatch.setattr(measure, "one_round", one_round)
    monkeypatch.setattr(measure, "fingerprint", lambda session: "0")
    for name in ("differences", "floor", "look_at_load", "look_enough"):
        monkeypatch.setattr(measure, name, lambda *_: 0.0)
    session = SimpleNamespace(
        settings=MeasurementSettings(), draws=Draws("key"), check_identities=lambda arms: None, watch=Stopwatch(),
        machine=SimpleNamespace(gpu=None, cores=[1]), isolated=False,
        pool=SimpleNamespace(homes=None), refuse_edits=Mock(), quiet=Unshared(),
        result=Result(Verdict.ERROR, "", "mlp", [], "cpu", 0), output=tmp_path,
        progress=SimpleNamespace(update=lambda *args, **kwargs: None),
    )  # fmt: skip
    timed = measured(session)
    assert len(timed.samples) == 5
    assert not timed.controls["A/A"].ok
    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    kinds = {row["kind"] for row in rows}
    assert kinds == {"main", "same", "delayed", "retried main", "retried same", "retried delayed"}
    assert {row["process"] for row in rows} == set(range(10))


@pytest.mark.parametrize(("cold_us", "refused"), [(60.0, True), (71.0, False), (200.0, False)])
def test_work_that_its_own_stream_does_not_wait_for_is_refused(cold_us: float, refused: bool) -> None:
    result = Result(Verdict.ERROR, "", "gelu", ["aside"], "cuda:0", 0)
    result.candidate.busy_us = 100.0
    slow, quick = (Timing(99, 1e-3, us * 1e-6, cold=True) for us in (500.0, cold_us))
    samples = [Sample([Pair(slow, quick, True, kind)]) for kind in (MAIN, COLD)]
    measure.refuse_work_aside(result, made(constant(1e-6), constant(1e-6)))  # warm blocks are timed by the wall
    if not refused:
        measure.refuse_work_aside(result, samples)
        return
    with pytest.raises(Distrusted, match="its own stream for 60"):
        measure.refuse_work_aside(result, samples)
    hot = (Reading(0.0, reasons=("thermal slow-down",)),)
    slowed = [replace(pair, readings=hot) for sample in samples for pair in sample.pairs]
    measure.refuse_work_aside(result, [Sample([*made(constant(1e-6), constant(1e-6))[0].pairs, *slowed])])


def beside(machine: object, experiment: object, launcher: int = 1) -> Any:
    """A session whose arms descend from this launcher."""
    pool = SimpleNamespace(processes=lambda: [launcher])
    return SimpleNamespace(machine=machine, experiment=experiment, result=None, quiet=Unshared(), pool=pool)


def test_an_arm_that_is_profiled_is_no_company(nvml: Nvml, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ENDING_S", 0.0)
    experiment = SimpleNamespace(verify="first", environment=SimpleNamespace(allow_foreign=False))
    machine = SimpleNamespace(gpu=gpu)
    with subprocess.Popen(["sleep", "60"]) as arm:
        nvml.running = {arm.pid: 2**30}
        measure.refuse_company(beside(machine, experiment, launcher=os.getpid()))
        with pytest.raises(Distrusted, match=f"shared with process {arm.pid} "):
            measure.refuse_company(beside(machine, experiment, launcher=0))
        arm.kill()


@pytest.mark.parametrize(
    ("verify", "allowed", "refused"), [("first", False, True), ("first", True, False), ("only", False, False)]
)
def test_company_on_the_card_is_refused_where_something_is_timed(
    verify: str, allowed: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "neighbours", lambda gpu, ours: (["process 7 (python, 700 MiB)"], 0))
    environment = SimpleNamespace(allow_foreign=allowed)
    monkeypatch.setattr(measure, "ENDING_S", 0.0)
    experiment = SimpleNamespace(verify=verify, environment=environment)
    machine = SimpleNamespace(gpu=object())
    session = beside(machine, experiment)
    if refused:
        with pytest.raises(Distrusted, match="shared with process 7"):
            measure.refuse_company(session)
    else:
        measure.refuse_company(session)


def test_a_process_that_is_ending_is_no_company(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([["process 7 (python, 700 MiB)"], ["process 7 (python, 700 MiB)"], []])
    monkeypatch.setattr(measure, "neighbours", lambda gpu, ours: (next(seen), 0))
    experiment = SimpleNamespace(verify="first", environment=SimpleNamespace(allow_foreign=False))
    machine = SimpleNamespace(gpu=object())
    measure.refuse_company(beside(machine, experiment))
    assert next(seen, None) is None


def test_nobody_waits_for_company_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "neighbours", lambda gpu, ours: (["process 7 (python, 700 MiB)"], 0))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    experiment = SimpleNamespace(verify="first", environment=SimpleNamespace(allow_foreign=True))
    machine = SimpleNamespace(gpu=object())
    measure.refuse_company(beside(machine, experiment))


def test_what_the_arms_do_not_have_in_common_is_listed() -> None:
    arms = {name: Mock() for name in ("baseline", "candidate")}
    for name, arm in arms.items():
        arm.call.return_value = {"gc.isenabled": True, "model.training": name == "baseline"}
    result = Result(Verdict.SAME, "", "mlp", [], "cuda", 0)
    assert measure.differences(arms, result) == {"model.training": "True → False"}
    result.profile.baseline = ArmProfile({"synchronisations": 0.0})
    result.profile.candidate = ArmProfile({"synchronisations": 2.0})
    assert measure.differences(arms, result)["waits for the GPU in a step"] == "0 → 2"
