"""`DataShare`: which share of the data a process gets, and whose numbers count where some compute the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShare:
    """A process among those that get different batches. Neighbours may get the same ones: peers.

    Peers compute parts of one forward pass. Along the tensor axis of a mesh they come to the same loss (twins); along
    its context axis each has the loss of its part of the sequences.
    """

    num_processes: int
    """How many shares there are."""
    process_index: int
    """Which of them this process gets."""
    num_peers: int = 1
    """How many processes, one after another, get the same batches."""
    peer: int = 0
    """Which of them this process is."""
    num_twins: int = 1
    """How many of these, one after another, come to the same loss."""

    def by_batches(self, rows: Sequence[T]) -> Sequence[T]:
        """Of what all processes have said, process 0 first, that of one process for each share of the data."""
        return rows if self.num_peers == 1 else rows[:: self.num_peers]

    def by_losses(self, rows: Sequence[T]) -> Sequence[T]:
        """Of what all processes have said, process 0 first, that of one process for each loss."""
        return rows if self.num_twins == 1 else rows[:: self.num_twins]

    @property
    def num_losses(self) -> int:
        """How many processes come to losses of their own, of which gradients are the mean."""
        return self.num_processes * self.num_peers // self.num_twins
