"""A user's own file, as a job runs it: a verdict for whatever it does, and tracebacks that are the user's."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from torch import nn

import optexp
from optexp.comparison import mistakes, runner
from optexp.config import search_path
from optexp.errors import ConfigError
from optexp.result import Result, Verdict
from optexp.sweeps.start import without_hydra
from optexp.workloads.module import Module
from tests.reached import measured

OUTSIDE = Path(__file__).parents[1] / "outside"
INPUT = "\ndef get_inputs():\n    return [torch.randn(8, 4)]\n"


def run(folder: Path, *overrides: str) -> Result:
    """One job in processes of its own, on the CPU, as short as a job gets."""
    settings = ["workload=module", "device=cpu", "measurement=quick", "tracking.enabled=false"]
    quicker = ["measurement.warmup_s=0.3", "measurement.block_ms=10", "measurement.pairs=10", "measurement.process_s=2"]
    quicker += ["measurement.verification_seeds=1", "measurement.profile_steps=2"]
    quicker += ["profile.details=false"]
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*settings, *quicker, *overrides])
    return runner.run(config, folder)


def written(folder: Path, text: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"import os\nimport torch\nfrom torch import nn\n{text}")
    return f"workload.path={path}"


def model(forward: str, init: str = "self.linear = nn.Linear(4, 4)") -> str:
    return (
        f"class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n"
        f"    def forward(self, x):\n        {forward}\n" + INPUT
    )


# --- errors are the user's own -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "frames"),
    [
        ("import not_installed\nModel = 1" + INPUT, "No module named 'not_installed'", ["import not_installed"]),
        ("class Model(nn.Module)\n    pass", "SyntaxError", ["class Model(nn.Module)"]),
        (
            "def width(options):\n    return options['width']\n" + model("return x", "self.width = width({})"),
            "KeyError: 'width'",
            ["self.width = width({})", "return options['width']"],
        ),
        (
            model("return self.linear(x) + {}['bias']"),
            "KeyError: 'bias'",
            ["return self.linear(x) + {}['bias']"],
        ),
        (
            model("try: x.nope\n        except AttributeError as e: raise ValueError('mine') from e"),
            "ValueError: mine",
            ["try: x.nope", "except AttributeError as e: raise ValueError('mine') from e"],
        ),
    ],
    ids=["import", "syntax", "init", "forward", "chained"],
)
def test_errors_show_the_users_own_traceback_and_only_that(
    text: str, message: str, frames: list[str], tmp_path: Path
) -> None:
    result = run(tmp_path, written(tmp_path, text))
    assert result.verdict is Verdict.ERROR
    assert result.verdict.exit_status == 1
    assert message in result.headline
    assert result.headline.startswith("ERROR: baseline: ")  # no strategy is to blame
    assert result.error is not None
    told = result.error.traceback
    assert [line.strip() for line in told.splitlines() if re.match(r"    [^ ~^]", line)] == frames
    assert "mine.py" in told
    assert str(Path(optexp.__file__).parent) not in told
    assert "importlib" not in told


IMAGES = "workload.inputs=[{shape: [4, 1, 8, 8]}]"
CONV = "self.conv = nn.Conv2d(3, 2, 3)"


@pytest.mark.parametrize(
    ("text", "overrides", "place", "given"),
    [
        (model("return self.conv(x)", CONV), [IMAGES], "mine.py:9, in forward, `return self.conv(x)`: ", "8] float32"),
        (
            model("return self.table(x)", "self.table = nn.Embedding(9, 2)"),
            ["workload.inputs=[{shape: [4, 5], name: x}]", "workload.mode=train", "workload.optimizer=SGD"],
            "mine.py:9, in forward, `return self.table(x)`: Expected tensor",
            "x [4, 5] float32",
        ),
        ("Model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 2, 3))", [IMAGES], "batch: 1 (Conv2d): Given", "[4, 1, 8, 8]"),
        (model("return self.linear(x[:, :3])"), [], "`return self.linear(x[:, :3])`: mat1", "get_inputs()) is [8, 4]"),
        (
            model("return self.linear(x.double())", "self.linear = nn.Linear(4, 2).double()"),
            [],
            "`return self.linear(x.double())`: mat1",
            "parameters in float64 became float32 (dtype=): set dtype= to what the model needs",
        ),
    ],
    ids=["channels", "dtype", "no-line", "inputs-of-the-file", "precision"],
)
def test_a_batch_that_the_model_cannot_take_is_one_sentence(
    text: str, overrides: list[str], place: str, given: str, tmp_path: Path
) -> None:
    result = run(tmp_path, written(tmp_path, text), *overrides)
    assert result.verdict is Verdict.ERROR
    assert result.headline.startswith("ERROR: the model cannot take its batch: ")
    assert place in result.headline
    assert given in result.headline
    assert not (result.error and result.error.traceback)


# --- whatever a model is, there is a verdict ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        (model("return x + torch.rand_like(x)"), Verdict.UNVERIFIED, "random numbers"),
        (model("return 'text'"), Verdict.UNVERIFIED, "returns no tensor"),
        (
            model("if x.element_size() == 8: raise TypeError('float32, please')\n        return x * 2"),
            Verdict.UNVERIFIED,
            "does not run in float64: float32, please",
        ),
        (
            model("return x * self.w", "self.w = nn.Parameter(torch.tensor(float(os.getpid())))"),
            Verdict.UNVERIFIED,
            "not the same in every process (w differs)",
        ),
        (model("os._exit(7)"), Verdict.ERROR, "exit code 7"),
        (model("raise SystemExit(3)"), Verdict.ERROR, "sys.exit(3)"),
        ("Model = 3" + INPUT, Verdict.ERROR, "Model is an int"),
        (
            model("return x") + "\ntrain_step = lambda model, batch: None\n",
            Verdict.ERROR,
            "train_step takes (model, batch): it is called as train_step(model, batch, optimizer)",
        ),
    ],
    ids=["random", "text", "float32", "own-seed", "exit", "sys-exit", "number", "two-arguments"],
)
def test_what_cannot_be_compared_says_why(text: str, verdict: Verdict, words: str, tmp_path: Path) -> None:
    result = run(tmp_path, written(tmp_path, text))
    assert result.verdict is verdict
    assert words in result.headline
    assert result.speedup is None


@pytest.mark.slow
def test_nested_outputs_keyword_arguments_and_no_parameters(tmp_path: Path) -> None:
    text = (
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Out:\n    pair: tuple\n    named: dict\n"
        "def Model():\n    return lambda x, *, scale, flag: Out((x * scale, x.argmax()), {'a': [x + 1], 'b': flag})\n"
        "def get_inputs():\n    return {'x': torch.randn(8, 4), 'scale': torch.ones(4), 'flag': True}\n"
    )
    result = run(tmp_path, written(tmp_path, text), "measurement.min_effect=0.2")  # a busy machine disturbs by less
    assert result.verdict.measured, result.headline
    assert result.equivalence.ok
    assert result.baseline.throughput is not None


def test_a_wrong_strategy_is_caught_on_every_shape(tmp_path: Path) -> None:
    """Right on the first size, wrong on the second: verification must meet both."""
    text = "def Model(): return lambda x: x * 2\ndef get_inputs(rows=8): return torch.randn(rows, 4)"
    sizes = "workload.shapes=[{rows: 8}, {rows: 6}]"
    outside = f"hydra.searchpath=[file://{OUTSIDE / 'conf'}]"
    sys.path.append(str(OUTSIDE))
    try:
        result = run(tmp_path, written(tmp_path, text), sizes, outside, "strategy=wrong_sometimes")
    finally:
        sys.path.remove(str(OUTSIDE))
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


def test_a_loader_that_is_too_slow_is_found(tmp_path: Path) -> None:
    text = (
        "import time\nfrom torch.utils.data import DataLoader\n"
        "class Slow(torch.utils.data.Dataset):\n    def __len__(self): return 64\n"
        "    def __getitem__(self, index):\n        time.sleep(0.002)\n        return torch.randn(4), index % 4\n"
        "def Model(): return nn.Linear(4, 4)\ndef get_loader(): return DataLoader(Slow(), batch_size=8)\n"
    )
    result = run(tmp_path, written(tmp_path, text), "workload.mode=train", "mode=profile")
    assert result.verdict is Verdict.PROFILED, result.headline
    worst = result.profile.bottlenecks[0]
    assert worst.label == "data_loading"
    assert worst.share > 0.5
    assert "loss: cross_entropy, because none was given" in result.notes


# --- a real training script --------------------------------------------------------------------------------------

DIGITS = OUTSIDE / "digits"


@pytest.mark.slow
def test_a_training_script_is_ported_in_twenty_lines(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    port = DIGITS / "port.py"
    assert len([line for line in port.read_text().splitlines() if line.strip()]) <= 20
    result = run(tmp_path, f"workload.path={port}", "workload.mode=train", "strategy=amp")
    assert measured(result), result.headline
    assert result.equivalence.headline.startswith("gradients, parameter changes and optimizer state")
    assert result.evidence[0].engaged
    assert result.notes == []


@pytest.mark.slow
def test_the_script_that_was_ported_trains() -> None:
    pytest.importorskip("sklearn")
    code = "import script; script.main(epochs=2)"
    done = subprocess.run([sys.executable, "-c", code], cwd=DIGITS, capture_output=True, text=True, timeout=120)
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2, done.stderr
    assert losses[1] < losses[0] < 2.5


@pytest.mark.slow
def test_dropout_while_training_is_compared_twice(tmp_path: Path) -> None:
    init = "self.linear, self.rate = nn.Linear(4, 4), 0.5"
    text = model("return nn.functional.dropout(self.linear(x), self.rate, self.training)", init)
    result = run(tmp_path, written(tmp_path, text), "workload.mode=train", "strategy=amp")
    assert measured(result), result.headline
    assert result.equivalence.gates["RANDOMNESS"].passed
    assert "with every dropout at p = 0" in result.equivalence.headline


# --- loaders, losses and batches of many kinds --------------------------------------------------------------------

NET = model("return self.linear(x)").removesuffix(INPUT)
DATA = "from torch.utils.data import DataLoader, Dataset, IterableDataset\n"
AUGMENTED = (
    DATA
    + """
