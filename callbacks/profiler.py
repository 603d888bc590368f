"""`Profiler`: traces of some steps of a training, by torch's profiler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, record_function

from ..distributed.atomic import whole_file
from ..distributed.errors import ConfigError, check_boolean, check_integer
from ..distributed.logger import get_logger
from ..distributed.memory import should_reduce_batch_size
from .callback import Callback
from .profiling import ProfileKwargs

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..strategies.outcome import StepOutcome
    from .view import TaskView, TrainerView

_logger = get_logger(__name__)
_HISTORY_ENTRIES = 100_000


class Profiler(Callback):
    """Records what runs in some optimizer steps, and writes a trace for each process and cycle of the schedule.

    A trace, `rank0.12.pt.trace.json` for process 0 and the cycle that ended with step 12, opens in Chrome's viewer
    (chrome://tracing, Perfetto) and in TensorBoard's profiler. The micro-batches' `training_step`, `backward` and
    `optimizer` are marked in it. What is not recorded costs a few calls per step.

    Args:
        skip_first: steps before the first cycle, in which training gets into its stride.
        wait, warmup, active: the steps of a cycle: left alone, recorded and dropped, and recorded.
        repeat: how many cycles; 0 for as many as the training has.
        folder: where traces go; by default `profile` in the run's folder.
        activities, record_shapes, profile_memory, with_stack, with_flops, with_modules: as `ProfileKwargs` has them.
        rows: the main process prints so many rows of the most expensive operations at the end; 0 for no table.
        memory_snapshots: also keep the history of CUDA's allocator. Where memory runs out it is written beside the
            traces, as `rank0.memory.pickle` for pytorch.org/memory_viz. Needs CUDA, and slows every allocation.
    Raises:
        ConfigError: an argument can't be used; at the start of the training: there is no CUDA for `memory_snapshots`.
    """

    steers = False

    def __init__(
        self,
        *,
        skip_first: int = 10,
        wait: int = 0,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        folder: str | Path | None = None,
        activities: Sequence[str] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        rows: int = 10,
        memory_snapshots: bool = False,
    ) -> None:
        schedule = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        for name, value in schedule.items():
            check_integer(f"Profiler({name})", value, 1 if name == "active" else 0, "It counts optimizer steps.")
        check_integer("Profiler(rows)", rows, 0, "0 prints no table.")
        check_boolean("Profiler(memory_snapshots)", memory_snapshots)
        self._skip_first = skip_first
        self._quiet = wait + warmup
        self._cycle = wait + warmup + active
        self._repeat = repeat
        # One profiler for each cycle: one that goes on clears its events with a warning, and one whose writing failed
        # inside it can't be stopped without a crash.
        self._settings = ProfileKwargs(
            activities=activities, schedule_option={"wait": wait, "warmup": warmup, "active": active, "repeat": 1},
            record_shapes=record_shapes,
            profile_memory=profile_memory, with_stack=with_stack, with_flops=with_flops, with_modules=with_modules,
        )  # fmt: skip
        self._given_folder = None if folder is None else Path(folder)
        self._rows = rows
        self._memory_snapshots = memory_snapshots
        self._folder = Path()
        self._index = 0
        self._waits = 0
        self._done = 0
        self._num_cycles = 0
        self._table = ""
        self._profiler: profile | None = None
        self._range: record_function | None = None

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Start, or count the steps before it."""
        if self._memory_snapshots and trainer.device.type != "cuda":
            raise ConfigError(
                f"Profiler(memory_snapshots=True) keeps the history of CUDA's allocator, and this run is on "
                f"{trainer.device}. Leave it out; profile_memory=True records allocations on every device."
            )
        self._folder = self._given_folder or trainer.run_directory / "profile"
        self._index, self._table = trainer.process.process_index, ""
        self._waits, self._num_cycles = self._skip_first, 0
        if self._memory_snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES)
        if not self._waits:
            self._begin()

    def on_batch_start(self, trainer: TrainerView, task: TaskView, batch: Any, batch_idx: int) -> None:
        """Mark what follows."""
        self._mark("training_step")

    def on_before_backward(self, trainer: TrainerView, task: TaskView, loss: Tensor) -> None:
        """Mark what follows."""
        self._mark("backward")

    def on_backward(self, trainer: TrainerView, task: TaskView, loss: Tensor) -> None:
        """The end of what was marked."""
        self._mark(None)

    def on_before_step(self, trainer: TrainerView, task: TaskView, optimizer: Optimizer) -> None:
        """Mark what follows."""
        self._mark("optimizer")

    def on_step(self, trainer: TrainerView, task: TaskView, outcome: StepOutcome) -> None:
        """One step more."""
        self._mark(None)
        if self._profiler is None:
            self._waits -= 1
            if not self._waits:
                self._begin()
            return
        self._profiler.step()
        self._done += 1
        if self._done == self._cycle:
            self._end(trainer)
            if self._repeat == 0 or self._num_cycles < self._repeat:
                self._begin()

    def on_batch_end(self, trainer: TrainerView, task: TaskView, outputs: Any) -> None:
        """The end of what was marked."""
        self._mark(None)

    def on_exception(self, trainer: TrainerView, task: TaskView, error: BaseException) -> None:
        """Write the allocator's history where memory ran out."""
        if self._memory_snapshots and should_reduce_batch_size(error):
            path = self._folder / f"rank{self._index}.memory.pickle"
            with whole_file(path) as place:
                torch.cuda.memory._dump_snapshot(str(place))  # type: ignore[no-untyped-call]
            _logger.warning("memory ran out; its history is in %s", path, main_process_only=False)

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Stop, and show the table."""
        self._mark(None)
        if self._profiler is not None:
            self._end(trainer)
        if self._memory_snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)
        if trainer.process.is_main_process and self._rows:
            text = self._table or (
                f"Profiler: no cycle ended in the {trainer.state.step} steps of this training, so nothing was written. "
                "Lower skip_first, wait, warmup or active."
            )
            print(text, file=sys.stderr, flush=True)

    def _mark(self, name: str | None) -> None:
        """End the range that is open, and open another one."""
        current, self._range = self._range, None
        if current is not None:
            current.__exit__(None, None, None)
        if name is not None and self._profiler is not None:
            self._range = record_function(f"loopwright.{name}")
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        """Begin a cycle."""
        self._done = 0
        self._profiler = self._settings.build()
        self._profiler.start()

    def _end(self, trainer: TrainerView) -> None:
        """End the cycle, and write what was recorded of it."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        if self._done < self._quiet or (self._done == self._quiet and trainer.error is None):
            return  # nothing was recorded yet
        self._num_cycles += 1
        with whole_file(self._folder / f"rank{self._index}.{trainer.state.step}.pt.trace.json") as path:
            profiler.export_chrome_trace(str(path))
        if self._index == 0 and self._rows:
            by_device = any(activity.name != "CPU" for activity in profiler.activities)
            key = "self_device_time_total" if by_device else "self_cpu_time_total"
            self._table = profiler.key_averages().table(sort_by=key, row_limit=self._rows)
