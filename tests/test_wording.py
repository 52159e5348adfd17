"""What is promised is never rounded up."""

import pytest

from optexp.wording import at_least, ratio


@pytest.mark.parametrize(
    ("value", "text"),
    [(5.996, "5.99"), (1.2752, "1.27"), (99.96, "99.9"), (104.7, "104"), (0.9961, "0.996"), (1.0, "1.00"), (0.0, "0")],
)
def test_at_least_holds(value: float, text: str) -> None:
    assert at_least(value) == text
    assert float(text) <= value


def test_ratios_carry_three_digits() -> None:
    assert [ratio(value) for value in (0.5612, 1.309, 12.41, 103.6)] == ["0.56×", "1.31×", "12.4×", "104×"]