class Augmented(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.full((4,), float(i)) + 0.1 * torch.randn(4), i % 4

def get_loader():
    return DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=2)
"""
)
STREAM = (
    DATA
    + """
class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.full((4,), float(i)), i % 4) for i in range(64))

def get_loader():
    return DataLoader(Stream(), batch_size=8)
"""
)
NAMED = """
from collections import namedtuple
Batch = namedtuple("Batch", "x y")

def get_inputs():
    return Batch(torch.randn(8, 4), torch.randint(4, (8,)))

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_data_set_that_draws_in_workers_gives_the_same_batches_again(tmp_path: Path) -> None:
    result = run(tmp_path, written(tmp_path, NET + AUGMENTED), "workload.mode=train")
    assert measured(result), result.headline


def test_batches_that_no_seed_changes_are_one_set(tmp_path: Path) -> None:
    twice = ["measurement.verification_seeds=2", "verify=only"]
    result = run(tmp_path, written(tmp_path, NET + STREAM), "workload.mode=train", *twice)
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert len(result.equivalence.seeds) == 1
    assert any("the same batches whatever the seed" in note for note in result.equivalence.notes)


def test_inputs_that_never_change_are_named(tmp_path: Path) -> None:
    fixed = "\ndef get_inputs():\n    return [torch.ones(8, 4)]\n"
    result = run(tmp_path, written(tmp_path, NET + fixed), "verify=only", "measurement.verification_seeds=2")
    assert result.verdict is Verdict.UNVERIFIED
    assert "inputs hold the same values whatever the seed" in result.headline


