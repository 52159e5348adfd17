"""`python -m optexp.audit result.json`: does the verdict follow from the record, and is the record as it was written?

Offline: nothing is run again. The digest shows an edit that forgot it. Verdict, headline and speedup are derived again
from the record's facts by the rules of `optexp.comparison.adjudicate`, and compared with the files beside the record:
samples.parquet, config.yaml, environment.json. A forger who edits all of them consistently is not found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

from optexp.comparison.adjudicate import adjudicate, facts_of
from optexp.records import filenames
from optexp.reporting.wording import corrected_headline, forms, headline
from optexp.result import Result, Verdict, digest, finite

Record = Mapping[str, Any]
EXACT = 1e-9  # relative: the same arithmetic again
CLAIMS = {Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.VERIFIED}  # the others promise nothing


def problems(record: Record) -> list[str]:
    """Contradictions inside a record, in sentences; none where everything follows."""
    result = Result.of(record)
    parts = (_verdict(result), _verification(result), _asked(result), _speedup(result), _headline(result))
    return [*_edited(record), *(problem for part in parts for problem in part)]


def follows(result: Result, tolerance: float = EXACT) -> list[str]:
    """Contradictions between a verdict, its speedup and the pairs of the same record; none where they follow.

    tolerance: relative, of the speedup, where pairs are rounded
    """
    return [*_verdict(result), *_speedup(result, tolerance)]


def says(result: Result) -> list[str]:
    """Contradictions between a headline and the record that it heads."""
    return list(_headline(result))


def underived(result: Result, folder: Path) -> list[str]:
    """Claims of a record that nothing beside it confirms."""
    if result.verdict not in CLAIMS:
        return []
    beside = [("device", filenames.ENVIRONMENT), ("workload, dtype, strategy and protocol", filenames.CONFIG)]
    beside += [("pairs", filenames.SAMPLES)] if result.measurement and result.measurement.pairs else []
    missing = [f"{claim} (no {name} beside it)" for claim, name in beside if not (folder / name).is_file()]
    return ["findings of the gates, mutants and evidence", *missing]


# --- contradictions ----------------------------------------------------------------------------------------------


def _edited(record: Record) -> Iterator[str]:
    if "digest" not in record:
        yield "there is no digest: the record was not written by this version, or cut"
    elif record["digest"] != digest(record):
        yield "the digest does not fit: the record was changed after it was written"


def _verdict(result: Result) -> Iterator[str]:
    decision = adjudicate(facts_of(result))
    found = decision.verdict if decision else None
    if result.verdict in CLAIMS and result.verdict is not found:
        yield f"the verdict is {result.verdict}, and the record gives {found or 'none'}"
    if not result.headline.startswith(result.verdict):
        yield f"the headline does not begin with the verdict: {result.headline}"
    if not result.verdict.measured and (result.speedup or result.measurement):
        yield f"a speedup is shown with {result.verdict}"


def _verification(result: Result) -> Iterator[str]:
    """A claim has a verification that passed, and one proof of engagement for each strategy."""
    if result.verdict not in CLAIMS:
        return
    found = result.equivalence
    if found is None or not found.seeds:
        yield "there is no verification on fresh inputs"
        return
    failed = [gate for gate, outcome in found.gates.items() if not outcome.passed]
    failed += [tensor for tensor, row in found.tensors.items() if not row.ok]
    failed += ["the process after its timing"] if found.recheck and not found.recheck.ok else []
    if result.verdict is not Verdict.VERIFIED and found.recheck is None:
        yield "the timed process was not checked again"
    if failed or found.failures:
        yield f"{', '.join(failed) or len(found.failures)} failed, and the verification is said to have passed"
    if [proof.strategy for proof in result.evidence] != [label.partition("[")[0] for label in result.strategy]:
        yield f"{len(result.evidence)} proofs of engagement are listed for {len(result.strategy)} strategies"


def _asked(result: Result) -> Iterator[str]:
    """The compared program and its device are those that the configuration asked for."""
    if result.verdict not in CLAIMS:
        return
    for name, said in (("workload", result.workload), ("device", result.device), ("strategy", result.label)):
        if result.config.get(name) != said:
            yield f"{name} is {said}, and {result.config.get(name)} was asked for"
    if result.environment.get("device") != result.device:
        yield f"device is {result.device}, and the environment's {result.environment.get('device')}"


def _speedup(result: Result, tolerance: float = EXACT) -> Iterator[str]:
    if (claimed := result.speedup) is None:
        return
    interval, measurement = facts_of(result).interval, result.measurement
    if interval is None or measurement is None:
        yield "a speedup is shown, and no pairs that it comes from"
        return
    for name, value in (("confidence", claimed.confidence), ("min_effect", measurement.min_effect)):
        asked = result.config.get(f"measurement.{name}", value)
        if value != asked:
            yield f"{name} is {value}, and {asked} was asked for"
    if claimed.processes != len(measurement.pairs):
        yield f"{claimed.processes} processes are named, and pairs of {len(measurement.pairs)} listed"
    for name, value in zip(("estimate", "low", "high"), interval.ratios(), strict=True):
        if not isclose(getattr(claimed, name), value, rel_tol=tolerance):
            yield f"speedup.{name} is {getattr(claimed, name):.6g}, and the pairs give {value:.6g}"


def _headline(result: Result) -> Iterator[str]:
    """A measured headline is word for word the one that the record gives."""
    if result.speedup is None:
        return
    dtype = result.equivalence.contract.partition("(")[2].rstrip(")") if result.equivalence else ""
    precision, against = dtype or result.config.get("dtype", "float32"), result.config.get("baseline", "baseline")
    weakness = result.equivalence.weakness if result.equivalence else None
    given, measurement = headline(result, precision, against, weakness), result.measurement
    decision, said = adjudicate(facts_of(result)), result.headline
    if measurement and decision and decision.alone and result.verdict is decision.verdict:  # a sweep corrected it
        given = headline(replace(result, verdict=decision.alone), precision, against, weakness)
        if measurement.comparisons is not None:
            given = corrected_headline(decision.verdict, decision.reason, given)
        elif said.endswith(forms(given)):  # an older record does not hold the number that the rest names
            return
    if said not in forms(given):
        yield f"the headline says {said!r}, and the record gives {given!r}"


# --- files beside it ---------------------------------------------------------------------------------------------


def beside(result: Result, record: Record, folder: Path) -> Iterator[str]:
    """Contradictions with the blocks, the configuration and the machine that were written down on their own."""
    if result.verdict in CLAIMS or result.speedup:
        # The machine of a winner that was measured again is described where that was done.
        machine = folder / (result.by_itself.again if result.by_itself else "") / filenames.ENVIRONMENT
        for part, path in (("config", folder / filenames.CONFIG), ("environment", machine)):
            if path.is_file():
                yield from _differs(record[part], path)
    blocks, measurement = folder / filenames.SAMPLES, result.measurement
    if measurement and measurement.pairs and blocks.is_file():
        from optexp.measurement import samples_file  # slow to import

        held = [
            [tuple(pair) for pair in process]
            for process in samples_file.pairs(blocks, measurement.l2.headline == "cold")
        ]
        if held != [[tuple(pair) for pair in process] for process in measurement.pairs]:
            yield f"{filenames.SAMPLES} beside it holds other pairs than the record"


def _differs(said: Record, path: Path) -> Iterator[str]:
    held = json.loads(path.read_text()) if path.suffix == ".json" else _yaml(path)
    held = finite(json.loads(json.dumps(held, default=str)))  # as a record holds it: JSON's keys are strings
    if keys := sorted(key for key in {*held, *said} if held.get(key) != said.get(key)):
        yield f"{path.name} beside it says otherwise about {', '.join(keys)}"


def _yaml(path: Path) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path))


# --- the command -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """0: every record follows from itself; 3: one does not; 1: one cannot be read.

    arguments: records, or folders that hold one; or --pages, for the README and the result pages
    """
    if list(arguments) == ["--pages"]:
        return _pages()
    if not arguments or "--help" in arguments:
        print("optexp.audit: name a record, as in python -m optexp.audit outputs/2026-11-21/13-59-15/result.json")
        print("              --pages: the README and the result pages, as far as they have records")
        return 1
    worst = 0
    for path in map(Path, arguments):
        path = path / filenames.RESULT if path.is_dir() else path
        try:
            record = json.loads(path.read_text())
            result = Result.of(record)
            found = [*problems(record), *beside(result, record, path.parent)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            print(f"{path}: cannot be read as a record ({reason})")
            worst = 1
            continue
        pairs = sum(map(len, result.measurement.pairs)) if result.measurement else 0
        basis = f"{pairs} pairs, {len(result.equivalence.tensors) if result.equivalence else 0} tensors"
        print(f"{path}: {result.verdict}, " + ("does not hold" if found else f"follows from the record ({basis})"))
        for problem in found:
            print(f"  {problem}")
        if raw := underived(result, path.parent):
            print(f"  not derivable: {', '.join(raw)}")
        worst = worst or (3 if found else 0)
    return worst


def _pages() -> int:
    """0: every figure that was derived or compared follows; 3: one does not."""
    from optexp.commands import audit_pages

    pages = audit_pages.audit()
    for page in sorted(pages, key=lambda page: (not page.records and not page.repeats, page.name)):
        print(page)
        for problem in page.problems:
            print(f"  {problem}")
    pages = [page for page in pages if not page.repeats]
    whole = sum(bool(page.records) and not page.underived for page in pages)
    part = sum(bool(page.records) and page.underived > 0 for page in pages)
    print(f"{len(pages)} pages: {whole} derived, {part} in part, {len(pages) - whole - part} not (no record)")
    return 3 if any(page.problems for page in pages) else 0
