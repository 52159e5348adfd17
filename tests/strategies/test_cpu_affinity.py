"""CPU affinity: which cores, when they are bound, and what the measurement leaves to choose from."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from optexp.errors import ConfigError
from optexp.measurement import placement
from optexp.schema import build
from optexp.strategies.cpu_affinity import CpuAffinity
from optexp.strategy import Evidence, Stage, Strategy
from optexp.trace import Span, Trace
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRACE = Trace(steps=(Span("step", 0.0, 1.0),))
several = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.fixture(autouse=True)
def _cores() -> Iterator[None]:
    """This process's cores as they were."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    placement.grant([])
    placement.bind_process(sorted(before))
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("given", "cores"), [("auto", "auto"), ([3, 2], [2, 3]), ("5,1", [1, 5]), (4, [4]), ([7, 7], [7])]
)
def test_cores_are_numbers_or_auto(given, cores):
    target = "optexp.strategies.cpu_affinity.CpuAffinity"
    assert build({"_target_": target, "cores": given}, "strategy.cpu_affinity").cores == cores


@pytest.mark.parametrize("given", ["some", "1,x", {"a": 1}])
def test_anything_else_is_a_mistake(given):
    target = "optexp.strategies.cpu_affinity.CpuAffinity"
    with pytest.raises(ConfigError, match="write auto, or numbers"):
        build({"_target_": target, "cores": given}, "strategy.cpu_affinity")


def test_there_is_something_to_choose_only_where_the_baseline_is_free():
    program = Mlp(dim=4).build(CPU, torch.float32, 0)
    placement.grant([5])
    assert "binds the baseline to core 5 too: use measurement.cpus=all" in CpuAffinity().unsupported(program, CUDA)
    placement.grant([5, 6])
    assert CpuAffinity().unsupported(program, CUDA) is None
    assert "binds the baseline to cores 5, 6 too" in CpuAffinity([5, 6]).unsupported(program, CUDA)
    assert "cores [9] are not among those of this run, [5, 6]" in CpuAffinity([9]).unsupported(program, CUDA)
    assert "measurement.cpus" in CpuAffinity().unsupported(program, CPU)


@several
def test_cores_are_bound_once_set_up_and_other_threads_too():
    everywhere = sorted(os.sched_getaffinity(0))
    program = Mlp(dim=4).build(CPU, torch.float32, 0)
    placement.grant(everywhere)
    _, notes = CpuAffinity().apply(program)
    assert notes == {"cores": everywhere[-1:], "granted": len(everywhere)}
    assert sorted(os.sched_getaffinity(0)) == everywhere, "set-up still has them all"
    placement.settle()
    assert {tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")} == {(everywhere[-1],)}


@several
def test_an_arm_binds_itself_and_says_so(monkeypatch: pytest.MonkeyPatch):
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    monkeypatch.setattr(CpuAffinity, "unsupported", lambda *given: None)
    arm, counted = Arm(), {}
    for name, stack in (("baseline", []), ("candidate", [CpuAffinity(list(everywhere[:1]))])):
        spec = Spec(Mlp(dim=4), stack, "cpu", "float32", 0, cores=everywhere)
        notes = arm.setup(spec.pack()).notes
        counted[name] = arm.counters()
    assert counted["baseline"]["process/cores"] == len(everywhere)
    assert counted["candidate"]["process/cores"] == 1
    for name, engaged in (("baseline", False), ("candidate", True)):
        assert CpuAffinity().evidence(TRACE, TRACE, notes["cpu_affinity"], counted[name]).engaged is engaged


@several
def test_what_is_compiled_before_an_arm_is_bound_stays_compiled(monkeypatch: pytest.MonkeyPatch):
    """torch compiles again once its number of threads is another one."""

    @dataclass
    class Compiled(Strategy):
        stage = Stage.COMPILE

        def apply(self, program):
            return replace(program, forward=torch.compile(program.call, backend="eager")), {}

        def evidence(self, before, after, notes, counters):
            return Evidence(True, "")

    monkeypatch.setattr(CpuAffinity, "unsupported", lambda *given: None)
    everywhere = tuple(sorted(os.sched_getaffinity(0)))
    torch.set_num_threads(2)
    arm = Arm()
    arm.setup(Spec(Mlp(dim=4), [Compiled(), CpuAffinity()], "cpu", "float32", 0, cores=everywhere).pack())
    assert torch.get_num_threads() == 1
    once = arm.counters()["stats/unique_graphs"]
    arm.work(2)
    assert arm.counters()["stats/unique_graphs"] == once > 0