LISTED = """
def get_loader():
    return DataLoader([(torch.randn(4), index % 4) for index in range(64)], batch_size=8)

def train_step(model, batch, optimizer):
    x, y = batch + []
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [NAMED, DATA + LISTED], ids=["named", "listed"])
def test_batches_keep_their_type(text: str, tmp_path: Path) -> None:
    result = run(tmp_path, written(tmp_path, NET + text), "workload.mode=train", "verify=only")
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["workload.optimizer=LBFGS"], "optimizer=LBFGS is not a choice"),
        (["workload.optimizer=Muon"], "optimizer=Muon: Muon only supports 2D parameters"),
        (["workload.loss=cross_entropy"], "output of shape [8, 4] with labels of shape [8]: Target"),
        (["workload.loss=mse_loss"], "with labels of shape [8]: The size"),
    ],
)
def test_mistakes_in_how_it_learns_are_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    labelled = "\ndef get_inputs():\n    return [torch.randn(8, 4), 9 + torch.randint(9, (8,))]\n"
    result = run(tmp_path, written(tmp_path, NET + labelled), "workload.mode=train", *overrides)
    assert result.verdict is Verdict.ERROR
    assert sentence in result.headline
    assert not (result.error and result.error.traceback)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["workload.optimizer=SGD", "+workload.optimizer_args.momentumm=1"],
            "workload: optimizer_args: SGD takes no momentumm (did you mean momentum?",
        ),
        (
            ["workload.loss=cross_entropy", "+workload.loss_args.smoothing=1"],
            "workload: loss_args: cross_entropy takes no smoothing (did you mean label_smoothing?",
        ),
        (["+workload.kwargs.widht=8"], "workload.kwargs: Model takes no widht (did you mean width? allowed: width)"),
        (["workload.names.inputs=inputs", "+workload.kwargs.width=4"],
         "has neither inputs() nor get_loader(): define one, or"),
        (["workload.names.loss=forwad"], "has no forwad"),
        (["mode=auto", "auto.without=[fusoin]"], "auto.without: fusoin is no strategy (did you mean fusion?"),
    ],
)  # fmt: skip
def test_names_that_do_not_exist_are_refused_before_a_job(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    path = written(tmp_path, model("return self.linear(x)").replace("__init__(self)", "__init__(self, width=4)"))
    config = search_path.compose(["workload=module", path, "device=cpu", *overrides])
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        mistakes.refuse(without_hydra(config))


def test_a_function_of_any_number_of_tensors_is_no_factory(tmp_path: Path) -> None:
    code = "def total(*tensors):\n    return sum(tensors)\n\ndef get_inputs():\n    return [torch.randn(8, 4)] * 2\n"
    result = run(tmp_path, written(tmp_path, code), "workload.names.model=total", "verify=only")
    assert "IndexError" not in result.headline
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_a_program_that_no_arm_can_restore_is_not_blamed_on_a_strategy(tmp_path: Path) -> None:
    code = model("return self.linear(x) + os.urandom(1)[0] / 256")
    result = run(tmp_path, written(tmp_path, code), "strategy=amp")
    assert result.verdict is Verdict.UNVERIFIED, result.headline


def test_random_numbers_of_numpy_and_python_are_put_back(tmp_path: Path) -> None:
    code = "import random\nimport numpy\n" + model("return self.linear(x) + numpy.random.rand() + random.random()")
    result = run(tmp_path, written(tmp_path, code), "strategy=amp", "verify=only")
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.slow
def test_what_a_training_step_remembers_is_no_difference(tmp_path: Path) -> None:
    """A schedule, a loss scale, a counter and times, as scripts keep them: in globals. Times are never the same."""
    text = """
