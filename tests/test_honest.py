"""The benchmark of honest pairs: which there are, how they are kept, and that it tells a false alarm from a verdict."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from optexp.pages.rules.honest import Found, rates
from optexp.workloads.mlp import Mlp
from tests.benchmarks import honest, honest_seeds
from tests.benchmarks.honest import Store, ended_in, records
from tests.benchmarks.honest_pairs import ZOO, Pair, entries, halved, imported, pairs, scaled, snake
from tests.benchmarks.honest_seeds import Counted

ASKED = argparse.Namespace(
    seconds=60,
    device="cpu",
    workers=1,
    half=None,
    kernelbench=None,
    only=None,
    limit=60,
    seed=0,
    again=False,
    set=[],
    max_gib=0.5,
)
FOUND = Found("zoo.Net forward × amp", "a", "cpu", "VERIFIED", "VERIFIED: the results are the same", ok=True)
PROBLEM = """
import torch
from torch import nn

width = 512


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.lin(x))


class Wrong(Model):
    def forward(self, x):
        return 1.001 * super().forward(x)


def get_inputs():
    return [torch.randn(8, width)]


def get_init_inputs():
    return [width]
"""
SETTINGS = ("device=cpu", "isolation=none", "measurement=quick")


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.py"
    path.write_text(scaled(PROBLEM))
    return path


def replaced(path: Path, model: str) -> Pair:
    overrides = "workload=module", f"workload.path={path}", "workload.mode=forward"
    return Pair(f"problem {model}", "replace", overrides, (("target", f"{path}:{model}"),))


def test_the_zoo_has_models_of_every_theme_and_pairs_fall_into_two_halves(tmp_path: Path) -> None:
    models = [entry.model for path in ZOO.glob("*.py") for entry in entries(path)]
    assert len(set(models)) == len(models) >= 60
    on_gpu = pairs("cuda", None, tmp_path)
    assert len({pair.id for pair in on_gpu}) == len(on_gpu) >= 500
    for device, strategy in (("cpu", "channels_last"), ("cuda", "cuda_graph"), ("cuda", "fusion")):
        assert any(pair.strategy == strategy for pair in pairs(device, None, tmp_path))
    share = sum(pair.half == "a" for pair in on_gpu) / len(on_gpu)
    assert 0.4 < share < 0.6
    assert [pair.cost for pair in on_gpu] == sorted(pair.cost for pair in on_gpu)


@pytest.mark.parametrize("path", sorted(ZOO.glob("*.py")), ids=lambda path: path.stem)
def test_models_of_the_zoo_compute_finite_numbers(path: Path) -> None:
    module = imported(path)
    for entry in entries(path):
        torch.manual_seed(0)
        model = getattr(module, entry.model)().eval()
        parts = {part: getattr(module, name, None) for part, name in entry.names.items()}
        batch = parts["inputs"]() if parts["inputs"] else next(iter(parts["loader"]()))
        taken = model.forward.__code__.co_argcount - 1 - len(model.forward.__defaults__ or ())
        out = model(*batch[:taken])
        values = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
        assert all(torch.isfinite(torch.as_tensor(value)).all() for value in values), entry.model


@pytest.mark.slow
def test_an_identical_model_is_verified_and_a_wrong_one_would_be_counted(problem: Path) -> None:
    pair = replaced(problem, "Model")
    same = Found(id=pair.id, half=pair.half, **{"device": "cpu", **ended_in(pair, SETTINGS)})
    assert (same.verdict, same.ok, same.alarm, same.decided) == ("VERIFIED", True, False, True)
    pair = replaced(problem, "Wrong")
    wrong = Found(id=pair.id, half=pair.half, **{"device": "cpu", **ended_in(pair, SETTINGS)})
    assert (wrong.verdict, wrong.ok, wrong.alarm) == ("NOT_EQUIVALENT", False, True)
    assert "| problem Wrong × replace |" in records([same, wrong])["verdicts"].text()


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [Pair(f"zoo.Net{number} forward", "amp", ()) for number in range(12)]
    asked: list[str] = []
    answers = {"verdict": "VERIFIED", "headline": "VERIFIED", "ok": True}
    monkeypatch.setattr(honest, "pairs", lambda *_: known)
    monkeypatch.setattr(honest.Desk, "ask", lambda self, pair, *_: asked.append(pair.id) or answers)
    path = tmp_path / "store.json"
    honest.run(argparse.Namespace(**{**vars(ASKED), "only": ["Net[0-3] "]}), Store(path), tmp_path)
    assert sorted(asked) == sorted(pair.id for pair in known[:4])
    honest.run(ASKED, Store(path), tmp_path)
    assert sorted(asked) == sorted(pair.id for pair in known)
    asked.clear()
    honest.run(argparse.Namespace(**{**vars(ASKED), "again": True}), Store(path), tmp_path)
    assert sorted(asked) == sorted(pair.id for pair in known if pair.half == "a")  # the other half is run once
    assert {one["id"] for one in json.loads(path.read_text())} == {pair.id for pair in known}


@pytest.mark.parametrize(
    ("verdict", "ok", "alarm", "decided"),
    [
        ("VERIFIED", True, False, True),
        ("UNVERIFIED", None, False, True),
        ("NOT_EQUIVALENT", False, True, True),
        ("INVALID", True, True, True),
        ("ERROR", None, True, True),
        ("UNSUPPORTED", None, False, False),
        ("NOT_ENGAGED", True, False, False),
        ("NOT_ENGAGED", False, True, True),  # nothing was changed, and the result was refused
        ("CUT", None, False, False),
    ],
)
def test_what_counts_as_a_false_alarm(verdict: str, ok: bool | None, alarm: bool, decided: bool) -> None:
    found = replace(FOUND, verdict=verdict, ok=ok)
    assert (found.alarm, found.decided) == (alarm, decided)
    last = rates("", [found], lambda one: one.half).splitlines()[-1]
    assert last.startswith(f"| all | {int(decided)} | {f'{int(alarm)} (' if decided else '–'}")


def test_seeds_add_up_over_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def count(name: str, device: str, first: int, seeds: int, seconds: float) -> Counted:
        begun.append(first)
        return Counted(min(seeds, 20), 1, 1.2 / first, "G1 loss", [f"refused at {first}"])

    monkeypatch.setattr(honest_seeds, "count", count)
    path, asked = tmp_path / "store.json", argparse.Namespace(**{**vars(ASKED), "seeds": 30, "only": ["mlp"]})
    for _ in range(3):
        honest.seeds(asked, Store(path))
    (found,) = Store(path).found
    assert begun == [1, 21]
    assert (found.seeds, found.alarms, found.used) == (30, 2, 1.2)
    assert found.headline == "2 of 30 seeds refused; refused at 1; refused at 21"
    assert "| mlp × fusion | cpu | 30 | 2 | 120% (G1 loss) |" in records([found])["verdicts.seeds"].text()


def test_a_pair_is_verified_on_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Mlp(batch_size=8, dim=16, layers=1)
    monkeypatch.setitem(honest_seeds.PAIRS, "small", (lambda: small, "inplace"))
    counted = honest_seeds.count("small", "cpu", first=1, seeds=2, seconds=60)
    assert (counted.seeds, counted.alarms, counted.headlines) == (2, 0, [])
    assert counted.used < 1


def test_a_worker_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = honest.Desk([0])
    killed: list[int] = []
    silent = SimpleNamespace(send=lambda _: None, poll=lambda _: False)
    desk.process = SimpleNamespace(pid=1, is_alive=lambda: True, join=lambda: None)  # type: ignore[assignment]
    desk.connection = silent  # type: ignore[assignment]
    monkeypatch.setattr(honest.os, "killpg", lambda pid, _: killed.append(pid))  # type: ignore[attr-defined]
    assert desk.ask(replaced(Path("x.py"), "Model"), (), 1.0)["verdict"] == "CUT"
    assert killed == [1]
    assert desk.process is None


def test_scaled_problems_keep_what_divides_their_sizes() -> None:
    assert [halved(size) for size in (16, 64, 8192, 393216, 768)] == [16, 32, 32, 24, 24]
    small = scaled("batch_size = 128\nheads, dim = 8, 512\nshape = (4, 2048 * 2)\neps = 1e-5\n")
    assert small == "batch_size = 4\nheads, dim = (8, 32)\nshape = (4, 32 * 2)\neps = 1e-05"


def test_names_of_parts() -> None:
    assert [snake(name) for name in ("UNet", "GRUTagger", "SqueezeExcite", "VAE")] == [
        "u_net",
        "gru_tagger",
        "squeeze_excite",
        "vae",
    ]
