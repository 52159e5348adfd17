"""The error of float32 hyperparameters becomes an allowance (see `optexp.equivalence.hyperparameters`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from optexp.equivalence.fp64_quantities import updates
from optexp.equivalence.hyperparameters import bias_correction_error
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity, measured


def allow_rounded_hyperparameters(
    inputs: InputSet, step: int, seen: Observation, exact: Mapping[str, Quantity]
) -> None:
    """Allow any candidate the error that float32 hyperparameters make in the update of one run.

    seen:  the run, of either arm
    exact: its changes and optimizer state, beside fp64's with exact hyperparameters
    """
    program = inputs.fp64.program
    assert program.optimizer is not None
    corrections = bias_correction_error(program.optimizer)
    rounded = updates(inputs, step, seen, rounded=True)
    moved = [(exact[quantity.name], quantity.reference) for quantity in rounded]
    for name, parameter in program.model.named_parameters():
        change, moved_by = exact.get(f"change/{name}"), corrections.get(parameter, 0.0)
        if change is not None and moved_by:
            moved.append((change, change.reference * (1 + moved_by)))
    for quantity in measured(replace(quantity, value=value) for quantity, value in moved):
        inputs.yardsticks.steps[step].allow(quantity)
