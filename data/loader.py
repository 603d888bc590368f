"""`PreparedLoader`: a loader of this process, whose end is known before its last batch is used."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..distributed.nested import send_to_device
from .samplers import epoch_listeners

_END = object()


class PreparedLoader:
    """Any iterable of batches, moved to the device, with its end known one batch ahead.

    While it is iterated it is on its owner's stack of active loaders, so that a loader which is run to its end inside
    another one's loop changes nothing for the outer one.

    Args:
        loader: the user's iterable of batches: a `DataLoader`, a list, a generator function's result, ...
        device: where batches go; None leaves them where they are.
        active: the owner's stack of loaders that are being iterated, the innermost last.
        non_blocking: let copies go on in the background where the memory is pinned.
        lookahead: batches that are fetched beyond the one that is given out: 1, or the size of a window whose real
            length has to be known when it begins.
        skip_batches: batches at the start of each pass that are fetched and left out; `skip_first_batches` skips
            without fetching where it can.
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        device: torch.device | None = None,
        active: list[PreparedLoader] | None = None,
        non_blocking: bool = False,
        lookahead: int = 1,
        skip_batches: int = 0,
    ) -> None:
        self.loader = loader
        self.device = device
        self.non_blocking = non_blocking
        self.lookahead = lookahead
        self.skip_batches = skip_batches
        self.iteration = 0
        """Passes that were begun and finished; also the epoch that samplers are told."""
        self.end_of_dataloader = False
        """Whether the batch that was given out last is the last one of the pass."""
        self.remainder = -1
        """Samples in the pass's short last batch over all processes, 0 where it is full; -1 outside a pass or if
        unknown.
        """
        self.active: list[PreparedLoader] = [] if active is None else active
        """The owner's stack of loaders that are being iterated, the innermost last."""
        self.origin: PreparedLoader | None = None
        """The loader whose pass this one finishes, which then goes on with the next; None: it has its own passes."""
        self.batches_known = 1
        """Batches that are known to be left, with the one that was given out last: up to `lookahead + 1` of them."""

    def attached_to(self, active: list[PreparedLoader]) -> PreparedLoader:
        """A loader like this one with another owner's stack of active loaders."""
        clone = copy.copy(self)
        clone.active = active
        return clone

    def __len__(self) -> int:
        """Batches in a pass. Raises TypeError where the loader has no length."""
        return max(len(self.loader) - self.skip_batches, 0)  # type: ignore[arg-type]

    @property
    def length(self) -> int | None:
        """Batches in a pass, None where the loader has no length."""
        return loader_length(self)

    @property
    def dataset(self) -> Any:
        """The wrapped loader's dataset. Raises AttributeError where it has none."""
        return self.loader.dataset  # type: ignore[attr-defined]

    @property
    def batch_size(self) -> int | None:
        """Samples per batch of the wrapped loader, None where it has no fixed size."""
        return self._option("batch_size")  # type: ignore[no-any-return]

    @property
    def total_batch_size(self) -> int | None:
        """Samples per batch over all processes, None where there is no fixed size."""
        return self.batch_size

    @property
    def total_dataset_length(self) -> int | None:
        """Samples in the dataset, None where it has no length."""
        dataset = self._option("dataset")
        return None if dataset is None else loader_length(dataset)

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler."""
        return self._option("sampler")

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler."""
        return self._option("batch_sampler")

    @property
    def drop_last(self) -> bool:
        """Whether the wrapped loader leaves out a short last batch."""
        return bool(self._option("drop_last"))

    @property
    def collate_fn(self) -> Any:
        """What makes a batch of samples, None where the loader does not say."""
        return self._option("collate_fn")

    @property
    def num_workers(self) -> int:
        """The wrapped loader's worker processes."""
        return self._option("num_workers") or 0

    @property
    def pin_memory(self) -> bool:
        """Whether batches are put into pinned memory."""
        return bool(self._option("pin_memory"))

    @property
    def generator(self) -> torch.Generator | None:
        """The wrapped loader's generator."""
        return self._option("generator")  # type: ignore[no-any-return]

    def _option(self, name: str) -> Any:
        return getattr(self.loader, name, None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers at any depth and its dataset, where they listen, which epoch begins."""
        self.iteration = epoch
        for listener in epoch_listeners(self.loader):
            listener.set_epoch(epoch)

    def move(self, batch: Any) -> Any:
        """The batch on the device."""
        if self.device is None or self.device.type == "cpu":
            return batch
        return send_to_device(batch, self.device, self.non_blocking)

    def raw_iterator(self) -> Iterator[Any]:
        """One pass over the batches, not moved, `skip_batches` left out. The base of every way to iterate."""
        iterator = iter(self.loader)
        for _ in range(self.skip_batches):
            if next(iterator, _END) is _END:
                break
        return iterator

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self.active.append(self)
        self.end_of_dataloader = False
        self.remainder = self._planned_remainder()
        try:
            yield from self._with_end_known()
        finally:
            # By identity: an equal loader may be active further out. A loop that was left early ends here as well.
            self.active[:] = [other for other in self.active if other is not self]
            self.remainder = -1

    def _with_end_known(self) -> Iterator[Any]:
        iterator = self.raw_iterator()
        ahead: deque[Any] = deque()
        has_ended = False
        given = 0
        while True:
            while not has_ended and len(ahead) <= self.lookahead:
                batch = next(iterator, _END)
                if batch is _END:
                    has_ended = True
                else:
                    ahead.append(batch)
            if not ahead:
                break
            batch = ahead.popleft()
            given += 1
            self.batches_known = 1 + len(ahead)
            self.end_of_dataloader = not ahead
            yield self.move(batch)
        if given or self.origin is not None:
            self.iteration += 1
        if self.origin is not None:
            self.origin.iteration = max(self.origin.iteration, self.iteration)

    def _planned_remainder(self) -> int:
        samples, size = loader_length(self.sampler), self.total_batch_size
        if samples is None:
            samples = self.total_dataset_length
        return -1 if samples is None or size is None or self.drop_last else samples % size


def loader_length(loader: Any) -> int | None:
    """Batches in one pass, None where the loader has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # what `len` raises where there is none
        return None
