"""`python -m optexp.workers.replay FILE` builds an arm's program once more and runs a few steps, for an Nsight tool.

The steps lie between cudaProfilerStart and cudaProfilerStop, and are NVTX ranges with their phases and regions inside.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

STEPS, WARM_STEPS = 2, 3


def pack(spec: bytes, path: Path) -> None:
    """Write a file for `main`, with this process's module path, so that the program is found from anywhere.

    Args:
        spec: As `Spec.pack` makes it.
    """
    path.write_bytes(pickle.dumps({"path": sys.path, "arguments": sys.argv[:1], "spec": spec}))


def main(arguments: Sequence[str]) -> int:
    """Build the program of a file that `pack` wrote, and run its steps."""
    content = pickle.loads(Path(arguments[0]).read_bytes())
    sys.path[:] = [*sys.path, *(entry for entry in content["path"] if entry not in sys.path)]
    sys.argv[:] = content["arguments"]
    import torch

    from optexp.measurement import clock
    from optexp.workers.arm import Arm

    arm = Arm()
    arm.setup(content["spec"])
    arm.restore()
    on_gpu = arm.device.type == "cuda"
    with arm.in_phases(shortest_s=0.0) as run:
        for _ in range(WARM_STEPS):
            run()
        clock.synchronize(arm.device)
        if on_gpu:
            torch.cuda.profiler.start()
        for _ in range(STEPS):
            if on_gpu:
                torch.cuda.nvtx.range_push("step")
            run()
            if on_gpu:
                torch.cuda.nvtx.range_pop()
        clock.synchronize(arm.device)
        if on_gpu:
            torch.cuda.profiler.stop()
    print(f"{STEPS} steps of {arm.workload.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
