"""`DispatchedLoader`: the main process alone reads the data, and hands each process its batches."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.errors import DataError
from ..distributed.exchange import broadcast_encoded
from ..distributed.group import rank
from ..distributed.nested import recursively_apply
from ..distributed.slots import control_device
from ..distributed.watch import collective
from .dealing import LoaderDealer
from .joining import SliceFunction, can_be_joined, parts_of, samples_in
from .rounds import completed
from .sizes import find_batch_size
from .skipping import opened_at, reads_by_index
from .stateful import put_state, state_of

_END = object()
_OPERATION = "handing out a batch"


@dataclass(frozen=True, slots=True)
class _Blank:
    """What stands for a tensor while the nesting of a batch is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Message(NamedTuple):
    """What the main process says before each round: one field is set, none at the end of the pass."""

    batches: list[Any] | None = None
    """Each process's batch, with blanks for its tensors; what is no tensor goes as it is."""
    real_samples: int = -1
    error: str | None = None


class DispatchedLoader(LoaderDealer):
    """One process's batches of a loader that the main process alone reads. Iterating it is collective.

    Rounds are dealt by whole batches; the last one, if its batches are not as long as the others, is joined, filled up
    with the first samples of the pass, and cut into equal parts.

    Args:
        loader: any iterable of batches; only the main process iterates it. What is no tensor in them is pickled.
        num_processes: how many processes there are.
        process_index: the index of this one.
        num_peers: how many processes, one after another, have the same index, and get the same batches.
        split_batches: each batch is cut into as many parts as there are processes.
        drop_last: leave out the last round if it is not full.
        slice_fn: cuts the parts; see `parts_of`. Each round is joined then.
        pins: whether received batches are put into pinned memory.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        num_processes: int,
        process_index: int,
        *,
        num_peers: int = 1,
        split_batches: bool = False,
        drop_last: bool = False,
        slice_fn: SliceFunction | None = None,
        pins: bool = False,
    ) -> None:
        super().__init__(
            loader,
            num_processes,
            process_index,
            split_batches=split_batches,
            even_batches=None,
            drop_last=drop_last,
        )
        self.num_peers = num_peers
        self.reads = process_index == 0 and (num_peers == 1 or rank() == 0)
        """Whether this is the process that reads the data."""
        self.slice_fn = slice_fn
        self.pins = pins
        self._position: Any = None
        """The loader's state after the last round that was handed out, where it is stateful."""
        self._first_round: list[Any] = []
        """That of the next pass, where it goes on in the middle of one."""

    @property
    def is_even(self) -> bool:
        """Each round gives every process a batch."""
        return True

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[Any]:
        """A pass behind its first `num_skipped` batches of each process, which are not sent. Collective."""
        self.real_samples = -1
        return self._hand_out(num_skipped) if self.reads else self._receive()

    def keep_first_round(self, state: Any) -> None:
        """Read the first round of a pass again, since the last one of the next pass may be completed from it. Local.

        Args:
            state: of the loader before that pass; None: it is as it was.
        """
        if not self.reads or self.drop_last:
            return
        if state is not None:
            put_state(self.loader, state)
        size = 1 if self.split_batches else self.num_processes
        found = list(islice(iter(self.loader), size))
        self._first_round = found or list(islice(iter(self.loader), size))  # the state may say that nothing is left

    def state_dict(self) -> dict[str, Any]:
        """The position after the last round that was handed out; empty except on the main process. Local."""
        if not self.reads:
            return {}
        state: dict[str, Any] = state_of(self.loader) if self._position is None else self._position
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the round that the state was saved at, in the next pass. Local."""
        self._position = None
        if self.reads:
            put_state(self.loader, state)

    def _hand_out(self, num_skipped: int) -> Iterator[Any]:
        rounds = self._rounds(num_skipped)
        while True:
            try:
                parts, real_samples = next(rounds, (None, 0))
                message = _encoded(parts, real_samples)
            except Exception as error:
                _say(pickle.dumps(_Message(error=f"{type(error).__name__}: {error}")))
                raise
            _say(message)
            if parts is None:
                return
            self.real_samples = real_samples
            _send(parts, self.num_peers)
            yield parts[0]

    def _receive(self) -> Iterator[Any]:
        while True:
            message = _hear()
            if message.error is not None:
                raise DataError(f"the main process could not read the next batch, and so none came: {message.error}")
            if message.batches is None:
                return
            self.real_samples = message.real_samples
            yield _received(message.batches[self.process_index], self.pins)

    def _rounds(self, num_skipped: int) -> Iterator[tuple[list[Any], int]]:
        """Each process's batch and the number of real samples, round by round. One batch is read ahead."""
        per_round = 1 if self.split_batches else self.num_processes
        first, iterator = opened_at(self.loader, num_skipped * per_round, per_round)
        first, self._first_round = self._first_round or first, []
        is_copy = num_skipped > 0 and reads_by_index(self.loader)  # the loader itself is nowhere then
        ahead = next(iterator, _END)
        while ahead is not _END:
            batches = [ahead, *islice(iterator, per_round - 1)]
            is_full = len(batches) == per_round
            if self.drop_last and not is_full:
                return
            position = None if is_copy else state_of(self.loader)
            ahead = next(iterator, _END) if is_full else _END
            first = first or batches
            parts = self._parts(batches, first, is_last=ahead is _END)
            self._position = position if ahead is not _END or is_copy else state_of(self.loader)
            yield parts

    def _parts(self, batches: list[Any], first: list[Any], *, is_last: bool) -> tuple[list[Any], int]:
        count = self.num_processes
        if self.split_batches or self.slice_fn is not None:
            return parts_of(batches, first, count, self.slice_fn)
        is_full = len(batches) == count
        if is_full and not is_last:
            return batches, samples_in(batches)
        # Batches that can't be joined are not cut: nothing that was read may end a pass.
        if not can_be_joined([*batches, *first]) or (is_full and len({find_batch_size(b) for b in batches}) == 1):
            return completed(batches, first, count), samples_in(batches)
        return parts_of(batches, first, count)


