"""`PreparedLoader`: a loader of this process, whose end is known before its last batch is used."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from ..distributed.errors import ConfigError
from ..distributed.nested import send_to_device
from ..distributed.random import synchronize_rng_state
from .described import LoaderAround
from .epochs import WorkerSeeds
from .rounds import Dealer
from .samplers import epoch_listeners
from .sizes import loader_length
from .stateful import LoaderState, is_stateful
from .transfer import SideStream, has_streams

_END = object()


class PreparedLoader(LoaderAround):
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
        num_processes: how many processes share the loader.
        dealer: what gives this process its share; None: the loader was not shared.
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
        num_processes: int = 1,
        dealer: Dealer | None = None,
    ) -> None:
        super().__init__(loader, num_processes, dealer)
        self.device = device
        self.non_blocking = non_blocking
        self.lookahead = lookahead
        self.skip_batches = skip_batches
        self.iteration = 0
        """Passes that were begun and finished; also the epoch that samplers are told."""
        self.end_of_dataloader = False
        """Whether the batch that was given out last is the last one of the pass."""
        self.remainder = -1
        """Samples in the pass's short last round over all processes, those that complete it not counted; 0 where it is
        full; -1 outside a pass or if unknown. Where a batch sampler does not tell it before, it is known with the last
        batch.
        """
        self.real_samples: int | None = None
        """Samples of the batch that was given last over all processes, if some were added to it; None: all are real.
        Samples are added to the last round, and, where a shard of an iterable dataset has several workers, to that of
        each worker.
        """
        self.shared_generators: list[torch.Generator] = []
        """Generators of samplers, whose state all processes take from the main process at the start of a pass."""
        self.worker_seeds: WorkerSeeds | None = None
        """Where the seeds of worker processes come from; None: from the loader's generator."""
        self.active: list[PreparedLoader] = [] if active is None else active
        """The owner's stack of loaders that are being iterated, the innermost last."""
        self.origin: PreparedLoader | None = None
        """The loader whose pass this one finishes, which then goes on with the next; None: it has its own passes."""
        self.batches_known = 1
        """Batches that are known to be left, with the one that was given out last: up to `lookahead + 1` of them."""
        self._position: Any = None

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

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers at any depth and its dataset, where they listen, which epoch begins."""
        self.iteration = epoch
        for listener in epoch_listeners(self.loader):
            listener.set_epoch(epoch)
        if self.worker_seeds is not None:
            self.worker_seeds.set_epoch(epoch)

    def move(self, batch: Any) -> Any:
        """The batch on the device."""
        if self.device is None or self.device.type == "cpu":
            return batch
        return send_to_device(batch, self.device, self.non_blocking or self.pin_memory)

    def raw_iterator(self) -> Iterator[Any]:
        """One pass over the batches, not moved, `skip_batches` left out.

        Collective where the loader is dispatched, or shuffles by a generator that processes share.
        """
        iterator = self._begin()
        return (counted.batch for counted in iterator) if self.counts_samples else iterator

    def _begin(self) -> Iterator[Any]:
        """The base of every way to iterate: the items of the wrapped loader, `Counted` where it counts samples."""
        for generator in self.shared_generators:
            synchronize_rng_state("generator", generator)
        if self.worker_seeds is not None:
            self.worker_seeds.keep_pace()
        if self.skip_batches and (skips := getattr(self.loader, "iterate_from", None)) is not None:
            return skips(self.skip_batches)  # type: ignore[no-any-return]
        iterator = iter(self.loader)
        for _ in islice(iterator, self.skip_batches):
            pass
        return iterator

    def state_dict(self) -> LoaderState:
        """The position after the batch that was given out last; what was only fetched counts as not given. Local.

        Raises:
            ConfigError: the wrapped loader can't say where it is.
        """
        self._check_stateful()
        is_over = self.end_of_dataloader and self._position is not None
        position = self.loader.state_dict() if self._position is None else self._position  # type: ignore[attr-defined]
        return {"version": 1, "iteration": self.iteration + is_over, "loader": position}

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on behind that position in the next pass over this loader. Local.

        Raises:
            ConfigError: the wrapped loader can't go on anywhere, or the state is of another kind.
        """
        self._check_stateful()
        if not isinstance(state, dict) or state.get("version") != 1:
            raise ConfigError(f"a loader's state is {state!r:.80}. Expected what PreparedLoader.state_dict() gave.")
        self.set_epoch(state["iteration"])
        self._position = None
        self.end_of_dataloader = False
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self.active.append(self)
        self.end_of_dataloader = False
        self.remainder = self.planned_remainder()
        self.real_samples = None
        try:
            yield from self._with_end_known()
        finally:
            # By identity: an equal loader may be active further out. A loop that was left early ends here as well.
            self.active[:] = [other for other in self.active if other is not self]
            self.remainder = -1
            self.real_samples = None

    def _with_end_known(self) -> Iterator[Any]:
        iterator = self._begin()
        ahead: deque[Any] = deque()
        side = self._side_stream()
        moves = self.device is not None and self.device.type != "cpu"
        notes = _Notes(self) if self.counts_samples or is_stateful(self.loader) else None
        has_ended = False
        given = 0
        while True:
            while not has_ended and len(ahead) <= self.lookahead:
                batch = next(iterator, _END)
                has_ended = batch is _END
                if notes is not None:
                    batch = notes.fetched(batch)
                if not has_ended:
                    ahead.append(batch)
            if not ahead:
                break
            batch = ahead.popleft()
            given += 1
            self.batches_known = 1 + len(ahead)
            if notes is not None:
                notes.given()
            if not ahead:
                self._end()
            if side is not None:
                batch = side.next(batch, ahead)
            elif moves:
                batch = self.move(batch)
            yield batch
        if given or self.origin is not None:
            self.iteration += 1
        self._position = None
        if self.origin is not None:
            self.origin.iteration = max(self.origin.iteration, self.iteration)

    def _end(self) -> None:
        """The batch that is given out now is the last one."""
        self.end_of_dataloader = True
        if self.dealer is not None and not self.drop_last:
            self.remainder = self.dealer.real_samples if not self.counts_samples else self.real_samples or 0
            if self.remainder > 0:
                self.real_samples = self.remainder

    def _side_stream(self) -> SideStream | None:
        """What moves batches in the background, where the device can and their memory is pinned or may be."""
        device = self.device
        if device is None or not (self.non_blocking or self.pin_memory) or not has_streams(device):
            return None
        return SideStream(device)

    def _check_stateful(self) -> None:
        if not is_stateful(self.loader):
            raise ConfigError(
                f"a {type(self.loader).__name__} can't say where it is. Use "
                "DataLoaderConfiguration(use_stateful_dataloader=True), or a loader with state_dict and "
                "load_state_dict; or count batches yourself and use skip_first_batches."
            )


class _Notes:
    """What is noted of each batch while others are fetched behind it: the loader's position, its real samples.

    Args:
        loader: whose pass it is.
    """

    def __init__(self, loader: PreparedLoader) -> None:
        self._loader = loader
        self._positions: deque[Any] | None = deque() if is_stateful(loader.loader) else None
        self._counts: deque[int] | None = deque() if loader.counts_samples else None

    def fetched(self, item: Any) -> Any:
        """The batch of an item that was fetched; `_END` where the end was."""
        if self._positions is not None:
            position = self._loader.loader.state_dict()  # type: ignore[attr-defined]
            if item is not _END:
                self._positions.append(position)
            elif self._positions:
                self._positions[-1] = position  # behind the last batch the pass is over
        if self._counts is None or item is _END:
            return item
        self._counts.append(item.real_samples)
        return item.batch

    def given(self) -> None:
        """The first one that was fetched is given out."""
        if self._positions is not None:
            self._loader._position = self._positions.popleft()
        if self._counts is not None:
            self._loader.real_samples = self._counts.popleft() or None
