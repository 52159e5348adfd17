"""How a candidate is verified: who does what, in which order. Runs in the parent, and never holds a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any, Protocol

from optexp.equivalence import dice, trajectory
from optexp.equivalence.bits import REPEATS, SURE, Bits, promised
from optexp.equivalence.families import FAMILIES, NONCONTIGUOUS, NORMAL, ONE_BY_ONE
from optexp.equivalence.far_off import FarOff
from optexp.equivalence.gates import broken
from optexp.equivalence.quantities import whole
from optexp.equivalence.slopes import PROVES
from optexp.errors import Failure, Unshared
from optexp.program import unreadable
from optexp.reporting.wording import unchecked_bits
from optexp.strategy import BITWISE, Contract
from optexp.workers.parcel import Parcel

SPREAD_RUNS = 5  # yardstick runs of a baseline that does not
CHANCE = ("Crash", "Timeout", "OutOfMemoryError")  # failures that need not be due to an input's values
OTHER_SEED = 10_000
SAME_BATCHES = "the loader gives the same batches whatever the seed: they count as one set of inputs"
TABULATED = 50  # tensors that have a row of their own in the record, those nearest to their limits
CLOSE = 1.5  # times the yardstick's error, above which nothing is called as close

Message = dict[str, Any]
Progress = Callable[[str], None]


class Arm(Protocol):
    """A process that holds one program, or the judge.

    all:       fill(piece) and by_host() -> parcel; expect(parcel) and take(piece): what is asked next is about the
               parcel that was taken last
    reference: draw(seed, count, family); batch(index) -> parcel; reference_info() -> dict; yardstick(step);
               judge(step) -> messages; dead() and constant() -> names; power() -> trials;
               distribution(tensor) -> shares
    name:      as a failure of its process tells it
    others:    load(index, family); observe(step, restore, noise, forward, order) -> parcel; repeats(times) -> bool;
               reassociated_operators() -> count; passed() -> list of Passed;
               varying(times, step, repeating) -> names;
               overwritten() -> names; losses(unit, seed) -> list; throw(unit) -> dice.Throws; rest(keep_fresh)
    """

    name: str

    def call(self, method: str, **arguments: Any) -> Any: ...

    def start(self, method: str, **arguments: Any) -> None: ...

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class Plan:
    """What is checked.

    seeds:      of fresh normal inputs; the last of several exchanges one input after the other
    steps:      consecutive steps per seed; several where they change state, so that what is frozen shows
    families:   of other inputs, one set of each
    overwrites: the candidate says that a step overwrites what the one before returned
    power:      the gates must show that they see mutants
    follow:     training is followed for many steps
    in_turns:   only the arm that takes a step holds batches and results
    """

    seeds: Sequence[int]
    steps: int = 1
    families: Sequence[str] = ()
    overwrites: bool = False
    power: bool = True
    follow: bool = False
    in_turns: bool = False

    @property
    def sets(self) -> list[tuple[int, str]]:
        """Seed and family of every set of inputs, the normal ones first."""
        *others, last = self.seeds
        normal = [*((seed, NORMAL) for seed in others), (last, ONE_BY_ONE if others else NORMAL)]
        return normal + [(self.seeds[0], family) for family in self.families if family != NORMAL]


@dataclass
class Verification:
    """What verification found. Ratios are the candidate's error over the baseline's, both against fp64.

    tails:        odd sizes at which it was verified too
    tensors:      by name, what stood nearest to its limit: gate, error, worst element, family, seed, step
    mutants:      by name, how many were tried and caught, and on which tensors they passed
    visible:      by tensor, the smallest RMS error and the smallest of one element that would have failed, over s
    dead:         inputs that the result does not depend on
    constant:     inputs that held the same values in every draw
    far_off:      at lower precision, by result: rows off by far more than rounding in the candidate, in plain autocast,
                  and all rows (see `optexp.equivalence.far_off`)
    unchecked_bits: tensors that were promised to have equal bits, and have others in every run of the baseline
    unseen:       by tensor, why a wrong value could not be told from a right one
    unkept:       what the model keeps in Python and no arm can put back, where that may be why
    parts_in:     where the baseline and fp64 part, if rounding does not explain it
    unread:       results, or parts of one, that hold nothing that can be compared
    varied:       which parameters had other values than they begin with (see `equivalence.generic`)
    distribution: shares of the errors of the worst output (see `gates.histogram`), of both arms
    trajectory:   of many training steps: where the loss strays farthest, as a share of what it may
    recheck:      of the last step of a timed block, and of fresh inputs after timing
    state:        global settings that the candidate changed without saying so
    seconds:      where its time went (see `optexp.equivalence.watched`)
    """

    contract: str
    ok: bool = True
    weakest: Message = field(default_factory=dict)  # the largest error above "warn", where there is one
    bitwise: bool = True
    repeats: bool = True
    seeds: list[int] = field(default_factory=list)
    reference: str = ""
    families: list[str] = field(default_factory=list)
    tails: list[str] = field(default_factory=list)
    gates: dict[str, dict[str, Any]] = field(default_factory=dict)
    worst: Message = field(default_factory=dict)
    failures: list[Message] = field(default_factory=list)
    tensors: dict[str, Message] = field(default_factory=dict)
    mutants: dict[str, Message] = field(default_factory=dict)
    visible: dict[str, Any] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)
    constant: list[str] = field(default_factory=list)
    far_off: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    unchecked_bits: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)
    unkept: str = ""
    parts_in: str = ""
    unread: list[str] = field(default_factory=list)
    varied: str = ""
    distribution: Message = field(default_factory=dict)
    trajectory: Message = field(default_factory=dict)
    randomness: Message = field(default_factory=dict)
    recheck: Message = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error_ratio: float | None = None
    max_ratio: float | None = None
    headline: str = ""

    @property
    def weakness(self) -> str | None:
        """What passes, though with clearly more error than the yardstick's; shown beside any speedup."""
        if not self.weakest:
            return None
        return f"{self.weakest['tensor']} has {self.weakest['error_ratio']:.2f}× its error"

    @property
    def undecided(self) -> str:
        """Why the results are neither right nor wrong; empty where they are."""
        if not (self.ok and self.unseen):
            return ""
        tensor, why = next(iter(self.unseen.items()))
        others = f" (and of {len(self.unseen) - 1} more)" if len(self.unseen) > 1 else ""
        because = "".join(f"; {text}" for text in (self.parts_in, self.unkept) if text)
        return f"a wrong {tensor} could not be told from a right one{others}: {why}{because}"

    def to_dict(self) -> dict[str, Any]:
        """As it stands in `result.json`: numbers that JSON has no word for become null."""
        clean: dict[str, Any] = _clean(self.__dict__)
        return clean


