"""How DeepSpeed reduces gradients, replayed: through one buffer that is filled, reduced, and filled again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .memory import BACKWARD, BYTES, GRADIENT, Meter, TracedStep


@dataclass(frozen=True)
class Rows:
    """The trained parameters in the order of the optimizer's groups, each group a row that is cut into equal parts.

    Attributes:
        groups: of each group its parameters: their index in the model, and their elements.
        num_parts: into how many parts a row is cut.
    """

    groups: Sequence[Sequence[tuple[int, int]]]
    num_parts: int

    @property
    def elements(self) -> dict[int, int]:
        """Those of each parameter, in order."""
        return {index: elements for group in self.groups for index, elements in group}

    @property
    def parts(self) -> list[int]:
        """Elements of one part of each row, with what fills them up."""
        # An even number: messages begin where hardware can read them at once.
        return [2 * -(-sum(elements for _, elements in group) // (2 * self.num_parts)) for group in self.groups]

    @property
    def owners(self) -> dict[int, range]:
        """The parts in which each parameter lies."""
        return dict(self._places())

    def touched(self, part: int) -> int:
        """Elements of the parameters of which a part holds some."""
        elements = self.elements
        return sum(elements[index] for index, parts in self._places() if part in parts)

    def _places(self) -> Iterator[tuple[int, range]]:
        for group, size in zip(self.groups, self.parts, strict=True):
            offset = 0
            for index, elements in group:
                yield index, range(offset // size, (offset + max(1, elements) - 1) // size + 1)
                offset += elements


class BucketReplay:
    """A window's micro-batches under ZeRO 1 or 2, with what lies there of gradients.

    A gradient that is copied into the buffer is freed; one that is larger than the buffer stays until it is reduced.
    What comes of a reduction is copied out of the buffer, for all parameters of which this process has a part.

    Args:
        rows: the parameters.
        part: this process's.
        width: bytes of a gradient's element.
        capacity: elements of the buffer.
        spreads: whether gradients are reduced as they come (stage 2), and not behind the last backward (stage 1).
    """

    def __init__(self, rows: Rows, part: int, width: int, capacity: int, *, spreads: bool) -> None:
        self._sizes = {index: elements * width for index, elements in rows.elements.items()}
        self._owners = rows.owners
        self._part, self._capacity, self._spreads = part, capacity * width, spreads
        self.kept = rows.touched(part) * width
        """Bytes of the reduced gradients that wait for the step."""
        self._meter = Meter()
        self._filled: list[int] = []
        self._has_buffer = self._has_own = False

    def highest(self, trace: TracedStep, window_size: int) -> int:
        """The most at once, in bytes. Weights and the optimizer's state are not among it."""
        num_passes = min(window_size, 3)  # all those between the first and the last are alike
        for position in range(num_passes):
            self._run(trace, is_first=position == 0, is_last=position == num_passes - 1)
        return self._meter.highest

    def _run(self, trace: TracedStep, *, is_first: bool, is_last: bool) -> None:
        for what, value in trace.events:
            if what == BYTES:
                self._meter.add(value)
            elif what == GRADIENT and value in self._sizes:
                self._take(value, is_new=self._spreads or is_first)
        if not self._spreads and is_last:
            for index in self._sizes:
                self._fill(index)
        self._meter.add(-trace.left)
        if self._spreads or is_last:
            self._end_pass(is_first=is_first or not self._spreads)

    def _take(self, index: int, *, is_new: bool) -> None:
        """A gradient comes; where it is not new, it is added to one that is there."""
        if not self._has_buffer:
            self._has_buffer = True
            self._meter.add(self._capacity)
        if is_new:
            self._meter.add(self._sizes[index])
        if self._spreads:
            self._fill(index)

    def _fill(self, index: int) -> None:
        if sum(self._sizes[each] for each in self._filled) + self._sizes[index] > self._capacity:
            self._reduce()
        self._filled.append(index)
        if self._sizes[index] <= self._capacity:
            self._meter.add(-self._sizes[index])

    def _reduce(self) -> None:
        owners = [part for index in self._filled for part in self._owners[index]]
        if any(part != owners[0] for part in owners):  # what lies in one part is sent as it is
            copy = sum(self._sizes[index] for index in self._filled)
            self._meter.add(copy)
            self._meter.add(-copy)
        if not self._has_own and self._part in owners:
            self._has_own = True
            self._meter.add(self.kept)
        for index in self._filled:
            if self._sizes[index] > self._capacity and (self._spreads or self._part in self._owners[index]):
                self._meter.add(-self._sizes[index])
        self._filled.clear()

    def _end_pass(self, *, is_first: bool) -> None:
        self._reduce()
        if not is_first and self._has_own:
            self._meter.add(-self.kept)  # added to those of the passes before
        self._has_own = False
        self._meter.add(-self._capacity)
        self._has_buffer = False


def part_reduction(trace: TracedStep, sizes: Mapping[int, int], capacity: int) -> int:
    """The most of one micro-batch under ZeRO 3, in bytes, with what lies there of gradients beside a buffer that stays.

    Args:
        trace: of the micro-batch.
        sizes: bytes of each trained parameter's gradient, by its index.
        capacity: of the buffer, in bytes.
    """
    meter, filled = Meter(), list[int]()

    def reduce() -> None:
        copy = sum(filled)
        meter.add(copy)
        meter.add(-copy)
        meter.add(-sum(size for size in filled if size > capacity))
        filled.clear()

    for what, value in trace.events:
        if what == BYTES:
            meter.add(value)
        elif what == GRADIENT and value in sizes:
            size = sizes[value]
            meter.add(size)
            if filled and sum(filled) + size > capacity:
                reduce()
            filled.append(size)
            if size <= capacity:
                meter.add(-size)
    reduce()
    return meter.highest


def forward_highest(trace: TracedStep) -> int:
    """The most that is held before backward begins, in bytes."""
    meter = Meter()
    for what, value in trace.events:
        if what == BACKWARD:
            break
        if what == BYTES:
            meter.add(value)
    return meter.highest
