"""The settings of a measurement; `conf/measurement/*.yaml` are its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from optexp.schema import choice

FEWEST = 8  # pairs of a process whose steps are longer than a block
SEVERAL = 5, 15  # fewest and most processes where one of them alone would tell nothing


@dataclass
class MeasurementSettings:
    """How much evidence a verdict rests on.

    preset:               name shown in the report
    processes_min, _max:  how often both arms are restarted
    pairs:                most blocks of each arm per process, for at most `process_s` seconds; one process measures
                          fewer where the spread between processes makes nearly all of its interval
    block_ms:             shortest block (and at least 200 empty timer pairs)
    warmup_s:             longest warm-up of an arm
    min_effect:           δ: smaller differences are SAME
    confidence:           of the interval
    half_width:           stop when the half-width of the log-ratio's interval is this small (or 5 % of its mean)
    budget_s:             no new process is started after this many seconds
    controls:             a second baseline and a known delay in the same rounds, once per device and workload
    cold_caches:          the comparison begins with empty compile caches: the first set-up is then a cold one
    lock_clocks:          print the commands that lock the GPU's clocks; optexp never changes clocks
    trials:               0; or, for teaching, the textbook method: the mean of so many steps after one warm-up
    confirm:              a sweep measures its winner again, in new processes and on other inputs
    l2:                   GPU cache at the start of a step: as the last step left it (warm), empty (cold: device times
                          are then compared), or warm with cold pairs beside it (both)
    load_s:               seconds that each arm works while its energy is read; 0: no energy
    cpus:                 cores the arms are bound to: auto (one on a GPU, all on a CPU), all, or a list "2,3"
    verification_seeds:   fresh input sets that equivalence is checked on
    thorough:             verify all families of inputs (else the few of `FEW`), and follow training for many steps
    profile_steps:        steady steps in a profile
    """

    preset: str = choice("default", "quick", "rigorous", "textbook")
    processes_min: int = 5
    processes_max: int = 15
    pairs: int = 50
    process_s: float = 5.0
    block_ms: float = 20.0
    warmup_s: float = 3.0
    min_effect: float = 0.01
    confidence: float = 0.99
    half_width: float = 0.005
    budget_s: float = 20.0
    controls: bool = True
    cold_caches: bool = False
    lock_clocks: bool = False
    trials: int = 0
    confirm: bool = True
    l2: str = choice("warm", "cold", "both")
    load_s: float = 1.0
    cpus: str = "auto"
    verification_seeds: int = 5
    thorough: bool = True
    profile_steps: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.processes_min <= self.processes_max:
            raise ValueError(f"processes_min={self.processes_min} must be at least 1 and at most processes_max")
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence={self.confidence} must lie between 0.5 and 1, as in 0.99")
        if 2 * 0.5 ** min(self.pairs, FEWEST) > 1 - self.confidence and self.processes_max == 1:
            raise ValueError(f"pairs={self.pairs} are too few for a {self.confidence:.3%} interval from one process")
        if self.pairs < 2:
            raise ValueError(f"pairs={self.pairs} must be at least 2")

    def with_several(self) -> MeasurementSettings:
        """The same with several processes in place of one: where a process gives one pair, one has no spread."""
        fewest, most = SEVERAL
        return self if self.processes_max > 1 else replace(self, processes_min=fewest, processes_max=most)

    def enough(self, processes: int, precise: bool, spent_s: float) -> bool:
        """Whether measuring ends. Significance of a difference is never a reason.

        Args:
            processes: Measured so far.
            precise: Whether their interval is narrow enough.
            spent_s: Seconds that measuring them took.
        """
        if processes >= self.processes_max:
            return True
        return processes >= self.processes_min and (precise or spent_s > self.budget_s)
