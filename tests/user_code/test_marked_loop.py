"""A marked loop's body as a function over the script's own variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import optexp
from optexp.commands.run import learns, overrides
from optexp.errors import ConfigError
from optexp.user_code.script_run import Reached, run

HEAD = """\
import sys
import torch
import optexp
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def bar(batches):
    yield from batches
"""


def reached(tmp_path: Path, body: str, *arguments: str) -> Reached:
    path = tmp_path / "train.py"
    path.write_text(HEAD + body)
    return run(path, arguments)


IN_FUNCTION = """\
def main():
    total, seen = 0, []
    def note(x):
        seen.append(total)
    with torch.no_grad():
        for i, x in enumerate(optexp.steps([1, 2, 3], model=model), 5):
            if x == 2:
                continue
            total += x * i
            doubled = 2 * x + 0 * len(seen)
            note(x)
    raise AssertionError
if __name__ == "__main__":
    main()
"""


def test_variables_that_the_body_carries_stay_the_scripts(tmp_path: Path) -> None:
    found = reached(tmp_path, IN_FUNCTION)
    assert found.loop.carried == ("total",)
    assert found.function([1])["total"] == 5
    assert found.function([2])["total"] == 5  # `continue` ends the step
    values = found.function([3])
    assert values["total"] == 5 + 3 * 7
    assert values["seen"] == [5, 26]  # the function beside the loop sees what the body assigned
    assert values["doubled"] == 6
    assert not found.ambient.grad
    with found.ambient.again():
        assert not torch.is_grad_enabled()


AT_TOP = """\
count = int(sys.argv[1])
def rate():
    return 10 * count
for x in bar(optexp.steps(range(3), model=model, optimizer=optimizer, every=2)):
    y = rate() + x
    count += 1
"""


def test_globals_progress_bars_and_several_iterations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.py:11: the loop goes over bar\(...\) of the marked batches"):
        reached(tmp_path, AT_TOP, "7")
    found = reached(tmp_path, AT_TOP.replace("bar(", "tqdm(").replace("def rate", "tqdm = bar\ndef rate"), "7")
    assert found.mark.every == 2
    assert found.function([1, 2])["y"] == 82  # of the second iteration
    assert found.function.__globals__["count"] == 9


def test_counters_of_every_kind_are_carried(tmp_path: Path) -> None:
    body = "n = m = 0\nfor x in optexp.steps([1], model=model):\n    m: int = m + 1\n    y = (n := n + 1)\n"
    found = reached(tmp_path, body)
    assert found.loop.carried == ("m", "n")
    assert [found.function([1, 1])["y"], found.function([1])["y"], found.function.__globals__["m"]] == [2, 3, 3]


def test_a_block_without_a_loader(tmp_path: Path) -> None:
    body = """\
for step in range(4):
    x, scale = torch.full((2,), float(step)), torch.ones(2)
    with optexp.step(model=model):
        y = x * scale
"""
    found = reached(tmp_path, body)
    assert [batch[0].tolist() for batch in found.drawn] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert found.function([(torch.tensor([3.0, 4.0]),)])["y"].tolist() == [3, 4]


def test_a_mark_that_names_no_model_means_the_only_one(tmp_path: Path) -> None:
    one = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x in optexp.steps([1]):\n    pass\n"
    found = reached(tmp_path, one)
    assert found.mark.model is found.function.__globals__["model"]
    assert found.mark.optimizer is found.function.__globals__["optimizer"]
    block = "for x in map(float, range(4)):\n    x = torch.tensor(x)\n    with optexp.step():\n        y = x + 1\n"
    assert reached(tmp_path, block).mark.model is not None
    with pytest.raises(ConfigError, match=r"no model, and there are several \(critic and model\): name it"):
        reached(tmp_path, f"critic = torch.nn.Linear(2, 1)\n{one}")


DOUBLES = """\
def doubled():
    for b in optexp.steps([1], model=model):
        yield 2 * b
"""
GIVES = """\
def given():
    yield 0
    yield from optexp.steps([1], model=model)
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('done')", "ran to its end and reached no mark"),
        ("b = optexp.steps([1], model=model)\nb = [b]", "train.py:8 calls optexp.steps, and no loop went over what"),
        ("sys.exit('no data')", "ended by sys.exit before its mark: no data"),
        ("list(optexp.steps([1], model=model))", "the mark is not at a loop"),
        ("for a in zip(optexp.steps([1], model=model)):\n    pass", r"mark all of it, as in optexp.steps\(zip"),
        ("for a in (2 * b for b in optexp.steps([1], model=model)):\n    pass", "may change the marked batches"),
        (f"{DOUBLES}for a in doubled():\n    pass", "train.py:10: the marked body has `yield`"),
        (f"{DOUBLES}for a in bar(doubled()):\n    pass", "train.py:10: the marked body has `yield`"),
        (f"{GIVES}for a in given():\n    pass", r"the loop goes over given\(\), which may change"),
    ],
)
def test_says_why_there_is_no_step(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        reached(tmp_path, body)


def test_an_error_of_the_script_is_the_scripts(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        reached(tmp_path, "1 / 0")


def test_outside_optexp_a_mark_is_the_loader_itself() -> None:
    batches: list[Any] = [1, 2]
    assert optexp.steps(batches, model=None) is batches
    drawn = iter([3, 4])
    assert next(iter(optexp.steps(lambda: next(drawn), model=None))) == 3
    with optexp.step(model=None):
        pass


def test_arguments_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "it's.py"
    script.write_text("for x in steps(loader, model=net):\n    pass\n")
    found = overrides(["strategy=amp", str(script), "--", "--lr", "1e-3"])
    assert found[0] == "workload=script"
    assert found[2:] == ["workload.arguments=['--lr','1e-3']", "workload.mode=forward", "strategy=amp"]
    assert overrides(["-m", "strategy=amp,fusion", str(script)])[:3] == ["-m", "strategy=amp,fusion", "workload=script"]
    assert not learns(script)
    for text, expected in (("loss.backward()", True), ("net(x)", False)):
        script.write_text(f"with optexp.step():\n    {text}\n    optimizer.step()\n")
        assert learns(script) is expected
    with pytest.raises(ValueError, match="no script is named"):
        overrides(["strategy=amp"])
