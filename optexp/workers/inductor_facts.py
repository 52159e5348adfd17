"""LAUNCHER: facts of this machine that Inductor finds out anew in every process, found out before arms are forked.

They are a hash of Inductor's files, a hash of Triton's, and, for code on a CPU, the instruction sets that the C++
compiler supports: 1.5 to 3 s. A process of the user's finds them out when it first compiles, so the set-up of an arm
that compiles includes `spent_s`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import import_module

# Functions that keep their answer.
_OF_FILES = ("torch._inductor.codecache:torch_key", "torch._inductor.runtime.triton_compat:triton_key")
_FACTS = {"cuda": _OF_FILES, "cpu": (*_OF_FILES, "torch._inductor.cpu_vec_isa:valid_vec_isa_list")}
spent_s = 0.0


def learn(device_type: str) -> None:
    """Find out once what a compilation for this type of device asks for; none of it starts CUDA or a thread."""
    global spent_s
    began = time.monotonic()
    for fact in _FACTS.get(device_type, ()):
        module, _, function = fact.partition(":")
        with suppress(Exception):  # another version of torch; an arm that needs it meets the same error, and tells it
            getattr(import_module(module), function)()
    spent_s += time.monotonic() - began
