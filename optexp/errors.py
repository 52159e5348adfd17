"""Every exception of optexp, and the verdict that each ends a comparison with.

    Exception
    ├── ConfigError        a request that cannot be met: ERROR, one sentence, exit status 1
    ├── Unsupported        a strategy cannot apply here: UNSUPPORTED
    │   └── Uncapturable   part of the work cannot be recorded in a CUDA graph
    ├── NoReference        equivalence cannot be decided: UNVERIFIED
    ├── Distrusted         a measurement cannot be believed: INVALID
    ├── Hopeless           a search's first look shows a stack to be slower: INCONCLUSIVE, and not verified
    ├── Failure            a worker process crashed, hung, ran out of memory or raised: ERROR, or see `Failure.type`
    ├── OtherProgram       a torch.fx graph would be another program; becomes Unsupported
    ├── NotCovered         code cannot be listed without its module; repro.py then carries the module
    ├── UserFailure        a user's function raised: ERROR, a sentence with the function's name, and the user's frames
    ├── TrackingError      MLflow's store refused a run; the result stands
    └── Unshared           two processes cannot share device memory; tensors then travel through the host

`optexp.comparison.adjudicate.ENDINGS` maps them to verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from optexp.support.shortage import is_shortage

FORGED = "Forged"  # Failure.type: a message without the ticket of its question; ends INVALID
SPENT = "BudgetSpent"  # Failure.type: a worker whose time is over; ends INCONCLUSIVE
LEFT_OUT = "a call that leaves its update out is not compared"  # in the message of a NoReference
UNTIMED = "Untimed"  # Failure.type: an arm that reports no time, or was stopped; ends INVALID


class ConfigError(Exception):
    """The user asked for something that does not exist; the message names the key, the value and what is allowed."""


class Unsupported(Exception):
    """A strategy cannot apply here; the message says why and what to do, in words a user can act on."""


class Uncapturable(Unsupported):
    """An operation cannot be recorded in a CUDA graph; the message names its line."""


class NoReference(Exception):
    """Equivalence cannot be decided; the message says why. The comparison ends UNVERIFIED."""


class Distrusted(Exception):
    """Nothing that was measured can be believed; the message says why. The comparison ends INVALID."""


class Hopeless(Exception):
    """A search's first look shows that a stack is slower than what it has to beat, so that it is not verified."""


class OtherProgram(Exception):
    """The work that a graph of the model would leave out, as the end of a sentence that starts with the model."""


class NotCovered(Exception):
    """Something cannot be said without its module; the message says what."""


class UserFailure(Exception):
    """A user's function raised; the message names the function, and the cause has the user's frames."""


class TrackingError(Exception):
    """The store could not be reached or refused; the result itself is not touched by it."""


class Unshared(RuntimeError):
    """This driver, or this container, does not let processes share device memory."""


@dataclass
class Failure(Exception):
    """A worker crashed, hung, ran out of memory, or its code raised.

    type:    name of the exception's class in the worker, or "Crash", "Timeout", `FORGED`, `SPENT`, `UNTIMED`
    worker:  name of the process; empty where no process is to blame
    """

    type: str
    message: str
    traceback: str = ""
    worker: str = ""

    def __str__(self) -> str:
        named = self.worker and self.type != "ConfigError"  # which is the user's mistake in any arm
        worker = "the baseline at lower precision" if self.worker == "yardstick" else self.worker
        return f"{worker}: {self.message}" if named else self.message


def first_line(error: BaseException) -> str:
    """First line of an error's message, with the class's name where the message is empty, or a key alone."""
    kind = type(error).__name__
    said = (str(error).strip().splitlines() or [kind])[0]
    return f"{kind}: {said}" if isinstance(error, KeyError) else said


@contextmanager
def refusing(what: str, advice: str) -> Iterator[None]:
    """Turn an error inside into a reason not to apply.

    Raises:
        Unsupported: "`what` (first line of the error): `advice`". Errors that the plain program shares pass unchanged.
    """
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise Unsupported(f"{what} ({first_line(error)}): {advice}") from error
