"""`optexp.compare`: the command's comparison from a script, a notebook, or another program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from torch import Tensor, nn

import optexp
from optexp import api
from optexp.errors import ConfigError
from optexp.result import Result, Verdict
from optexp.user_code.given_objects import Shuffled, shuffled
from tests.reached import measured

CHECKOUT = Path(__file__).parent.parent
QUICK = ["measurement.warmup_s=0.1", "measurement.block_ms=10", "measurement.pairs=10", "measurement.process_s=0.5"]
QUICK += ["measurement.verification_seeds=1", "measurement.profile_steps=2", "tracking.enabled=false"]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.body(x) * scale}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compare(*args: Any, overrides: tuple[str, ...] = (), **kwargs: Any) -> Result:
    """In this process, on the CPU, as short as a comparison gets."""
    return optexp.compare(
        *args, **kwargs, device="cpu", measurement="quick", overrides=[*QUICK, "isolation=none", *overrides]
    )


# --- models and inputs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        pytest.param(Net(), torch.randn(8, 4), marks=pytest.mark.slow),
        (Net, (torch.randn(8, 4), torch.ones(3))),
        (lambda: Net(5), {"x": torch.randn(8, 4), "scale": 2.0}),
        pytest.param(Net, lambda: torch.randn(8, 4), marks=pytest.mark.slow),
        (nn.functional.gelu, torch.randn(8, 4)),
    ],
    ids=["instance", "class", "factory", "inputs by function", "function"],
)
def test_a_model_however_it_is_given(model: Any, inputs: Any) -> None:
    result = compare(model, inputs)
    assert measured(result), result.headline
    assert result.equivalence.bitwise
    assert list(Path("outputs").rglob("result.json"))


def test_fresh_inputs_have_the_values_of_the_examples() -> None:
    example = {"x": torch.arange(12.0).view(3, 4), "flag": True}
    fresh = Shuffled(example)({}, torch.device("cpu"))
    assert fresh["flag"] is True
    assert fresh["x"].shape == (3, 4)
    assert not torch.equal(fresh["x"], example["x"])
    assert torch.equal(fresh["x"].flatten().sort().values, example["x"].flatten())  # type: ignore[attr-defined]


def test_what_means_its_order_keeps_it() -> None:
    lengths, matrices = torch.tensor([6, 5, 3, 2]), torch.randn(4, 8, 8)
    matrices = matrices @ matrices.mT + torch.eye(8)
    assert torch.equal(shuffled(lengths), lengths)
    assert torch.equal(shuffled(matrices[0]), matrices[0])
    places = {next(i for i, matrix in enumerate(matrices) if torch.equal(matrix, made)) for made in shuffled(matrices)}
    assert places == {0, 1, 2, 3}
    labels = torch.tensor([3, 1, 2, 0, 5, 4, 9, 8])
    assert not all(torch.equal(shuffled(labels), labels) for _ in range(5))


def test_trains_with_functions_of_the_caller() -> None:
    result = compare(
        Net,
        (torch.randn(8, 4), torch.randint(3, (8,))),
        "amp",
        mode="train",
        labels=1,
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs["logits"], batch[1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    assert measured(result), result.headline
    assert result.strategy == ["amp"]
    assert "parameter changes" in result.equivalence.headline
    assert result.notes == ["inputs: the values given, in another order for every batch (a function can make others)"]


def test_the_precision_is_the_models_own() -> None:
    assert compare(Net().bfloat16(), torch.randn(8, 4), verify="only").config["dtype"] == "bfloat16"


@pytest.mark.slow
def test_shapes_are_arguments_of_the_function() -> None:
    result = compare(Net, lambda rows: torch.randn(rows, 4), shapes=[{"rows": 2}, {"rows": 6}])
    assert measured(result), result.headline
    with pytest.raises(ConfigError, match="a function that makes inputs"):
        compare(Net, torch.randn(2, 4), shapes=[{"rows": 2}])


def test_what_cannot_travel_is_named_and_its_factory_can() -> None:
    def normalized() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))  # torch refuses to pickle these

    with pytest.raises(ConfigError, match=r"model cannot be copied .*parametrized.* a function that makes it"):
        compare(normalized(), torch.randn(8, 4))
    assert compare(normalized, torch.randn(8, 4), verify="only").verdict is Verdict.VERIFIED
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"inputs cannot be copied .*lock"):
        compare(Net, lambda: (lock, torch.randn(8, 4)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"verfy": "only"}, r"verfy='only': .*did you mean verify\?"),
        ({"strategi": "amp"}, r"did you mean strategy\?"),
        ({"verify": "onyl"}, r"verify=onyl is not allowed \(did you mean only\?"),
        ({"mode": "trian"}, r"mode=trian .*did you mean train\?"),
        ({"dtype": "flaot32"}, r"did you mean float32\?"),
        ({"tracking": {"enabeld": False}}, r"tracking.enabeld=false: .*did you mean enabled\?"),
    ],
)
def test_a_misspelt_keyword_is_answered_as_on_the_command_line(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optexp.compare(Net, torch.randn(8, 4), **keys)
    assert not Path("outputs").exists()


def test_a_top_level_key_is_a_keyword() -> None:
    found = compare(Net, torch.randn(8, 4), verify="only", seed=3)
    assert (found.verdict, found.seed) == (Verdict.VERIFIED, 3)


def test_an_error_of_the_model_is_in_the_result_and_wrong_inputs_are_a_mistake() -> None:
    class Unfinished(Net):
        def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> dict[str, Tensor]:
            return {"logits": self.head(x)}

    result = compare(Unfinished, torch.randn(8, 4))
    assert result.verdict is Verdict.ERROR
    assert result.error is not None
    assert "self.head(x)" in result.error.traceback
    assert "self.head(x)" in result._repr_html_()
    with pytest.raises(ConfigError, match=r"self\.body\(x\).*shapes cannot be multiplied.*\[8, 5\] float32"):
        compare(Net, torch.randn(8, 5))


# --- stacks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "members"),
    [
        ((), {}),
        ("", {}),
        ("amp", {"amp": {}}),
        ("amp+cuda_graph", {"amp": {}, "cuda_graph": {}}),
        (["amp", "cuda_graph"], {"amp": {}, "cuda_graph": {}}),
        (["fusion[mode=max-autotune,fullgraph=true]"], {"fusion": {"mode": "max-autotune", "fullgraph": True}}),
        ("amp[dtype=float16]+fusion", {"amp": {"dtype": "float16"}, "fusion": {}}),
        ({"fusion": {"dynamic": None}}, {"fusion": {"dynamic": None}}),
        (["amp", {"cuda_graph": {"warmup": 5}}], {"amp": {}, "cuda_graph": {"warmup": 5}}),
    ],
)
def test_stacks_as_labels_print_them_or_as_data(written: Any, members: Any) -> None:
    assert api.members(written) == members


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("apm", "did you mean amp"),
        ("amp fusion", "'amp\\+fusion'"),
        ([3], "name strategies"),
        ("amp[type=bfloat16]", "there is no such key .*dtype"),
        ({"amp": {"dtype": "int8"}}, "allowed: bfloat16, float16"),
    ],
)
def test_a_mistake_is_one_sentence(strategy: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=words):
        compare(Net, torch.randn(8, 4), strategy)
    assert capsys.readouterr().out == ""


def test_options_and_a_baseline_reach_the_record() -> None:
    result = compare(Net, torch.randn(8, 4), "amp[dtype=float16]", baseline="amp", quiet=True, verify="only")
    assert result.strategy == ["amp[dtype=float16]"]
    assert result.config["baseline"] == "amp"


# --- where it is called from -------------------------------------------------------------------------------------


def test_the_callers_own_hydra_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("answer: 42\n")
    with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path / "mine")):
        assert compare(Net, torch.randn(8, 4), verify="only").verdict is Verdict.VERIFIED
        assert hydra_compose("config").answer == 42
    assert not GlobalHydra.instance().is_initialized()


SCRIPT = """
import torch
from torch import nn
import optexp

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return helper(self.linear(x))

