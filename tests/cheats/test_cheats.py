"""Every cheat of the catalogue is caught, and honest strategies are not, by the same comparison that users run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from optexp.comparison import runner
from optexp.config import search_path
from optexp.equivalence import scatter
from optexp.result import Result, Verdict
from tests.reached import measured

CATALOGUE = "tests.cheats.catalogue"
QUICKLY = ["tracking.enabled=false", "measurement.pairs=10"]
QUICKLY += [
    "measurement.warmup_s=0.2",
    "measurement.block_ms=10",
    "measurement.process_s=0.5",
    "measurement.profile_steps=2",
    "profile.details=false",
]
QUICK = ["measurement=quick", *QUICKLY]
PRESETS = [
    pytest.param(QUICK, id="quick"),
    pytest.param(["measurement=default", "measurement.controls=false", *QUICKLY], id="default", marks=pytest.mark.slow),
]
IN_ONE_PROCESS = [*QUICK, "device=cpu", "isolation=none"]

GELU = ["workload=gelu", "workload.size=64"]
MLP = ["workload=mlp", "workload.dim=32", "workload.layers=2", "workload.batch_size=16"]
INFER = [*MLP, "workload.mode=forward"]
LEARN = [*MLP, "workload.mode=train"]
NORM = ["workload=layernorm_linear", "workload.rows=64", "workload.features=32", "workload.out=32"]
DROP = ["workload=elementwise", "workload.variant=relu_bias_dropout", "workload.rows=64", "workload.columns=64"]
TEXT = [
    "workload=causal_lm",
    "workload.sequence=16",
    "workload.hidden=32",
    "workload.heads=2",
    "workload.layers=1",
    "workload.vocabulary=64",
]
TEXT += ["workload.mode=forward_backward"]
BERT = ["workload=bert", "workload.sequence=8", "workload.hidden=32", "workload.heads=2", "workload.layers=1"]
BERT += ["workload.vocabulary=64"]
MATMUL = ["workload=matmul", "workload.size=256"]
VISION = ["workload=lenet5", "workload.batch_size=4"]
SHAPES = ["workload=module", "workload.target=torch.nn:GELU", "workload.inputs=[{shape: [B, 64]}]"]
SHAPES += ["workload.shapes=[{B: 24}, {B: 32}, {B: 40}, {B: 48}]"]
LOADER = ["workload=module", f"workload.path={Path(__file__).with_name('loader.py')}"]
VALIDATION = ["workload=module", f"workload.path={Path(__file__).with_name('validation.py')}"]
WARMED_UP = ["workload=module", f"workload.path={Path(__file__).with_name('warmed_up.py')}", "workload.mode=train"]
SCHEDULED = ["workload=module", f"workload.path={Path(__file__).with_name('scheduled.py')}", "workload.mode=train"]
DETERMINISTIC = ["workload=module", f"workload.path={Path(__file__).with_name('deterministic.py')}"]
FAMILIES = ["measurement.thorough=true"]
HALF = "strategy.amp.dtype=float16"


def own(model: str, shape: str = "[16, 64]", instead: str = "") -> list[str]:
    """A model of tests/cheats/models.py, and another to be put in its place."""
    target = f"workload.target=tests.cheats.models:{model}"
    replaced = [f"strategy.replace.target=tests.cheats.models:{instead}"] if instead else []
    return ["workload=module", target, f"workload.inputs=[{{shape: {shape}}}]", *replaced]


WIDE_DROPPING = [*own("Dropping", "[128, 64]"), "workload.mode=forward_backward"]
ROWS = ["workload=module", "workload.target=tests.cheats.models:Shift", "workload.inputs=[{shape: [262144, 8]}]"]
ROWS += ["workload.mode=forward_backward"]
WIDE_BLOCK = ["workload=mlp", "workload.dim=32", "workload.layers=6", "workload.batch_size=4", "workload.mode=forward"]
STREAM = own("Stream", "[4, 8, 8]")
WRONG, UNTRUSTED, NOTHING = Verdict.NOT_EQUIVALENT, Verdict.INVALID, Verdict.NOT_ENGAGED
# What each is tried on, what it must end in, and what the sentence must say.
CHEATS: dict[str, tuple[list[str], Verdict, str]] = {
    "ReturnsEmptyMemory": (GELU, WRONG, "output"),
    "ReturnsAResultThatWasFreed": (GELU, WRONG, "output"),
    "ZeroesItsInputs": (GELU, WRONG, "changes the caller's batch"),
    "AKernelThatNeverLaunches": (GELU, WRONG, "output"),
    "ReturnsItsInput": (GELU, WRONG, "caller's batch"),
    "OverwritesItsOutput": (GELU, WRONG, "writes over it"),
    "TakesBuffersInTurn": (GELU, WRONG, "writes over it"),
    "ReturnsALazyTensor": (GELU, WRONG, "plain torch.Tensor"),
    "ComputesWhenDetached": (GELU, WRONG, "plain torch.Tensor"),
    "ComputesWhenCompared": (GELU, WRONG, "plain torch.Tensor"),
    "GradientsWhenRead": ([*MLP, "workload.mode=forward_backward"], WRONG, "plain torch.Tensor"),
    "FinishesInAThread": (GELU, WRONG, "output"),
    "WritesToTheWeights": (INFER, WRONG, "leaves it alone"),
    "IgnoresStrides": ([*GELU, *FAMILIES], WRONG, "noncontiguous"),
    "RemembersByAddress": (GELU, WRONG, "output"),
    "RemembersByIdentity": (["workload=matmul", "workload.size=256"], UNTRUSTED, "has not seen"),
    "RemembersByContent": (["workload=matmul", "workload.size=256"], UNTRUSTED, "has not seen"),
    "RemembersByFirstElements": ([*MATMUL, "verify=only"], WRONG, "output"),
    "AConstant": (GELU, WRONG, "output"),
    "RightForAWhile": (GELU, WRONG, "after timing"),
    "WrongNowAndThen": ([*INFER, "verify=only"], WRONG, ""),
    "WrongEveryTwentiethCall": ([*GELU, "verify=only"], WRONG, "output"),
    "ForgetsTheChunkBefore": (STREAM, WRONG, "output"),
    "ForgetsTheChunkBeforeInTheEnd": (STREAM, WRONG, "after timing"),
    "FittedToASeed": (GELU, WRONG, "output"),
    "TheBatchBefore": (INFER, WRONG, "output"),
    "FeedsZeros": (GELU, UNTRUSTED, "does not give the batches"),
    "HiddenAutocast": (INFER, WRONG, "output"),
    "HalfPrecisionInside": (INFER, WRONG, "output"),
    "Tf32Inside": (MLP, WRONG, "grad"),
    "WithoutBias": (INFER, WRONG, "output"),
    "ForgetsWhatIsZeroAtFirst": (BERT, WRONG, "output"),
    "LeavesTheBranchOut": (own("Gated"), WRONG, "output"),
    "LeavesTheBranchOutOnceItIsShut": (
        [*own("Gated"), "workload.mode=forward_backward"],
        WRONG,
        "after timing: with other values of the parameters",
    ),
    "WithoutEps": (NORM, WRONG, "output"),
    "WithoutMask": ([*TEXT, "workload.mode=forward"], WRONG, "logits"),
    "WithoutTail": ([*GELU, "workload.size=63"], WRONG, "output"),
    "AlmostRight": (GELU, WRONG, "G1"),
    "OneWrongElement": (GELU, WRONG, "element"),
    "HidesNotANumber": ([*GELU, *FAMILIES], WRONG, "NaN and Inf differ"),
    "OnlyPositiveVariance": ([*NORM, *FAMILIES], WRONG, "inputs"),
    "FrozenRandomNumbers": (DROP, WRONG, "frozen"),
    "DropsLess": (DROP, WRONG, "dropout has the rate 0.05"),
    "OneMaskForAllRows": (DROP, WRONG, "scatters"),
    "OneMaskForTwoElements": (WIDE_DROPPING, WRONG, "scatter together"),
    "DrawsMasksAgain": ([*own("Dropping"), "workload.mode=forward_backward"], WRONG, "another mask in backward"),
    "DrawsMasksAgain in training": ([*own("Dropping"), "workload.mode=train"], WRONG, "another mask in backward"),
    "ForgetsWhatItDrew": ([*own("Dropping"), "workload.mode=forward_backward"], WRONG, "another mask in backward"),
    "NoUpdate": (LEARN, WRONG, "weight"),
    "SkipsSteps": (LEARN, WRONG, "weight"),
    "FreezesPython": (SCHEDULED, WRONG, "a captured graph repeats no Python"),
    "KeepsTheRate": (SCHEDULED, WRONG, "optimizer/group0/lr"),
    "CountsTwice": (WARMED_UP, WRONG, "count fails G0"),
    "NoUpdate of a step that sets its rate": (WARMED_UP, WRONG, "change/"),
    "FrozenLearningRate": (LEARN, WRONG, "change"),
    "FrozenStepCount": (LEARN, WRONG, "change"),
    "GradientsPileUp": (LEARN, WRONG, "grad/"),
    "FrozenLayer": (LEARN, WRONG, "0.weight"),
    "AFasterRate": (LEARN, WRONG, "change"),
    "UpdatesOneStepLate": (LEARN, WRONG, "exp_avg"),
    "HalfPrecisionState": (LEARN, WRONG, "exp_avg"),
    "DisownsItsParameters": ([*MLP, "workload.mode=forward_backward"], WRONG, "missing"),
    "PatchesTheClock": (GELU, UNTRUSTED, "time.perf_counter"),
    "PatchesSynchronize": (GELU, UNTRUSTED, "torch.cuda.synchronize"),
    "PatchesElapsedTime": (GELU, UNTRUSTED, "elapsed_time"),
    "WarmsUpSlowly": (GELU, UNTRUSTED, "warm"),
    "WorksOnlyWhenWatched": (GELU, WRONG, "timed block"),
    "SlowsTheBaseline": (GELU, UNTRUSTED, "deterministic"),
    "FallsBack": (GELU, NOTHING, "none"),
    "RightOnlyAtThisSize": ([*GELU, *FAMILIES], WRONG, "at size=1031"),
    "ForgetsGradientsWhenTimed": ([*MLP, "workload.mode=forward_backward"], WRONG, "timed block: grad/"),
    "WildWhereItIsDisturbed": ([*MLP, "workload.mode=forward_backward"], WRONG, "timed block: grad/"),
    "BiasWithoutTail": (ROWS, WRONG, "grad/bias"),
    "LearnsNothingWhenTimed": (LEARN, WRONG, "timed block"),
    "NeverTheSameTwice": (LEARN, WRONG, "timed block"),
    "DropsOnlyWhenWatched": (DROP, WRONG, "timed block"),
    "RemembersByContent from a loader": (LOADER, UNTRUSTED, "has not seen"),
    "RemembersByContent from a loader of one order": (VALIDATION, UNTRUSTED, "has not seen"),
    "RemembersEachShape": (SHAPES, WRONG, "timed block"),
    "KeepsItsFirstResults": (["workload=matmul", "workload.size=256"], UNTRUSTED, "has not seen"),
    "KeepsItsLastResults": (["workload=matmul", "workload.size=256"], UNTRUSTED, "has not seen"),
    "GuessesInAHurry": (["workload=matmul", "workload.size=256"], UNTRUSTED, "follow each other quickly"),
    "RandomForAWhile": (DROP, WRONG, "after timing"),
    "ForgetsWhatIsNotMasked": (own("Masked"), WRONG, "(unmasked)"),
    "MakesNumbersUp": (own("Scored"), WRONG, "output.size"),
    "WithoutClamp": (own("Clamped"), WRONG, "large inputs"),
    "OnlyPairsOfRows": ([*own("Linear"), *FAMILIES], WRONG, "at odd batch"),
    "ReturnsALazyDict": (GELU, UNTRUSTED, "the dict of outputs"),
    "BackwardOnDemand": ([*MLP, "workload.mode=forward_backward"], UNTRUSTED, "named_parameters"),
    "WorksInReset": (MATMUL, UNTRUSTED, "before a step asks"),
    "TheWholeBlockAtOnce": (WIDE_BLOCK, UNTRUSTED, "does not compute each step"),
    "TheBlockOnceItIsKnown": (WIDE_BLOCK, UNTRUSTED, "the candidate"),
    "TwoOfTheBlockTogether": (WIDE_BLOCK, UNTRUSTED, "does not compute each step"),
    "TheFirstBatchForEver": (MATMUL, UNTRUSTED, "does not give the batches"),
    "TheFirstBatchForEver of a loader": (LOADER, UNTRUSTED, "does not give the batches"),
    "GivesNothing": (MATMUL, UNTRUSTED, "does not give the batches"),
    "RestsInTheMiddle": (GELU, WRONG, "timed block"),
    "LeavesAModeOn": (MATMUL, UNTRUSTED, "Completing"),
    "DeclaresItsMode": (MATMUL, UNTRUSTED, "Completing"),
    "PatchesDetach": (MATMUL, UNTRUSTED, "Tensor.detach"),
    "PatchesTheToolsClock": (GELU, UNTRUSTED, "clock.now"),
    "TellsLess": (MATMUL, UNTRUSTED, "keeps its caller waiting"),
    "SlowsEveryModule": (INFER, UNTRUSTED, "hooks"),
    "RemembersALayer": ([*INFER, "workload.dim=1024", "workload.batch_size=64"], UNTRUSTED, "has not seen"),
    "KeepsHalfPrecisionState": (LEARN, WRONG, "exp_avg_sq"),
    "CastsItsWeightsOnce": ([*MLP, "workload.mode=forward_backward"], WRONG, "with other values of the parameters"),
    "HandsOutAParameter": (own("Tells"), WRONG, "shares memory with a parameter"),
    "RefusesWhatItCannot": ([*NORM, *FAMILIES], WRONG, "the candidate raises tests.cheats.catalogue.NoReference"),
}

HELP = {
    "Redrawn",
    "Through",
    "NothingButNaN",
    "Shifted",
    "Lazy",
    "Unmasked",
    "Zeros",
    "Deferred",
    "Passing",
    "Completing",
    "NoReference",
}


HONEST: list[tuple[list[str], str]] = [
    *(([*MLP, f"workload.mode={mode}"], "") for mode in ("forward", "forward_backward", "train")),
    *(([*MLP, f"workload.mode={mode}"], "amp") for mode in ("forward", "forward_backward", "train")),
    *((GELU, stack) for stack in ("", "inplace", "inference_mode", "inplace+inference_mode")),
    (LEARN, "fused_optimizer"),
    (SCHEDULED, "fused_optimizer"),
    (SCHEDULED, "compiled_optimizer"),
    (SCHEDULED, ""),
    (WARMED_UP, ""),
    (WARMED_UP, "fused_optimizer"),
    (WARMED_UP, "amp"),
    ([*LEARN, "workload.optim=sgd"], "fused_optimizer"),
    (LEARN, "amp+fused_optimizer"),
    (INFER, "inference_mode"),
    (INFER, "amp+inference_mode"),
    (INFER, "inplace"),
    (INFER, "amp+inplace"),
    (NORM, ""),
    (NORM, "amp"),
    ([*NORM, "workload.mode=forward_backward"], ""),
    (DROP, ""),
    (DROP, "inplace"),
    ([*DROP, "workload.mode=forward_backward"], ""),
    (["workload=elementwise", "workload.rows=64", "workload.columns=64"], "inplace"),
    (["workload=softmax", "workload.rows=64", "workload.columns=64"], "inference_mode"),
    (["workload=softmax", "workload.rows=64", "workload.columns=64", "workload.mode=forward_backward"], ""),
    (["workload=matmul", "workload.size=128"], "inference_mode"),
    (["workload=matmul", "workload.size=128"], "amp"),
    (["workload=add", "workload.size=4096"], "inference_mode"),
    (["workload=linear_gelu", "workload.rows=64", "workload.features=32", "workload.out=32"], "inplace"),
    (["workload=cdist", "workload.points=64", "workload.dim=8"], "inference_mode"),
    ([*VISION, "workload.mode=forward_backward"], "channels_last"),
    ([*VISION, "workload.mode=forward_backward"], "amp"),
    ([*VISION, "workload.mode=forward"], "inference_mode"),
    (VISION, "channels_last+fused_optimizer"),
    (TEXT, ""),
    (TEXT, "amp"),
    ([*TEXT, "workload.mode=forward"], "inference_mode"),
    ([*TEXT, "workload.dropout=0.1"], "amp"),
    ([*MLP, "workload.num_steps=2"], ""),
    (["workload=branches", "workload.dim=16", "workload.layers=2", "workload.batch_size=8"], "amp"),
    (["workload=training", "workload.batch_size=4"], "fused_optimizer"),
    (NORM, "inference_mode"),
    ([*LEARN, "workload.optim=sgd"], "amp+fused_optimizer"),
    ([*NORM, "workload.mode=forward_backward"], "amp"),
    (["workload=elementwise", "workload.rows=64", "workload.columns=64"], "inference_mode"),
    ([*GELU, "workload.size=63"], "inference_mode"),
    (["workload=matmul", "workload.size=128"], "amp+inference_mode"),
    (["workload=linear_gelu", "workload.rows=64", "workload.features=32", "workload.out=32"], "amp+inference_mode"),
    ([*VISION, "workload.mode=forward_backward"], "amp+channels_last"),
    (["workload=cdist", "workload.points=64", "workload.dim=8"], ""),
    (["workload=add", "workload.size=4096"], ""),
    (["workload=matmul", "workload.size=128"], ""),
    (["workload=softmax", "workload.rows=64", "workload.columns=64"], ""),
    (["workload=linear_gelu", "workload.rows=64", "workload.features=32", "workload.out=32"], ""),
    (["workload=linear_gelu", "workload.rows=64", "workload.features=32", "workload.out=32"], "amp"),
    ([*LEARN, "workload.optim=sgd"], ""),
    ([*INFER, "workload.batch_size=1"], "inference_mode"),
    *(
        ([*own("Dropping", instead=instead), f"workload.mode={mode}"], "replace")
        for mode in ("forward_backward", "train")
        for instead in ("DroppingTwice", "DroppingByHand")
    ),
    ([*own("Dropping", "[128, 64]", "DroppingByHand"), "workload.mode=forward_backward"], "replace"),
    ([*own("Dropping"), "workload.mode=forward_backward"], ""),
    ([*own("Dropping"), "workload.mode=train"], ""),
    ([*own("Dropping"), "workload.mode=train"], "amp"),
    ([*own("Halved"), "workload.mode=forward_backward"], ""),
    ([*own("Gated"), "workload.mode=forward_backward"], ""),
    (own("Gated"), "amp"),
    (own("Chosen"), "inference_mode"),
    (own("Expanded"), "inference_mode"),
    ([*own("Penalized"), "workload.mode=forward_backward"], ""),
    (own("Expanded", instead="Repeated"), "replace"),
    (BERT, "inference_mode"),
    *((own(model), stack) for model in ("Masked", "Scored", "Clamped") for stack in ("inference_mode", "amp")),
    (SHAPES, ""),
    (VALIDATION, "inference_mode"),
    (LOADER, ""),
    (SHAPES, "inference_mode"),
    (MATMUL, "inference_mode"),
    ([*INFER, "workload.dim=256"], ""),
    ([*INFER, "workload.dim=256"], "amp"),
    ([*LEARN, "workload.batch_size=1"], "fused_optimizer"),
    ([*TEXT, "workload.mode=forward"], "amp"),
    ([*TEXT, "workload.mode=train"], "fused_optimizer"),
    ([*VISION, "workload.mode=train"], "amp"),
    (["workload=training", "workload.batch_size=4", "workload.workers=1"], "fused_optimizer"),
    (DETERMINISTIC, "inference_mode"),
    ([*LEARN, "workload.dim=64"], ""),
    ([*TEXT, "workload.mode=train"], ""),
    ([*TEXT, "workload.mode=train"], "amp"),
    (own("Turned", "[8, 16, 64]"), "inference_mode"),
    (own("Turned", "[8, 16, 64]", "TurnedInReals"), "replace"),
    (own("Rounded", "[4096, 64]", "RoundedInHalves"), "replace"),
    (own("Stream", "[4, 8, 8]", "StreamByProducts"), "replace"),
    (STREAM, "inference_mode"),
    *(([*own("Steep"), f"workload.mode={mode}", HALF], "amp") for mode in ("forward_backward", "train")),
]


def compare(folder: Path, overrides: list[str], cheat: str = "", stack: str = "") -> Result:
    """One comparison, with a strategy of the catalogue or a stack of the repository's own."""
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*overrides, f"strategy=[{stack.replace('+', ',')}]"])
    if cheat:
        OmegaConf.set_struct(config, False)
        OmegaConf.update(config, "strategy.cheat", {"_target_": cheat})
    return runner.run(config, folder)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_are_caught(cheat: str, preset: list[str], tmp_path: Path, count: list[tuple[str, Result]]) -> None:
    overrides, verdict, words = CHEATS[cheat]
    here = [*preset, "device=cpu", "isolation=none", *overrides]
    result = compare(tmp_path, here, f"{CATALOGUE}.{cheat.partition(' ')[0]}")
    count.append(("cheat", result))
    assert result.verdict is verdict, result.headline
    assert words in result.headline
    assert result.speedup is None
    assert Result.read(tmp_path / "result.json").speedup is None


