"""`PreparedLoader`: a loader of this process, whose end is known before its last batch is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .transfer import send_to_device

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
        lookahead: batches that are fetched before the first of them is given out: 1, or the size of a window whose
            real length has to be known when it begins.
        skip_batches: batches at the start of each pass that are fetched and left out.
    """

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
        self._active: list[PreparedLoader] = [] if active is None else active
        self._window_size = 1
        self._moves = device is not None and device.type != "cpu"

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
        return getattr(self.loader, "batch_size", None)

    @property
    def total_batch_size(self) -> int | None:
        """Samples per batch over all processes."""
        return self.batch_size

    @property
    def sampler(self) -> Any:
        """The wrapped loader's sampler."""
        return getattr(self.loader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The wrapped loader's batch sampler."""
        return getattr(self.loader, "batch_sampler", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the dataset, where they listen, which epoch begins."""
        self.iteration = epoch
        for listener in (self.loader, self.batch_sampler, self.sampler, getattr(self.loader, "dataset", None)):
            if callable(tell := getattr(listener, "set_epoch", None)):
                tell(epoch)

    def move(self, batch: Any) -> Any:
        """The batch on the device."""
        return send_to_device(batch, self.device, self.non_blocking) if self._moves else batch  # type: ignore[arg-type]

    def window_size(self, num_steps: int) -> int:
        """Micro-batches in the window of `num_steps` that the newest batch belongs to; exact where that is
        `lookahead`.
        """
        return self._window_size if num_steps == self.lookahead else num_steps

    def raw_iterator(self) -> Iterator[Any]:
        """One pass over the batches, not moved, `skip_batches` left out. The base of every way to iterate."""
        iterator = iter(self.loader)
        for _ in range(self.skip_batches):
            if next(iterator, _END) is _END:
                break
        return iterator

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self._active.append(self)
        self.end_of_dataloader = False
        self.remainder = self._planned_remainder()
        try:
            yield from self._with_end_known()
        finally:
            # By identity: an equal loader may be active further out. A loop that was left early ends here as well.
            self._active[:] = [other for other in self._active if other is not self]
            self.remainder = -1

    def _with_end_known(self) -> Iterator[Any]:
        iterator = self.raw_iterator()
        ahead: deque[Any] = deque()
        given = 0
        while True:
            while len(ahead) <= self.lookahead:
                batch = next(iterator, _END)
                if batch is _END:
                    break
                ahead.append(batch)
            if not ahead:
                break
            if given % self.lookahead == 0:
                self._window_size = min(len(ahead), self.lookahead)
            batch = ahead.popleft()
            given += 1
            self.end_of_dataloader = not ahead
            yield self.move(batch)
        if given:
            self.iteration += 1

    def _planned_remainder(self) -> int:
        dataset, size = getattr(self.loader, "dataset", None), self.total_batch_size
        if size is None or getattr(self.loader, "drop_last", False) or not hasattr(dataset, "__len__"):
            return -1
        return int(len(dataset) % size)  # type: ignore[arg-type]


def loader_length(loader: Iterable[Any]) -> int | None:
    """Batches in one pass, None where the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # what `len` raises where there is none
        return None
