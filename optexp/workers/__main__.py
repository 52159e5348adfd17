"""LAUNCHER: `python -m optexp.workers` imports torch once and forks workers on request."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    import torch._dynamo  # noqa: F401  fake tensors and graphs import it, in nearly every arm: a second each

    import optexp.workers.arm
    import optexp.workers.reference  # noqa: F401  the other kind of worker
    from optexp.workers.process import serve_launcher

    sys.path[:] = [entry or os.getcwd() for entry in sys.path]
    serve_launcher(int(sys.argv.pop()))
    os._exit(0)  # taking torch down takes a second or two, for which the parent would wait
