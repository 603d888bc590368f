"""`ModelSummary`: a table of a model's parts, with their parameters, sizes and modes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed.errors import check_integer
from ..distributed.units import size_bytes
from ..strategies.wrapping import class_of
from .callback import Callback

if TYPE_CHECKING:
    from .view import TaskView, TrainerView

_HEADER = ("name", "type", "parameters", "trainable", "mode")


class ModelSummary(Callback):
    """Prints the model to stderr when training starts, from the main process.

    Args:
        max_depth: how deep to go: 1 shows the children, 0 the totals alone, -1 everything.
    Raises:
        ConfigError: `max_depth` is no integer, or below -1.
    """

    steers = False

    def __init__(self, max_depth: int = 1) -> None:
        check_integer("ModelSummary(max_depth)", max_depth, -1, "-1 shows everything, 0 the totals alone.")
        self._max_depth = max_depth

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Print it."""
        if trainer.process.is_main_process:
            with trainer.whole_shapes():
                text = summarize(trainer.unwrapped_model(), self._max_depth)
            print(text, file=sys.stderr, flush=True)


def summarize(model: nn.Module, max_depth: int = 1) -> str:
    """The table of a model, as text.

    A parameter that several modules share counts once in each row and once in the total. Parameters on the meta device
    are counted; lazy ones that no batch has shaped yet have no size, and are shown by a question mark.

    Args:
        model: any module.
        max_depth: how deep to go: 1 shows the children, 0 the totals alone, -1 everything.
    Raises:
        ConfigError: `max_depth` is no integer, or below -1.
    """
    check_integer("max_depth", max_depth, -1, "-1 shows everything, 0 the totals alone.")
    own = _Count.of(model.parameters(recurse=False))
    rows = list(_rows(model, max_depth))
    if own.tensors and rows:
        rows.insert(0, ("(own)", "", own.total_text, own.trainable_text, ""))
    return "\n".join([class_of(model).__name__, *_table(rows), *_totals(model)])


@dataclass(frozen=True, slots=True)
class _Count:
    """Numbers of elements."""

    tensors: int
    total: int
    trainable: int
    num_lazy: int

    @classmethod
    def of(cls, parameters: Iterator[nn.Parameter]) -> _Count:
        found = list(parameters)
        known = [p for p in found if not is_lazy(p)]
        trainable = sum(p.numel() for p in known if p.requires_grad)
        return cls(len(found), sum(p.numel() for p in known), trainable, len(found) - len(known))

    @property
    def total_text(self) -> str:
        return self._text(self.total)

    @property
    def trainable_text(self) -> str:
        return self._text(self.trainable)

    def _text(self, count: int) -> str:
        if not self.num_lazy:
            return f"{count:,}"
        return f"{count:,} + ?" if count else "?"


def _rows(module: nn.Module, depth: int, level: int = 0) -> Iterator[tuple[str, ...]]:
    if depth == 0:
        return
    for name, child in module.named_children():
        count = _Count.of(child.parameters())
        mode = "train" if child.training else "eval"
        yield "  " * level + name, class_of(child).__name__, count.total_text, count.trainable_text, mode
        yield from _rows(child, depth - 1, level + 1)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell, numbers to the right."""
    if not rows:
        return []
    cells = [_HEADER, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADER))]
    return [
        "  ".join(
            c.rjust(w) if i in (2, 3) else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _totals(model: nn.Module) -> Iterator[str]:
    parameters, buffers = list(model.parameters()), list(model.buffers())
    count = _Count.of(iter(parameters))
    yield f"parameters: {count.total_text} ({count.trainable_text} trainable, {count.total - count.trainable:,} frozen)"
    yield f"size: {_sizes(parameters)}" + (f"; buffers {_sizes(buffers)}" if buffers else "")
    modes = Counter(module.training for module in model.modules())
    yield f"modules: {modes[True]} in train mode, {modes[False]} in eval mode"
    if count.num_lazy:
        yield f"lazy: {count.num_lazy} parameters get their shape from the first batch, and are not counted"
    num_meta = sum(p.is_meta for p in parameters)
    if num_meta:
        yield f"meta: {num_meta} parameters have no storage yet"


def _sizes(tensors: list[Tensor] | list[nn.Parameter]) -> str:
    """Megabytes (10^6 bytes) by number format, the largest first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if not is_lazy(tensor):
            sizes[str(tensor.dtype).removeprefix("torch.")] += size_bytes([tensor])
    total = f"{sizes.total() / 1e6:,.2f} MB"
    return total + (
        f" ({', '.join(f'{name} {size / 1e6:,.2f}' for name, size in sizes.most_common())})" if sizes else ""
    )
