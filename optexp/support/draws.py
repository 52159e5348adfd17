"""Seeds of a run's inputs, all derived from one random key, so that no program can know its inputs beforehand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from secrets import token_hex

BITS = 48  # of a seed: numbers that JSON keeps exactly


@dataclass(frozen=True)
class Draws:
    """The key of one run. Arms get single seeds, never the key.

    Args:
        replayed: Whether the key came from `replay=`, so that inputs equal those of an earlier run.
    """

    key: str
    replayed: bool = False

    @classmethod
    def of(cls, replay: str | None) -> Draws:
        """The given key, else a new one."""
        return cls(token_hex(16)) if replay is None else cls(replay, replayed=True)

    def seed(self, *purpose: str | int) -> int:
        """The seed for a purpose, such as ("verification", 3); equal purposes get equal seeds."""
        text = "/".join(map(str, (self.key, *purpose)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[: BITS // 8])

    def to_dict(self) -> dict[str, str | bool]:
        return {"key": self.key, "replayed": self.replayed}