import time
times = []
Model = lambda: nn.Linear(4, 4)
scaler, count = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), 0

def get_inputs():
    return [torch.randn(8, 4), torch.randint(4, (8,))]

def get_optimizer(params):
    global schedule
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    return optimizer

def train_step(model, batch, optimizer):
    global count
    start, count = time.perf_counter(), count + 1
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1 / count)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    times.append(time.perf_counter() - start)
    return loss
"""
    result = run(tmp_path, written(tmp_path, text), "workload.mode=train", "strategy=compiled_optimizer", "verify=only")
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_a_function_may_make_the_model(tmp_path: Path) -> None:
    text = "class Net(nn.Linear):\n    pass\n\ndef get_model():\n    return Net(4, 4)\n" + INPUT
    result = run(tmp_path, written(tmp_path, text), "verify=only")
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_a_second_file_may_make_what_the_first_one_has_as_a_class(tmp_path: Path) -> None:
    class_ = written(tmp_path, "class Model(nn.Tanh): pass\n" + INPUT).removeprefix("workload.path=")
    (tmp_path / "made.py").write_text(f"from torch import nn\ndef get_model(): return nn.Tanh()\n{INPUT}")
    for first, second in ((class_, str(tmp_path / "made.py")), (str(tmp_path / "made.py"), class_)):
        rebuilt = replace(Module(path=first).resolve("cpu"), path=second)
        assert isinstance(rebuilt.load().model(), nn.Tanh)


def test_a_factory_may_be_imported(tmp_path: Path) -> None:
    (tmp_path / "factories.py").write_text("from torch import nn\ndef get_model(): return nn.Tanh()\n")
    text = "from factories import get_model\n\ndef train_step(model, batch, optimizer): ...\n" + INPUT
    path = written(tmp_path, text).removeprefix("workload.path=")
    assert Module(path=path).resolve("cpu").names.model == "get_model"


@pytest.mark.parametrize("line", ["list(model.modules())", "setattr(model, 'bias', None)"])
def test_it_may_replace_parts_of_the_model(tmp_path: Path, line: str) -> None:
    text = f"def get_model():\n    model = nn.Linear(4, 4)\n    {line}\n    return model\n" + INPUT
    path = written(tmp_path, text).removeprefix("workload.path=")
    assert Module(path=path).resolve("cpu").names.model == "get_model"


DROPS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.drop, self.out = nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.dropped(torch.relu(self.hidden(x))))

    def dropped(self, x):
        return self.drop(x)

def get_inputs():
    return [torch.randn(8, 16)]
"""


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        ("return x * (torch.rand_like(x) >= 0.2) / 0.8", Verdict.UNVERIFIED),
        ("return x * (torch.rand_like(x) >= 0.2).any() * 0.5", Verdict.NOT_EQUIVALENT),
    ],
    ids=["by hand", "draws and is wrong"],
)
def test_a_dropout_by_hand_is_not_called_wrong(second: str, verdict: Verdict, tmp_path: Path) -> None:
    paths = [tmp_path / "first.py", tmp_path / "second.py"]
    for path, how in zip(paths, ("return self.drop(x)", second), strict=True):
        path.write_text(DROPS.replace("return self.drop(x)", how))
    files = [f"workload.path={paths[0]}", "strategy=replace", f"strategy.replace.target={paths[1]}"]
    result = run(tmp_path, *files, "workload.mode=forward_backward", "verify=only")
    assert result.verdict is verdict, result.headline
    assert ("by hand" in result.headline) == (verdict is Verdict.UNVERIFIED)