@dataclass
class Trial:
    """One verification under way: the three that take part, and what they have said.

    in_turns: as the plan has it, or the reference, which knows the sizes of results
    holder:   where arms take turns, the one that has batches, and which of those drawn
    others_learn: gradients are for somebody else, who changes parameters
    """

    reference: Arm
    yardstick: Arm
    candidate: Arm
    plan: Plan
    contract: Contract
    verification: Verification
    messages: list[Message] = field(default_factory=list)
    bits: Bits = field(default_factory=Bits)
    in_turns: bool = False
    holder: tuple[Arm, tuple[int, ...]] | None = None
    family: str = NORMAL
    others_learn: bool = False

    def passed(self) -> bool:
        return all(message["ok"] for message in self.messages)

    def load(self, seed: int, family: str, count: int) -> Message:
        """Fresh inputs to both arms. Returns what the reference says about them."""
        arms, self.family = (self.yardstick, self.candidate), family
        if self.in_turns:
            self.rest(*arms)
        self.reference.call("draw", seed=seed, count=count, family=family)
        info: Message = self.reference.call("reference_info")
        self.others_learn = info["others_learn"]
        if info["in_turns"] and not self.in_turns:
            self.in_turns = True
            self.rest(*arms)
        if not self.in_turns:
            deliver(self.reference, arms, range(info["steps"]), family)
        return info

    def turn(self, arm: Arm, *steps: int) -> Arm:
        """The arm, with the batches of these steps."""
        if self.in_turns and self.holder != (arm, steps):
            if self.holder is not None:
                self.rest(self.holder[0])
            deliver(self.reference, (arm,), steps, self.family)
            self.holder = arm, steps
        return arm

    def rest(self, *arms: Arm) -> None:
        """No arm holds a batch."""
        for arm in arms:
            arm.call("rest")
        self.holder = None

    def observe(
        self, arm: Arm, step: int, restore: bool, noise: int | None = None, forward: bool = False, **options: Any
    ) -> None:
        """One step of an arm, conveyed to the reference."""
        self.turn(arm, step)
        seen = arm.call("observe", step=step, restore=restore, noise=noise, forward=forward, **options)
        convey(seen, arm, self.reference)
        if self.in_turns:
            arm.call("rest", keep_fresh=noise is not None)  # noisy runs follow each other
            self.holder = self.holder if noise is not None else None

    def measure(
        self,
        step: int,
        restore: bool,
        noise: int | None = None,
        forward: bool = False,
        order: int | None = None,
        **options: bool,
    ) -> None:
        """One more run of the baseline for the reference to take its yardsticks from."""
        self.observe(self.yardstick, step, restore, noise, forward, order=order, **options)
        self.reference.call("yardstick", step=step)

    def judged(self, step: int, restore: bool, **options: bool) -> list[Message]:
        """What the gates say of a run of the candidate."""
        self.observe(self.candidate, step, restore, **options)
        messages: list[Message] = self.reference.call("judge", step=step)
        return messages

    def add(self, messages: Sequence[Message], seed: int, step: int, family: str) -> None:
        about = {"seed": seed, "step": step, "family": family}
        self.messages += [{**message, **about} for message in messages]


