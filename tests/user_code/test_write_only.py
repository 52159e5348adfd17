"""What a program keeps for people alone is told from what later steps read."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from torch import nn

from optexp.python_state.write_only import write_only
from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared
from tests.user_code.test_written_apart import stepped

OPTIMIZER = "get_optimizer = lambda params: torch.optim.AdamW(params, lr=1e-3)\n"
PLAIN = stepped(OPTIMIZER)
METER = """
class Meter:
    def __init__(self):
        self.val = self.sum = self.mean = self.seen = 0
    def update(self, val, seen):
        self.val = val
        self.sum += val * seen
        self.seen += seen
        self.mean = self.sum / self.seen
meter = Meter()
"""
FOR_PEOPLE = {
    "a sum": ("running = 0.0", "global running\n    running += loss.item()"),
    "a mean": (
        "mean = None",
        "global mean\n    mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()",
    ),
    "the best": ("best = float('inf')", "global best\n    best = min(best, loss.item())"),
    "a tensor": ("total = torch.zeros(())", "total.add_(loss.detach())"),
    "a list": ("losses = []", "losses.append(loss.item())"),
    "printed": (
        "running, calls = 0.0, 0",
        "global running, calls\n    running += loss.item()\n    calls += 1\n"
        "    if calls % 100 == 0:\n        print(f'{running / 100:.3f}')\n        running = 0.0",
    ),
    "a dict of lists": ("losses = {'train': []}", "losses['train'].append(loss.item())"),
    "a dict of sums": ("running = {'loss': 0.0}", "running['loss'] += loss.item()\n    print(running['loss'] / 2)"),
    "a meter": (METER, "meter.update(loss.item(), 16)"),
}
READ = {
    "a rate": (
        "running = 0.0",
        "global running\n    running += loss.item()\n"
        "    if running > 400:\n        for g in optimizer.param_groups: g['lr'] = 1e-4",
    ),
    "by a function": (
        "running = 0.0\ndef far(): return running > 400\n",
        "global running\n    running += loss.item()\n    if far(): optimizer.param_groups[0]['lr'] = 1e-4",
    ),
    "handed on": (
        "running = 0.0\ndef watch(value, optimizer): optimizer.param_groups[0]['lr'] = 1e-3 if value < 400 else 1e-4\n",
        "global running\n    running += loss.item()\n    watch(running, optimizer)",
    ),
    "by what is called print": (
        "running = 0.0\ndef log(value): optimizer_of[0].param_groups[0]['lr'] = 1e-3 if value < 400 else 1e-4\n"
        "optimizer_of = [None]\n",
        "global running\n    optimizer_of[0] = optimizer\n    running += loss.item()\n    log(running)",
    ),
    "by its text": (
        "running = 0.0",
        "global running\n    running += loss.item()\n"
        "    if getattr(__import__(__name__), 'running', 0) > 400: optimizer.param_groups[0]['lr'] = 1e-4",
    ),
    "by another name": (
        "running, other = 0.0, 0.0",
        "global running, other\n    running += loss.item()\n    other = running + 1\n"
        "    if other > 400: optimizer.param_groups[0]['lr'] = 1e-4",
    ),
    "an entry": (
        "running = {'loss': 0.0}",
        "running['loss'] += loss.item()\n    if running['loss'] > 400: optimizer.param_groups[0]['lr'] = 1e-4",
    ),
    "the place of an entry": (
        "running, losses = [0, 0], [0.0, 0.0]\ndef rate(optimizer, at): optimizer.param_groups[0]['lr'] /= 1 + at\n",
        "running[0] += 1\n    losses[rate(optimizer, running[0])] = 1.0",
    ),
    "in an alias": (
        "losses = []",
        "losses.append(loss.item())\n    recent = losses\n"
        "    if len(recent) > 400: optimizer.param_groups[0]['lr'] = 1e-4",
    ),
}
KEPT = [
    "running",
    "best",
    "mean",
    "total",
    "losses",
    "other",
    "calls",
    "meter.val",
    "meter.sum",
    "meter.mean",
    "meter.seen",
]


def found(folder: Path, first: str, end: str) -> set[str]:
    path = folder / f"kept_{abs(hash((first, end)))}.py"
    path.write_text(stepped(OPTIMIZER, end=end, first=first + "\n"))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        there = {name for name in KEPT if name.partition(".")[0] in vars(module)}
        return write_only(there, module.train_step, nn.Linear(1, 1)) ^ there
    finally:
        del sys.modules[path.stem]


@pytest.mark.parametrize("name", FOR_PEOPLE)
def test_an_update_and_a_print_are_no_reads(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, *FOR_PEOPLE[name]) == set()


@pytest.mark.parametrize("name", READ)
def test_what_a_later_step_may_depend_on_is_read(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, *READ[name]) & {"running", "losses"}


@pytest.mark.parametrize(
    ("kept", "verdict"),
    [
        (FOR_PEOPLE["a mean"], Verdict.VERIFIED),
        pytest.param(FOR_PEOPLE["a meter"], Verdict.VERIFIED, marks=pytest.mark.slow),
        (READ["a rate"], Verdict.NOT_EQUIVALENT),
    ],
)
def test_a_second_program_need_not_keep_what_is_for_people(
    kept: tuple[str, str], verdict: Verdict, tmp_path: Path
) -> None:
    first, end = kept
    result = compared(tmp_path, PLAIN, stepped(OPTIMIZER, end=end, first=first + "\n"))
    assert result.verdict is verdict, result.headline
    assert verdict is not Verdict.VERIFIED or any("what prints it" in note for note in result.equivalence.notes)
