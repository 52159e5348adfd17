"""Memory of arms and reference that runs out while tensors are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optexp.equivalence.checksums import LARGE
from optexp.equivalence.drawn_set import Fp64Results
from optexp.support.memory_plan import PLANS
from optexp.workers import arm_program
from optexp.workers.arm import Arm
from optexp.workers.reference import Reference
from optexp.workers.transfer import Outbox, Transfer

META = torch.device("meta")


class FullInbox:
    """An inbox on a device that has room after `full` requests."""

    def __init__(self, full: int) -> None:
        self.full, self.devices = full, list[torch.device]()

    def expect(self, transfer: Transfer, device: torch.device) -> None:
        self.devices.append(device)
        if len(self.devices) <= self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")


def at_a_full_device(full: int, sharing: int = 1) -> tuple[Reference, FullInbox, Fp64Results]:
    results = Fp64Results()
    results.golden[0] = {"out/output": torch.empty(LARGE, device=META)}
    reference, inbox = Reference(), FullInbox(full)
    fp64 = SimpleNamespace(device=META, results=results)
    reference.judgement = SimpleNamespace(fp64=fp64, sharing=sharing)  # type: ignore[assignment]
    reference.inbox = inbox  # type: ignore[assignment]
    return reference, inbox, results


@pytest.mark.parametrize(
    ("full", "devices", "computed"), [(0, ["meta"], 1), (1, ["meta", "meta"], 0), (2, ["meta", "meta", "cpu"], 0)]
)
def test_tensors_take_the_place_of_fp64_results_before_they_move_to_the_host(
    full: int, devices: list[str], computed: int
) -> None:
    reference, inbox, results = at_a_full_device(full)
    reference.expect(Transfer("", b"", 0, ()))
    assert [device.type for device in inbox.devices] == devices
    assert len(results.golden) == computed


def test_beside_other_comparisons_they_do_not_move_there() -> None:
    """There the judge would be without an answer for minutes; the comparison is made again later, alone."""
    reference, inbox, _ = at_a_full_device(3, sharing=2)
    with pytest.raises(torch.OutOfMemoryError):
        reference.expect(Transfer("", b"", 0, ()))
    assert {device.type for device in inbox.devices} == {"meta"}


@pytest.mark.parametrize("in_turns", [False, True])
def test_an_arm_whose_turn_ends_gives_back_what_its_step_took(in_turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = list[Any]()
    monkeypatch.setattr(arm_program, "give_back", given_back.append)
    arm = Arm()
    arm.device, arm.outbox = torch.device("cpu"), Outbox()
    arm.plan = next(index for index, plan in enumerate(PLANS) if plan.in_turns is in_turns)
    arm.send({"out/output": torch.ones(3)})
    assert given_back == ([arm.device] if in_turns else [])
