"""Problems as Python files: KernelBench (https://github.com/ScalingIntelligence/KernelBench), and any pair of files.

A problem has `Model` and `get_inputs`; a candidate has `ModelNew`, else `Model`. Candidates are matched by their names.
Files are parsed, never run: importing a candidate may do anything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexp.errors import ConfigError
from optexp.judging.job import Job, Settings, Suite, hash_of, key_of

SAMPLE = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)(?:_kernel)?")  # file names of KernelBench's runs
NAMED = re.compile(r"(?P<path>.+\.py):(?P<name>\w+)")
SHOWN = 5


@dataclass(frozen=True)
class Target:
    """A model in a file: `path`, or `path:Name`."""

    path: Path
    name: str | None = None

    @classmethod
    def of(cls, text: str) -> Target:
        found = NAMED.fullmatch(text)
        return cls(Path(found["path"]).resolve(), found["name"]) if found else cls(Path(text).resolve())

    def model(self, *usual: str) -> str:
        """The model's name: `name` if set, else the first of `usual` that the file defines, else `usual[0]`."""
        if self.name:
            return self.name
        names = bound(self.path.read_text(errors="replace"))
        return next((name for name in usual if name in names), usual[0])


def bound(source: str) -> set[str]:
    """Names that a module's code binds (classes, functions, variables, imports); empty if the source does not parse."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):  # the import in the worker will show the error
        return set()
    found = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found | {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}


@dataclass(frozen=True)
class Match:
    """A candidate's file with its problem; entrant: see `Job`."""

    problem: Path
    candidate: Path
    entrant: str = ""


def is_problem(path: Path) -> bool:
    """Whether the text of a file defines both parts of a problem."""
    text = path.read_text(errors="replace")
    return bool(
        re.search(r"^class Model\b", text, re.MULTILINE) and re.search(r"^def get_inputs\b", text, re.MULTILINE)
    )


def python_files(folder: Path) -> list[Path]:
    """Python files in a folder tree, ordered by leading numbers in their names; without hidden files and caches."""
    found = (path for path in folder.rglob("*.py") if not _hidden(path.relative_to(folder)))
    return sorted(found, key=lambda path: (path.parent, _number(path), path.name))


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)


def _number(path: Path) -> float:
    first = re.match(r"\d+", path.stem)
    return int(first.group()) if first else float("inf")


def suite(place: Target, candidates: Target | None, settings: Settings) -> Suite:
    """Jobs of a folder of problems with a folder of candidates, or of two files.

    Args:
        candidates: None where a strategy is judged.

    Raises:
        ConfigError: there is no problem, or no candidate has a problem's name.
    """
    if place.path.is_dir():
        problems, root = [path for path in python_files(place.path) if is_problem(path)], place.path
    else:
        problems, root = [place.path], place.path.parent
    if not problems:
        raise ConfigError(f"{place.path} holds no problem: a file with `class Model` and `def get_inputs`")
    names = {path: path.relative_to(root).with_suffix("").as_posix() for path in problems}
    reference = {path: Target(path, place.name).model("Model") for path in problems}

    def job(problem: Path, candidate: str, sources: list[Path], stack: dict[str, dict[str, Any]], entrant: str) -> Job:
        workload: dict[str, Any] = {"path": str(problem)}
        workload |= {"names": {"model": reference[problem]}} if reference[problem] != "Model" else {}
        named = "\0".join((place.name or "", names[problem], candidate)).encode()
        hashes = {str(path): hash_of(path) for path in (problem, *sources)}
        key = key_of([*(value.encode() for value in hashes.values()), named], settings)
        return Job(key, "files", names[problem], candidate, entrant, workload=workload, strategy=stack, files=hashes)

    if candidates is None:
        return Suite([job(problem, "", [], {}, "") for problem in problems])
    matches, remarks = _pairs(problems, root, candidates)
    jobs = []
    for match in matches:
        model = Target(match.candidate, candidates.name).model("ModelNew", "Model")
        stack = {"replace": {"target": f"{match.candidate}:{model}"}}
        base = candidates.path if candidates.path.is_dir() else candidates.path.parent
        name = match.candidate.relative_to(base).with_suffix("").as_posix()
        name = f"{name}:{candidates.name}" if candidates.name else name
        jobs.append(job(match.problem, name, [match.candidate], stack, match.entrant))
    return Suite(jobs, remarks)


def _pairs(problems: Sequence[Path], root: Path, candidates: Target) -> tuple[list[Match], list[str]]:
    """Candidates with their problems, and remarks on candidates and problems without a partner.

    Raises:
        ConfigError: there is no pair.
    """
    if not candidates.path.is_dir():
        if len(problems) == 1:
            return [Match(problems[0], candidates.path)], []
        files, base = [candidates.path], candidates.path.parent
    else:
        files, base = python_files(candidates.path), candidates.path
    found = {path: match(path, base, problems, root) for path in files}
    matches = [pair for pair in found.values() if pair is not None]
    without = [path.relative_to(base).as_posix() for path, pair in found.items() if pair is None]
    if not matches:
        example = problems[0].relative_to(root).as_posix()
        raise ConfigError(
            f"{candidates.path} holds no candidate with a problem's name: name them as the problems, as in {example},"
            " or as level_1_problem_2_sample_0_kernel.py"
        )
    more = f" and {len(without) - SHOWN} others" if len(without) > SHOWN else ""
    remarks = [f"no problem has the name of {', '.join(without[:SHOWN])}{more}: not judged"] if without else []
    left = len(problems) - len({pair.problem for pair in matches})
    remarks += [f"{left} of {len(problems)} problems have no candidate: not counted"] if left else []
    order = {path: index for index, path in enumerate(problems)}
    return sorted(matches, key=lambda pair: order[pair.problem]), remarks


def match(path: Path, base: Path, problems: Sequence[Path], root: Path) -> Match | None:
    """The problem of a candidate's file; None without a single one.

    The first rule that applies: the same relative path; the name of a KernelBench run (`SAMPLE`); the same file name;
    the name of the candidate's folder; the longest problem name that the candidate's name begins with.
    """
    name, folder = path.stem, path.parent.name
    by_path = {problem.relative_to(root).with_suffix(""): problem for problem in problems}
    if problem := by_path.get(path.relative_to(base).with_suffix("")):
        return Match(problem, path)
    if run := SAMPLE.fullmatch(name):
        level, number, sample = run.groups()
        of_level = (p for p in problems if f"level{level}" in (p.parent.name, root.name))
        problem = _only(p for p in of_level if _number(p) == int(number))
        return Match(problem, path, entrant=f"sample {sample}") if problem else None
    if problem := _only(p for p in problems if p.stem == name):
        return Match(problem, path)
    if problem := _only(p for p in problems if p.stem == folder):
        return Match(problem, path, entrant=name)
    beginnings = [p for p in problems if re.match(rf"{re.escape(p.stem)}[\W_]", name)]
    longest = max((len(p.stem) for p in beginnings), default=0)
    problem = _only(p for p in beginnings if len(p.stem) == longest)
    return Match(problem, path, entrant=name[longest:].strip("_-. ")) if problem else None


def _only(problems: Iterable[Path]) -> Path | None:
    """The problem, if there is exactly one."""
    found = list(problems)
    return found[0] if len(found) == 1 else None
