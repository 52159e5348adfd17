"""The goal of a search: which trials are measured longer, and which stacks are kept. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.config.auto_settings import AutoSettings
from optexp.records.trials import Figures, Gain, Trial
from optexp.result import Verdict
from optexp.support.units import duration, mebibytes, ratio

FIGURE = {"memory": "peak memory", "energy": "energy of a step"}


@dataclass(frozen=True)
class Judgement:
    """A decision on a trial.

    go_on: a quick trial is followed by a longer one; the stack of a longer one is kept
    text:  the reason
    """

    go_on: bool
    text: str


@dataclass(frozen=True)
class Goal:
    """The objective of a search, and its limits.

    objective:        time, memory or energy, of which the stack is to take less
    min_gain:         least gain, as a share, for which a trial is made
    memory_limit_mib: most peak memory of a stack; None: no limit
    max_slowdown:     most step time over the baseline's, where the objective is not time
    """

    objective: str = "time"
    min_gain: float = 0.02
    memory_limit_mib: float | None = None
    max_slowdown: float = 1.1

    @classmethod
    def of(cls, settings: AutoSettings) -> Goal:
        limit = settings.memory_limit_bytes
        return cls(
            settings.objective, settings.min_gain, limit / 2**20 if limit is not None else None, settings.max_slowdown
        )

    @property
    def constraints(self) -> list[str]:
        """The limits in words."""
        found = []
        if self.memory_limit_mib is not None:
            found.append(f"peak memory at most {mebibytes(self.memory_limit_mib)}")
        if self.objective != "time":
            found.append(f"a step at most {self.max_slowdown:g}× the baseline's")
        return found

    def hopeless(self, bound: float | None) -> str:
        """Why a predicted speedup is not worth a trial; empty where it is, or where nothing is predicted."""
        if self.objective != "time" or bound is None or bound >= 1 + self.min_gain:
            return ""
        return f"predicted: at most {ratio(bound)}, less than {1 + self.min_gain:g}×"

    def is_clear(self, trial: Trial) -> bool:
        """Whether a quick trial shows the least gain, so that no longer one is needed to keep its stack."""
        gain = trial.gain
        return bool(
            self.objective == "time" and trial.verdict is Verdict.FASTER and gain and gain.low >= 1 + self.min_gain
        )

    def is_open(self, trial: Trial) -> bool:
        """Whether a trial looks like a gain that noise has left undecided."""
        estimate = trial.gain.estimate if trial.gain else 1.0
        return self.objective == "time" and trial.verdict is Verdict.INCONCLUSIVE and estimate >= 1 + self.min_gain

    def judge(self, trial: Trial, so_far: float, final: bool) -> Judgement:
        """Decide on a trial, which was measured against the stack kept so far.

        Args:
            so_far: Speedup of that stack.
            final: No longer trial follows.
        """
        gain = trial.gain
        if trial.looked is not None:
            return Judgement(False, f"rejected: {trial.reason}")
        if not trial.verdict.measured or gain is None:
            return Judgement(False, f"cut: {trial.reason}")
        if self.memory_limit_mib is not None:
            over = self._over_the_limit(trial, self.memory_limit_mib)
            if over is not None:
                return over
        if self.objective == "time":
            return self._faster(trial.verdict, gain, final)
        return self._less(trial, so_far * gain.estimate)

    def _faster(self, verdict: Verdict, gain: Gain, final: bool) -> Judgement:
        if final:
            kept = verdict is Verdict.FASTER
            return Judgement(kept, "kept" if kept else f"rejected: {verdict}, not shown to be faster")
        if verdict is Verdict.SLOWER or (gain.high is not None and gain.high < 1 + self.min_gain):
            return Judgement(False, f"rejected: at most {ratio(gain.high or gain.estimate)}")
        return Judgement(True, "measured again: it may be faster")

    def _less(self, trial: Trial, speedup: float) -> Judgement:
        before, after, name = self.figure(trial.baseline), self.figure(trial.candidate), FIGURE[self.objective]
        if not before or not after:
            return Judgement(False, f"rejected: its {name} is not known")
        less = f"{name} {ratio(after / before)}"
        if before / after < 1 + self.min_gain:
            return Judgement(False, f"rejected: {less}")
        if speedup * self.max_slowdown < 1:
            return Judgement(False, f"rejected: {less}, and a step takes {ratio(1 / speedup)} the baseline's time")
        return Judgement(True, f"kept: {less}")

    def figure(self, arm: Figures) -> float | None:
        """The objective's figure of an arm, in its record's unit."""
        return {"time": arm.step_us, "memory": arm.peak_mib, "energy": arm.energy_j}[self.objective]

    def _over_the_limit(self, trial: Trial, limit_mib: float) -> Judgement | None:
        """The decision on a stack beyond the memory limit, kept only if it comes nearer; None within the limit."""
        before, after = trial.baseline.peak_mib, trial.candidate.peak_mib
        if after is None:
            return Judgement(False, "rejected: its peak memory is not known")
        if before is not None and before > limit_mib and after * (1 + self.min_gain) <= before:
            change = f"{mebibytes(before)} → {mebibytes(after)}"
            return Judgement(True, f"kept: peak memory {change}, towards the limit of {mebibytes(limit_mib)}")
        if after > limit_mib:
            limit = mebibytes(limit_mib)
            return Judgement(False, f"rejected: its peak memory of {mebibytes(after)} is over {limit}")
        return None


@dataclass(frozen=True)
class Budget:
    """The budget of a search.

    seconds: of all trials and of the winner's last measurement
    trials:  most trials; None: no limit
    """

    seconds: float
    trials: int | None = None

    def spent(self, seconds: float, trials: int, trial_s: float = 0.0, last_s: float = 0.0) -> str:
        """Why no further trial starts; empty where one may.

        Args:
            trial_s: Expected seconds of the trial.
            last_s: Expected seconds of the winner's last measurement.
        """
        if self.trials is not None and trials >= self.trials:
            return f"the budget of {self.trials} trial{'s' if self.trials > 1 else ''} was spent"
        if seconds >= self.seconds:
            return f"the budget of {duration(self.seconds)} was spent"
        if seconds + trial_s + last_s >= self.seconds:
            beside = " beside the last measurement" if last_s else ""
            return f"the rest of the budget of {duration(self.seconds)} holds no trial{beside}"
        return ""
