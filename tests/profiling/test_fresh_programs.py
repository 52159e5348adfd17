"""The second set of blind programs: each computes the same with its cause and without it, on a CPU at small sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from optexp.pages.record import Record
from optexp.profiling import diagnosis, waste
from tests.benchmarks import blind, blind_programs, blind_programs_fresh
from tests.benchmarks.blind_programs import Program

CPU = torch.device("cpu")
PROGRAMS = blind_programs_fresh.PROGRAMS
WITHOUT_STREAMS = [program for program in PROGRAMS if program.label != "streams_in_turn"]
ROUNDING = {"causal_attention_by_hand": 0.02}  # in bfloat16; elsewhere float32


def three_steps(program: Program, injected: bool) -> list[Tensor]:
    torch.manual_seed(0)
    step = program.make(CPU, injected)
    outputs = []
    for _ in range(3):
        output = step()
        assert isinstance(output, Tensor)
        outputs.append(output.double())  # a copy, or nothing writes it again
    return outputs


@pytest.mark.parametrize("program", WITHOUT_STREAMS, ids=lambda p: p.name)
def test_a_program_computes_the_same_without_its_cause(program: Program) -> None:
    injected, again, without = (three_steps(program, cause) for cause in (True, True, False))
    allowed = ROUNDING.get(program.name, 1e-5)
    for first, second, other in zip(injected, again, without, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, other, rtol=allowed, atol=allowed)


def test_programs_are_new_and_their_labels_exist() -> None:
    names = [program.name for program in (*PROGRAMS, *blind_programs.PROGRAMS)]
    assert len(PROGRAMS) == 26
    assert len(set(names)) == len(names)
    for program in PROGRAMS:
        for label, words in ((program.label, program.words), *program.or_label):
            assert hasattr(diagnosis, label) or hasattr(waste, label), label
            assert words


def test_another_name_that_is_as_true() -> None:
    program = Program("any", lambda *_: tuple, "a", "one", "x", or_label=(("b", "two"),), or_account=("y",))
    assert program.names("a", "it is one")
    assert program.names("b", "it is two")
    assert not program.names("a", "it is two")
    assert not program.names("c", "it is one")
    assert [account for account in "wxyz" if program.explains(account)] == ["x", "y"]


@pytest.mark.parametrize(("options", "programs"), [([], blind_programs.PROGRAMS), (["--programs", "fresh"], PROGRAMS)])
def test_the_set_that_is_asked_for(
    options: list[str], programs: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(program: Program, *_: object) -> blind.Answer:
        return blind.Answer(program, [(program.label, program.words)], [(program.account, "")], 1.0)

    monkeypatch.setattr(blind, "answer", named)
    assert blind.main([*options, "--device", "cpu", "--record", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("why*.json")
    text = Record.read(path).text()
    for program in (*PROGRAMS, *blind_programs.PROGRAMS):
        assert (program.name in text) is (program.on_cpu and program in programs)
