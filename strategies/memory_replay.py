"""One micro-batch of a sharded model, replayed with what `fully_shard` gathers, reduces and frees in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .memory import BACKWARD, BYTES, ENTER, GRADIENT, LEAVE, Meter, TracedStep


@dataclass(slots=True)
class UnitSizes:
    """What one unit takes, in bytes."""

    part: int = 0
    """The part of its weights that a process keeps."""
    sent: int = 0
    """That part in the format in which it is gathered, where that is another."""
    whole: int = 0
    """All its weights in the format in which they are computed with."""
    accumulated: int = 0
    """Its gradients as they are accumulated where they are not reduced."""
    reduced: int = 0
    """The buffer from which they are reduced."""
    reduced_part: int = 0
    """What comes of that, before it has the weights' format."""
    gradient_part: int = 0
    """The part of the gradients that a process keeps on its device."""
    away: int = 0
    """The part that it keeps on the host instead."""
    trained: dict[int, int] = field(default_factory=dict)
    """What the gradient of each of its trained parameters takes, by the parameter's index."""

    @property
    def changes_format(self) -> bool:
        """Whether gradients come in another format than that in which they are accumulated."""
        return self.accumulated != sum(self.trained.values())


@dataclass(frozen=True, slots=True)
class Replay:
    """One micro-batch of a sharded model: the traced step, with what `fully_shard` does at each of its moments.

    It follows torch's own order: a unit is gathered into one buffer and copied out of it; in forward the buffer of one
    unit is kept until the next is copied out; in backward the unit before is gathered ahead; the buffer from which a
    unit's gradients are reduced is kept until those of the next.
    """

    sizes: Sequence[UnitSizes]
    """Of the units, the outermost last."""
    num_parts: int
    """Processes that share a copy."""
    whole_gradients: Mapping[int, int]
    """What the gradients of ignored parameters take, by the parameter's index."""
    reshards: bool = True
    """Whether units are freed after their forward."""
    prefetch: int = 0
    """Units that are gathered ahead in forward."""
    copies: bool = False
    """Whether gradients are reduced in a copy of the buffer, as gloo does it on the CPU."""

    @property
    def parts(self) -> int:
        """What a process keeps of all weights of units."""
        return sum(size.part for size in self.sizes)

    @property
    def gradients(self) -> int:
        """What all gradients take when the optimizer steps."""
        return sum(size.gradient_part for size in self.sizes) + sum(self.whole_gradients.values())

    def highest(self, trace: TracedStep, window_size: int) -> int:
        """The most of a window's micro-batches, of which only the last reduces gradients; as `run`."""
        if window_size == 1:
            return self.run(trace, syncs=True, accumulated=False)
        first, last = self.run(trace, syncs=False, accumulated=False), self.run(trace, syncs=True, accumulated=True)
        between = self.run(trace, syncs=False, accumulated=True) if window_size > 2 else 0
        return max(first, between, last)

    def run(self, trace: TracedStep, *, syncs: bool, accumulated: bool) -> int:
        """The most that is held at once, beside weights and optimizer state.

        Args:
            trace: of the micro-batch.
            syncs: whether its backward reduces gradients.
            accumulated: whether earlier micro-batches have left gradients that are not reduced.
        """
        return _Pass(self, syncs, accumulated).run(trace)


