"""`Attempts`: several processes try the same thing, and go on only together.

What came of a try is told through the group's store, not by a collective: the others may be inside one of their own,
which a second one would mix with.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from . import watch
from .errors import DistributedError, PeerFailedError
from .failures import Answer
from .group import has_joined, is_connected, rank, world_size

_FITS, _LACKS, _FAILED = "fits", "lacks memory", "failed: "
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25
PATIENCE_SECONDS = 15.0
"""How long another process may be in one collective after memory ran out here, where it waits for this one."""


class Attempts:
    """The tries of one search, which all processes begin and make in the same order. Local.

    Args:
        what: what is tried, for errors: a function's name.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._number = 0
        self._joined: tuple[Store, str] | None = None
        self._was_apart = _is_apart()

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process gives up on the present try, and why. Local."""
        self._tell(f"{_FAILED}{type(error).__name__}: {error}")

    def have_ended(self) -> bool:
        """Whether this process left the others in this search, as the Trainer does where one of them fails. Local."""
        return _is_apart() and not self._was_apart

    def all_fit(self, size: int, fits: bool) -> bool:
        """End the present try: whether it has fitted on every process. Collective.

        Args:
            size: what was tried.
            fits: whether it has fitted here.
        Raises:
            PeerFailedError: another process gave up, or has failed.
            DistributedError: it has not fitted here, and others wait for this process in the midst of their try; or
                the processes have tried different sizes.
        """
        self._tell(f"{_FITS if fits else _LACKS} {size}")
        if world_size() == 1:
            return fits
        with watch.collective(self._what):
            waits = None if fits else _Waits(self._what)
            outcomes = [self._outcome_of(index, waits) for index in range(world_size())]
        self._number += 1
        sizes = [int(outcome.rpartition(" ")[2]) for outcome in outcomes]
        if len(set(sizes)) > 1:
            raise DistributedError(
                f"{self._what}: the processes have tried the sizes {sizes}. They begin with one size, and go on alike "
                "once they have met: let them meet before (Accelerator() does), so that memory can't run out on one "
                "of them alone and unnoticed."
            )
        return all(outcome.startswith(_FITS) for outcome in outcomes)

    def _tell(self, outcome: str) -> None:
        if world_size() > 1:
            self._store().set(self._key(rank()), outcome)

    def _outcome_of(self, index: int, waits: _Waits | None) -> str:
        store, key, pause = self._store(), self._key(index), _FIRST_PAUSE_SECONDS
        while not store.check([key]):
            self._look_for_failures()
            if waits is not None:
                waits.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._look_for_failures()
        return store.get(key).decode()

    def _look_for_failures(self) -> None:
        store = self._store()
        for index in range(world_size()):
            key = self._key(index)
            if store.check([key]) and (outcome := store.get(key).decode()).startswith(_FAILED):
                raise PeerFailedError(
                    f"{self._what}: process {index} {outcome}. That says nothing of the batch size, so that no "
                    "other is tried."
                )
        if (failure := watch.first_failure()) is not None:
            raise PeerFailedError(f"{self._what}: process {failure.index} failed: {failure.kind}: {failure.text}")

    def _store(self) -> Store:
        return self._join()[0]

    def _key(self, index: int) -> str:
        return f"{self._join()[1]}/{self._number}/{index}"

    def _join(self) -> tuple[Store, str]:
        """The store and the prefix of this search; found late, since the first try may be what joins the processes."""
        if self._joined is None:
            store = dist.distributed_c10d._get_default_store()
            # Each process counts its searches for itself, in the store, which is as old as the group.
            number = store.add(f"loopwright/attempts/begun/{rank()}", 1)
            self._joined = store, f"loopwright/attempts/{number}"
        return self._joined


class _Waits:
    """Looks whether others wait in vain for a process that has left a try. Local.

    A collective that others are in can't be taken back, so that they can't make another try either.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._due = time.monotonic() + PATIENCE_SECONDS / 2
        self._before: dict[int, Answer] = {}

    def look(self) -> None:
        """Ask now and then where the others stand.

        Raises:
            DistributedError: one of them has stood in the same collective at two looks.
        """
        if time.monotonic() < self._due:
            return
        now = {index: each for index, each in watch.ask_all().items() if each.operation not in (None, self._what)}
        for index, answer in now.items():
            if index in self._before and self._before[index].entries == answer.entries:
                raise DistributedError(
                    f"{self._what}: memory ran out in process {rank()}, while process {index} waits for it in "
                    f"{answer.operation!r}, which can't be taken back, so that no other size can be tried. Begin with "
                    "a smaller size, or give the processes batches that need the same memory."
                )
        self._before, self._due = now, time.monotonic() + PATIENCE_SECONDS / 2


def _is_apart() -> bool:
    return has_joined() and not is_connected()
