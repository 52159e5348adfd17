"""Two training files that call the same state otherwise, and keep more of it, are compared by what it holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optexp.result import Verdict
from optexp.workers import arm_checks
from tests.user_code.test_rare_steps import compared

HEAD = """
import copy, math
from collections import defaultdict
import torch
from torch import nn

Model = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
get_inputs = lambda: [torch.randn(16, 8), torch.randint(4, (16,))]
"""
STEP = """
def train_step(model, batch, optimizer):
    BEGIN
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    END
    return loss
"""
SLOW = pytest.mark.slow


def stepped(optimizer: str, begin: str = "pass", end: str = "pass", first: str = "") -> str:
    return HEAD + first + optimizer + STEP.replace("BEGIN", begin).replace("END", end)


def averaged(name: str = "ema", rate: float = 0.01, update: str = "e.lerp_(p, {})", every: int = 1) -> str:
    begin = f"global {name}, calls\n    {name} = {name} or copy.deepcopy(model)\n    calls += 1"
    each = f"for e, p in zip({name}.parameters(), model.parameters()):"
    end = f"with torch.no_grad():\n        {each}\n            if calls % {every} == 0: {update.format(rate)}"
    return stepped(
        "get_optimizer = lambda params: torch.optim.AdamW(params, lr=1e-3)", begin, end, f"{name}, calls = None, 0\n"
    )


OBJECT = (
    HEAD
    + """
class Averager:
    def __init__(self, model):
        self.copies = [p.detach().clone() for p in model.parameters()]
    @torch.no_grad()
    def update(self, model):
        for one, p in zip(self.copies, model.parameters()):
            one.mul_(0.99).add_(p, alpha=0.01)
averager, calls = None, 0
get_optimizer = lambda params: torch.optim.AdamW(params, lr=1e-3)
"""
    + STEP.replace(
        "BEGIN", "global averager, calls\n    averager = averager or Averager(model)\n    calls += 1"
    ).replace("END", "averager.update(model)")
)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        pytest.param(averaged("teacher"), Verdict.VERIFIED, id="another name"),
        pytest.param(OBJECT, Verdict.VERIFIED, id="in an object", marks=SLOW),
        pytest.param(averaged("teacher", 0.0101), Verdict.NOT_EQUIVALENT, id="another rate"),
        pytest.param(averaged("teacher", every=2), Verdict.NOT_EQUIVALENT, id="every other step", marks=SLOW),
        pytest.param(averaged("teacher", update="pass"), Verdict.NOT_EQUIVALENT, id="never", marks=SLOW),
    ],
)
def test_an_average_is_known_by_its_values(after: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, after, averaged())
    assert result.verdict is verdict, result.headline
    assert verdict is Verdict.VERIFIED or "nothing that the second program keeps changes as it does" in result.headline


SILENT = stepped(
    "get_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)",
    begin="calls[0] += 1",
    end="if calls[0] % 10 == 0: teacher.load_state_dict(model.state_dict())",
    first="torch.manual_seed(0)\nteacher, calls = Model(), [0]\n",
)


@SLOW
@pytest.mark.parametrize(
    ("when", "verdict", "said"),
    [
        ("% 10 == 0", Verdict.VERIFIED, ""),
        ("% 11 == 0", Verdict.NOT_EQUIVALENT, "after 10 steps: teacher"),
        ("in (10, 15)", Verdict.NOT_EQUIVALENT, "after 15 steps: target"),
        ("in (5, 10)", Verdict.NOT_EQUIVALENT, "after 10 steps: teacher"),
    ],
)
def test_what_changes_at_times_changes_at_the_same_times(
    when: str, verdict: Verdict, said: str, tmp_path: Path
) -> None:
    after = SILENT.replace("teacher", "target").replace("% 10 == 0", when)
    result = compared(tmp_path, after, SILENT)
    assert result.verdict is verdict, result.headline
    assert said in result.headline


def scheduled(schedule: str, name: str = "schedule", by: str = "", first: str = "") -> str:
    optimizer = f"""