def verify(
    reference: Arm,
    yardstick: Arm,
    candidate: Arm,
    plan: Plan,
    contract: Contract,
    on_progress: Progress = lambda text: None,
) -> Verification:
    """Compare the candidate with fp64, by the measure of what the baseline does, on fresh inputs for every set.

    yardstick: the bare eager program; for a PRECISION contract plain autocast
    Inputs are drawn here, so after the arms compiled, warmed up and captured. Ends at the first set that fails.
    Where equivalence cannot be decided, the reference raises NoReference.
    """
    verification = Verification(str(contract))
    trial = Trial(reference, yardstick, candidate, plan, contract, verification, in_turns=plan.in_turns)
    sets = plan.sets
    for position, (seed, family) in enumerate(sets):
        on_progress(f"fresh input set {position + 1} of {len(sets)}" + (f": {family}" if family in FAMILIES else ""))
        try:
            one_set(trial, seed, family)
        except Exception as error:
            kind = getattr(error, "type", type(error).__name__)
            by_candidate = getattr(error, "worker", None) == trial.candidate.name
            if by_candidate and family in FAMILIES and kind not in CHANCE:
                text = f"the candidate raises {kind} where the baseline computes ({error})"
                trial.add([broken("outputs", text).to_dict()], seed, 0, family)
                break
            if family in (NORMAL, ONE_BY_ONE) or kind != "NoReference":
                raise
            trial.verification.notes.append(f"inputs of family {family.replace('_', ' ')} prove nothing: {error}")
            continue
        if not trial.passed():
            break
        if position == len(plan.seeds) - 1 and plan.power:
            power(trial)
    if plan.power and trial.passed() and contract.dtype != "float16":  # whose gradients may overflow then
        with_other_parameters(trial, plan.seeds[0] + OTHER_SEED)
    if plan.follow and trial.passed():
        on_progress(f"following the loss for {trajectory.STEPS} steps")
        follow(trial, plan.seeds[0])
    trial.verification.unchecked_bits = trial.bits.unchecked(trial.messages) if contract == BITWISE else []
    return _conclude(trial.verification, trial.messages, contract)


