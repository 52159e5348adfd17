"""The documents: the site builds without a broken link, names resolve, commands are accepted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from optexp.commands import ab, bisect, history, judge, kernel_benchmark, watch
from optexp.config import overrides, search_path
from optexp.config.watch_list import WatchList
from optexp.kernelkit.kernel import kernels

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


# --- the site ------------------------------------------------------------------------------------------------------


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build` with `strict: true` of mkdocs.yml: a warning is a failure."""
    pytest.importorskip("material", reason="the extra [docs] is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=60)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()
    assert (tmp_path / "experiments" / "results" / "kernels" / "index.html").is_file()


@pytest.mark.parametrize("link", ["no_such_page.md", "verdicts.md#no-such-heading", "no_such_picture.svg"])
def test_a_broken_link_fails_the_build(link: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("README.md", "mkdocs.yml"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "docs", source / "docs")
    shutil.copytree(RESULTS, source / "experiments" / "results")
    page = source / "docs" / "measurement.md"
    page.write_text(f"{page.read_text()}\n[broken]({link})\n")
    done = build(source, tmp_path / "site")
    assert done.returncode != 0
    assert link in done.stderr


# --- names on the pages ----------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(("group", "name"), [("strategy", "strategies.md"), ("measurement", "measurement.md")])
def test_pages_name_only_choices_that_exist(group: str, name: str) -> None:
    heading = {"strategy": "# Strategies", "measurement": "## Presets"}[group]
    section = (ROOT / "docs" / name).read_text().partition(f"{heading}\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert len(named) > 3
    assert {*named} <= {*search_path.options(group)}


def test_every_page_of_a_kernel_or_a_result_is_listed() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "kernels").glob("*.md")}
    overview, index = (ROOT / "docs" / "kernels.md").read_text(), (RESULTS / "index.md").read_text()
    assert pages <= set(kernels())
    assert [name for name in pages if f"](kernels/{name}.md)" not in overview] == []
    assert [page.name for page in RESULTS.glob("*.md") if f"]({page.name})" not in index and page.stem != "index"] == []


def names() -> list[str]:
    """Dotted names in the tables of the page about architecture: `module.attribute` of the package."""
    tables = [line for line in ARCHITECTURE.splitlines() if line.startswith("|")]
    found = {name for line in tables for name in re.findall(r"`([a-z_]\w*(?:\.\w+)+)`", line)}
    return sorted(name for name in found if not name.endswith((".json", ".py")))


def exists(name: str) -> bool:
    """Whether `equivalence.gates.TOLERANCES` is there: a module of the package, then attributes."""
    parts = f"optexp.{name}".split(".")
    length = next(n for n in range(len(parts), 0, -1) if importable(".".join(parts[:n])))
    found: object = import_module(".".join(parts[:length]))
    for part in parts[length:]:
        found = getattr(found, part, None)
    return found is not None and length > 1


def importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_the_page_on_architecture_names_many_things() -> None:
    assert len(names()) > 60
    assert len(re.findall(r"^\| [1-9]\. ", ARCHITECTURE, re.MULTILINE)) == 9


def test_names_on_the_page_about_architecture_resolve() -> None:
    assert [name for name in names() if not exists(name)] == []


def test_a_name_that_moved_does_not_resolve() -> None:
    assert not exists("equivalence.gates.NO_SUCH_CONSTANT")
    assert not exists("no_such_module.attribute")


def test_folders_on_the_page_about_architecture_exist() -> None:
    rows = re.findall(r"^\| (`[\w/]+/`(?:, `[\w/]+/`)*) \|", ARCHITECTURE, re.MULTILINE)
    folders = [folder for row in rows for folder in re.findall(r"`([\w/]+)`", row)]
    assert len(folders) > 12
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
    inner = {f"optexp/{path.parent.name}/" for path in (ROOT / "optexp").glob("*/__init__.py")}
    assert inner <= set(folders)


def test_the_port_on_the_page_about_models_is_the_one_that_is_tested() -> None:
    port = (ROOT / "tests" / "outside" / "digits" / "port.py").read_text()
    assert port.partition("import torch")[2] in (ROOT / "docs" / "own_models.md").read_text()


def test_the_yaml_on_the_page_about_regressions_is_a_list_and_a_workflow(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "regressions.md").read_text()
    listed, workflow = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "watch.yaml").write_text(listed)
    steps = yaml.safe_load(workflow)["jobs"]["watch"]["steps"]
    typed = [*WatchList.read(tmp_path / "watch.yaml").comparisons]
    typed += [line.partition(">>")[0] for step in steps if "python -m optexp" in (line := step.get("run", ""))]
    assert len(typed) == 5
    for line in typed:
        accept(shlex.split(line if line.startswith("python") else f"python -m optexp {line}"))


# --- commands on the pages -------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """Commands of a page as words: of its console blocks, and those of Python in running text."""
    text = page.read_text()
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line.removeprefix("$ "), comments=True) if starts(line) else []:
                yield words
    for quoted in re.findall(r"`(python -m optexp[^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield shlex.split(quoted.replace("\\|", "|"))


def starts(line: str) -> bool:
    return line.removeprefix("$ ").startswith(("python ", "make ", "pip ", "mlflow "))


TYPED = [(page, words) for page in PAGES for words in commands(page)]


def test_there_are_commands() -> None:
    assert len(TYPED) > 60
    assert len({page for page, _ in TYPED}) > 25


def test_every_command_is_accepted() -> None:
    refused = []
    for page, words in TYPED:
        try:
            accept(words)
        except (Exception, SystemExit) as reason:
            refused.append(f"{page.relative_to(ROOT)}: {shlex.join(words)}: {reason}")
    assert refused == []


PARSERS = {
    "optexp.ab": ab.parse,
    "optexp.bisect": bisect.parse,
    "optexp.history": history.parse,
    "optexp.judge": judge.parse,
    "optexp.watch": watch.parse,
}


def accept(words: list[str]) -> None:
    """Raises where a command names a target, a module, a file, a choice or a key that does not exist."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:3] == ["python", "-m", "optexp"]:
        compose(words[3:])
    elif words[:3] == ["python", "-m", "optexp.benchmark"]:
        kernel_benchmark.parse(words[3:])
    elif words[:2] == ["python", "-m"] and words[2] in PARSERS:
        PARSERS[words[2]](words[3:])
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2]), "there is no such module"
    paths = (word.partition("::")[0] for word in words if word.startswith("tests/"))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def compose(words: list[str]) -> None:
    """Each choice of a sweep becomes a configuration, in some job; flags such as --help are Hydra's own."""
    rewritten = overrides.rewrite([word for word in words if not word.startswith("-") and word != "..."])
    choices = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [word]
        for word, override in zip(rewritten, OverridesParser.create().parse_overrides(rewritten), strict=True)
    ]
    for job in range(max(map(len, choices), default=1)):
        composed(tuple(values[job % len(values)] for values in choices))


@cache
def composed(overrides: tuple[str, ...]) -> None:
    assert search_path.compose(list(overrides)).workload._target_


@pytest.mark.parametrize(
    "command",
    ["make no_such_target", "python -m optexp workload=none_such", "python -m optexp.none", "python tests/none.py"],
)
def test_a_command_with_a_mistake_is_refused(command: str) -> None:
    with pytest.raises(Exception, match=r"none|no such|assert"):
        accept(shlex.split(command))
