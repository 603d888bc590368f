"""`PreparedLoader`: a loader of this process, whose end is known before its last batch is used."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..distributed.errors import ConfigError
from .passes import Passes
from .position import Position
from .rounds import Dealer
from .stateful import LoaderState, is_stateful, put_state, state_of
from .transfer import SideStream, Transfer, has_streams

_END = object()


class PreparedLoader(Passes):
    """Any iterable of batches, moved to the device, with its end known one batch ahead.

    While it is iterated it is on its owner's stack of active loaders, so that a loader which is run to its end inside
    another one's loop changes nothing for the outer one.

    Args:
        loader: the user's iterable of batches: a `DataLoader`, a list, a generator function's result, ...
        device: where batches go; None leaves them where they are.
        active: the owner's stack of loaders that are being iterated, the innermost last.
        non_blocking: don't wait for copies out of pinned memory; where the loader pins it this is always so.
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
        super().__init__(loader, num_processes, dealer, skip_batches)
        self.device = device
        self.non_blocking = non_blocking
        self.lookahead = lookahead
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
        self.active: list[PreparedLoader] = [] if active is None else active
        """The owner's stack of loaders that are being iterated, the innermost last."""
        self.origin: PreparedLoader | None = None
        """The loader whose pass this one finishes, which then goes on with the next; None: it has its own passes."""
        self.batches_known = 1
        """Batches that are known to be left, with the one that was given out last: up to `lookahead + 1` of them."""
        self.skips_all = False
        """Whether it is the rest of an origin's pass, and nothing is left of it."""
        self.make_transfer: Callable[[], Transfer] | None = None
        """What makes `transfer`, where a strategy has its own for the device."""
        self._num_given: int | None = None
        """Batches of the running pass that were given out, None outside one."""

    def attached_to(self, active: list[PreparedLoader]) -> PreparedLoader:
        """A loader like this one with another owner's stack of active loaders."""
        clone = copy.copy(self)
        clone.active = active
        return clone

    def transfer(self) -> Transfer | None:
        """What moves the batches of one pass to the device; None where they stay as they are."""
        device = self.device
        if device is None or device.type == "cpu":
            return None
        if self.make_transfer is not None:
            return self.make_transfer()
        side = SideStream(device) if has_streams(device) else None
        return Transfer(device, non_blocking=self.non_blocking or self.pin_memory, side=side)

    def raw_iterator(self, lookahead: int = 1) -> Iterator[Any]:
        """One pass over the batches, not moved, `skip_batches` left out.

        Collective where the loader is dispatched, or shuffles by a generator that processes share.

        Args:
            lookahead: batches that its user reads beyond the one in use; positions are known for all of them.
        """
        iterator = self._begin(lookahead)
        return (counted.batch for counted in iterator) if self.counts_samples else iterator

    def current_position(self) -> Position:
        """The position after the batch that was given out last, in a loop over this loader or over the rest of it that
        `skip_first_batches` gave; outside of a loop, that of the next pass. Local.

        Raises:
            ConfigError: as `position`.
        """
        running = next((each for each in reversed(self.active) if each.gives(self)), None)
        if running is None and is_stateful(self.loader):
            running = self  # a loop that was left early: what is stateful can go on in the middle
        if running is None or running._num_given is None:
            return self.position(0)
        if running.end_of_dataloader:
            return self.position(0, epoch=running.iteration + 1)
        inner = running.position(running._num_given)
        if running is self:
            return inner
        outer = self.position(running.num_before + running._num_given, epoch=running.iteration)
        outer["generators"], outer["workers"], outer["state"] = inner["generators"], inner["workers"], inner["state"]
        return outer

    def gives(self, loader: PreparedLoader) -> bool:
        """Whether the batches of this loader are some of the other's: it is that one, or made from it. Local."""
        return self is loader or (self.origin is not None and self.origin.gives(loader))

    def state_dict(self) -> LoaderState:
        """The position after the batch that was given out last; what was only fetched counts as not given. Local.

        Raises:
            ConfigError: the wrapped loader can't say where it is.
        """
        self._check_stateful()
        given, running = self._num_given, self._pass
        if given is None or running is None or given == running.first:
            return {"version": 1, "iteration": self.iteration, "loader": state_of(self.loader)}
        state = self._kept_state(given, running)
        return {"version": 1, "iteration": self.iteration + self.end_of_dataloader, "loader": state}

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on behind that position in the next pass over this loader. Local.

        Raises:
            ConfigError: the wrapped loader can't go on anywhere, or the state is of another kind.
        """
        self._check_stateful()
        if not isinstance(state, dict) or state.get("version") != 1:
            raise ConfigError(f"a loader's state is {state!r:.80}. Expected what PreparedLoader.state_dict() gave.")
        self.set_epoch(state["iteration"])
        self._start = self._num_given = None
        self.end_of_dataloader = False
        put_state(self.loader, state["loader"])

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        self.active.append(self)
        self.end_of_dataloader = False
        self.real_samples = None
        try:
            yield from self._with_end_known()
        finally:
            # By identity: an equal loader may be active further out. A loop that was left early ends here as well.
            self.active[:] = [other for other in self.active if other is not self]
            self.remainder = -1
            self.real_samples = None

    def _with_end_known(self) -> Iterator[Any]:
        if self.skips_all:
            if self.origin is not None and not self._is_between_passes():
                self.origin._start = None
                self._end_pass()
            return
        iterator = self._begin(self.lookahead)
        if self.origin is not None:
            self.origin._start = None  # where it was to go on, this loader does
        self.remainder = self._read.planned_remainder()
        ahead: deque[Any] = deque()
        transfer = self.transfer()
        counts: deque[int] | None = deque() if self.counts_samples else None
        has_ended = False
        running = self._pass
        self._num_given = num_given = self.first_batch
        while True:
            while not has_ended and len(ahead) <= self.lookahead:
                batch: Any = next(iterator, _END)
                if batch is _END:
                    has_ended = True
                    break
                if counts is not None:
                    counts.append(batch.real_samples)
                    batch = batch.batch
                ahead.append(batch)
            if not ahead:
                break
            batch = ahead.popleft()
            num_given += 1
            # All anew with each batch: inside the loop over this pass another one may have been run.
            self._pass, self._num_given = running, num_given
            self.batches_known = 1 + len(ahead)
            self.end_of_dataloader = not ahead
            if counts is not None:
                self.real_samples = counts.popleft() or None
            if self.end_of_dataloader:
                self._tell_remainder()
            if transfer is not None:
                batch = transfer.next(batch, ahead)
            yield batch
        self._num_given = None
        if num_given or self.origin is not None:
            self._end_pass()

    def _end_pass(self) -> None:
        self.iteration += 1
        if self.origin is not None:
            self.origin.iteration = max(self.origin.iteration, self.iteration)

    def _is_between_passes(self) -> bool:
        """Whether the pass that was skipped was over already at the position at which its loader goes on."""
        start = None if self.origin is None else self.origin._start
        return start is not None and not start.was_begun

    def _tell_remainder(self) -> None:
        """Say how many samples the last round has, as its batch is given out."""
        dealer = self._read.dealer
        if dealer is not None and not self.drop_last:
            self.remainder = dealer.real_samples if not self.counts_samples else self.real_samples or 0
            if self.remainder > 0:
                self.real_samples = self.remainder

    def _check_stateful(self) -> None:
        if not is_stateful(self.loader):
            raise ConfigError(
                f"a {type(self.loader).__name__} can't say where it is. Use "
                "DataLoaderConfiguration(use_stateful_dataloader=True), or a loader with state_dict and "
                "load_state_dict; or count batches yourself and use skip_first_batches."
            )
