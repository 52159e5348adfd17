"""Scripts in the manner of well-known tutorials reach a verdict; each has a line or two for its mark."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from optexp.commands.run import overrides
from optexp.comparison import runner
from optexp.config import search_path
from optexp.result import Result, Verdict

FOLDER = Path(__file__).parent / "scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
EVERY_DAY = {"diffusion", "evaluation"}
NEEDS = {"accelerate_loop": "accelerate", "trainer": "accelerate", "lightning_module": "pytorch_lightning"}
ARGUMENTS = {"super_resolution": ["--", "--upscale_factor", "2"]}
HELPER = """\
def loss_of(model, inputs, labels):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(inputs), labels)


"""
SETTINGS = [
    "isolation=none",
    "device=cpu",
    "measurement=quick",
    "tracking.enabled=false",
    "measurement.verification_seeds=1",
    "measurement.profile_steps=2",
    "profile.details=false",
    "verify=only",
]


def verified(folder: Path, script: str, *given: str) -> Result:
    """One script in this process, on the CPU, without a clock."""
    search_path.register()
    arguments = overrides([*given, str(FOLDER / f"{script}.py"), *ARGUMENTS.get(script, [])])
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*SETTINGS, *arguments])
    return runner.run(config, folder)


def each(script: str) -> object:
    return pytest.param(script, marks=() if script in EVERY_DAY else pytest.mark.slow)


@pytest.mark.parametrize("script", [each(script) for script in SCRIPTS])
def test_reaches_a_verdict(script: str, tmp_path: Path) -> None:
    if script in NEEDS and importlib.util.find_spec(NEEDS[script]) is None:
        pytest.skip(f"needs {NEEDS[script]}")
    result = verified(tmp_path, script)
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_says_what_a_script_starts_from_and_leaves_a_patch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = (FOLDER / "classifier.py").read_text().replace("lr=1e-3", "lr=1e-3, fused=True")
    text = text.replace("F.cross_entropy(model(inputs), labels)", "loss_of(model, inputs, labels)")
    path.write_text(text.replace("def main():", f"{HELPER}def main():"))
    traced = ["strategy=[fusion]", "strategy.fusion.backend=eager"]
    result = verified(tmp_path, str(path.with_suffix("")), *traced, "patch=verified")
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert "the script starts from autocast to bfloat16, a fused optimizer, in both arms" in result.notes
    subprocess.run(["patch", "-p1", "-i", "optimized.patch", "train.py"], cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert 'Net.forward = torch.compile(Net.forward, backend="eager")' in path.read_text()
    assert done.stdout.count("\n") == 4


@pytest.mark.slow
@pytest.mark.parametrize("script", ["diffusion", "generation", "nanogpt"])
def test_strategies_reach_the_model(script: str, tmp_path: Path) -> None:
    result = verified(tmp_path, script, "strategy=[amp]")
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert all(evidence.engaged for evidence in result.evidence)


BY_HAND = """import torch, optexp
net = torch.nn.Linear(4, 1)
for x in optexp.steps([torch.randn(8, 4) for _ in range(4)]):
    net(x).sum().backward()
    for p in net.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None
"""


def test_a_mark_is_at_most_three_lines() -> None:
    for script in SCRIPTS:
        lines = [line for line in (FOLDER / f"{script}.py").read_text().splitlines() if "ptexp" in line]
        assert 1 <= len(lines) <= 3, script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other", "named"),
    [
        ("max_epochs=1,", 'max_epochs=1, precision="bf16-mixed",', "precision=bf16-mixed"),
        ("gradient_clip_val=0.5", 'gradient_clip_val=0.5, gradient_clip_algorithm="value"', "clip_algorithm=value"),
        (
            "    def forward(",
            "    def on_after_backward(self):\n        pass\n\n    def forward(",
            "on_after_backward()",
        ),
    ],
)
def test_parts_of_lightnings_step_that_the_callback_leaves_out_are_refused(
    text: str, other: str, named: str, tmp_path: Path
) -> None:
    pytest.importorskip("pytorch_lightning")
    path = tmp_path / "fit.py"
    path.write_text((FOLDER / "lightning_module.py").read_text().replace(text, other))
    result = verified(tmp_path, str(path.with_suffix("")))
    assert result.verdict is Verdict.ERROR
    assert named in result.headline


def test_an_override_behind_the_script_is_told_at_once() -> None:
    script = str(FOLDER / "classifier.py")
    with pytest.raises(ValueError, match="strategy=amp stands behind the script: write it before"):
        overrides([script, "strategy=amp"])
    assert overrides([script, "--lr=3"])[-1].startswith("workload.")
    assert overrides(["strategy=amp", script, "--", "key=value"])[-1] == "strategy=amp"


def test_a_step_without_an_optimizer_updates_by_hand_or_is_told_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "by_hand.py"
    path.write_text(BY_HAND)
    assert verified(tmp_path, str(path.with_suffix(""))).verdict is Verdict.VERIFIED
    path.write_text(BY_HAND.replace("p.data -= 0.1 * p.grad", "pass"))
    result = verified(tmp_path, str(path.with_suffix("")))
    assert result.verdict is Verdict.ERROR
    assert "the mark names no optimizer, and its step calls none: write optexp.steps(..., optimizer=" in result.headline


@pytest.mark.parametrize(
    ("faulty", "frames"),
    [
        ("model = torch.nn.Linear(4)", ["in <module>"]),
        ("loss = model(x).sum().nope", ["in marked_loop"]),
    ],
)
def test_an_error_shows_the_frames_of_the_script_alone(faulty: str, frames: list[str], tmp_path: Path) -> None:
    name = faulty.partition(" ")[0]
    lines = {"model": "model = torch.nn.Linear(4, 2)", "loss": "loss = model(x).sum()"} | {name: faulty}
    script = tmp_path / "train.py"
    script.write_text(
        f"import torch, optexp\n{lines['model']}\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x in optexp.steps([torch.randn(3, 4)] * 4, model=model, optimizer=optimizer):\n"
        f"    {lines['loss']}\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*SETTINGS, "strategy=fusion", *overrides([str(script)])])
    result = runner.run(config, tmp_path)
    assert result.verdict is Verdict.ERROR
    assert result.error is not None
    told = [line for line in result.error.traceback.splitlines() if line.startswith("  File")]
    assert [line.rpartition(", ")[2] for line in told if str(script) in line] == frames
    assert not [line for line in told if "<frozen" in line]


def test_a_loss_of_some_steps_alone_has_errors_in_those(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, optexp\ntorch.manual_seed(0)\nmodel, count = torch.nn.Linear(32, 32), 0\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x in optexp.steps([torch.randn(8, 32) for _ in range(64)], model=model, optimizer=optimizer):\n"
        "    optimizer.zero_grad()\n    y = model(x)\n    loss = y[:, :8].square().mean()\n"
        "    if count % 4 == 0:\n        second_loss = y.exp().sum()\n        second_loss.backward(retain_graph=True)\n"
        "    loss.backward()\n    optimizer.step()\n    count += 1\n"
    )
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*SETTINGS, "strategy=amp", *overrides([str(script)])])
    result = runner.run(config, tmp_path / "record")
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert "second_loss" in str(result.equivalence)
