"""Problems as kernel definitions: the data sets of flashinfer-bench, and the problems of SOL-ExecBench.

flashinfer-bench: definitions/**.json, workloads/**.jsonl and solutions/**.json below one folder. SOL-ExecBench: a
folder for each problem with definition.json and workload.jsonl; solutions are JSON files anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from optexp.errors import ConfigError
from optexp.judging.job import Defined, Job, Settings, Suite, hash_of, key_of
from optexp.user_code.definitions import CaseSpec, Definition, Solution, Stored, Traced, filled, sizes

DEFINITION, WORKLOADS = "definition.json", "workload.jsonl"
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """A definition with its workloads (`cases`); by_name: see `Defined`."""

    path: Path
    definition: Definition
    cases: list[CaseSpec]
    by_name: bool


def is_suite(place: Path) -> bool:
    """Whether a folder holds kernel definitions."""
    return (place / "definitions").is_dir() or next(place.rglob(DEFINITION), None) is not None


def suite(
    place: Path,
    candidates: Path | None,
    settings: Settings,
    most: int | None = None,
) -> Suite:
    """Jobs of every solution on every workload of its definition.

    Args:
        candidates: Folder of solutions, or the file of one; None where a strategy is judged.
        most: Most workloads of a definition, spread evenly over all; None takes every one.

    Raises:
        ConfigError: a file does not follow the schema, or no solution has its definition here.
    """
    problems: dict[str, Problem] = {}
    for problem in _problems(place):
        if known := problems.get(problem.definition.name):
            raise ConfigError(
                f"{problem.path} defines {problem.definition.name}, as {known.path} does: name one of them"
            )
        problems[problem.definition.name] = problem
    if not problems:
        raise ConfigError(f"{place} holds no definition with workloads")
    remarks: list[str] = []
    if candidates is None:
        return Suite(_jobs([(problem, None) for problem in problems.values()], settings, most, remarks), remarks)
    solutions, remarks = _solutions(candidates)
    solved = {path: found for path, found in solutions.items() if found.definition in problems}
    if not solved:
        raise ConfigError(f"{candidates} holds no solution of {', '.join(list(problems)[:5])}")
    if without := sorted({found.definition for found in solutions.values()} - problems.keys()):
        remarks.append(f"solutions of {', '.join(without)} have no definition here: not judged")
    pairs: list[tuple[Problem, tuple[Path, Solution] | None]] = [
        (problems[found.definition], (path, found)) for path, found in solved.items()
    ]
    return Suite(_jobs(pairs, settings, most, remarks), remarks)


def _jobs(
    pairs: Sequence[tuple[Problem, tuple[Path, Solution] | None]],
    settings: Settings,
    most: int | None,
    remarks: list[str],
) -> list[Job]:
    """A job for each workload of each pair; a workload whose sizes are not known is a remark."""
    jobs = []
    for problem, solved in pairs:
        for case in _spread(problem.cases, most):
            try:
                jobs.append(_job(problem, case, settings, solved))
            except ConfigError as reason:
                remarks.append(f"{reason}: not judged")
    return jobs


def _job(
    problem: Problem,
    case: CaseSpec,
    settings: Settings,
    solved: tuple[Path, Solution] | None,
) -> Job:
    path, solution = solved or (None, None)
    beside = [path.parent / one.path for one in solution.sources if not one.content] if path and solution else []
    files = {str(one): hash_of(one) for one in (problem.path, path, *beside) if one}
    sources: list[Path | bytes] = [files[str(problem.path)].encode()]
    sources += [msgspec.json.encode([case, problem.by_name, _versions(case)])]
    sources += [msgspec.json.encode(filled(solution, path.parent))] if path and solution else []
    return Job(
        key_of(sources, settings),
        "definitions",
        problem.definition.name,
        solution.name if solution else "",
        solution.author if solution else "",
        case.uuid,
        sizes(problem.definition, case),
        defined=Defined(str(problem.path), case, str(path) if path else None, problem.by_name),
        files=files,
    )


def _versions(case: CaseSpec) -> list[tuple[int, int]]:
    """Size and modification time of each file of tensors, in place of its hash: such files may be large."""
    paths = (Path(source.path) for source in case.inputs.values() if isinstance(source, Stored))
    stats = (path.stat() for path in paths if path.is_file())
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def _problems(place: Path) -> Iterator[Problem]:
    if (place / "definitions").is_dir():
        cases: dict[str, list[CaseSpec]] = {}
        for path in sorted((place / "workloads").rglob("*.jsonl")):
            for traced in _lines(path, Traced):
                cases.setdefault(traced.definition, []).append(_placed(traced.workload, [place]))
        for path in sorted((place / "definitions").rglob("*.json")):
            definition = _decoded(path.read_bytes(), Definition, path)
            if definition.name in cases:
                yield Problem(path, definition, cases[definition.name], by_name=False)
        return
    for path in sorted(place.rglob(DEFINITION)):
        workloads = path.with_name(WORKLOADS)
        if not workloads.is_file():
            raise ConfigError(f"{path} has no {WORKLOADS} beside it")
        roots = [path.parent, *path.parent.parents]
        cases_ = [_placed(case, roots) for case in _lines(workloads, CaseSpec)]
        yield Problem(path, _decoded(path.read_bytes(), Definition, path), cases_, by_name=True)


def _placed(case: CaseSpec, roots: Sequence[Path]) -> CaseSpec:
    """The workload with absolute paths; a relative path is resolved in the first of `roots` that has the file."""

    def placed(source: Stored) -> Stored:
        path = next((root / source.path for root in roots if (root / source.path).is_file()), roots[0] / source.path)
        return msgspec.structs.replace(source, path=str(path))

    inputs = {name: placed(one) if isinstance(one, Stored) else one for name, one in case.inputs.items()}
    return msgspec.structs.replace(case, inputs=inputs)


def _solutions(place: Path) -> tuple[dict[Path, Solution], list[str]]:
    """Solutions by their files, and remarks on JSON files that are no solutions."""
    if place.is_file():
        return {place: _decoded(place.read_bytes(), Solution, place)}, []
    solutions, remarks = {}, []
    for path in sorted(place.rglob("*.json")):
        if path.name == DEFINITION or {"definitions", "workloads", "traces"} & {*path.relative_to(place).parts}:
            continue
        try:
            solutions[path] = _decoded(path.read_bytes(), Solution, path)
        except ConfigError as reason:
            remarks.append(f"{reason}: not judged")
    return solutions, remarks


def _spread(cases: list[CaseSpec], most: int | None) -> list[CaseSpec]:
    """At most `most` workloads, evenly spread, the first and the last included."""
    if most is None or len(cases) <= most:
        return cases
    if most == 1:
        return cases[:1]
    return [cases[round(index * (len(cases) - 1) / (most - 1))] for index in range(most)]


def _lines(path: Path, kind: type[T]) -> list[T]:
    return [_decoded(line, kind, path) for line in path.read_bytes().splitlines() if line.strip()]


def _decoded(content: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no {kind.__name__.lower()}: {error}") from None
