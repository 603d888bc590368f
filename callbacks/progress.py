"""`ProgressBar`: how far the run is, on a terminal, in a notebook, or as plain lines in a log."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from ..distributed.errors import ConfigError, check_boolean, check_number, suggest
from .callback import Callback
from .intervals import Interval, IntervalLike
from .progress_bars import BarDisplay
from .progress_lines import LineDisplay
from .progress_work import Display, Work, epoch_work, format_shares

if TYPE_CHECKING:
    from .view import TaskView, TrainerView

Style = Literal["auto", "bar", "lines"]

_EVERY = ("10 s", "1 epoch")
_GAP_SECONDS = 1.0  # between the lines of short epochs, where nobody asked for each


class ProgressBar(Callback):
    """Shows progress on stderr, from the main process: tqdm bars, or plain lines where stderr is no terminal.

    The metrics shown are those logged with `progress_bar=True`. They are read from the device when something is
    drawn, at most once per `refresh_seconds`; a batch in between costs one call and one look at the clock.

    Args:
        every: when a plain line is written; a bare number counts optimizer steps. What counts epochs is due after the
            epoch's validation. The default, every 10 seconds and each epoch, leaves out epochs that end within a
            second of the last line.
        style: "bar" and "lines" force one of the two; "auto" looks at the stream.
        leave: keep each finished epoch's bar on the screen, not only the last one.
        refresh_seconds: the shortest time between two drawings of the bars.
        stream: where to write in place of stderr.
        times_after_seconds: a training that took at least so long ends with a line that says where its time went.
    Raises:
        ConfigError: an argument can't be read.
    """

    steers = False

    def __init__(
        self,
        *,
        every: IntervalLike | None = None,
        style: Style = "auto",
        leave: bool = False,
        refresh_seconds: float = 0.1,
        stream: TextIO | None = None,
        times_after_seconds: float = 10.0,
    ) -> None:
        if style not in get_args(Style):
            raise ConfigError(f"ProgressBar(style={style!r}) is unknown. {suggest(style, get_args(Style))}")
        check_number("ProgressBar(refresh_seconds)", refresh_seconds, least=0, hint="0 draws at every batch.")
        check_number("ProgressBar(times_after_seconds)", times_after_seconds, least=0, hint="0 always shows it.")
        check_boolean("ProgressBar(leave)", leave)
        if stream is not None and not all(callable(getattr(stream, name, None)) for name in ("write", "flush")):
            raise ConfigError(
                f"ProgressBar(stream={stream!r}). Expected an open text file or sys.stdout; leave it out for stderr."
            )
        self._every = Interval.parse(_EVERY if every is None else every, unit="steps", option="ProgressBar(every)")
        self._gap_seconds = _GAP_SECONDS if every is None else 0.0
        self._style = style
        self._leave = leave
        self._refresh_seconds = refresh_seconds
        self._times_after_seconds = times_after_seconds
        self._stream = stream
        self._display: Display | None = None
        self._training: Work | None = None
        self._evaluation: Work | None = None
        self._evaluation_began = 0.0
        self._next_look = math.inf

    def on_setup(self, trainer: TrainerView, task: TaskView) -> None:
        """Choose how to show progress; other processes than the main one show nothing."""
        stream = self._stream or sys.stderr
        self._training = self._evaluation = None
        self._display = None
        self._next_look = math.inf
        if trainer.process.is_main_process and stream is not None:  # there is no stderr in a windowed program
            self._display = self._choose_display(stream)
            self._next_look = 0.0

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Start counting."""
        if self._display is not None:
            self._display.start(trainer.state)

    def on_epoch_start(self, trainer: TrainerView, task: TaskView) -> None:
        """A new epoch to show."""
        self._training = epoch_work(trainer)

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """Look at the clock."""
        if time.monotonic() >= self._next_look and self._training is not None:
            self._training.done = trainer.state.batch
            self._show(self._training, trainer)

    def on_epoch_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """The epoch with its validation is done."""
        if self._training is not None and self._display is not None:
            self._training.done = trainer.state.batch
            self._display.finish(self._training, trainer)

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Leave the last state on the screen."""
        if self._training is not None and self._display is not None:
            self._display.end(self._training, trainer)
            seconds = trainer.training_seconds
            if sum(seconds.values()) >= self._times_after_seconds:
                print(f"time: {format_shares(seconds)}", file=self._stream or sys.stderr, flush=True)
            if anew := trainer.recompilations:
                told = ", ".join(f"{name} {count} times" for name, count in anew.items())
                print(f"compiled anew: {told}", file=self._stream or sys.stderr, flush=True)
        self._training = None

    def on_teardown(self, trainer: TrainerView, task: TaskView) -> None:
        """Give the terminal back, also after an exception."""
        if self._display is not None:
            self._display.close()
        self._display = self._training = self._evaluation = None
        self._next_look = math.inf

    def on_validation_start(self, trainer: TrainerView, task: TaskView) -> None:
        """A second bar, below that of the training."""
        self._begin("validation", trainer.num_evaluation_batches, trainer)

    def on_validation_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """Look at the clock."""
        self._count(trainer)

    def on_validation_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """Take the second bar away."""
        self._finish(trainer)

    def on_test_start(self, trainer: TrainerView, task: TaskView) -> None:
        """A bar for the test."""
        self._begin("test", trainer.num_evaluation_batches, trainer)

    def on_test_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """Look at the clock."""
        self._count(trainer)

    def on_test_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """The test is done."""
        self._finish(trainer)

    def on_predict_start(self, trainer: TrainerView, task: TaskView) -> None:
        """A bar for the predictions."""
        self._begin("predict", trainer.num_evaluation_batches, trainer)

    def on_predict_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """Look at the clock."""
        self._count(trainer)

    def on_predict_end(self, trainer: TrainerView, task: TaskView) -> None:
        """The predictions are done."""
        self._finish(trainer)

    def _begin(self, title: str, total: int | None, trainer: TrainerView) -> None:
        if self._training is not None:
            self._training.done = trainer.state.batch
        self._evaluation = Work(title, total, parent=self._training)
        self._evaluation_began = time.monotonic()

    def _count(self, trainer: TrainerView) -> None:
        work = self._evaluation
        if work is not None:
            work.done += 1
            if time.monotonic() >= self._next_look:
                self._show(work, trainer)

    def _finish(self, trainer: TrainerView) -> None:
        work, self._evaluation = self._evaluation, None
        if work is None or self._display is None:
            return
        if work.parent is None:
            self._display.end(work, trainer)
        else:
            work.parent.paused_seconds += time.monotonic() - self._evaluation_began
            self._display.finish(work, trainer)

    def _show(self, work: Work, trainer: TrainerView) -> None:
        assert self._display is not None  # else `_next_look` is infinite
        self._display.show(work, trainer)
        self._next_look = 0.0 if self._display.needs_every_batch else time.monotonic() + self._refresh_seconds

    def _choose_display(self, stream: TextIO) -> Display:
        notebook = _in_notebook()
        if self._style == "bar" or (self._style == "auto" and (notebook or stream.isatty())):
            return BarDisplay(notebook=notebook, stream=stream, leave=self._leave)
        return LineDisplay(every=self._every, gap_seconds=self._gap_seconds, stream=stream)


def _in_notebook() -> bool:
    """Whether an IPython kernel runs this. IPython is not imported for the question."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