def get_optimizer(params):
    global {name}
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    {name} = {schedule}
    return optimizer
"""
    return stepped(optimizer, end=by or f"{name}.step()", first=first)


TORCHS = "torch.optim.lr_scheduler."
COSINE = f"{TORCHS}CosineAnnealingLR(optimizer, 100)"
LAMBDA = f"{TORCHS}LambdaLR(optimizer, lambda t: (1 + math.cos(math.pi * t / 100)) / 2)"
STEPS = f"{TORCHS}MultiStepLR(optimizer, [4, 12], gamma=0.5)"
FAR = f"{TORCHS}MultiStepLR(optimizer, [900], gamma=0.5)"
BY_HAND = 'global count\n    count += 1\n    for group in optimizer.param_groups: group["lr"] = '
HALVED = "0.1 * 0.5 ** ((count >= 4) + (count >= 12))"


def by_hand(rate: str) -> str:
    return scheduled("None", by=BY_HAND + rate, first="count = 0\n")


@pytest.mark.parametrize(
    ("before", "after", "verdict", "said"),
    [
        pytest.param(COSINE, scheduled(LAMBDA, "plan"), Verdict.VERIFIED, "", id="another class"),
        pytest.param(LAMBDA, scheduled(COSINE), Verdict.VERIFIED, "", id="the other way", marks=SLOW),
        pytest.param(STEPS, by_hand(HALVED), Verdict.VERIFIED, "", id="by hand", marks=SLOW),
        pytest.param(
            STEPS, by_hand(HALVED.replace("12", "13")), Verdict.NOT_EQUIVALENT, "after 13 steps", id="late", marks=SLOW
        ),
        pytest.param(
            COSINE,
            scheduled(LAMBDA.replace("100", "101")),
            Verdict.NOT_EQUIVALENT,
            "later steps",
            id="longer",
            marks=SLOW,
        ),
        pytest.param(
            FAR,
            scheduled(f"{TORCHS}LambdaLR(optimizer, lambda t: 0.5 ** (t >= 1000))", "plan"),
            Verdict.NOT_EQUIVALENT,
            "from about step 896 on",
            id="much later",
        ),
        pytest.param(FAR, by_hand("0.1"), Verdict.NOT_EQUIVALENT, "after 901 steps: rates", id="never", marks=SLOW),
        pytest.param(
            COSINE, scheduled(LAMBDA, by="pass"), Verdict.NOT_EQUIVALENT, "lr of 0.weight", id="stale", marks=SLOW
        ),
    ],
)
def test_a_schedule_is_its_rates(before: str, after: str, verdict: Verdict, said: str, tmp_path: Path) -> None:
    result = compared(tmp_path, after, scheduled(before))
    assert result.verdict is verdict, result.headline
    assert said in result.headline


@SLOW
def test_rates_by_hand_are_seen_as_far_as_steps_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_checks, "RATES_S", 0.01)
    result = compared(tmp_path, by_hand("0.1"), scheduled(FAR))
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "the other program sets its rates by hand" in result.headline


RISING = "min(1, ({} + 1) / 5)"
RISES = scheduled(f"{TORCHS}LambdaLR(optimizer, lambda t: {RISING.format('t')})")


def set_first(rate: str) -> str:
    begin = f"global count\n    for group in optimizer.param_groups: group['lr'] = 0.1 * {rate}\n    count += 1"
    return stepped(
        "get_optimizer = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)", begin, first="count = 0\n"
    )


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        pytest.param(RISES, set_first(RISING.format("count")), Verdict.VERIFIED, id="by hand"),
        pytest.param(set_first(RISING.format("count")), RISES, Verdict.VERIFIED, id="the other way", marks=SLOW),
        pytest.param(
            RISES, set_first(RISING.format("count + 1")), Verdict.NOT_EQUIVALENT, id="a step early", marks=SLOW
        ),
        pytest.param(
            RISES, set_first("min(0.9, (count + 1) / 5)"), Verdict.NOT_EQUIVALENT, id="lower at last", marks=SLOW
        ),
        pytest.param(
            RISES, set_first("(min(1, (count + 1) / 5) - (count >= 900) / 2)"), Verdict.NOT_EQUIVALENT, id="much later"
        ),
    ],
)
def test_a_rate_may_be_set_before_the_step_or_after_the_one_before(
    before: str, after: str, verdict: Verdict, tmp_path: Path
) -> None:
    result = compared(tmp_path, after, before)
    assert result.verdict is verdict, result.headline


MOMENTUM = """
class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                state = self.state[p]
                if not state:
                    state.update(velocity=torch.zeros_like(p), master=p.clone(), count=0)
                state["count"] += 1
                state["velocity"].mul_(group["momentum"]).add_(p.grad)
                state["master"].copy_(p).add_(state["velocity"], alpha=-group["lr"])
                p.copy_(state["master"])