def deliver(reference: Arm, arms: Sequence[Arm], indices: Iterable[int], family: str) -> None:
    """Some of what the reference has drawn, batch by batch."""
    for place, index in enumerate(indices):
        convey(reference.call("batch", index=index), reference, *arms)
        for arm in arms:
            arm.call("load", index=place, family=family)


def convey(parcel: Parcel, sender: Arm, *receivers: Arm) -> None:
    """Every piece of a parcel: the next one is filled while one is taken."""
    try:
        expect(parcel, *receivers)
    except Failure as reason:
        if reason.type != Unshared.__name__:
            raise
        parcel = sender.call("by_host")
        expect(parcel, *receivers)
    sender.call("fill", piece=0)
    for piece in range(parcel.pieces):
        more = piece + 1 < parcel.pieces
        if more:
            sender.start("fill", piece=piece + 1)
        try:
            for receiver in receivers:
                receiver.call("take", piece=piece)
        finally:
            if more:
                sender.wait()


def expect(parcel: Parcel, *receivers: Arm) -> None:
    for receiver in receivers:
        receiver.call("expect", parcel=parcel)


# --- the checks ------------------------------------------------------------------------------------------------


def one_set(trial: Trial, seed: int, family: str) -> None:
    """Gates on one set of inputs: yardsticks first, then every step of the candidate."""
    verification, restart = trial.verification, family == ONE_BY_ONE
    info = trial.load(seed, family, trial.plan.steps)
    steps = info["steps"]
    if not verification.seeds:
        trial.bits.varying = set(trial.turn(trial.yardstick, 0).call("varying", times=REPEATS))
        verification.repeats = not trial.bits.varying
    if trial.contract == BITWISE and not verification.repeats and family in (NORMAL, ONE_BY_ONE):
        equal_bits(trial, seed, family)
    if restart:
        exchange(trial, seed)
    if not trial.in_turns:  # large tensors have no room for it, nor sums that one run is a lottery for
        trial.measure(0, True)  # what reassociated and noisy runs are held against
        reassociate(trial, info["reassociated_runs"])
    noisy = list(range(info["noisy_steps"]))
    for noise in sorted(noisy, key=lambda noise: noise % steps) if restart else noisy:
        trial.measure(noise % steps, restart or noise % steps == 0, noise + 1)
    for extra in range(0 if verification.repeats else (SPREAD_RUNS - 1) * steps):
        # Gradients have the noisy runs.
        trial.measure(extra % steps, restart or extra % steps == 0, forward=True)
    found = list[list[Message]]()
    for step in range(steps):
        trial.measure(step, restart or step == 0)
        found.append(judged := trial.judged(step, restart or step == 0))
        if family not in FAMILIES and not verification.parts_in and any(m["parted"] for m in judged):
            verification.parts_in = where_they_part(trial)
    if trial.contract == BITWISE:
        found = same_bits(trial, found, restart)
    for step, messages in enumerate(found):
        trial.add(messages, seed, step, family)
    if not verification.repeats and not trial.passed():
        itself(trial, steps, restart)
    if family in (NORMAL, ONE_BY_ONE) and (info["anew"] or not verification.seeds):
        verification.seeds.append(seed)
    elif family in (NORMAL, ONE_BY_ONE):
        verification.notes += [SAME_BATCHES] if SAME_BATCHES not in verification.notes else []
    name = NORMAL if restart else family
    verification.families += [name] if name not in verification.families else []
    verification.reference = info["reference"]