def helper(x):
    return torch.relu(x) + 1

result = optexp.compare(Mine(), torch.randn(8, 4), ["inplace"], device="cpu", measurement="quick", overrides={quick})
print("VERDICT", result.verdict, result.workload)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "stdin"])
def test_an_unguarded_script_and_classes_that_no_file_holds(how: str, tmp_path: Path) -> None:
    """Without a file it is as in a notebook: the class exists in this process alone."""
    code = SCRIPT.format(quick=[*QUICK[:-1], "verify=only"])
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py" if how == "file" else "-"],
        input=code if how == "stdin" else None,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("VERDICT")]
    assert len(verdicts) == 1, done.stdout + done.stderr  # the script ran once
    assert verdicts[0].split()[1] == "VERIFIED"
    assert verdicts[0].endswith("Mine")
    assert Path("mlflow.db").exists()  # the same record


def test_importing_optexp_is_light() -> None:
    code = "import optexp, sys; assert 'torch' not in sys.modules; optexp.compare; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CHECKOUT)
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        _ = optexp.compere  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "results").glob("*.json")), ids=lambda p: p.stem)
def test_a_notebook_shows_every_kind_of_result(path: Path) -> None:
    result = Result.read(path)
    shown = result._repr_html_()
    assert result.verdict in shown
    assert (">candidate</th>" in shown) == result.verdict.measured
    assert "<script" not in shown
    assert len(repr(result)) < 400
