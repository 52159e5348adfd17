"""A configuration becomes typed objects, or one sentence that says what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from optexp.config import Experiment, search_path
from optexp.errors import ConfigError
from optexp.schema import _dataclass, build, choice, suggest, typed
from optexp.user_code.described_input import Input

Of = Callable[..., Experiment]
GROUPS = ("workload", "strategy", "measurement")
NODES = sorted(path for group in GROUPS for path in (search_path.CONF / group).glob("*.yaml"))
STUDIES = sorted((search_path.CONF.parent / "experiments").glob("*.yaml"))


@dataclass
class Example:
    kind: str = choice("plain", "fancy")
    count: int = 3
    limit: int | None = None
    flag: bool = False
    sizes: list[int] = field(default_factory=lambda: [1])

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count={self.count} must not be negative")


def example(**values: object) -> Example:
    made = build(OmegaConf.create({"_target_": f"{__name__}.Example", **values}), "workload")
    assert type(made).__name__ == "Example"
    return made


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--import-mode=importlib` may leave this module out of `sys.modules`, where `_target_` looks for it."""
    import sys
    import types

    module = types.ModuleType(__name__)
    module.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, __name__, module)


def test_a_node_becomes_its_dataclass() -> None:
    made = example(kind="fancy", count=5, limit=7, flag=True, sizes=[2, 3])
    assert (made.kind, made.count, made.limit, made.flag, made.sizes) == ("fancy", 5, 7, True, [2, 3])
    assert example(limit=None).limit is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"cuont": 1},
            "workload.cuont=1: there is no such key (did you mean count? allowed: kind, count, limit, flag, sizes)",
        ),
        ({"count": "many"}, "workload.count=many is not allowed: it must be an integer"),
        ({"count": 1.5}, "workload.count=1.5 is not allowed: it must be an integer"),
        ({"count": None}, "workload.count=null is not allowed: it must be an integer"),
        ({"limit": "x"}, "workload.limit=x is not allowed: it must be an integer or null"),
        ({"flag": "perhaps"}, "workload.flag=perhaps is not allowed: it must be true or false"),
        ({"kind": "fncy"}, "workload.kind=fncy is not allowed (did you mean fancy? allowed: plain, fancy)"),
        ({"sizes": ["x"]}, "workload.sizes=['x'] is not allowed: it must be a list of an integer"),
        ({"count": -1}, "workload.count=-1 must not be negative"),
    ],
)
def test_a_mistake_names_key_value_and_what_is_allowed(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        example(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, "has no _target_"),
        ("Class", "names no module"),
        ("no_such_package.module.Class", "there is no module 'no_such_package'"),
        ("optexp.workloads.mlp.Mpl", "module 'optexp.workloads.mlp' has no 'Mpl'"),
        ("optexp.result.Verdict", "is not a dataclass"),
    ],
)
def test_a_target_that_cannot_be_built(target: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(OmegaConf.create({"_target_": target} if target else {}), "workload")


def test_an_import_error_inside_a_users_module_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_module.py").write_text("import something_they_forgot\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_they_forgot"):
        build(OmegaConf.create({"_target_": "their_module.Thing"}), "workload")


@pytest.mark.parametrize("path", NODES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_yaml_lists_every_field(path: Path) -> None:
    node = OmegaConf.to_container(OmegaConf.load(path))
    if not node:
        assert path.stem == "baseline"
        return
    assert isinstance(node, dict)
    target = node.pop("_target_")
    assert list(node) == [f.name for f in fields(_dataclass(target, path.stem))]
    build({"_target_": target, **node}, path.stem)


@pytest.mark.parametrize("path", sorted((search_path.CONF / "strategy").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_strategy_yaml_is_placed_under_its_own_name(path: Path) -> None:
    assert path.read_text().startswith(f"# @package strategy.{path.stem}\n")


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_composes(path: Path) -> None:
    config = search_path.compose([f"experiments={path.stem}"])
    swept = config.hydra.sweeper.params or {}
    # The command line adds dotted keys (`++`), and replaces a study's own sweep only where the keys are equal.
    assert all("." not in key or key.startswith("++") for key in swept)


# --- whole jobs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overrides", "details"), [((), True), (("verify=only",), False)])
def test_what_is_only_verified_is_profiled_briefly(experiment: Of, overrides: tuple[str, ...], details: bool) -> None:
    assert experiment(*overrides).profile.details is details
    assert experiment(*overrides, "profile.details=true").profile.details is True


def test_a_job_is_resolved(experiment: Of) -> None:
    job = experiment("workload=mlp", "workload.layers=2", "strategy=cuda_graph+amp", "measurement=quick", "seed=3")
    assert job.workload.name == "mlp"
    assert [s.name for s in job.strategies] == ["amp", "cuda_graph"]
    assert (job.measurement.preset, job.seed, job.horizon_steps) == ("quick", 3, None)
    assert (job.isolation, job.mode) == ("process", "compare")
    assert job.tracking.experiment == "optexp"
    assert job.baseline == []
    assert job.notes == []


def test_the_record_is_flat_and_says_everything(experiment: Of) -> None:
    resolved = experiment("workload=mlp", "strategy=[amp]", "strategy.amp.dtype=float16", "baseline=[fusion]").resolved
    expected = {
        "workload": "mlp", "workload.layers": 4, "strategy": "amp[dtype=float16]", "strategy.amp.dtype": "float16",
        "baseline": "fusion", "baseline.fusion.mode": "default", "measurement": "default", "device": "auto", "seed": 0,
    }  # fmt: skip
    assert expected.items() <= resolved.items()
    assert not [key for key in resolved if key.startswith("tracking")]


@pytest.mark.parametrize("empty", ["strategy=baseline", "strategy=[]", "strategy=[baseline]", "workload=mlp"])
def test_the_empty_stack(experiment: Of, empty: str) -> None:
    assert experiment(empty).strategies == []


@pytest.mark.parametrize(
    ("baseline", "names"),
    [
        ("[amp,fusion]", ["amp", "fusion"]),
        ("amp+fusion", ["amp", "fusion"]),
        ("amp", ["amp"]),
        ("baseline", []),
        ("[]", []),
        ("null", []),
    ],
)
def test_a_stack_to_compare_against(experiment: Of, baseline: str, names: list[str]) -> None:
    assert [s.name for s in experiment(f"baseline={baseline}").baseline] == names


def test_options_of_the_stack_to_compare_against_are_its_own(experiment: Of) -> None:
    job = experiment("baseline=[{fusion:{fullgraph:true}},amp]", "strategy=fusion", "strategy.fusion.mode=max-autotune")
    assert [s.label for s in job.baseline] == ["amp", "fusion[fullgraph=True]"]
    assert [s.label for s in job.strategies] == ["fusion[mode=max-autotune]"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("workload.layrs=3", ["workload.layrs=3", "did you mean layers", "batch_size"]),
        ("workload.layers=many", ["workload.layers=many", "an integer"]),
        ("workload.mode=forwrd", ["workload.mode=forwrd", "did you mean forward", "train"]),
        ("measurement.pairs=few", ["measurement.pairs=few", "an integer"]),
        ("tracking.urii=x", ["tracking.urii=x", "did you mean uri"]),
        ("device=gpu", ["device=gpu", "allowed: auto, cuda, cpu"]),
        ("seed=1.5", ["seed=1.5", "an integer"]),
        ("baseline=[nope]", ["baseline=nope", "amp", "fusion"]),
        ("baseline=[{amp:{dtyp:x}}]", ["baseline.amp.dtyp=x", "did you mean dtype"]),
        ("baseline=[3]", ["baseline=3 is not a stack"]),
        ("strategy.fuson.mode=default", ["strategy=fuson", "did you mean fusion"]),
        ("strategy.fusion.mod=default", ["strategy.fusion.mod=default", "did you mean mode"]),
        ("strategy.fusion.mode=default", ["fusion is not in the stack", "strategy=[fusion]"]),
        ("strategy.baseline.x=1", ["strategy.baseline.x=1", "has no options"]),
        ("seed=${nope}", ["nope", "seed"]),
    ],
)
def test_a_job_that_does_not_exist(experiment: Of, argument: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment("workload=mlp", argument)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.usefixtures("in_sweep")
def test_in_a_sweep_an_option_applies_where_its_strategy_is(experiment: Of) -> None:
    option = "strategy.fusion.mode=reduce-overhead"
    with_it, without = experiment("strategy=[fusion]", option), experiment("strategy=[inplace]", option)
    assert [s.label for s in with_it.strategies] == ["fusion[mode=reduce-overhead]"]
    assert with_it.notes == []
    assert [s.name for s in without.strategies] == ["inplace"]
    assert without.notes == [f"{option} does not apply, because fusion is not in the stack: ignored"]


@pytest.mark.usefixtures("in_sweep")
def test_in_a_sweep_a_misspelt_option_is_still_a_mistake(experiment: Of) -> None:
    with pytest.raises(ConfigError, match="did you mean mode"):
        experiment("strategy=[inplace]", "strategy.fusion.mod=default")


def test_a_strategy_from_the_working_folder(experiment: Of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mine.yaml").write_text(
        "# @package strategy.mine\n_target_: optexp.strategies.amp.Amp\ndtype: float16\n"
    )
    monkeypatch.chdir(tmp_path)
    job = experiment("strategy=mine", "baseline=[mine]")
    assert [s.label for s in job.strategies + job.baseline] == ["mine[dtype=float16]"] * 2


def test_a_strategy_from_an_installed_package(experiment: Of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "their_package" / "configs"
    (folder / "strategy").mkdir(parents=True)
    (folder / "strategy" / "theirs.yaml").write_text(
        "# @package strategy.theirs\n_target_: optexp.strategies.amp.Amp\ndtype: float16\n"
    )
    entry = EntryPoint(name="theirs", value="their_package.configs", group="optexp.configs")
    monkeypatch.setattr(search_path, "entry_points", lambda group: [entry] if group == entry.group else [])
    monkeypatch.syspath_prepend(tmp_path)
    assert [s.label for s in experiment("strategy=theirs").strategies] == ["theirs[dtype=float16]"]


def test_studies_from_the_working_folder_and_nothing_else_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("experiments/mine.yaml", "results/old.yaml"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("# @package _global_\nseed: 7\n")
    monkeypatch.chdir(tmp_path)
    assert {"mine", "mlp_stacks"} <= set(search_path.options("experiments"))
    assert search_path.compose(["experiments=mine"]).seed == 7
    with search_path._loader() as loader:  # Hydra walks through all of these for --help
        assert set(loader.list_groups("")) == {"hydra", "experiments", "measurement", "strategy", "workload"}


def test_a_long_list_of_names_is_not_a_message():
    names = [f"Layer{number}" for number in range(200)]
    assert suggest("Layr7", names) == " (did you mean Layer7? there are 200)"
    assert suggest("x", names) == " (there are 200)"


def test_a_shape_that_is_no_list_is_told_how_one_is_written() -> None:
    with pytest.raises(ConfigError, match=r"shape=32x128 is not allowed: it must be a list of numbers, as \[32, 128\]"):
        typed(Input, {"shape": "32x128"}, "workload.inputs[0]")
