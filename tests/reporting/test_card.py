"""A decision card holds what a reviewer asks for, and is written for what one may propose alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from optexp.export.vendoring import carried
from optexp.records import filenames
from optexp.records.measurement import Cost, Watch
from optexp.reporting import card
from optexp.result import Result, Verdict

RESULTS = {path.stem.upper(): Result.read(path) for path in (Path(__file__).parents[1] / "results").glob("*.json")}
SCRIPT = """import torch
from types import MethodType, ModuleType

# --- mlp, as it is ----------------------------------------------------------------------------------------------------

model = Net()

# --- cuda_graph: CUDA graphs: all kernels of a step are launched at once ----------------------------------------------


step = captured(step)
model.forward = MethodType(step, model)


# --- run --------------------------------------------------------------------------------------------------------------

print(step())
"""


def test_a_card_has_gain_cost_memory_verification_and_lines(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    card.write(RESULTS["FASTER"], tmp_path)
    text = (tmp_path / "card.md").read_text()
    for part in (
        "### FASTER, at least 5.85×", "752 µs → 127 µs", "| Saved | 10.4 min (at least 10.3 min) in 1,000,000 steps |",
        "after 2,405 steps: 1.5 s more set-up (1.9 s, the baseline's 400 ms), at 625 µs saved a step",
        "41.5 MiB → 48.9 MiB", "agree with fp64", "instead of 47 kernel launches",
        "```python\nfrom types import MethodType\n"
        "# cuda_graph: CUDA graphs: all kernels of a step are launched at once\nstep = captured(step)\n"
        "model.forward = MethodType(step, model)\n```",
    ):  # fmt: skip
        assert part in text, part
    assert "Net()" not in text
    assert Image.open(tmp_path / "plots" / "card.png").width > 1000


def test_the_name_of_a_long_stack_leaves_room_for_the_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in the title, in lines that the picture has room for."""
    label = "replace[target=gpt_accumulation.py,precision=bfloat16]+fusion[backend=kernels]+cuda_graph+memory_pool+tf32"
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *given, **more: (drawn.append(self), save(self, *given, **more))
    )
    result = Result.read(Path(__file__).parents[1] / "results" / "faster.json")
    result.strategy = label.split("+")
    card.write(result, tmp_path)
    bars, *_, text = drawn[0].axes
    assert [label.get_text() for label in bars.get_yticklabels()] == ["baseline", "candidate"]
    assert bars.get_position().width > 0.3
    lines = text.texts[0].get_text().splitlines()
    assert "cuda_graph" in lines[0]
    assert max(map(len, lines)) <= card.LETTERS


def test_modules_that_a_script_carries_have_headings_of_their_own(tmp_path: Path) -> None:
    kernels = f"{carried(['kernels.gelu', 'transforms.rewriting'])}model = put_in(model)\n"
    (tmp_path / "repro.py").write_text(SCRIPT.replace("step = captured(step)\n", kernels))
    card.write(RESULTS["FASTER"], tmp_path)
    text = (tmp_path / "card.md").read_text()
    assert text.count("# ---") > 0
    assert "model = put_in(model)\nmodel.forward = MethodType(step, model)\n```" in text
    assert "Net()" not in text


def test_without_a_horizon_a_million_steps_are_counted() -> None:
    result = RESULTS["FASTER"]
    measurement = replace(result.measurement, cost=Cost())
    assert card.saved(replace(result, measurement=measurement)) == "10.4 min (at least 10.4 min) in 1,000,000 steps"


def test_a_reviewer_reads_what_disturbed_the_measurement(tmp_path: Path) -> None:
    result = RESULTS["FASTER"]
    crowded = [Watch("cores", False, "other programs run here"), Watch("inputs", True, "fine")]
    measurement = replace(result.measurement, watchdogs=crowded)
    assert ("Disturbed", "cores: other programs run here") in card.card(
        replace(result, measurement=measurement), tmp_path
    ).facts


def test_a_patch_of_the_users_file_goes_before_the_script(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text(SCRIPT)
    (tmp_path / "optimized.patch").write_text("--- a/net.py\n+++ b/net.py\n")
    assert card.paste(RESULTS["FASTER"], tmp_path) == ("--- a/net.py\n+++ b/net.py", "diff")


def test_a_picture_shows_the_lines_that_a_patch_adds() -> None:
    patch = "--- a/net.py\n+++ b/net.py\n@@ -1 +1,3 @@\n kept\n+\n+net = torch.compile(net)\n-gone"
    assert card.Card("", "", [], patch, "diff").added == ["net = torch.compile(net)"]
    assert card.Card("", "", [], "a\nb", "python").added == ["a", "b"]


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.FASTER])
def test_no_card_for_what_nobody_proposes(verdict: Verdict, tmp_path: Path) -> None:
    """Also none is left of a verdict that a sweep corrected."""
    (tmp_path / "plots").mkdir()
    for name in (filenames.CARD, filenames.CARD_PICTURE):
        (tmp_path / name).touch()
    card.write(replace(RESULTS[verdict], strategy=["fusion"]), tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
