"""PARENT: the workers of one comparison: launchers by their environment variables, and arms forked from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, TypeVar

from optexp.errors import ConfigError, Distrusted
from optexp.strategy import Strategy, environment
from optexp.workers.arm import Arm
from optexp.workers.client import Client, InProcess, Pending
from optexp.workers.home import Home, Homes
from optexp.workers.launching import launcher
from optexp.workers.messages import SetUp, WorkloadInfo
from optexp.workers.peer import Peer
from optexp.workers.process import Launcher
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec

# Packages that all arms may find imported: importing any other may change more than how long that takes.
SHARED = {"torch", "triton", "torchvision", "transformers", "sklearn"}

A = TypeVar("A", bound=Peer)
S = TypeVar("S")


@dataclass(frozen=True)
class Starting(Generic[A, S]):
    """A worker whose set-up is under way."""

    arm: Client[A]
    setup: Pending[S]


@dataclass
class ArmPool:
    """Starts and ends the workers of one comparison.

    Args:
        device: As the parent names it, "cpu" or "cuda:1".
        isolated: Each worker is a process of its own; else all are objects in this process.
        logs: Folder of one log for each worker.
        timeout_s: Longest answer of a worker.
        preload: Modules that take long to import: of the workload and, in a search, of strategies that it tries.
        caches: Environment variables of compile caches that begin empty.
        homes: Of the arms, where two versions of the user's code are compared.
        until_s: Time of `time.monotonic` after which no worker's answer is awaited.
    """

    device: str
    isolated: bool
    logs: Path
    timeout_s: float
    preload: Iterable[str] = ()
    caches: Mapping[str, str] = field(default_factory=dict)
    homes: Homes | None = None
    until_s: float = float("inf")
    launchers: dict[tuple[frozenset[tuple[str, str]], Home | None], Launcher] = field(default_factory=dict)

    def set_up(
        self, specs: Mapping[str, Spec], judge: Spec, first: Sequence[str] = (), in_turns: bool = False
    ) -> tuple[dict[str, Client[Arm]], Client[Reference], dict[str, SetUp], WorkloadInfo]:
        """Arms and the reference, with the answers to their set-up.

        Args:
            first: Arms whose failures are reported before others'.
            in_turns: One after the other, as memory is short; else side by side.

        Raises:
            Failure: An arm could not be set up.
        """
        order = list(dict.fromkeys([*first, *specs]))
        starting, done = dict[str, Starting[Arm, SetUp]](), dict[str, SetUp]()
        if not in_turns:  # arms without strategies are set up while the launcher imports what strategies need
            self._open(specs)
            plain = {name: spec for name, spec in specs.items() if not spec.strategies}
            starting = self.start(plain)
            reference = self.start_reference(judge)
            starting |= self.start({name: spec for name, spec in specs.items() if name not in plain})
        for name in order:
            if in_turns:
                starting |= self.start({name: specs[name]})
            done[name] = starting[name].setup.wait()
        if in_turns:
            reference = self.start_reference(judge)
        info = reference.setup.wait()
        return {name: starting[name].arm for name in order}, reference.arm, done, info

    def start(self, specs: Mapping[str, Spec]) -> dict[str, Starting[Arm, SetUp]]:
        """Begin to set up several arms side by side."""
        self._open(specs)
        starting = {}
        for name, spec in specs.items():
            arm = self.arm(Arm, name, spec.strategies)
            starting[name] = Starting(arm, arm.start(Arm.setup, packed=replace(spec, name=name).pack()))
        return starting

    def _open(self, specs: Mapping[str, Spec]) -> None:
        """Begin to start the launchers that are not there yet, side by side."""
        for name, spec in specs.items() if self.isolated else ():
            self._launcher(spec.strategies, name)

    def start_reference(self, spec: Spec, name: str = "reference") -> Starting[Reference, WorkloadInfo]:
        """Begin to set up the process that judges."""
        reference = self.arm(Reference, name, ())
        return Starting(reference, reference.start(Reference.setup, packed=replace(spec, name=name).pack()))

    def arm(self, role: type[A], name: str, stack: Sequence[Strategy]) -> Client[A]:
        """One worker: a process, or an object in this one.

        Raises:
            ConfigError: The stack sets environment variables, and this process has its own.
        """
        if not self.isolated:
            if variables := environment(stack):
                raise ConfigError(f"isolation=none cannot set {', '.join(variables)}: use isolation=process")
            return InProcess(role(), name)
        self.logs.mkdir(exist_ok=True)
        log = (self.logs / f"{name}.log").resolve()
        worker = self.launcher(stack, name).fork(role, name, log, self.timeout_s, self.visible)
        worker.until_s = self.until_s
        return worker

    def launcher(self, stack: Sequence[Strategy], arm: str = "") -> Launcher:
        """The launcher of an arm, which imports what the arm's strategies need before it forks the next one."""
        chosen = self._launcher(stack, arm)
        slow = {*self.preload, *(module for strategy in stack for module in strategy.preload)}
        modules = sorted(module for module in slow if _shared(module.partition(".")[0]))
        chosen.preload(modules, self.device.partition(":")[0])
        return chosen

    def _launcher(self, stack: Sequence[Strategy], arm: str) -> Launcher:
        """The shared launcher, or one of this comparison's own where an arm needs environment variables or has a home.

        An arm has the variables of its own stack and no other: those are compared.
        """
        home = self.homes.of(arm) if self.homes else None
        variables = {**self.caches, **environment(stack)}
        key = frozenset(variables.items()), home
        if (variables or home) and key not in self.launchers:
            self.launchers[key] = Launcher(variables, home)
        return self.launchers[key] if variables or home else launcher()

    def check_home(self, name: str, arm: Client[Arm]) -> None:
        """Refuse an arm of one version that imported code of another.

        Raises:
            Distrusted: It did.
        """
        home = self.homes.of(name) if self.homes else None
        if home and home.elsewhere and (files := arm.call(Arm.imported_below, str(home.elsewhere))):
            raise Distrusted(
                f"the {name} runs the working tree's {files[0]}, as an editable install makes it: the folder that holds"
                " the package has to be the working folder, or on PYTHONPATH"
            )

    @property
    def arm_device(self) -> str:
        """The device as an arm names it: of the cards it sees one."""
        return "cuda:0" if self.isolated and self.device.startswith("cuda") else self.device

    @property
    def visible(self) -> dict[str, str]:
        """Variables by which an arm sees one card: it cannot leave work to another."""
        return {"CUDA_VISIBLE_DEVICES": one_card(self.device)} if self.device.startswith("cuda") else {}

    def processes(self) -> list[int]:
        """Process ids that workers descend from."""
        if not self.isolated:
            return [os.getpid()]
        return [launcher().process.pid, *(own.process.pid for own in self.launchers.values())]

    def end_workers(self) -> None:
        """End every worker; launchers stay, for others."""
        for own in self.launchers.values():
            own.end_workers()
        if self.isolated:
            launcher().end_workers()

    def close(self) -> None:
        """End every worker and every launcher of this comparison's own."""
        for own in self.launchers.values():
            own.close()
        if self.isolated:
            launcher().end_workers()


def one_card(device: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES for a device; "cuda:1" is the second of those that this process sees."""
    index, seen = int(device.partition(":")[2] or 0), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return seen[index].strip() if seen != [""] else str(index)


def _shared(package: str) -> bool:
    return package in SHARED and find_spec(package) is not None
