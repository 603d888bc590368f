"""Progress as tqdm bars: one for the epoch, a second one below it for an evaluation inside."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, TextIO

from tqdm.std import tqdm

from ..distributed.imports import is_installed
from ..distributed.numbers import to_numbers
from .progress_work import Work, format_number

if TYPE_CHECKING:
    from .state import RunState
    from .view import TrainerView


class _TextBar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread that redraws: a bar is drawn when there is something new


def _bar_class(notebook: bool) -> type[tqdm[Any]]:
    if notebook and is_installed("ipywidgets"):
        from tqdm.notebook import tqdm as notebook_bar

        return notebook_bar
    return _TextBar


class BarDisplay:
    """Draws when it is asked to; the asking is limited elsewhere.

    Args:
        notebook: draw widgets, where `ipywidgets` is installed.
        stream: where text bars go.
        leave: keep a finished epoch's bar and begin a new one below it.
    """

    needs_every_batch = False

    def __init__(self, *, notebook: bool, stream: TextIO, leave: bool) -> None:
        self._class = _bar_class(notebook)
        self._stream = stream
        self._leave = leave
        self._outer: tqdm[Any] | None = None
        self._inner: tqdm[Any] | None = None
        self._drawn: Work | None = None  # the work that the outer bar stands for
        self._left: Work | None = None  # the work whose bar was left on the screen
        self._paused_seconds = 0.0  # of it, those which the bar's clock has left out already

    def start(self, state: RunState) -> None:
        """Nothing to prepare: the first drawing opens the bar."""

    def show(self, work: Work, trainer: TrainerView) -> None:
        """Draw the work's bar."""
        if work.parent is not None:
            self._show_nested(work, work.parent, trainer)
        else:
            self._show_outer(work, trainer)

    def finish(self, work: Work, trainer: TrainerView) -> None:
        """Take a nested bar away; keep an epoch's bar on the screen where that was asked for."""
        if work.parent is not None:
            _close(self._inner)
            self._inner = None
        elif self._leave:
            self.end(work, trainer)

    def end(self, work: Work, trainer: TrainerView) -> None:
        """Draw the last state and leave it on the screen, once."""
        if work is self._left:
            return
        self._show_outer(work, trainer)
        _close(self._outer)
        self._outer, self._left = None, work

    def close(self) -> None:
        """Close what an exception left open."""
        _close(self._inner)
        _close(self._outer)
        self._inner = self._outer = None

    def _show_outer(self, work: Work, trainer: TrainerView) -> None:
        bar = self._outer_bar(work)
        skipped = work.paused_seconds - self._paused_seconds
        bar.start_t += skipped
        bar.last_print_t += skipped
        self._paused_seconds = work.paused_seconds
        numbers = to_numbers(trainer.progress_metrics)
        bar.set_postfix_str(", ".join(f"{name}={format_number(n)}" for name, n in numbers.items()), refresh=False)
        bar.update(work.done - bar.n)

    def _outer_bar(self, work: Work) -> tqdm[Any]:
        if self._outer is None:
            self._outer = self._open(work, position=0, leave=True)
        elif self._drawn is not work:
            _begin_again(self._outer, work)
        else:
            return self._outer
        self._drawn, self._paused_seconds = work, work.paused_seconds
        return self._outer

    def _show_nested(self, work: Work, parent: Work, trainer: TrainerView) -> None:
        if self._inner is None:
            self._show_outer(parent, trainer)  # it stands still from here on
            self._inner = self._open(work, position=1, leave=False)
        self._inner.update(work.done - self._inner.n)

    def _open(self, work: Work, *, position: int, leave: bool) -> tqdm[Any]:
        # miniters=0 and mininterval=0: each `update` draws.
        columns, rows = _size(self._stream)
        bar = self._class(
            desc=work.title, total=work.total, initial=work.initial, position=position, leave=leave, file=self._stream,
            unit="batch", ncols=columns, nrows=rows, dynamic_ncols=columns is None,
            miniters=0, mininterval=0,
        )  # fmt: skip
        _set_clock(bar, work)
        return bar


def _size(stream: TextIO) -> tuple[int, int] | tuple[None, None]:
    """80 columns and 24 rows on a terminal that says it has none, as they do in some containers; else tqdm looks."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # not a terminal, or not a file: nothing to be asked
        return None, None
    return (80, 24) if columns == 0 else (None, None)


def _begin_again(bar: tqdm[Any], work: Work) -> None:
    bar.set_description_str(work.title, refresh=False)
    bar.set_postfix_str("", refresh=False)
    bar.total = work.total  # `reset` keeps the old one when it is given None
    bar.reset(total=work.total)
    bar.initial = bar.n = bar.last_print_n = work.initial
    _set_clock(bar, work)


def _set_clock(bar: tqdm[Any], work: Work) -> None:
    """The work began before its bar was first drawn, and the rate counts from there."""
    bar.start_t = bar.last_print_t = time.time() - work.seconds


def _close(bar: tqdm[Any] | None) -> None:
    if bar is not None:
        bar.close()
