"""A worker that crashes, exits, hangs or raises becomes a `Failure` that says so; the next one works."""

import os
import pickle
import signal
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy
import pytest
import torch

from optexp.equivalence import process_state
from optexp.errors import FORGED, SPENT, UNTIMED, Failure, Unsupported
from optexp.support.descent import descendants
from optexp.workers import arm_setup, inductor_facts
from optexp.workers.arm import Arm
from optexp.workers.arm_setup import FirstSteps
from optexp.workers.client import InProcess, Worker
from optexp.workers.process import INDUCTOR, Launcher


class Misbehaving:
    """What code under test may do to its process."""

    def greet(self, name: str) -> str:
        return f"hello {name} from {os.getpid()}"

    def fail_in_the_compiler(self) -> None:
        """With an error whose class has the name of one of ours."""
        raise torch._dynamo.exc.Unsupported("no graph of this")

    def segfault(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self) -> None:
        os._exit(7)

    def polite_exit(self) -> None:
        raise SystemExit(3)

    def hang(self) -> None:
        time.sleep(3600)

    def fail(self) -> None:
        raise ValueError("the user's own mistake")

    def refuse(self) -> None:
        raise Unsupported("not here: try elsewhere")

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def arguments(self) -> list[str]:
        return sys.argv

    def forge(self) -> str:
        """An answer of its own, written to every socket that it finds, before the true one."""
        content = pickle.dumps(("ok", "forged"))
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    os.write(int(name), struct.pack("!i", len(content)) + content)
        return "the true answer"

    def spawn_orphan(self) -> int:
        """A process of a group of its own, whose parent ends."""
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            os.setsid()
            if orphan := os.fork():
                os.write(theirs, str(orphan).encode())
                os._exit(0)
            time.sleep(3600)
        os.waitpid(child, 0)
        return int(os.read(ours, 20))

    def spawn_child(self) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "3600"]).pid

    def state(self) -> dict[str, str]:
        """Everything of a process that a job could leave for the next one."""
        dynamo = torch._dynamo
        found = {
            "flags": process_state.settings(),
            "variables": sorted(os.environ.items()),
            "working folder": os.getcwd(),
            "import path": sys.path,
            "arguments": sys.argv,
            "modules": "mailbox" in sys.modules,
            "threads": torch.get_num_threads(),
            "cores": os.sched_getaffinity(0),
            "default dtype": torch.get_default_dtype(),
            "draws": (torch.rand(2).tolist(), numpy.random.rand()),
            "functions": (torch.nn.functional.gelu.__name__, time.perf_counter.__name__),
            "compiler": (dynamo.config.cache_size_limit, sorted(dynamo.utils.counters["stats"].items())),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "signals": signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL,
            "warnings": len(warnings.filters),
        }
        return {name: repr(value) for name, value in found.items()}

    def change_everything(self) -> dict[str, str]:
        """A job with no manners; returns the state that it leaves."""
        import mailbox  # noqa: F401

        torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
        os.environ["OPTEXP_TEST_LEFT"] = "behind"
        os.chdir("/")
        sys.path.insert(0, "/nowhere")
        sys.argv.append("--left")
        torch.set_num_threads(torch.get_num_threads() + 1)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(1)
        torch.nn.functional.gelu = time.perf_counter = time.monotonic  # type: ignore[assignment]
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
        os.nice(1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        warnings.simplefilter("ignore")
        return self.state()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def worker(launcher: Launcher, tmp_path: Path) -> Iterator[Worker[Misbehaving]]:
    worker = launcher.fork(Misbehaving, "candidate", tmp_path / "worker.log", timeout_s=20)
    yield worker
    worker.close()


def test_an_arm_counts_cards_as_nvml_does(worker: Worker[Misbehaving]) -> None:
    assert worker.call(Misbehaving.variable, name="CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def test_an_answer_that_no_question_asked_for_is_not_taken(worker: Worker[Misbehaving]) -> None:
    with pytest.raises(Failure, match="wrote to the connection of its answers") as caught:
        worker.call(Misbehaving.forge)
    assert caught.value.type == FORGED
    assert not worker.alive


def test_an_answer_that_nobody_read_is_no_forgery(worker: Worker[Misbehaving]) -> None:
    """An error in one arm leaves the answers of others unread."""
    for name in ("Ada", "Grace"):
        worker.start(Misbehaving.greet, name)
    assert worker.call(Misbehaving.greet, "Emmy").startswith("hello Emmy")
    assert not worker.asked


def test_a_worker_has_variables_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    worker = launcher.fork(Misbehaving, "candidate", tmp_path / "arm.log", 20, {"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert worker.call(Misbehaving.variable, name="CUDA_VISIBLE_DEVICES") == "GPU-1"
    other = launcher.fork(Misbehaving, "baseline", tmp_path / "other.log", 20)
    assert other.call(Misbehaving.variable, name="CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_answers(worker: Worker[Misbehaving]) -> None:
    assert worker.call(Misbehaving.greet, name="you") == f"hello you from {worker.pid}"


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        ("segfault", "Crash", "SIGSEGV"),
        ("leave", "Crash", "exit code 7"),
        ("polite_exit", "SystemExit", "sys.exit(3)"),
        ("fail", "ValueError", "the user's own mistake"),
        ("fail_in_the_compiler", "torch._dynamo.exc.Unsupported", "no graph of this"),
    ],
)
def test_failures_say_what_happened(worker: Worker[Misbehaving], method: str, kind: str, words: str) -> None:
    with pytest.raises(Failure) as caught:
        worker.call(getattr(Misbehaving, method))
    assert caught.value.type == kind
    assert words in str(caught.value)
    assert caught.value.worker == "candidate"


def test_a_traceback_shows_the_code_under_test_only(worker: Worker[Misbehaving]) -> None:
    with pytest.raises(Failure) as caught:
        worker.call(Misbehaving.fail)
    assert "test_processes.py" in caught.value.traceback
    assert 'processes.py", line' not in caught.value.traceback.replace("test_processes.py", "")


def test_a_refusal_is_no_failure(worker: Worker[Misbehaving]) -> None:
    with pytest.raises(Unsupported, match="try elsewhere"):
        worker.call(Misbehaving.refuse)


def test_a_hang_ends_at_the_time_limit(launcher: Launcher, tmp_path: Path) -> None:
    worker = launcher.fork(Misbehaving, "candidate", tmp_path / "worker.log", timeout_s=0.5)
    with pytest.raises(Failure, match=r"no answer within 0\.5 s"):
        worker.call(Misbehaving.hang)
    assert launcher.ending(worker.pid) == "killed by SIGKILL"


def test_the_time_of_a_pause_is_nobodys(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for an answer is paused as the worker is, and goes on when its time is over."""
    worker = launcher.fork(Misbehaving, "candidate", tmp_path / "worker.log", timeout_s=20)
    worker.call(Misbehaving.greet, name="a")
    real, paused = worker.connection.poll, [True]
    monkeypatch.setattr(worker.connection, "poll", lambda seconds: not (paused and paused.pop()) and real(seconds))
    assert worker.call(Misbehaving.greet, name="b").startswith("hello b")


def test_a_worker_that_others_stopped_is_not_awaited_for_long(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optexp.workers.client.LOOK_S", 0.05)
    stopped = launcher.fork(Misbehaving, "stopped", tmp_path / "worker.log", timeout_s=60)
    os.kill(stopped.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(Failure) as failure:
        stopped.call(Misbehaving.greet, "nobody")
    assert (failure.value.type, "another process stopped it" in failure.value.message) == (UNTIMED, True)
    assert time.monotonic() - begin < 5
    stopped.close()


def test_no_answer_is_awaited_when_the_budget_is_spent(launcher: Launcher, tmp_path: Path) -> None:
    worker = launcher.fork(Misbehaving, "candidate", tmp_path / "worker.log", timeout_s=60)
    worker.until_s = time.monotonic() + 0.5
    for _ in range(2):  # whoever passes over the first failure meets it again
        with pytest.raises(Failure) as caught:
            worker.call(Misbehaving.hang)
        assert caught.value.type == SPENT
    assert launcher.ending(worker.pid) == "killed by SIGKILL"


@pytest.mark.parametrize("how", ["spawn_child", "spawn_orphan"])
def test_what_a_worker_started_ends_with_it(worker: Worker[Misbehaving], how: str) -> None:
    child = worker.call(getattr(Misbehaving, how))
    assert child in descendants(worker.pid)
    worker.close()
    deadline = time.monotonic() + 5
    while _running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running(child)


def test_workers_are_gone_when_they_have_been_ended(launcher: Launcher, tmp_path: Path) -> None:
    pids = [launcher.fork(Misbehaving, f"{i}", tmp_path / f"{i}.log", 60).pid for i in range(3)]
    launcher.end_workers()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_nothing_leaks_from_one_job_to_the_next(launcher: Launcher, tmp_path: Path) -> None:
    """Jobs of a sweep share a launcher, and so its imports; whatever one does to its process ends with it."""

    def fresh(name: str) -> Worker[Misbehaving]:
        return launcher.fork(Misbehaving, name, tmp_path / f"{name}.log", 60)

    before, left = fresh("first").call(Misbehaving.state), fresh("second").call(Misbehaving.change_everything)
    cores = len(os.sched_getaffinity(0))
    unchanged = {name for name in before if left[name] == before[name]} - ({"cores"} if cores == 1 else set())
    assert unchanged == set()
    launcher.end_workers()
    assert fresh("third").call(Misbehaving.state) == before


def test_variables_reach_workers_of_their_own_launcher(tmp_path: Path) -> None:
    launcher = Launcher({"OPTEXP_TEST_VARIABLE": "set"})
    worker = launcher.fork(Misbehaving, "candidate", tmp_path / "worker.log", timeout_s=20)
    assert worker.call(Misbehaving.variable, name="OPTEXP_TEST_VARIABLE") == "set"
    pid = worker.pid
    launcher.close()
    deadline = time.monotonic() + 5
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running(pid)


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_nobody_sees_the_arguments_of_the_process(worker: Worker[Misbehaving]) -> None:
    assert worker.call(Misbehaving.arguments) == sys.argv[:1]
    here = InProcess(Misbehaving(), "candidate")
    assert here.call(Misbehaving.arguments) == sys.argv[:1]


def test_what_code_in_this_process_does_to_arguments_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["optexp", "workload=mlp"])
    here = InProcess(Imports(), "candidate")
    here.call(Imports.start)
    assert sys.argv == ["optexp", "workload=mlp"]
    assert here.call(Misbehaving.arguments) == ["script.py"]


class Imports(Misbehaving):
    def start(self) -> None:
        sys.argv = ["script.py"]


class Compiles(Misbehaving):
    def facts(self) -> tuple[int, float]:
        """Answers about instruction sets that this process has kept, and the seconds that facts took."""
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        return valid_vec_isa_list.cache_info().currsize, inductor_facts.spent_s


def test_arms_inherit_what_inductor_finds_out_in_every_process(launcher: Launcher, tmp_path: Path) -> None:
    launcher.preload([INDUCTOR], "cpu")
    worker = launcher.fork(Compiles, "candidate", tmp_path / "worker.log", timeout_s=20)
    kept, spent_s = worker.call(Compiles.facts)
    worker.close()
    assert kept == 1
    assert spent_s > 0.05


def test_a_set_up_that_compiles_counts_facts_that_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_facts, "spent_s", 1.5)
    for compile_s, inherited_s in ((0.0, 0.0), (2.0, 1.5)):
        monkeypatch.setattr(arm_setup, "compile_s", lambda compile_s=compile_s: compile_s)
        arm = Arm()
        assert arm._first_step(FirstSteps(False, 0.1, 0.1, 0.0, first_s=3.0)) == inherited_s
        assert arm.phases.get("compilation", 0.0) == compile_s + inherited_s
