"""A pretended side stream, and batches that tell when they are copied: the order of transfers without a device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.data.loader import PreparedLoader
from loopwright.data.transfer import Transfer


class PretendStream:
    """Stands in for `SideStream`: copies made in it are made at once, and written down. Shows their order alone."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_used = False
        self.most_alive = 0
        """The most copies that existed at once."""
        self._copies: list[weakref.ref[Tensor]] = []

    @contextmanager
    def used(self) -> Iterator[None]:
        self.is_used = True
        try:
            yield
        finally:
            self.is_used = False

    def hand_over(self, moved: Any) -> None:
        self.log.append(f"take {number(moved)}")

    def batches(self, *values: float, fail: float | None = None) -> list[HostBatch]:
        """Batches of one sample each, which write down here when they are copied; one of them can't be."""
        found = [torch.tensor([float(value)]).as_subclass(HostBatch) for value in values]
        for batch in found:
            batch.stream, batch.fails = self, number(batch) == fail
        return found

    def copied(self, batch: HostBatch) -> Tensor:
        """What the batch is on the device that there is not."""
        self.log.append(f"{'ahead' if self.is_used else 'copy'} {number(batch)}")
        if batch.fails:
            raise ValueError(f"batch {number(batch)} can't be moved")
        copy = batch.as_subclass(Tensor).clone()
        self._copies.append(weakref.ref(copy))
        self.most_alive = max(self.most_alive, sum(each() is not None for each in self._copies))
        return copy

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have every loader move its batches as for a device with streams."""
        cpu: Any = torch.device("cpu")
        monkeypatch.setattr(PreparedLoader, "transfer", lambda loader: Transfer(cpu, side=self))


class HostBatch(Tensor):
    """A batch that has still to be copied; its copy is a plain tensor."""

    stream: PretendStream
    fails: bool

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self.stream.copied(self)


def number(batch: Any) -> int:
    """The first number in a batch, by which it is told from others."""
    return int(batch.as_subclass(Tensor).flatten()[0] if isinstance(batch, Tensor) else number(batch.x))