def equal_bits(trial: Trial, seed: int, family: str) -> None:
    """A baseline that does not repeat itself has bits to compare with where torch's deterministic algorithms give it
    some: both are run there, from where all begin."""
    bits = trial.bits
    if bits.hopeless is None:
        bits.hopeless = set(trial.turn(trial.yardstick, 0).call("varying", times=REPEATS, repeating=True))
    if bits.varying <= bits.hopeless:
        return
    trial.measure(0, restore=True, repeating=True)
    judged = trial.judged(0, restore=True, repeating=True)
    if not all(message["ok"] for message in bits.settled(judged)):
        bits.hopeless |= set(trial.turn(trial.yardstick, 0).call("varying", times=SURE, repeating=True))
    bits.note(found := bits.settled(judged))
    trial.add(found, seed, 0, family)


def same_bits(trial: Trial, judged: Sequence[Sequence[Message]], restart: bool) -> list[list[Message]]:
    """What a stack that promises equal bits is held to, step by step: of each tensor that the baseline repeats."""
    bits, verification = trial.bits, trial.verification
    steps = [(step > 0 and not restart, messages) for step, messages in enumerate(judged)]
    suspected = [step for step, (later, each) in enumerate(steps) if any(bits.deviating(m, later) for m in each)]
    for step in suspected:  # atomics seldom meet: what was the same three times may not be
        found = set(trial.turn(trial.yardstick, step).call("varying", times=SURE, step=step))
        if not found <= bits.varying:
            bits.varying, bits.hopeless, verification.repeats = bits.varying | found, None, False
    return [[promised(m) if bits.binding(m, later) else m for m in each] for later, each in steps]


def where_they_part(trial: Trial) -> str:
    """The place where the baseline and float64 compute something else."""
    module = trial.reference.call("first_apart", passed=trial.turn(trial.yardstick, 0).call("passed"))
    where = f"first in {module}" if module else "behind all modules, as in the loss"
    return (
        f"it computes something else there, {where}: a constant or a branch that depends on the dtype, or what its code"
        " keeps from call to call; make it the same in every dtype (eps=1e-7), or hold it in a buffer"
    )


def reassociate(trial: Trial, runs: int, step: int = 0) -> None:
    """Runs of the baseline in other orders, as long as there is anything to reorder."""
    for order in range(1, runs + 1):
        trial.measure(step, True, order=order)
        if not trial.yardstick.call("reassociated_operators"):
            return


def with_other_parameters(trial: Trial, seed: int) -> None:
    """Gradients are for somebody who changes parameters: until then a step that computes with a copy, folded or cast
    before, is right. What only infers may do that, and a whole training step changes them itself."""
    if not trial.others_learn:
        return
    verification, begin = trial.verification, len(trial.messages)
    seeds, arms = list(verification.seeds), (trial.reference, trial.yardstick, trial.candidate)
    for arm in arms:
        arm.call("turn_parameters")
    try:
        one_set(trial, seed, NORMAL)
    except Exception as error:
        if getattr(error, "type", type(error).__name__) != "NoReference":
            raise
        verification.notes.append(f"other values of parameters prove nothing: {error}")
    finally:
        for arm in arms:
            arm.call("turn_parameters")
        verification.seeds = seeds
    for message in (m for m in trial.messages[begin:] if not m["ok"]):
        message["message"] = "; ".join(filter(None, (message["message"], "with other values of the parameters")))


def itself(trial: Trial, steps: int, restart: bool) -> None:
    """A baseline that fails as its own candidate is no yardstick for any other. By chance it may pass once."""
    for step in list(range(steps)) * SPREAD_RUNS:
        trial.measure(step, restart or step == 0)
        for again in range(step if restart else 0, step + 1):  # from the start: a count would be one step ahead
            trial.observe(trial.yardstick, again, restart or again == 0)
        if wrong := [m for m in trial.reference.call("judge", step=step) if not m["ok"]]:
            raise Failure(
                "NoReference",
                f"the baseline does not pass beside itself ({wrong[0]['tensor']}: {wrong[0]['message']}): its steps"
                " depend on what no arm can restore, as a clock, a counter or random numbers that torch does not draw",
            )


