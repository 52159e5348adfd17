"""Steps to neighbouring numbers, as another rounding takes them: −1, 0 or +1 in the last bit, drawn once for many
tensors.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

ROUNDED = 16  # of 256 results as many are rounded up and as many down: RMS 0.35 of a last bit, as rounding has
NARROW = {torch.bfloat16, torch.float16}
# Of results whose last bits are zero nothing was lost: counts, masks, indices stay what they are.
BITS = {
    torch.float64: (torch.int64, 2**20 - 1),
    torch.float32: (torch.int32, 2**8 - 1),
    torch.bfloat16: (torch.int16, 2**3 - 1),
    torch.float16: (torch.int16, 2**4 - 1),
}
LEAST, ROOM = 2**16, 4  # elements of a pool, and how often the largest tensor so far has place in it


class RoundingSteps:
    """Random steps of one run: each tensor takes them from another place of a pool, and with another sign.

    Drawing them anew for each tensor took most of a run's time.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.places = seed, Random(seed)
        self.generators: dict[torch.device, torch.Generator] = {}
        self.pools: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """The run's own source of random numbers."""
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]

    def like(self, bits: Tensor) -> Tensor:
        """Steps of the shape and dtype of `bits`, an integer tensor."""
        count, key = bits.numel(), (bits.device, bits.dtype)
        pool = self.pools.get(key)
        if pool is None or len(pool) < 2 * count:
            pool = self.pools[key] = self._drawn(max(LEAST, ROOM * count), bits)
        start = self.places.randrange(len(pool) - count + 1)
        return pool[start : start + count].view(bits.shape)

    def sign(self) -> int:
        """1 or −1, drawn anew: steps of places that overlap then cancel in sums, as independent ones do."""
        return 1 - 2 * self.places.getrandbits(1)

    def _drawn(self, count: int, bits: Tensor) -> Tensor:
        drawn = torch.empty(count, dtype=torch.uint8, device=bits.device)
        drawn.random_(generator=self.generator(bits.device))
        return (drawn < ROUNDED).to(bits.dtype).sub_((drawn >= 256 - ROUNDED).to(bits.dtype))
