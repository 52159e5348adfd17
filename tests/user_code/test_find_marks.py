"""A forgotten mark is found in the source, before the script runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from optexp.errors import ConfigError
from optexp.user_code.find_marks import require_mark

SCRIPTS = sorted((Path(__file__).parents[1] / "scripts").glob("*.py"))
LOOP = """\
open("ran", "w")
for epoch in range(9):
    for i, (x, y) in enumerate(tqdm(loader), 1):
        opt.zero_grad()
        net(x).sum().backward()
        opt.step()
"""


def unmarked(text: str) -> str:
    text = re.sub(r"optexp\.steps\((\w[\w.]*(?:\([^()]*\))?),.*?\)(?=[):,])", r"\1", text)
    text = re.sub(r"with optexp\.step\(.*?\):", "if True:", text)
    return re.sub(r"(?m)^.*(import optexp|OptexpCallback).*\n", "", text)


def test_marked_scripts_pass_and_without_their_marks_they_do_not(tmp_path: Path) -> None:
    for script in SCRIPTS:
        require_mark(script)
        other = tmp_path / script.name
        other.write_text(unmarked(script.read_text()))
        with pytest.raises(ConfigError, match=r"optexp\.step|OptexpCallback"):
            require_mark(other)


@pytest.mark.parametrize(
    ("files", "passes"),
    [
        (
            {
                "train.py": "from engine.loop import fit\nfit()",
                "engine/loop.py": "from . import core",
                "engine/core.py": "",
            },
            False,
        ),
        (
            {
                "train.py": "import engine.loop",
                "engine/loop.py": "from . import core",
                "engine/core.py": "import optexp as o\no.steps",
            },
            True,
        ),
        ({"train.py": "import torch, missing\nimport optexp  # and no mark"}, False),
        ({"train.py": "import importlib\nimportlib.import_module(name)"}, True),
        ({"train.py": "import sys\nsys.path.insert(0, 'elsewhere')\nimport away"}, True),
        ({"train.py": "def f(:"}, True),
    ],
    ids=["none", "in-a-module", "import-alone", "by-name", "other-folders", "syntax"],
)
def test_a_mark_may_lie_in_what_the_script_imports(files: dict[str, str], passes: bool, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if passes:
        require_mark(tmp_path / "train.py")
    else:
        with pytest.raises(ConfigError, match="marks no step"):
            require_mark(tmp_path / "train.py")


MARK = "optexp.steps(tqdm(loader), model=net)"


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (f"import optexp\n{MARK}\n", 2),
        (f"import optexp as o\nmarked = {MARK.replace('optexp', 'o')}\n", 2),
        (f"import optexp\nloader = {MARK}\n", None),
        (f"import optexp\n{MARK}\nfor x in {MARK}:\n    pass\n", None),
        (f"import optexp\nfit({MARK})\n", None),
    ],
    ids=["alone", "assigned", "used", "another", "passed-on"],
)
def test_a_mark_that_no_loop_goes_over(head: str, line: int | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(head + LOOP)
    if line is None:
        require_mark(script)
        return
    told = f"train.py:{line} calls optexp.steps and no loop goes over what it returns: write line 5 as `for i, "
    with pytest.raises(ConfigError, match=re.escape(told)):
        require_mark(script)


def test_a_forgotten_mark_is_told_before_anything_runs(
    command_line: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    assert command_line("workload=script", "workload.path=train.py", "strategy=amp") == 1
    line = "`for i, (x, y) in enumerate(tqdm(optexp.steps(loader, model=model, optimizer=opt)), 1):`"
    assert f"train.py marks no step, nor does a module that it imports: import optexp, and write line 3 as {line}" in (
        capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