@pytest.mark.slow
def test_a_busy_machine_hides_no_shared_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "MANY_S", 0.0)
    overrides, verdict, words = CHEATS["OneMaskForTwoElements"]
    here = ["device=cpu", "isolation=none", "verify=only", *overrides]
    result = compare(tmp_path, here, f"{CATALOGUE}.OneMaskForTwoElements")
    assert (result.verdict, words in result.headline) == (verdict, True), result.headline


@pytest.mark.parametrize(("overrides", "stack"), HONEST, ids=lambda value: value if isinstance(value, str) else "")
def test_honest_controls_pass(
    overrides: list[str], stack: str, tmp_path: Path, count: list[tuple[str, Result]]
) -> None:
    result = compare(tmp_path, [*IN_ONE_PROCESS, *overrides, *FAMILIES], stack=stack)
    count.append(("honest", result))
    assert measured(result), result.headline
    assert result.equivalence.ok


def test_what_overflows_at_lower_precision_is_wrong_though_plain_autocast_does_so_too(tmp_path: Path) -> None:
    result = compare(tmp_path, [*IN_ONE_PROCESS, *own("Large"), HALF], stack="amp")
    assert result.verdict is WRONG
    assert "512 of 512 elements are NaN or Inf, and finite in float64: float16 overflows here" in result.headline


