"""A search's settings, its verdict without a winner, its sentence, and the stack that it hands over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optexp.comparison.adjudicate import Exhausted, Facts, adjudicate
from optexp.comparison.decision import decide
from optexp.comparison.goal import Goal
from optexp.comparison.hand_over import stack_yaml
from optexp.config.auto_settings import AutoSettings
from optexp.errors import ConfigError
from optexp.records import filenames
from optexp.records.measurement import Cost, Measurement
from optexp.records.trials import Ablation, Contribution, Figures, Gain, Search, Trial
from optexp.reporting import report, terminal, trial_sections, waterfall
from optexp.result import ArmSummary, Result, Speedup, Verdict
from optexp.strategy import REASSOCIATES, precision


def trial(change: str, verdict: Verdict, high: float = 1.0) -> Trial:
    return Trial(1, [change], [], verdict, gain=Gain(high - 0.1, high - 0.2, high), change=change)


@pytest.mark.parametrize(
    ("trials", "verdict"),
    [
        ([trial("a", Verdict.SAME), trial("b", Verdict.SLOWER, 0.8)], Verdict.SAME),
        ([trial("a", Verdict.INCONCLUSIVE, 1.01)], Verdict.SAME),
        ([trial("a", Verdict.INCONCLUSIVE, 1.2)], Verdict.INCONCLUSIVE),
        ([trial("a", Verdict.INCONCLUSIVE, 1.2), trial("a", Verdict.SAME)], Verdict.SAME),
        ([trial("a", Verdict.NOT_EQUIVALENT), trial("b", Verdict.SAME)], Verdict.SAME),
        ([trial("a", Verdict.INVALID), trial("b", Verdict.UNSUPPORTED)], Verdict.INVALID),
        ([trial("a", Verdict.NOT_ENGAGED)], Verdict.UNSUPPORTED),
        ([], Verdict.UNSUPPORTED),
    ],
)
def test_the_verdict_of_a_search_that_kept_nothing(trials: list[Trial], verdict: Verdict) -> None:
    found = adjudicate(Facts(exhausted=Exhausted.of(trials, 0.02)))
    assert found is not None
    assert found.verdict is verdict


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("budget", "soon", r"^auto\.budget=soon is no time: write 90s, 10m, 1.5h"),
        ("budget", "0", "more than nothing"),
        ("memory_limit", "8 GB of it", "write 8GiB, 512MiB"),
        ("min_gain", "2", "between 0 and 1"),
        ("trials", "0", "at least 1"),
        ("objective", "beauty", "time, memory, energy"),
        ("max_slowdown", "0.5", "at least 1"),
    ],
)
def test_mistakes_in_the_settings(experiment, key: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment("mode=auto", f"auto.{key}={value}")


@pytest.mark.usefixtures("in_sweep")
def test_in_a_sweep_jobs_of_other_modes_ignore_keys_of_a_search(experiment) -> None:
    assert experiment("auto.budget=5m").mode == "compare"


def test_settings_with_units(experiment) -> None:
    found = experiment("mode=auto", "auto.budget=1.5h", "auto.memory_limit=8GiB").auto
    assert (found.budget_s, found.memory_limit_bytes) == (5400, 8 * 2**30)
    assert experiment("mode=auto", "auto.budget=90").auto.budget_s == 90
    assert AutoSettings(memory_limit="8GB").memory_limit_bytes == 8e9


def test_keys_of_a_search_need_a_search(experiment) -> None:
    with pytest.raises(ConfigError, match=r"auto\.budget=5m is for a search: add mode=auto"):
        experiment("auto.budget=5m")
    with pytest.raises(ConfigError, match="leave verify=only out"):
        experiment("mode=ablate", "verify=only")


WINNER = Result(
    Verdict.FASTER,
    "",
    "mlp",
    ["amp", "fusion"],
    "cpu",
    0,
    speedup=Speedup(1.5, 1.42, 1.6, 0.99, 5),
    baseline=ArmSummary(step_us=300.0, peak_mib=100.0, setup_s=0.5),
    candidate=ArmSummary(step_us=200.0, peak_mib=150.0, setup_s=12.5),
    measurement=Measurement(cost=Cost(setup_s=12.5, baseline_setup_s=0.5, break_even_steps=120_000)),
)


def test_the_sentence_says_what_the_winner_costs() -> None:
    found = decide(WINNER, Verdict.FASTER, Goal(), precision("bfloat16"), kept=True)
    assert found.use
    assert found.text == (
        "Use amp+fusion: at least 1.42× faster than the baseline (best estimate 1.50×); it costs 12 s more set-up, paid"
        " back after 120,000 steps, 1.50× the peak memory (150 MiB), bfloat16 precision."
    )


def test_a_winner_that_does_not_hold_is_not_used() -> None:
    found = decide(WINNER, Verdict.INCONCLUSIVE, Goal(), REASSOCIATES, kept=True)
    assert not found.use
    assert found.text == "Keep the baseline: the search kept amp+fusion, and measured anew it ends INCONCLUSIVE."
    more_memory = decide(WINNER, Verdict.FASTER, Goal("memory"), REASSOCIATES, kept=True)
    assert not more_memory.use


def test_without_a_winner_the_baseline_stays() -> None:
    lost = replace(WINNER, trials=[trial("a", Verdict.SAME), trial("b", Verdict.SAME)])
    found = decide(lost, Verdict.SAME, Goal(memory_limit_mib=120), REASSOCIATES, kept=False)
    assert found.text.startswith("Keep the baseline: none of 2 changes that were tried is shown to be faster; its peak")


def test_what_was_not_tried_gained_nothing() -> None:
    one = replace(WINNER, trials=[trial("a", Verdict.SAME)])
    found = decide(one, Verdict.SAME, Goal("memory"), REASSOCIATES, kept=False)
    assert found.text == "Keep the baseline: no change takes less peak memory, of the one tried."


def test_less_memory_is_said_with_its_speed() -> None:
    thrifty = replace(WINNER, candidate=replace(WINNER.candidate, peak_mib=50.0))
    found = decide(thrifty, Verdict.SAME, Goal("memory"), REASSOCIATES, kept=True)
    assert "peak memory 50 MiB instead of 100 MiB, speed SAME (1.50×)" in found.text


def test_the_stack_is_a_choice_of_the_group_strategy(experiment, tmp_path: Path, monkeypatch) -> None:
    stack = experiment("strategy=[amp,fusion]", "strategy.fusion.mode=max-autotune").strategies
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "tuned.yaml").write_text(stack_yaml(stack))
    monkeypatch.chdir(tmp_path)
    for argument in ("strategy=tuned", "baseline=[tuned]"):
        found = experiment(argument)
        labels = [s.label for s in (found.strategies or found.baseline)]
        assert labels == ["amp", "fusion[mode=max-autotune]"]


def test_a_stack_on_the_search_path_changes_no_strategy_of_its_own(tmp_path: Path, monkeypatch, experiment) -> None:
    from optexp.comparison.suggestions import installed

    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "tuned.yaml").write_text(
        stack_yaml(experiment("strategy=amp", "strategy.amp.dtype=float16").strategies)
    )
    monkeypatch.chdir(tmp_path)
    labels = [strategy.label for strategy in installed()]
    assert "amp" in labels
    assert not any(label.startswith("tuned") for label in labels)


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    kept = replace(trial("amp", Verdict.FASTER, 1.6), kept=True)
    search = Search("time", [], ["amp", "fusion"], "Use it.", "the end", 1.0, yaml="strategy.yaml")
    result = replace(WINNER, trials=[kept], search=search)
    result.write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json").trials == [kept]
    assert Result.read(tmp_path / "result.json").search == search
    replace(result, trials=[], search=None).write(tmp_path / "result.json")
    assert Result.read(tmp_path / "result.json").trials == []


def test_the_waterfall_ends_with_the_measurement_anew(tmp_path: Path) -> None:
    kept = [replace(trial(name, Verdict.FASTER, 1.35), kept=True) for name in ("amp", "fusion")]
    search = Search("time", [], ["amp", "fusion"], "Use it.", "the end", 1.0)
    result = replace(WINNER, trials=kept, search=search)
    bars = waterfall.waterfall(result)
    assert [bar.label for bar in bars] == ["baseline", "+ amp", "+ fusion", "amp+fusion, measured anew"]
    assert [bar.share for bar in bars] == pytest.approx([1, 1 / 1.25, 1 / 1.25**2, 1 / 1.5])
    assert waterfall.draw(result, tmp_path)
    assert (tmp_path / filenames.WATERFALL).read_bytes().startswith(b"\x89PNG")
    assert not waterfall.draw(WINNER, tmp_path / "none")
    assert terminal.render(result)


def test_an_undecided_winner_is_neither_gain_nor_loss(tmp_path: Path) -> None:
    kept = replace(trial("amp", Verdict.FASTER, 1.35), kept=True)
    search = Search("time", [], ["amp"], "Keep the baseline.", "the end", 1.0)
    lost = replace(WINNER, trials=[kept], search=search, speedup=Speedup(0.8, 0.5, 1.3, 0.99, 1))
    *_, slower = waterfall.waterfall(replace(lost, verdict=Verdict.SLOWER))
    assert slower.added == pytest.approx(0.25)
    result = replace(lost, verdict=Verdict.INCONCLUSIVE)
    *_, open_ = waterfall.waterfall(result)
    assert (open_.saved, open_.added, open_.open, open_.solid) == pytest.approx((0, 0, 0.25, 1))
    assert open_.text == "undecided: 0.80× (0.500 to 1.30)"
    assert waterfall.draw(result, tmp_path)
    parts = trial_sections.drawn(result)[-1]
    assert (parts.added, parts.open, parts.solid) == pytest.approx((0, 20, 80))
    assert "width: 20.00%; background: var(--soft)" in report.render(result)


def test_the_decision_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    search = Search("time", [], ["amp", "fusion"], "Use amp+fusion: so much faster.", "the end", 1.0)
    result = replace(WINNER, headline="FASTER, at least 1.42×", search=search)
    terminal.show(result, tmp_path)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["Use amp+fusion: so much faster.", "mlp · amp+fusion  FASTER, at least 1.42×"]
    for page in (report.render(result), report.fragment(result)):
        assert page.count(search.decision) == 1
        assert page.index(search.decision) < page.rindex("FASTER, at least")


def test_a_reason_is_told_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = "inplace: 4 kept: backward needs its operand"
    trials = [
        Trial(number, stack, [], Verdict.NOT_ENGAGED, said)
        for number, stack in enumerate((["amp", "inplace"], ["inplace"], ["amp"]))
    ]
    trials[2] = replace(trials[2], verdict=Verdict.SAME, reason="", gain=Gain(1.0, 0.99, 1.01))
    nothing = [Contribution("inplace", ["amp"], None, "amp+inplace: NOT_ENGAGED (trial 0)")]
    nothing += [Contribution("inplace", [], None, "inplace: NOT_ENGAGED (trial 1); amp+inplace: NOT_ENGAGED (trial 0)")]
    found = Ablation(["inplace"], nothing[:1], nothing[1:], [], "", [])
    result = replace(WINNER, verdict=Verdict.NOT_ENGAGED, speedup=None, trials=trials, ablation=found)
    terminal.show(result, tmp_path)
    for shown in (capsys.readouterr().out, report.render(result)):
        assert shown.count(said) == 1
        assert "as trial 0" in shown
        assert shown.count("amp+inplace: NOT_ENGAGED (trial 0)") == 1


def test_the_waterfall_shows_what_was_to_become_less() -> None:
    figures = {"baseline": Figures(peak_mib=100.0), "candidate": Figures(peak_mib=80.0)}
    kept = replace(trial("inplace", Verdict.SAME), kept=True, **figures)
    search = Search("memory", [], ["inplace"], "Use it.", "the end", 1.0)
    result = replace(WINNER, trials=[kept], search=search, candidate=ArmSummary(peak_mib=75.0))
    bars = waterfall.waterfall(result)
    assert [(bar.share, bar.text) for bar in bars] == [
        (1.0, "100 MiB"),
        (0.8, "100 MiB → 80 MiB"),
        (0.75, "100 MiB → 75 MiB"),
    ]
    assert waterfall.quantity(result) == "peak memory"