def exchange(trial: Trial, seed: int) -> None:
    """Which inputs matter at all, and whether outputs outlive the next step."""
    verification = trial.verification
    verification.dead = trial.reference.call("dead")
    verification.constant = trial.reference.call("constant")
    if dead := ", ".join(verification.dead):
        verification.notes.append(f"the result does not depend on input {dead}: what is done with it is not checked")
    if constant := ", ".join(verification.constant):
        verification.notes.append(f"input {constant} was the same in every draw: other values of it are not checked")
    if not trial.plan.overwrites:
        candidate, yardstick = (trial.turn(arm, 0, 1).call("overwritten") for arm in (trial.candidate, trial.yardstick))
        lost = set(candidate) - set(yardstick)
        text = "the next step writes over it, and the candidate does not say so (Strategy.overwrites)"
        trial.add([broken(name, text).to_dict() for name in sorted(lost)], seed, 1, ONE_BY_ONE)


def power(trial: Trial) -> None:
    """Would the gates that just passed have seen a wrong result?"""
    verification = trial.verification
    for found in trial.reference.call("power"):
        row = verification.mutants.setdefault(found["mutant"], {"tried": 0, "caught": 0, "passed": []})
        row["tried"] += 1
        row["caught"] += found["caught"]
        row["passed"] += [] if found["caught"] else [found["tensor"]]
        if found["visible"] is not None:
            verification.visible[found["tensor"]] = found["visible"]
    outputs = [m for m in trial.messages if "/" not in m["tensor"] and m["error_rms"] is not None]
    if outputs:
        tensor = whole(max(outputs, key=lambda m: m["used"])["tensor"])  # small columns come and go
        verification.distribution = {"tensor": tensor, **trial.reference.call("distribution", tensor=tensor)}


def follow(trial: Trial, seed: int) -> None:
    """The loss over many steps, beside what one rounding of the parameters makes of the baseline's."""
    info = trial.load(seed, NORMAL, 8)
    unit, every = info["unit_used"], range(info["steps"])
    yardstick = trial.turn(trial.yardstick, *every)
    plain = yardstick.call("losses", unit=0.0, seed=0)
    moved = [yardstick.call("losses", unit=unit, seed=run + 1) for run in range(trajectory.PERTURBED)]
    candidate = trial.turn(trial.candidate, *every)
    step, share = trajectory.strays(candidate.call("losses", unit=0.0, seed=0), plain, moved, unit)
    trial.verification.trajectory = {"steps": trajectory.STEPS, "step": step, "share": share}
    if share > 1:
        text = f"after {step + 1} steps the loss is {share:.3g} times as far from the baseline's as rounding explains"
        found = {**broken("loss", text).to_dict(), "gate": "TRAJECTORY", "failed": ("TRAJECTORY",)}
        trial.add([found], seed, step, NORMAL)


def verify_randomness(
    verification: Verification, reference: Arm, yardstick: Arm, candidate: Arm, seed: int, unit: float
) -> None:
    """For steps that draw random numbers, whose gates passed with every dropout at p = 0: the same at the real rates.

    unit: u of the arithmetic that was promised
    """
    reference.call("draw", seed=seed, count=1, family=NORMAL)
    deliver(reference, (yardstick, candidate), range(1), NORMAL)
    expected, found = yardstick.call("throw", unit=unit), candidate.call("throw", unit=unit)
    zeros = reference.call("zeros") if expected.moments else {}
    findings, verification.randomness = dice.compare(found, expected, unit, zeros)
    failed = [{**finding.to_dict(), "seed": seed, "step": 0, "family": NORMAL} for finding in findings]
    verification.gates["DICE"] = {"passed": not failed, "worst_ratio": None}
    verification.failures += failed
    if failed:
        verification.ok, verification.worst = False, failed[0]
        verification.headline = failure(failed[0])
    else:
        facts = [text for fact, text in _DICE.items() if getattr(expected, fact)]
        limit = verification.randomness.get("slopes_limit", 0.0)
        facts += [_SLOPES] if 0 < limit <= PROVES else []
        if limit > PROVES:
            verification.notes.append(f"whether {_SLOPES} is not known: the baseline's scatter too much around them")
        verification.headline = (
            f"with every dropout at p = 0, {verification.headline}; at its real rate, the results of {dice.SEEDS} seeds"
            f" of each are distributed alike" + (f", {', '.join(facts)}" if facts else "")
        )