def test_what_only_the_imaginary_part_tells_is_seen(tmp_path: Path) -> None:
    overrides = [*IN_ONE_PROCESS, *own("Turned", "[8, 16, 64]", "HardlyTurned")]
    result = compare(tmp_path, overrides, stack="replace")
    assert result.verdict is WRONG
    assert "output fails" in result.headline


@pytest.mark.slow
def test_what_is_kept_of_parameters_that_nobody_changes_makes_no_step_faster(tmp_path: Path) -> None:
    overrides = [*own("Penalized", instead="PenalizedOnce"), "workload.mode=forward_backward"]
    result = compare(tmp_path, [*IN_ONE_PROCESS, *overrides], stack="replace")
    assert result.verdict is UNTRUSTED
    assert "once parameters have changed" in result.headline


@pytest.mark.parametrize("verify", ["only", "first"])
def test_a_copy_of_parameters_is_old_once_somebody_changes_them(tmp_path: Path, verify: str) -> None:
    overrides = [*own("Linear", instead="Copied"), "workload.mode=forward_backward", f"verify={verify}"]
    result = compare(tmp_path, [*IN_ONE_PROCESS, *overrides], stack="replace")
    assert result.verdict is WRONG
    assert "after 6 steps, halfway with other values of the parameters: " in result.headline


