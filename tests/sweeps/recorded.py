"""Results of studies as the pages in experiments/results hold them, measured on an H200: cells become records again.

A cell has three digits, so a record has no more. What a page leaves out (traces, samples, reasons) is missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optexp.records.measurement import Cost, Measurement
from optexp.records.profile import ArmProfile, Calibration, ProfileRecord, TopEntry
from optexp.result import ArmSummary, Result, Speedup, Verdict
from optexp.sweeps.figures import FIGURES, heading
from optexp.sweeps.study import Study
from tests.benchmarks.results import cells

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "experiments" / "results"
SCALES = {
    "µs": 1.0, "ms": 1e3, "s": 1e6, "/s": 1.0, "k/s": 1e3, "M/s": 1e6, "KiB": 2**-10, "MiB": 1.0, "GiB": 1024.0,
    "%": 0.01, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "×": 1.0, "": 1.0,
}  # fmt: skip
NAMES = {heading(name): name for name in FIGURES if name != "arm"}
SUMMARY = ("step_us", "throughput", "peak_mib", "kernels", "gpu_busy", "setup_s")


def study(name: str) -> Study:
    """The study of a file in experiments/."""
    config = OmegaConf.load(ROOT / "experiments" / f"{name}.yaml")
    assert isinstance(config, DictConfig)
    found = Study.of(config)
    assert found is not None
    return found


def recorded(name: str) -> list[tuple[Result, str]]:
    """The jobs of a study, each with its step; none where its page holds no measurement."""
    page = (PAGES / f"{name}.md").read_text()
    rows = cells(page) if "| " in page else []
    settings = {heading(key): key for key in (*_settings(name), "dtype")}
    found, baseline = list[tuple[Result, str]](), ArmSummary()
    for row in rows:
        values = {settings.get(head) or NAMES.get(head, head): cell for head, cell in row.items() if cell}
        if values.get("strategy") == "baseline" and "verdict" in rows[0]:
            baseline = _summary(values)
            continue
        found.append((_result(name, values, baseline, "verdict" in rows[0]), values.get("step", "")))
    return found


def _settings(name: str) -> list[str]:
    """The settings that a study's file names."""
    text = (ROOT / "experiments" / f"{name}.yaml").read_text()
    return list(dict.fromkeys(re.findall(r"workload\.\w+", text)))


def number(cell: str) -> float:
    """A cell's value in the unit of records: µs, MiB, samples/s, a share."""
    found = re.match(r"([\d.,]+) ?(\D*?)(?: |$)", cell)
    assert found is not None, cell
    return float(found[1].replace(",", "")) * SCALES[found[2]]


def _summary(values: dict[str, str]) -> ArmSummary:
    read = {key: number(values[key]) for key in SUMMARY if key in values}
    if "setup_s" in read:
        read["setup_s"] /= 1e6
    if "step_us" in read:
        read.setdefault("throughput", 1e6 / read["step_us"])  # where a page has no rate: steps
    return ArmSummary(**read)


def _result(name: str, values: dict[str, str], baseline: ArmSummary, compared: bool) -> Result:
    step = values.get("step", "")
    compared = compared or step == "streams"
    verdict, _, reason = values.get("verdict", "FASTER" if compared else "PROFILED").partition(": ")
    own, label = _summary(values), values.get("strategy", "")
    config: dict[str, Any] = {
        key: int(cell) if cell.isdecimal() else cell
        for key, cell in values.items()
        if key.startswith("workload.") or key in ("dtype", "strategy")
    }
    plain = label in ("", "baseline") and step in ("", "plain", "workers")
    speedup = re.match(r"([\d.]+)× \(([\d.]+) to ([\d.]+)\)", values.get("speedup", ""))
    return Result(
        Verdict(verdict),
        f"{verdict}: {reason}" if reason else verdict,
        values.get("workload", name.split("_")[0]),
        [] if plain else [label or step],
        "cuda:0",
        0,
        speedup=Speedup(float(speedup[1]), float(speedup[2]), float(speedup[3]), 0.99, 1) if speedup else None,
        baseline=baseline if compared else own,
        candidate=own if compared else ArmSummary(),
        measurement=Measurement(cost=Cost(break_even_steps=_steps(values.get("paid_back")))),
        profile=_profile(values, own, compared, str(config.get("dtype", "float32"))),
        config={"dtype": "float32", "baseline": "baseline", "measurement": "quick", **config},
        environment={"gpu": "NVIDIA H200", "torch": "2.11.0"},
    )


def _steps(cell: str | None) -> Any:
    return int(cell) if cell and cell.isdecimal() else cell


def _profile(values: dict[str, str], own: ArmSummary, compared: bool, dtype: str) -> ProfileRecord:
    metrics, ceilings = dict[str, float](), dict[str, float]()
    if "memcpy" in values:
        metrics["memcpy"] = number(values["memcpy"])
    if "flops" in values and own.step_us:
        metrics["matrix_flop"] = number(values["flops"]) * own.step_us / 1e6
        share = number(values.get("of_ceiling", "0%"))
        ceilings = {dtype: number(values["flops"]) / share} if share else {}
    for term, part in re.findall(r"([a-z ]+) ([\d.]+%)", values.get("shares", "")):
        metrics[f"share_{term.strip().replace(' ', '_')}"] = number(part)
    top = [TopEntry(values["kernel"], 1.0, 1.0, own.step_us)] if "kernel" in values else []
    arm = ArmProfile(metrics, top_kernels=top)
    calibration = Calibration("cuda:0", 1.0, ceilings) if ceilings else None
    return ProfileRecord(None if compared else arm, arm if compared else None, calibration)
