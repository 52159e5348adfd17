"""Batches as the user's code gives them: from their loader, or from their function of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from optexp.errors import ConfigError
from optexp.user_code.adapters import Iterated, drawn_from, endless, kind, seed_all
from optexp.user_code.both_ends import BothEnds
from optexp.user_code.drawing import Inputs, drawing
from optexp.user_code.parts import Parts


@dataclass
class GivenBatches:
    """Batches in the user's form.

    shapes:   values of named sizes, which take turns
    drawn_by: functions that draw batches, by sizes and device
    """

    parts: Parts
    shapes: list[dict[str, int]]
    drawn_by: dict[tuple[str, str], Inputs] = field(default_factory=dict)

    def give(self, generator: torch.Generator, count: int) -> list[Any]:
        """Batches of the user's code; equal generators give equal ones.

        Args:
            generator: Source of the seed; its device is the batches'.
            count: Number of batches.

        Raises:
            ConfigError: there are no inputs, or `shapes` are given for batches of a loader.
        """
        seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        seed_all(seed)
        if self.parts.loader is not None:
            if self.shapes:
                raise ConfigError("workload.shapes are sizes of inputs, and batches come from a loader: leave them out")
            return list(islice(endless(drawn_from(self.loader)), count))
        if self.parts.inputs is None:
            raise ConfigError("the workload has no inputs")
        kinds: Sequence[Mapping[str, int]] = self.shapes or [{}]
        made = [self._drawing(kind, generator.device) for kind in kinds[:count]]
        seed_all(seed)
        with BothEnds():
            return [made[index % len(made)](kinds[index % len(kinds)], generator.device) for index in range(count)]

    def remainder(self, generator: torch.Generator) -> Any | None:
        """A batch as small as the last one of an epoch; None where all are of one size, or the last is a single sample.

        Args:
            generator: Source of the seed.
        """
        batched = self.loader.batch_sampler if self.parts.loader is not None else None
        if type(batched) is not BatchSampler or batched.drop_last or not isinstance(batched.sampler, Sized):
            return None
        size = len(batched.sampler) % batched.batch_size
        if size < 2 or len(batched.sampler) < batched.batch_size:
            return None
        seed_all(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))
        smaller = DataLoader(self.loader.dataset, size, shuffle=True, collate_fn=self.loader.collate_fn)
        return next(iter(smaller))

    def _drawing(self, sizes: Mapping[str, int], device: torch.device) -> Inputs:
        """The function that draws batches of these sizes, found once (see `optexp.user_code.drawing`)."""
        assert self.parts.inputs is not None
        key = str(sizes), str(device)
        if key not in self.drawn_by:
            self.drawn_by[key] = drawing(self.parts.inputs, sizes, device)
        return self.drawn_by[key]

    @cached_property
    def loader(self) -> DataLoader[Any]:
        """The user's loader; another iterable becomes one.

        Raises:
            ConfigError: it cannot be iterated.
        """
        assert self.parts.loader is not None
        given = self.parts.loader()
        if isinstance(given, DataLoader):
            return given
        if not isinstance(given, Iterable):
            raise ConfigError(f"the loader is {kind(given)}: it must give batches, as a DataLoader does")
        return DataLoader(Iterated(self.parts.loader), batch_size=None)