_DICE = {"repeat": "equal seeds repeat", "differ": "others differ"}
_SLOPES = "gradients are those of the loss"


def _conclude(verification: Verification, messages: list[Message], contract: Contract) -> Verification:
    verification.bitwise = all(m["bitwise"] for m in messages if m["gate"] not in ("G0", "SKIPPED"))
    verification.failures = [m for m in messages if not m["ok"]]
    verification.ok = bool(messages) and not verification.failures
    if verification.ok:
        verification.weakest = max((m for m in messages if m["weak"]), key=lambda m: m["error_ratio"], default={})
    if verification.failures and not verification.repeats:
        verification.notes.append(
            "the baseline does not repeat its own steps bit for bit: by chance, or because it keeps what neither"
            " parameters, buffers nor the optimizer hold, nor globals beside train_step, and no arm can restore"
        )
    verification.bitwise = verification.bitwise and not any("G0" in m["failed"] for m in verification.failures)
    verification.notes += sorted({m["message"] for m in messages if m["ok"] and m["message"]})
    verification.notes += sorted(
        f"inputs of family {m['family'].replace('_', ' ')} prove nothing about {m['tensor']}: {m['unseen']}"
        for m in messages
        if m["unseen"] and m["family"] in FAMILIES
    )
    verification.unseen = unseen(messages)
    verification.unread = sorted({m["tensor"] for m in messages if unreadable(m["tensor"])})
    verification.far_off = _far_off(messages)
    verification.worst = max(messages, key=lambda m: m["used"], default={})
    verification.gates = _gates(messages, contract)
    nearest = {m["tensor"]: m for m in sorted(messages, key=lambda m: m["used"])}
    verification.tensors = dict(sorted(nearest.items(), key=lambda item: -item[1]["used"])[:TABULATED])
    outputs = [m for m in messages if "/" not in m["tensor"] and m["error_rms"] is not None]
    verification.error_ratio = _pooled(outputs)
    verification.max_ratio = max((m["max_ratio"] for m in outputs), default=None)
    verification.headline = _headline(verification, messages, contract)
    return verification


def _far_off(messages: list[Message]) -> dict[str, tuple[int, int, int]]:
    """Of all sets of inputs as declared, where a row is off at all."""
    found: dict[str, FarOff] = {}
    for message in messages:
        if message["far_off"] and message["family"] in (NORMAL, ONE_BY_ONE):
            found[message["tensor"]] = found.get(message["tensor"], FarOff(0, 0, 0)) + FarOff(*message["far_off"])
    return {name: rows.to_tuple() for name, rows in found.items() if rows.candidate or rows.plain}


def unseen(messages: Sequence[Message]) -> dict[str, str]:
    """Tensors that no set of usual inputs could have shown to be wrong. A gradient that hangs on a tie in one set is
    seen in another; equal bits show nothing of what others would have been let through."""
    usual = [m for m in messages if m["family"] not in FAMILIES and m["error_rms"] is not None]
    seen = {m["tensor"] for m in usual if not m["unseen"] and not m["bitwise"]}
    hidden = [m for m in usual if m["unseen"] and m["tensor"] not in seen]
    return {m["tensor"]: m["unseen"] for m in sorted(hidden, key=lambda m: -(m["visible"] or (inf,))[0])}


