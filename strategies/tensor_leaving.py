"""Batches that a process leaves out, whose peers compute parts of the same pass: they have to leave it too."""

from __future__ import annotations

import time

from ..distributed import watch
from ..distributed.errors import DistributedError
from ..distributed.shares import DataShare

PATIENCE_SECONDS = 60.0
"""How much later one of them may come to it."""
_POLL_SECONDS = 0.02


class Leaving:
    """Refuses that a process leaves its pass while a peer is in it, who would wait for its part for ever.

    Args:
        share: of this process.
    """

    def __init__(self, share: DataShare) -> None:
        self._share = share
        self._board = watch.board_of_group("loopwright/leaving")
        self._num_passes = 0

    def passed(self) -> None:
        """Count a pass that this process has made, as its peers do. Local."""
        self._num_passes += 1

    def leave(self) -> None:
        """Wait until all peers have left the same pass.

        Raises:
            DistributedError: some go on with it.
        """
        key = self._share.process_index, self._num_passes
        self._num_passes += 1
        num_left = self._board.count(*key, by=1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while num_left < self._share.num_peers:
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"this process has left a batch without a loss, and {self._share.num_peers - num_left} of the "
                    f"{self._share.num_peers} that compute parts of the same batch have not for {PATIENCE_SECONDS:g} "
                    "s: they wait for its part. Decide on all of them alike what ends an epoch or a run, and which "
                    "batches are left out: by the batch and the step, not by time or by the process."
                )
            time.sleep(_POLL_SECONDS)
            num_left = self._board.count(*key)
