"""What the README tells people to type, typed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from optexp.result import Result

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def block(language: str, after: str) -> str:
    """The first code block of a language after some words."""
    found = re.search(rf"```{language}\n(.*?)```", README.read_text().partition(after)[2], re.DOTALL)
    assert found
    return found[1]


def test_the_strategy_of_the_readme_reaches_a_verdict(tmp_path: Path) -> None:
    """In a folder of one's own: the working folder's modules and its conf/ are found."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "threads.py").write_text(block("python", "`strategies/threads.py`"))
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    target = block("yaml", "`conf/strategy/threads.yaml`").replace("optexp.strategies.threads", "mine.threads")
    (tmp_path / "conf" / "strategy" / "threads.yaml").write_text(target)
    quick = "device=cpu measurement=quick measurement.warmup_s=0.1 measurement.pairs=10 measurement.process_s=1"
    more = "tracking.enabled=false hydra.run.dir=out workload.dim=16 workload.batch_size=8"
    command = f"-m optexp workload=mlp strategy=threads {quick} {more}".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    result = Result.read(tmp_path / "out" / "result.json")
    alone = "1 threads became 1" in result.headline  # a machine with one core
    assert result.verdict.measured or alone, done.stdout + done.stderr
    assert alone or re.fullmatch(r"\d+ threads became 1", result.evidence[0]["text"])
