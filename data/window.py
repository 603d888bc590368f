"""Windows: the micro-batches of one optimizer step, fetched before the first of them is used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from ..distributed.errors import DataError
from .loader import PreparedLoader
from .samplers import SeedableRandomSampler

Remainder: TypeAlias = Literal["flush", "carry", "drop"]

_END = object()


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step, or the part of them that one epoch holds."""

    batches: list[Any]
    """On the host, in order; at least one."""
    size: int
    """What each mean loss of the window is divided by: its micro-batches, or those planned for one left open."""
    closes: bool
    """Whether the optimizer steps after the last of these batches."""
    is_last: bool
    """Whether the epoch ends with these batches."""


class WindowReader:
    """Cuts one pass of a loader into windows.

    Args:
        loader: what to read.
        size: micro-batches in a full window.
        remainder: what becomes of a short window at the end: `"flush"` makes it a window of its own, `"carry"` leaves
            it open for the next pass, `"drop"` leaves its batches out.
        carried: micro-batches that an open window holds from the pass before.
        limit: batches after which the pass ends, None: all.
        begin: batches of the pass that are done, behind which the loader goes on.
    """

    def __init__(
        self,
        loader: PreparedLoader,
        size: int,
        *,
        remainder: Remainder = "flush",
        carried: int = 0,
        limit: int | None = None,
        begin: int = 0,
    ) -> None:
        self._loader = loader
        self._size = size
        self._remainder = remainder
        self._limit = limit
        self._ahead: deque[Any] = deque()
        self._ended = False
        self.transfer = loader.transfer()
        """What moves the batches to the device; None where they stay as they are."""
        self.carried = carried
        """Micro-batches in the window that this pass leaves open."""
        self.num_fetched = begin
        """Batches of the pass that were fetched so far, with those that were done before."""
        self.wait_seconds = 0.0
        """Time spent waiting for the loader."""

    def __iter__(self) -> Generator[Window]:
        iterator = self._loader.raw_iterator(2 * self._size)
        ahead, size = self._ahead, self._size
        drops = self._remainder == "drop"
        # One batch beyond the window tells whether it is the last one; a rest that is dropped must be seen whole.
        beyond = size if drops else 1
        while True:
            wanted = size - self.carried
            if len(ahead) < wanted + beyond and not self._ended:
                self._fetch(iterator, wanted + beyond)
            if not ahead or (drops and len(ahead) < wanted):
                break
            batches = [ahead.popleft() for _ in range(min(wanted, len(ahead)))] if wanted > 1 else [ahead.popleft()]
            is_last = not ahead or (drops and len(ahead) < size)
            is_short = len(batches) < wanted
            if is_short and self._remainder == "carry":
                self.carried += len(batches)
                yield Window(batches, size, False, is_last)
            else:
                # A window that was left open keeps the size that its first losses were divided by.
                divisor = size if self.carried else len(batches)
                self.carried = 0
                yield Window(batches, divisor, True, is_last)
        check_length(self._loader, self.num_fetched, self._limit)

    def on_device(self, window: Window, position: int) -> Any:
        """A batch of the newest window on the device. With streams the next one of the pass is on its way from now on.

        Only where `transfer` is not None. What was moved and is never used counts nowhere.
        """
        assert self.transfer is not None
        ahead: Sequence[Any] = window.batches[position + 1 : position + 2]
        if not ahead and not window.is_last:
            ahead = self._ahead
        return self.transfer.next(window.batches[position], ahead)

    def _fetch(self, iterator: Iterator[Any], count: int) -> None:
        """Have `count` batches ahead, or the end. Only `next` here takes a StopIteration as the end of the data."""
        began = time.perf_counter()
        while len(self._ahead) < count:
            is_over = self._limit is not None and self.num_fetched >= self._limit
            batch = _END if is_over else next(iterator, _END)
            if batch is _END:
                self._ended = True
                break
            self.num_fetched += 1
            self._ahead.append(batch)
        self.wait_seconds += time.perf_counter() - began


def check_length(loader: PreparedLoader, num_fetched: int, limit: int | None) -> None:
    """See at the end of a pass that it was one: a dataset that raises StopIteration would cut it short in silence.

    Raises:
        DataError: a map-style loader ended before its length; says where.
    """
    expected = loader.pass_length
    if expected is None or (limit is not None and limit <= num_fetched):
        return
    # Torch's own samplers give as many indices as they say; the length of others may be an estimate.
    is_exact = type(loader.sampler) in (SequentialSampler, RandomSampler, SeedableRandomSampler)
    is_exact = is_exact and type(loader.batch_sampler) in (BatchSampler, type(None))
    if is_exact and num_fetched < expected:
        raise DataError(
            f"the loader ended after {num_fetched} of its {expected} batches. Its dataset or collate function raised "
            f"StopIteration at batch {num_fetched}, or a sampler gave fewer indices than its length says."
        )
