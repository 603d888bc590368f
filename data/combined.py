"""`CombinedLoader`: several loaders read as one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal, TypeAlias, get_args

from ..distributed.errors import ConfigError, DataError, suggest
from .samplers import epoch_listeners, index_source, parts_of_loader
from .sizes import loader_length
from .skipping import batches_from, discard, reads_by_index
from .starting import begins_anywhere

Mode: TypeAlias = Literal["min_size", "max_size_cycle", "max_size", "sequential"]

_END = object()


class CombinedLoader:
    """Several loaders read as one.

    Args:
        loaders: by name, or in order.
        mode: `"min_size"` ends with the shortest; `"max_size_cycle"` ends with the longest and begins the others anew;
            `"max_size"` ends with the longest and gives None for those that have ended; `"sequential"` gives the
            batches of one loader after those of another.
    Raises:
        ConfigError: no loader, or an unknown mode.

    Each item is a mapping by name or a list in order, of one batch per loader; in `"sequential"` mode it is one batch.
    """

    def __init__(self, loaders: Mapping[str, Iterable[Any]] | Sequence[Iterable[Any]], mode: Mode = "min_size") -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"CombinedLoader(mode={mode!r}) is unknown. {suggest(mode, get_args(Mode))}")
        if not loaders:
            raise ConfigError("CombinedLoader has no loader. Pass at least one.")
        self.mode = mode
        self._epoch: int | None = None
        self._names = list(loaders) if isinstance(loaders, Mapping) else None
        self.loaders: list[Iterable[Any]] = list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)

    def __len__(self) -> int:
        """Items in a pass. Raises TypeError where a loader that decides it has no length."""
        lengths = [loader_length(loader) for loader in self.loaders]
        known = [length for length in lengths if length is not None]
        if self.mode == "min_size" and known:
            return min(known)  # a loader without length may still be shorter; the pass tells
        if len(known) < len(lengths):
            raise TypeError("a loader of this CombinedLoader has no length")
        return sum(known) if self.mode == "sequential" else max(known)

    def with_loaders(self, loaders: Sequence[Iterable[Any]]) -> CombinedLoader:
        """The same with other loaders in the place of these, in order."""
        clone = copy.copy(self)
        clone.loaders = list(loaders)
        return clone

    def set_epoch(self, epoch: int) -> None:
        """Tell each loader, its samplers at any depth and its dataset, where they listen, which epoch begins."""
        self._epoch = epoch
        for loader in self.loaders:
            _tell(loader, epoch)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[Any]:
        """The items behind the first `num_skipped` ones. Loaders that work by indices load nothing for those.

        All are of the epoch that was set when this was called, also those of loaders that begin later.
        """
        through = self._one_by_one if self.mode == "sequential" else self._together
        return through(num_skipped, self._epoch)

    def _one_by_one(self, num_skipped: int, epoch: int | None) -> Iterator[Any]:
        for loader in self.loaders:
            if reads_by_index(loader):
                yield from self._begun(loader, epoch, num_skipped)
                num_skipped = max(num_skipped - len(loader), 0)  # type: ignore[arg-type]
            else:
                iterator = self._begun(loader, epoch)
                num_skipped -= discard(iterator, num_skipped)
                yield from iterator

    def _begun(self, loader: Iterable[Any], epoch: int | None, num_skipped: int = 0) -> Iterator[Any]:
        """The batches of a loader behind its first ones, in the epoch of the pass that it is a part of."""
        if epoch is None or epoch == self._epoch:
            return batches_from(loader, num_skipped)
        _tell(loader, epoch)  # another one was set in the middle of the pass
        try:
            iterator = batches_from(loader, num_skipped)
            first = list(islice(iterator, 1))  # samplers may look at their epoch with the first batch only
        finally:
            _tell(loader, self._epoch)
        return chain(first, iterator)

    def _together(self, num_skipped: int, epoch: int | None) -> Iterator[Any]:
        iterators: list[Iterator[Any]] = [iter(())] * len(self.loaders)
        ended = [False] * len(iterators)
        for index in range(len(iterators)):
            self._begin(index, num_skipped, iterators, ended, epoch)
        while True:
            batches = [self._next(index, iterators, ended, epoch) for index in range(len(iterators))]
            if all(ended) or (self.mode == "min_size" and any(ended)):
                return
            yield batches if self._names is None else dict(zip(self._names, batches, strict=True))

    def _begin(
        self, index: int, num_skipped: int, iterators: list[Iterator[Any]], ended: list[bool], epoch: int | None
    ) -> None:
        """Begin to read a loader behind the batches that it gave to the first `num_skipped` items."""
        loader: Any = self.loaders[index]
        length = len(loader) if num_skipped and reads_by_index(loader) else 0
        if 0 < length < num_skipped and self.mode == "max_size_cycle" and begins_anywhere(index_source(loader)[1]):
            rounds = (num_skipped - 1) // length
            for part in parts_of_loader(loader):
                if hasattr(part, "num_given"):  # numbers go on where a loader is begun again
                    part.num_given = rounds * length
            ended[index] = True
            num_skipped -= rounds * length
        if num_skipped == 0 or (length and (num_skipped <= length or self.mode != "max_size_cycle")):
            iterators[index] = self._begun(loader, epoch, num_skipped)
            return
        iterators[index] = self._begun(loader, epoch)
        for _ in range(num_skipped):
            self._next(index, iterators, ended, epoch)

    def _next(self, index: int, iterators: list[Iterator[Any]], ended: list[bool], epoch: int | None) -> Any:
        batch = next(iterators[index], _END)
        if batch is not _END:
            return batch
        ended[index] = True
        if self.mode != "max_size_cycle" or all(ended):
            return None
        iterators[index] = self._begun(self.loaders[index], epoch)
        again = next(iterators[index], _END)
        if again is _END:
            raise DataError(
                f"loader {index if self._names is None else self._names[index]!r} of a CombinedLoader gives no batch "
                "when it is begun again. Use mode='max_size' or 'min_size', or a loader that can be iterated more "
                "than once."
            )
        return again


def _tell(loader: Iterable[Any], epoch: int | None) -> None:
    """Tell a loader, its samplers at any depth and its dataset which epoch it is."""
    for listener in epoch_listeners(loader):
        listener.set_epoch(epoch)
