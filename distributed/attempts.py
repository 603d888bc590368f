"""`Attempts`: several processes try the same thing, and go on only together.

What came of a try is told through the group's store, not by a collective: the others may be inside one of their own,
which a second one would mix with.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from . import watch
from .errors import PeerFailedError
from .group import rank, world_size

_FITS, _FITS_NOT, _FAILED = "fits", "fits not", "failed: "
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25


class Attempts:
    """The tries of one search, which all processes begin and make in the same order. Local.

    Args:
        what: what is tried, for errors: a function's name.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._number = 0
        if world_size() > 1:
            self._store = dist.distributed_c10d._get_default_store()
            # Each process counts its searches for itself, in the store, which is as old as the group.
            self._prefix = f"loopwright/attempts/{self._store.add(f'loopwright/attempts/begun/{rank()}', 1)}"

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process gives up on the present try, and why. Local."""
        self._tell(f"{_FAILED}{type(error).__name__}: {error}")

    def all_fit(self, fits: bool) -> bool:
        """End the present try: whether it has fitted on every process. Collective.

        Raises:
            PeerFailedError: another process gave up, or has failed.
        """
        self._tell(_FITS if fits else _FITS_NOT)
        if world_size() == 1:
            return fits
        with watch.collective(self._what):
            outcomes = [self._outcome_of(index) for index in range(world_size())]
        self._number += 1
        return all(outcome == _FITS for outcome in outcomes)

    def _tell(self, outcome: str) -> None:
        if world_size() > 1:
            self._store.set(self._key(rank()), outcome)

    def _outcome_of(self, index: int) -> str:
        key, pause = self._key(index), _FIRST_PAUSE_SECONDS
        while not self._store.check([key]):
            self._look_for_failures()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._look_for_failures()
        return self._store.get(key).decode()

    def _look_for_failures(self) -> None:
        for index in range(world_size()):
            key = self._key(index)
            if self._store.check([key]) and (outcome := self._store.get(key).decode()).startswith(_FAILED):
                raise PeerFailedError(
                    f"{self._what}: process {index} {outcome}. That says nothing of the batch size, so that no "
                    "other is tried."
                )
        if (failure := watch.first_failure()) is not None:
            raise PeerFailedError(f"{self._what}: process {failure.index} failed: {failure.kind}: {failure.text}")

    def _key(self, index: int) -> str:
        return f"{self._prefix}/{self._number}/{index}"
