"""What honest verifications say of themselves follows, whatever was promised; `tests/test_audit.py` edits records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from optexp.equivalence.account import problems
from optexp.equivalence.autocast import autocast
from optexp.equivalence.families import FAMILIES
from optexp.equivalence.finding import Verification
from optexp.strategy import BITWISE, REASSOCIATES, Contract, precision

CASES: dict[str, tuple[str, Contract, Mapping[str, Any]]] = {
    "forward": ("forward", BITWISE, {}),
    "gradients": ("forward_backward", REASSOCIATES, {}),
    "training": ("train", REASSOCIATES, {"follow": True}),
    "families": ("forward", REASSOCIATES, {"families": ["normal", *FAMILIES]}),
    "bfloat16": ("train", precision("bfloat16"), {}),
    "float64": ("forward", REASSOCIATES, {"dtype": torch.float64}),
}


def told(promise: Contract) -> Callable[[Any], Any]:
    return partial(autocast, dtype=promise.dtype) if promise.dtype else lambda program: program


@pytest.mark.parametrize("case", CASES)
def test_honest_verifications_follow(check: Callable[..., Verification], net: type, case: str) -> None:
    mode, promise, options = CASES[case]
    found = check(net(mode=mode), told(promise), promise, **options)
    assert found.ok, found.headline
    thorough = bool({"families", "follow"} & options.keys())
    config = {"measurement.verification_seeds": 2, "measurement.thorough": thorough, "workload.mode": mode}
    record = {"config": config, "measurement": {}, "workload": "net", "equivalence": found.to_dict()}
    assert list(problems(json.loads(json.dumps(record)))) == []
    record["config"] = {**config, "measurement.verification_seeds": 5}
    assert list(problems(record)) == ["2 fresh input sets are listed, and 5 were asked for"]
