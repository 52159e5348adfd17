"""The settings of a profile: keys below `profile` in conf/config.yaml."""

from dataclasses import dataclass

from optexp.schema import choice


@dataclass
class ProfileSettings:
    """How steps are traced, and which tables are made.

    wait:    steps before the profiler starts
    warmup:  steps after these that the profiler records and drops
    active:  steps that are traced; null: measurement.profile_steps, or fewer where a step is slow
    repeat:  recordings, each after `wait` and `warmup` steps; tables use the recording with the median step time
    region:  name of an `optexp.region`, to which breakdown, tables and diagnosis are limited (mode=profile)
    stacks:  a further trace with Python calls, and a flame graph of the host; null: in mode=profile
    tool:    an Nsight tool that runs the program once more: ncu (kernels) or nsys (the system) (mode=profile)
    ncu_set: sections that ncu collects
    kernels: launches of kernels that ncu measures, at most
    details: tables of modules, lines of code, memory by category and compiled graphs, and the physical lower bound:
             some seconds more; null: true unless verify=only
    """

    wait: int = 0
    warmup: int = 2
    active: int | None = None
    repeat: int = 1
    region: str | None = None
    stacks: bool | None = None
    tool: str | None = choice(None, "ncu", "nsys")
    ncu_set: str = choice("basic", "detailed", "full")
    kernels: int = 100
    details: bool | None = None

    def __post_init__(self) -> None:
        for name, least in {"wait": 0, "warmup": 0, "active": 1, "repeat": 1, "kernels": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