class _Pass:
    """What is held while one micro-batch is replayed.

    Args:
        replay: the model and how it is spread.
        syncs, accumulated: as `Replay.run` takes them.
    """

    def __init__(self, replay: Replay, syncs: bool, accumulated: bool) -> None:
        self._replay, self._sizes = replay, replay.sizes
        self._syncs, self._accumulated = syncs, accumulated
        self._meter = Meter()
        self._outermost = len(replay.sizes) - 1
        self._owner = {index: unit for unit, size in enumerate(replay.sizes) for index in size.trained}
        self._whole: set[int] = set()
        self._buffers: dict[int, int] = {}
        self._kept_buffer = self._kept_reduction = 0
        self._order: list[int] = []
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._missing = {unit: set(size.trained) for unit, size in enumerate(replay.sizes)}
        self._held = {unit: size.accumulated if accumulated else 0 for unit, size in enumerate(replay.sizes)}

    def run(self, trace: TracedStep) -> int:
        """The most that is held at once."""
        self._meter.add(sum(self._held.values()))
        if self._accumulated:
            self._meter.add(sum(self._replay.whole_gradients.values()))
        actions: dict[str, Callable[[int], None]] = {
            BYTES: self._meter.add,
            ENTER: self._enter,
            LEAVE: self._leave,
            BACKWARD: self._begin_backward,
            GRADIENT: self._take,
        }
        for what, value in trace.events:
            actions[what](value)
        for unit in reversed(range(len(self._sizes))):
            self._finish(unit)
        return self._meter.highest

    def _gather(self, unit: int) -> None:
        """Begin to gather, unless it is there or on its way."""
        if unit in self._whole or unit in self._buffers:
            return
        size = self._sizes[unit]
        buffer = size.whole if self._replay.num_parts > 1 else 0
        self._meter.add(size.sent)
        self._meter.add(buffer)
        self._meter.add(-size.sent)
        self._buffers[unit] = buffer

    def _copy_out(self, unit: int) -> None:
        buffer = self._buffers.pop(unit, None)
        if buffer is None:
            return
        self._meter.add(self._sizes[unit].whole)
        self._whole.add(unit)
        if self._begun:
            self._meter.add(-buffer)
        else:
            self._meter.add(-self._kept_buffer)
            self._kept_buffer = buffer

    def _free(self, unit: int) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self._meter.add(-self._sizes[unit].whole)

    def _enter(self, unit: int) -> None:
        self._gather(unit)
        self._copy_out(unit)
        if not self._begun:
            for ahead in self._following(unit):
                self._gather(ahead)

    def _following(self, unit: int) -> range:
        """The units that are gathered ahead: those behind it in the model's order, which is the reverse of theirs."""
        return range(unit - 1, max(-1, unit - 1 - self._replay.prefetch), -1) if unit != self._outermost else range(0)

    def _leave(self, unit: int) -> None:
        if self._begun:
            return
        self._order.append(unit)
        if unit == self._outermost:
            self._meter.add(-self._kept_buffer)
            self._kept_buffer = 0
        elif self._replay.reshards:
            self._free(unit)

    def _begin_backward(self, unit: int) -> None:
        for other in self._whole & self._begun:
            if not self._sizes[other].trained and other != self._outermost:
                self._free(other)  # it is frozen: no gradient will tell its end
        self._begun.add(unit)
        self._gather(unit)
        self._copy_out(unit)
        if unit in self._order:
            index = len(self._order) - 1 - self._order[::-1].index(unit)
            del self._order[index:]
            if index:
                self._gather(self._order[index - 1])

    def _take(self, parameter: int) -> None:
        """A gradient is there: a new tensor, unless it was added to an accumulated one."""
        unit = self._owner.get(parameter)
        if unit is None:
            self._meter.add(0 if self._accumulated else self._replay.whole_gradients.get(parameter, 0))
            return
        size, missing = self._sizes[unit], self._missing[unit]
        if not self._accumulated or size.changes_format:
            self._held[unit] += size.trained[parameter]
            self._meter.add(size.trained[parameter])
        missing.discard(parameter)
        if not missing and unit != self._outermost:
            self._finish(unit)

    def _finish(self, unit: int) -> None:
        """The end of a unit's backward: its weights are freed, its gradients reduced."""
        if unit in self._finished:
            return
        self._finished.add(unit)
        size, meter = self._sizes[unit], self._meter
        if self._accumulated:
            meter.add(size.accumulated - self._held[unit])
            self._held[unit] = size.accumulated
        self._free(unit)
        if not size.trained:
            return
        if not self._syncs:
            if not self._accumulated and size.changes_format:
                meter.add(size.accumulated)
                meter.add(-self._held[unit])
            return
        meter.add(-self._kept_reduction)
        meter.add(size.reduced)
        self._kept_reduction = size.reduced
        meter.add(-self._held[unit])
        meter.add(size.reduced_part)
        meter.add(size.gradient_part)
        if self._replay.copies:
            meter.add(size.reduced)
            meter.add(-size.reduced)
        meter.add(-size.reduced_part)