get_optimizer = lambda params: Mine(params)
"""
KEEPS_DIMENSIONS = (
    MOMENTUM.replace("velocity", "momentum_buffer")
    .replace("=torch.zeros_like(p)", "=torch.zeros_like(p)[None]")
    .replace(".add_(p.grad)", ".add_(p.grad[None])")
    .replace('add_(state["momentum_buffer"]', 'add_(state["momentum_buffer"][0]')
)
SCALED = MOMENTUM.replace(".add_(p.grad)", '.add_(p.grad, alpha=group["lr"])').replace('-group["lr"]', "-1.0")
SGD = "get_optimizer = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)"


@pytest.mark.parametrize(
    ("after", "verdict", "said"),
    [
        pytest.param(MOMENTUM, Verdict.VERIFIED, "", id="names and more"),
        pytest.param(KEEPS_DIMENSIONS, Verdict.VERIFIED, "", id="a dimension more"),
        pytest.param(MOMENTUM.replace("=0.9", "=0.91"), Verdict.NOT_EQUIVALENT, "momentum", id="another", marks=SLOW),
        pytest.param(
            MOMENTUM.replace(".mul_(group", ".mul_(0 * group"), Verdict.NOT_EQUIVALENT, "", id="none", marks=SLOW
        ),
        pytest.param(SCALED, Verdict.UNVERIFIED, "keeps velocity instead", id="another scale", marks=SLOW),
    ],
)
def test_an_optimizers_state_is_known_by_its_values(after: str, verdict: Verdict, said: str, tmp_path: Path) -> None:
    result = compared(tmp_path, stepped(after), stepped(SGD))
    assert result.verdict is verdict, result.headline
    assert said in result.headline


LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, k=5, alpha=0.5):
        self.inner, self.k, self.alpha = inner, k, alpha
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, defaultdict(dict)
        self.count = 0
    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if "slow" not in state: state["slow"] = p.detach().clone()
            if self.count % self.k == 0:
                state["slow"].lerp_(p, self.alpha)
                p.copy_(state["slow"])
    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none=set_to_none)
get_optimizer = lambda params: Lookahead(torch.optim.SGD(params, lr=0.1, momentum=0.9))
"""
RENAMED = LOOKAHEAD.replace("inner", "base").replace("slow", "anchor")


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        pytest.param(RENAMED, Verdict.VERIFIED, id="names"),
        pytest.param(RENAMED.replace("k=5", "k=6"), Verdict.NOT_EQUIVALENT, id="later", marks=SLOW),
        pytest.param(RENAMED.replace("alpha=0.5", "alpha=0.6"), Verdict.NOT_EQUIVALENT, id="further", marks=SLOW),
        pytest.param(RENAMED.replace("=0.9", "=0.91"), Verdict.NOT_EQUIVALENT, id="another within", marks=SLOW),
    ],
)
def test_an_optimizer_around_another_keeps_the_state_of_both(after: str, verdict: Verdict, tmp_path: Path) -> None:
    result = compared(tmp_path, stepped(after), stepped(LOOKAHEAD))
    assert result.verdict is verdict, result.headline


