"""What is promised is never rounded up."""

import pytest

from optexp.records.measurement import Measurement, Watch
from optexp.reporting.wording import CROWDED, forms, headline
from optexp.result import Result, Speedup, Verdict
from optexp.support.units import at_least, duration, low_to_high, percent, ratio


@pytest.mark.parametrize(
    ("value", "text"),
    [(5.996, "5.99"), (1.2752, "1.27"), (99.96, "99.9"), (104.7, "104"), (0.9961, "0.996"), (1.0, "1.00"), (0.0, "0")],
)
def test_at_least_holds(value: float, text: str) -> None:
    assert at_least(value) == text
    assert float(text) <= value


def test_ratios_carry_three_digits() -> None:
    assert [ratio(value) for value in (0.5612, 1.309, 12.41, 103.6)] == ["0.56×", "1.31×", "12.4×", "104×"]
    assert ratio(0.00371) == "0.0037×"
    assert low_to_high(1.1399, 1.7) == "1.13 to 1.70"
    assert low_to_high(0.8449, float("inf")) == "0.844 to ∞"
    assert [percent(share) for share in (0.99, 0.995, 0.9973)] == ["99%", "99.5%", "99.73%"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(112e-6, "112 µs"), (0.99951e-3, "1 ms"), (0.9994e-3, "999 µs"), (3.1, "3.1 s"), (90, "90 s")]
)
def test_durations_have_no_power_of_ten(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headlines_of_older_records_are_known() -> None:
    now = f"one process; the interval allows for 5.3 % between processes, as is usual): {CROWDED}"
    then = "one process; processes differ by 5.3 %): a machine that does nothing else decides more"
    assert forms(now) == (now, now, then)
    digits = "99% interval 0.844 to 1.70, one process"
    assert forms(digits)[1] == "99% interval 0.844 to 1.7, one process"
    assert forms("99% interval 0.84 to ∞, one process")[1] == "99% interval 0.84 to inf, one process"


@pytest.mark.parametrize(
    ("processes", "free", "advice"),
    [
        (1, True, "measurement=default looks closer"),
        (5, True, "more processes may decide it"),
        (5, False, "other programs used the cores; run again on an idle machine"),
    ],
)
def test_what_may_decide_depends_on_what_disturbed(processes: int, free: bool, advice: str) -> None:
    result = Result(Verdict.INCONCLUSIVE, "", "mlp", ["amp"], "cpu", 0)
    result.speedup = Speedup(1.1, 0.8, 1.4, confidence=0.99, processes=processes)
    result.measurement = Measurement(watchdogs=[Watch("cores", free, "")])
    assert headline(result, "float32", "baseline", None).endswith(advice)