def _say(message: bytes) -> None:
    broadcast_encoded(lambda: message, 0, _OPERATION)


def _hear() -> _Message:
    message: _Message = pickle.loads(broadcast_encoded(lambda: b"", 0, _OPERATION))
    return message


def _encoded(parts: Sequence[Any] | None, real_samples: int) -> bytes:
    """What is said of a round, None the end.

    Raises:
        DataError: the batches hold an object that can't be pickled.
    """
    if parts is None:
        return pickle.dumps(_Message())
    blanks = [recursively_apply(lambda t: _Blank(tuple(t.shape), t.dtype), part) for part in parts]
    try:
        return pickle.dumps(_Message(blanks, real_samples))
    except Exception as error:  # an object's own methods may raise anything
        raise DataError(
            f"the main process can't hand out a batch, since it holds what can't be pickled: {type(error).__name__}: "
            f"{error}. Collate to tensors and plain objects, or use DataLoaderConfiguration(dispatch_batches=False), "
            "so that each process reads its own batches."
        ) from error


def _tensors_of(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    recursively_apply(found.append, batch)
    return found


def _send(parts: Sequence[Any], num_peers: int) -> None:
    """Send each other process its tensors; they go as bytes, whatever their type. Each part is that of some peers."""
    device = control_device()
    with collective(_OPERATION):
        buffers = [
            (tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(device), index)
            for index in range(1, len(parts) * num_peers)
            for tensor in _tensors_of(parts[index // num_peers])
            if tensor.numel()
        ]
        for work in [dist.isend(buffer, index) for buffer, index in buffers]:
            if work is not None:
                work.wait()


def _received(batch: Any, pins: bool) -> Any:
    """The batch of this process, whose tensors come in the order of its leaves."""
    device = control_device()

    def receive(blank: _Blank) -> Tensor:
        tensor = torch.empty(blank.shape, dtype=blank.dtype, pin_memory=pins)
        if tensor.numel():
            buffer = tensor.reshape(-1).view(torch.uint8)
            arrived = buffer.to(device)  # the same memory where the group speaks CPU
            dist.recv(arrived, 0)
            if arrived is not buffer:
                buffer.copy_(arrived)
        return tensor

    with collective(_OPERATION):
        return recursively_apply(receive, batch, test_type=lambda leaf: isinstance(leaf, _Blank))