@SLOW
def test_a_count_that_one_program_reads_alone_is_unseen_in_the_other(tmp_path: Path) -> None:
    late = "if calls == 10**6: optimizer.param_groups[0]['lr'] = 0.01"
    counting = stepped(SGD, begin="global calls; calls += 1", end=late, first="calls = 0\n")
    assert compared(tmp_path, counting, stepped(SGD)).verdict is Verdict.VERIFIED
    result = compared(tmp_path, stepped(SGD), counting)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "nothing that the second program keeps counts alike" in result.headline


def test_another_seed_is_named(tmp_path: Path) -> None:
    before = stepped(SGD)
    result = compared(tmp_path, before.replace("Model = lambda: ", "Model = lambda: torch.manual_seed(7) and "), before)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "begins with other values than the first one's (0.weight differs), as with another seed" in result.headline


def test_values_that_begin_apart_by_rounding_are_no_other_seed(tmp_path: Path) -> None:
    before = stepped(SGD)
    rounded = "(m := {}).requires_grad_() and [p.data.mul_(1 + 2**-22) for p in m.parameters()] and m"
    after = re.sub(r"Model = lambda: (.*)", lambda found: "Model = lambda: " + rounded.format(found[1]), before)
    assert after != before
    result = compared(tmp_path, after, before)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "begins with other values in the second program (0.weight differs, by less than 0.001 %" in result.headline


ADAM = "get_optimizer = lambda params: torch.optim.Adam(params, lr=1e-3)"
BY_ITSELF = (
    HEAD
    + """
kept = {}
def train_step(model, batch, optimizer):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    kept["t"] = kept.get("t", 0) + 1
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            m, v = (kept.setdefault((name, i), torch.zeros_like(p)) for name in "mv")
            m.lerp_(p.grad, 0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            size = (v / (1 - 0.999 ** kept["t"])).sqrt() + 1e-8
            p.sub_(1e-3 * m / (1 - 0.9 ** kept["t"]) / size)
    return loss
"""
)
WITHOUT_MEMORY = BY_ITSELF.replace("m.lerp_(p.grad, 0.1)", "m.copy_(0.1 * p.grad)")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        pytest.param(stepped(ADAM), BY_ITSELF, Verdict.VERIFIED, id="in place of an optimizer's"),
        pytest.param(BY_ITSELF, stepped(ADAM), Verdict.VERIFIED, id="the other way", marks=SLOW),
        pytest.param(stepped(ADAM), WITHOUT_MEMORY, Verdict.NOT_EQUIVALENT, id="none", marks=SLOW),
        pytest.param(WITHOUT_MEMORY, stepped(ADAM), Verdict.NOT_EQUIVALENT, id="none, the other way", marks=SLOW),
        pytest.param(
            stepped(ADAM), BY_ITSELF.replace("1e-3", "1.01e-3"), Verdict.NOT_EQUIVALENT, id="another rate", marks=SLOW
        ),
    ],
)
def test_state_that_a_step_keeps_by_itself_is_known_by_its_values(
    before: str, after: str, verdict: Verdict, tmp_path: Path
) -> None:
    result = compared(tmp_path, after, before)
    assert result.verdict is verdict, result.headline


def test_gradients_that_nobody_sees_are_asked_for(tmp_path: Path) -> None:
    descent = stepped("get_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)")
    unseen = (
        HEAD
        + """
def train_step(model, batch, optimizer):
    weights = [*model.parameters()]
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    with torch.no_grad():
        for p, gradient in zip(weights, torch.autograd.grad(loss, weights)): p.sub_(0.1 * gradient)
    return loss
"""
    )
    result = compared(tmp_path, unseen, descent)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "leaves no gradient in p.grad" in result.headline