@pytest.mark.parametrize("instead", ["Scaled", "ScaledAtFirst"])
def test_nothing_is_known_of_later_parameters_where_the_baseline_keeps_what_earlier_ones_gave(
    tmp_path: Path, instead: str
) -> None:
    overrides = [*own("ScaledAtFirst", instead=instead), "workload.mode=forward_backward", "verify=only"]
    result = compare(tmp_path, [*IN_ONE_PROCESS, *overrides], stack="replace")
    assert result.verdict is Verdict.VERIFIED, result.headline
    told = any(
        "the baseline goes on with what it has computed of earlier ones" in note for note in result.equivalence.notes
    )
    assert told == (instead == "Scaled")


def test_a_first_result_that_nobody_computed_is_seen(tmp_path: Path) -> None:
    result = compare(tmp_path, [*IN_ONE_PROCESS, *own("Linear", instead="RecordsFirst")], stack="replace")
    assert result.verdict is WRONG
    assert "the first step after building: output fails FIRST" in result.headline


def test_what_is_computed_when_somebody_asks_for_it_proves_nothing(tmp_path: Path) -> None:
    overrides = [*own("Lazily", instead="LazilyWrong"), "verify=only"]
    result = compare(tmp_path, [*IN_ONE_PROCESS, *overrides], stack="replace")
    assert result.verdict is Verdict.UNVERIFIED
    assert "return a list" in result.headline