def _gates(messages: list[Message], contract: Contract) -> dict[str, dict[str, Any]]:
    """Per gate whether it passed, and the largest ratio to the baseline's error where it has one."""
    measured = [m for m in messages if m["error_rms"] is not None]
    ratios: dict[str, float | None] = {
        "G0": None,
        "G1": max((m["error_ratio"] for m in measured), default=None),
        "G2": max((m["max_ratio"] for m in measured), default=None),
        "G3": max((m["block_ratio"] for m in measured if m["block_ratio"] is not None), default=None),
    }
    if contract == BITWISE:
        ratios["BITWISE"] = None
    if contract.name == "PRECISION":
        ratios["CAP"] = None
    failed = {gate for m in messages for gate in m["failed"]}
    ratios |= dict.fromkeys(failed - ratios.keys())
    return {gate: {"passed": gate not in failed, "worst_ratio": ratio} for gate, ratio in ratios.items()}


def _pooled(messages: list[Message]) -> float | None:
    """The largest ratio of RMS errors over tensors, each over all its steps: one step of one scalar may be luck."""
    ratios = []
    for tensor in {m["tensor"] for m in messages}:
        same = [m for m in messages if m["tensor"] == tensor]
        error, baseline = (sqrt(sum(m[key] ** 2 for m in same)) for key in ("error_rms", "baseline_rms"))
        ratios.append(error / baseline if baseline else (inf if error else 0.0))
    return max(ratios, default=None)


def _headline(verification: Verification, messages: list[Message], contract: Contract) -> str:
    """One sentence for people."""
    yardstick = f"plain {contract.dtype} autocast" if contract.name == "PRECISION" else "the baseline"
    if not verification.ok:
        return failure(verification.worst)
    what = _listed([m["tensor"] for m in messages])
    sets = f"{len(verification.seeds)} fresh input set{'s' if len(verification.seeds) > 1 else ''}"
    others = len(verification.families) - 1
    sets += f" and {others} other famil{'ies' if others > 1 else 'y'} of inputs" if others else ""
    sets = "; ".join(filter(None, (sets, unchecked_bits(verification.unchecked_bits))))
    if verification.bitwise:
        return f"{what} equal those of {yardstick} bit for bit; {sets}"
    if verification.weakest:
        return f"{what} agree with fp64, but weaker than {yardstick}: {verification.weakness}; {sets}"
    ratio = verification.error_ratio
    if ratio is not None and CLOSE < ratio < inf:  # where the yardstick happens to err by less than rounding may
        return f"{what} agree with fp64 to rounding (outputs at worst {ratio:.2f}× the error of {yardstick}); {sets}"
    compared = f" (outputs at worst {ratio:.2f}× its error)" if ratio is not None and 0.01 <= ratio < inf else ""
    return f"{what} agree with fp64 as closely as {yardstick} does{compared}; {sets}"


def failure(message: Message) -> str:
    """One sentence about what failed, and where."""
    where = f"seed {message['seed']}, step {message['step']}"
    if message["family"] in FAMILIES or message["family"] == NONCONTIGUOUS:
        where += f", {message['family'].replace('_', ' ')} inputs"
    return f"{message['tensor']} fails {message['gate']}: {message['message']} ({where})"


def _listed(tensors: Sequence[str]) -> str:
    words = {"input": "inputs", "grad": "gradients", "change": "parameter changes", "optimizer": "optimizer state"}
    words |= {"buffer": "buffers"}
    kinds = dict.fromkeys(words.get(t.partition("/")[0], t) if "/" in t else _output(t) for t in tensors)
    kinds.pop("", None)
    names = [kind for kind in kinds if not kind.startswith(("scaler", "generators", "attribute "))]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _output(name: str) -> str:
    return "outputs" if name.startswith("output") else name


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
