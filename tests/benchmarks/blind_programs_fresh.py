"""A second set of programs with one cause of slowness each: no rule of the diagnosis was tuned on them.

Expected names were chosen from the names of bottlenecks and accounts, before any of these programs was diagnosed. A
program that a rule was mended for afterwards is no longer blind.

Sizes suit a GPU of the H100 class, where the cause is the largest cost; on a CPU they are small.
"""

from __future__ import annotations

from tests.benchmarks import blind_programs_fresh_gpu, blind_programs_fresh_host

PROGRAMS = [*blind_programs_fresh_host.PROGRAMS, *blind_programs_fresh_gpu.PROGRAMS]