COUNTED = """\
import torch
from torch import nn

Model, turns = lambda: nn.Linear(16, 4), bytearray(1)

def get_inputs(): return [torch.randn(32, 16), torch.randn(32, 4)]
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1]) * (1 + turns[0] / 10)
    loss.backward()
    optimizer.step()
    turns[0] = (turns[0] + STEP) % 5
    return loss
"""


def test_a_baseline_whose_equal_steps_are_far_apart_is_no_yardstick(tmp_path: Path) -> None:
    """They agree on some sets of inputs, by chance."""
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(COUNTED.replace("STEP", "1"))
    after.write_text(COUNTED.replace("STEP", "0"))
    files = [f"workload.path={before}", f"strategy.replace.target={after}", "workload.mode=train"]
    result = compare(tmp_path / "run", [*IN_ONE_PROCESS, "workload=module", *files, "verify=only"], stack="replace")
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "apart: a step keeps what no arm can put back" in result.headline


def test_where_the_baseline_has_no_numbers_nothing_is_told_from_anything(tmp_path: Path) -> None:
    result = compare(tmp_path, [*IN_ONE_PROCESS, *own("Overflowing")], f"{CATALOGUE}.NothingButNaN")
    assert result.verdict is Verdict.UNVERIFIED
    assert "512 of 512 elements of the baseline's own output are NaN" in result.headline


def test_there_are_as_many_honest_controls_as_cheats() -> None:
    import tests.cheats.catalogue as catalogue

    written = {
        name for name, value in vars(catalogue).items() if isinstance(value, type) and value.__module__ == CATALOGUE
    }
    assert written - {"Cheat", *HELP} == {cheat.partition(" ")[0] for cheat in CHEATS}
    assert 26 <= len(CHEATS) <= len(HONEST)
