"""What a search is after: whether a trial is worth more, and whether its stack is kept. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.config.auto_settings import AutoSettings
from optexp.records.trials import Figures, Gain, Trial
from optexp.reporting import summary
from optexp.result import Verdict
from optexp.support.units import duration, ratio

FIGURE = {"memory": "peak memory", "energy": "energy of a step"}


@dataclass(frozen=True)
class Judgement:
    """go_on: a quick trial is worth a longer one, or a longer one's stack is kept;  text: why"""

    go_on: bool
    text: str


@dataclass(frozen=True)
class Goal:
    """What is to become less, and what it may cost.

    objective:        time, memory or energy
    min_gain:         share that is worth a trial
    memory_limit_mib: peak memory that a stack may take
    max_slowdown:     against the baseline, for less memory or energy
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
        """In words."""
        found = []
        if self.memory_limit_mib is not None:
            found.append(f"peak memory at most {summary.mebibytes(self.memory_limit_mib)}")
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

    def judge(self, trial: Trial, so_far: float, final: bool) -> Judgement:
        """A trial against the stack that the search stands at.

        Args:
            so_far: Speedup of that stack.
            final: No longer trial follows.
        """
        gain = trial.gain
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
        """What is to become less."""
        return {"time": arm.step_us, "memory": arm.peak_mib, "energy": arm.energy_j}[self.objective]

    def _over_the_limit(self, trial: Trial, limit_mib: float) -> Judgement | None:
        """None within the limit. Beyond it, a stack is kept only where it comes nearer."""
        before, after = trial.baseline.peak_mib, trial.candidate.peak_mib
        if after is None:
            return Judgement(False, "rejected: its peak memory is not known")
        if before is not None and before > limit_mib and after * (1 + self.min_gain) <= before:
            change = f"{summary.mebibytes(before)} → {summary.mebibytes(after)}"
            return Judgement(True, f"kept: peak memory {change}, towards the limit of {summary.mebibytes(limit_mib)}")
        if after > limit_mib:
            limit = summary.mebibytes(limit_mib)
            return Judgement(False, f"rejected: its peak memory of {summary.mebibytes(after)} is over {limit}")
        return None


@dataclass(frozen=True)
class Budget:
    """seconds: of the trials and of the winner's last measurement;  trials: at most so many"""

    seconds: float
    trials: int | None = None

    def spent(self, seconds: float, trials: int, last_s: float = 0.0) -> str:
        """Why no further trial starts; empty where one may.

        Args:
            last_s: That measuring the winner anew will take.
        """
        if self.trials is not None and trials >= self.trials:
            return f"the budget of {self.trials} trial{'s' if self.trials > 1 else ''} was spent"
        if seconds >= self.seconds:
            return f"the budget of {duration(self.seconds)} was spent"
        if seconds + last_s >= self.seconds:
            return f"what was left of the budget of {duration(self.seconds)} is for measuring the winner anew"
        return ""
