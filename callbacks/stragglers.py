"""`StragglerMonitor`: the process that the others wait for."""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.errors import check_integer, check_number
from ..distributed.exchange import exchange
from .callback import Callback

if TYPE_CHECKING:
    from torch import Tensor

    from .view import TaskView, TrainerView


class StragglerMonitor(Callback):
    """Compares, at each record of training, how long the processes' own work takes: data and forward.

    Work is what a process does before it meets the others: on CUDA the forward passes' time on the device, elsewhere
    that on the host, and the time spent waiting for data. Backward is left out, since there the quick processes wait
    for the slow one. Strategies that meet in forward as well (FSDP, tensor parallelism) level the forward passes; data
    is still told apart.

    | name | what |
    |---|---|
    | `straggler/slowdown` | the slowest process's seconds per micro-batch over the median of all |
    | `straggler/process` | its number |

    With one process it does nothing. Collective: one small message per record.

    Args:
        factor: a process that is slower than so many times the median is warned of, once in a row of such records.
        patience: after so many records in a row with the same slow process.
    Raises:
        ConfigError: an argument is no number of its range.
    """

    provides = ("straggler/slowdown", "straggler/process")
    steers = False

    def __init__(self, factor: float = 1.3, patience: int = 3) -> None:
        check_number("StragglerMonitor(factor)", factor, above=1, allows_infinity=False, hint="It is a ratio.")
        check_integer("StragglerMonitor(patience)", patience, 1, "It counts records.")
        self._factor = factor
        self._patience = patience
        self._in_a_row: deque[int] = deque(maxlen=patience)
        self._begin: torch.cuda.Event | None = None
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._before: tuple[int, float] = (0, 0.0)
        self._is_training = False

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Start measuring."""
        self._in_a_row.clear()
        self._passes.clear()
        self._begin = None
        self._before = trainer.state.micro_step, self._host_seconds(trainer)
        self._is_training = trainer.process.num_processes > 1

    def on_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        """A forward pass begins."""
        if self._is_training and trainer.device.type == "cuda":
            self._begin = _mark_time()

    def on_before_backward(self, trainer: TrainerView, task: TaskView, loss: Tensor) -> None:
        """It ends."""
        if self._begin is not None:
            self._passes.append((self._begin, _mark_time()))
            self._begin = None

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Records of evaluations are nothing to compare."""
        self._is_training = False

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        """Compare the processes' work since the last record. Collective."""
        if not self._is_training or trainer.error is not None:
            return
        per_batch = exchange(self._seconds_per_batch(trainer), "StragglerMonitor")
        told = [seconds for seconds in per_batch if seconds is not None]
        if len(told) < len(per_batch) or statistics.median(told) <= 0:
            return
        slowest = max(range(len(told)), key=told.__getitem__)
        slowdown = told[slowest] / statistics.median(told)
        metrics["straggler/slowdown"], metrics["straggler/process"] = slowdown, float(slowest)
        self._judge(slowest, slowdown, told, trainer)

    def _judge(self, slowest: int, slowdown: float, seconds: list[float], trainer: TrainerView) -> None:
        if slowdown <= self._factor:
            self._in_a_row.clear()
            return
        was_named = len(self._in_a_row) == self._patience and set(self._in_a_row) == {slowest}
        self._in_a_row.append(slowest)
        is_certain = len(self._in_a_row) == self._patience and set(self._in_a_row) == {slowest}
        if is_certain and not was_named and trainer.process.is_main_process:
            warnings.warn(
                f"process {slowest} is slow: {seconds[slowest]:.4f} s of data and forward per micro-batch, "
                f"{slowdown:.2f} times the median, in the last {self._patience} records until step "
                f"{trainer.state.step}. All others wait for it: look at its device's clocks and at its data.",
                stacklevel=2,
            )

    def _seconds_per_batch(self, trainer: TrainerView) -> float | None:
        """This process's own work per micro-batch since the last call, None where there was none."""
        done, seconds = trainer.state.micro_step, self._host_seconds(trainer)
        batches, spent = done - self._before[0], seconds - self._before[1]
        self._before = done, seconds
        ended = [each for each in self._passes if each[1].query()]  # type: ignore[no-untyped-call]
        on_device = 1e-3 * sum(begin.elapsed_time(end) for begin, end in ended)
        self._passes = self._passes[len(ended) :]
        return (spent + on_device) / batches if batches > 0 else None

    def _host_seconds(self, trainer: TrainerView) -> float:
        parts = trainer.training_seconds
        return parts["data"] if trainer.device.type == "cuda" else parts["data"] + parts["forward"]


def _mark_time() -> torch.cuda.Event:
    """A moment on the device's own clock."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
