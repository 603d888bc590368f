"""What the processes of a run decide together.

A run ends, an epoch ends and a step is dropped on all processes or on none. What one of them knows (a stop that was
asked for, a signal, the end of its data, a batch without a loss) travels in one small vector per window: it is sent
before the window's last backward, overlaps with it, and is read before the optimizer steps. What the loop decides by a
counter (intervals, limits) is decided alike everywhere, since the counters travel along.

What callbacks decide after that vector was sent takes effect at the same step as in one process: where a callback that
may steer (`Callback.steers`) listens to such an event, one more vector is exchanged there. Without one, nothing is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..callbacks.bus import overridden
from ..callbacks.callback import ControlFlow, EndEpoch, NonFiniteSkip, SkipBatch, StopRun
from ..data.sizes import AmbiguousBatchSizeError
from ..data.window import Window
from ..distributed import watch
from ..distributed.errors import ConfigError, DataError, DistributedError, TaskError
from ..distributed.exchange import PendingVector, exchange, start_vector
from ..distributed.numbers import wide_float
from .metrics import STEP

if TYPE_CHECKING:
    from .run import Run, Training

Rows: TypeAlias = "list[tuple[float, ...]]"


class Flag:
    """What one process says at a step boundary. Each holds for all as soon as any process says it.

    Plain integers: those of `enum` take their time, and there are a dozen operations on them in each step.
    """

    ENDED = 1 << 0
    """Its data ends with this window, and so does the pass."""
    STOP = 1 << 1
    """The run is to end at this boundary, when what is due was done."""
    STOP_NOW = 1 << 2
    """`StopRun` was raised: the run is to end before anything else."""
    END_EPOCH = 1 << 3
    """`EndEpoch` was raised."""
    DROP = 1 << 4
    """Control flow left the window before its gradients were reduced: nobody steps on it."""
    SKIP = 1 << 5
    """A callback drops this step."""
    NONFINITE = 1 << 6
    """It does so for a value that is not finite."""
    SIGNAL = 1 << 7
    """A signal asked this process to end."""
    COUNTS = 1 << 8
    """Its steps return `(loss_sum, count)`."""
    MEANS = 1 << 9
    """Its steps return mean losses."""
    DEVICE_COUNT = 1 << 10
    """Its count is on the device, where it has to be added up."""


NOTHING = 0

BEFORE_STEP = ("on_backward", "on_before_step")
AFTER_STEP = ("on_step", "on_batch_end")
WHEN_DUE = (
    "on_log", "on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end",
)  # fmt: skip
"""Events after a window's vector was sent, by the vector that is exchanged for them."""


class Agreement:
    """Decides for one run of several processes.

    Args:
        run: of this process.
        num_processes: how many processes there are.
    """

    def __init__(self, run: Run, num_processes: int) -> None:
        self._run = run
        self.num_processes = num_processes
        self.stops = False
        """Whether all have agreed to end the run."""
        self.ends_pass = False
        """Whether all have agreed to end the running pass."""
        self.was_left = False
        """Whether the newest window was left by control flow before its gradients were reduced."""
        self.had_loss = False
        """Whether any process has had a loss in this run."""
        self.seed = 0
        """Process 0's seed, from which each process has its own random numbers in training."""
        self.nonfinite_elsewhere = False
        """Whether another process dropped the newest step for a value that is not finite."""
        self._votes = {BEFORE_STEP: True, AFTER_STEP: True, WHEN_DUE: True}
        self._flags = NOTHING
        self._pending: PendingVector | None = None
        self._window = Window([], 1, True, False)
        self._is_decided = True
        self._ends_epoch = self._is_manual = False
        self._agreed_flow: ControlFlow | None = None
        self._veto: ControlFlow | None = None
        self._warned_of_end = False
        self._samples = self._tokens = 0
        self._losses_before = 0  # of the open window, in the epoch before

    # At a run's beginning and at those of its passes.

    def meet(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every process's facts of the run that begins, process 0 first. Collective.

        Raises:
            DistributedError: they don't run the same.
        """
        run = self._run
        found: list[dict[str, Any]] = exchange(facts | {"stage": run.state.stage, "task": type(run.task).__name__})
        for key in ("stage", "task"):
            values = [each[key] for each in found]
            if len(set(values)) > 1:
                shown = ", ".join(f"process {index}: {value}" for index, value in enumerate(values))
                raise DistributedError(
                    f"the processes don't run the same {key} ({shown}). All of them have to call the Trainer's methods "
                    "in the same order: not under `if trainer.process.is_main_process`."
                )
        self.seed = found[0]["seed"]
        return found

    def begin_fit(self, *, is_manual: bool) -> None:
        """Agree on where callbacks may steer from, and on how long an epoch is. Collective."""
        self._is_manual = is_manual
        own = [self._steers_from(events) for events in self._votes]
        own[1] = own[1] or is_manual  # `training_step` itself steps, clips and stops there
        found = exchange([own, self._run.state.batches_per_epoch])
        self._votes = {events: any(each[i] for each, _ in found) for i, events in enumerate(self._votes)}
        lengths = [length for _, length in found]
        self._run.state.batches_per_epoch = None if None in lengths else min(lengths)  # it ends with the first process
        if not is_manual and self._run.training_log.exchange is not None:
            self._run.training_log.exchange.seen.update({"": 0, STEP: 0})

    def begin_pass(self, training: Training, window: Window | None) -> Window | None:
        """The first window of a pass, None where the run is to stop before it. Collective.

        Raises:
            DataError: some processes have a window and others have none.
        """
        self.ends_pass = False
        size = 0 if window is None else _size(training, window.batches[0])
        rows = self._exchange("begin an epoch", Flag.ENDED if window is None else NOTHING, losses=size)
        empty = [index for index, row in enumerate(rows) if int(row[0]) & Flag.ENDED]
        if empty and len(empty) < self.num_processes and not self.stops:
            raise DataError(
                f"processes {empty} of {self.num_processes} got no batch in epoch {self._run.state.epoch}, and the "
                "others did: the loader gives fewer batches than there are processes. Use fewer processes, or smaller "
                "batches."
            )
        if training.loss.reference is None:
            training.loss.refer_to(max(row[2] for row in rows))
        return None if self.stops else window

    # In a window.

    def open_window(self, training: Training, window: Window) -> Window:
        """A window begins. Collective where an epoch's end may leave it open on some processes and not on others.

        Returns:
            The window, which closes on all processes or on none: on all if it is full on one.
        """
        if training.remainder == "carry" and not training.loader.is_even:
            closes = any(exchange(window.closes, "open a window"))
            if closes and not window.closes:
                assert training.reader is not None
                window, training.reader.carried = replace(window, closes=True), 0
        self._window = window
        self._is_decided = self.was_left = self.nonfinite_elsewhere = self._ends_epoch = False
        self._agreed_flow = self._veto = None
        self._losses_before = training.loss.num_losses
        if not training.carried and not self._is_manual:
            self._run.training_log.expect(STEP, None)
        return window

    def hold(self, samples: object, tokens: int) -> None:
        """Count what this process sees of a window; the counters get the sum over all at its end. Local."""
        watch.stand("training_step", self._run.state.step)
        self._samples += samples if type(samples) is int else 0
        self._tokens += tokens

    @property
    def is_due(self) -> bool:
        """Whether the next backward is the last of its window, in automatic optimization."""
        return not self._is_manual and self._run.strategy.gradient_state.sync_gradients

    def send(self, flags: int = NOTHING) -> None:
        """Send this process's part of a window's vector, before its last backward. `receive` reads it. Local."""
        assert self._run.training is not None
        loss, count = self._run.training.loss, 0.0
        if loss.count is not None:
            on_device = isinstance(loss.count, Tensor) and loss.count.device.type != "cpu"
            flags |= Flag.COUNTS | (Flag.DEVICE_COUNT if on_device else NOTHING)
            count = 0.0 if on_device else float(loss.count)
        elif loss.num_losses:
            flags |= Flag.MEANS
        if self._window.is_last:
            flags |= Flag.ENDED
        self._pending = self._start("agree on a step", flags, losses=loss.num_losses, count=count)

    @property
    def is_sent(self) -> bool:
        """Whether the open window's vector is on its way."""
        return self._pending is not None

    def receive(self, training: Training) -> int:
        """Read a window's vector. Collective.

        Returns:
            The losses of the window on all processes; at 0 there is nothing to step on.
        Raises:
            EndEpoch, StopRun: a process left the window, so that all do.
            TaskError: some processes return mean losses and others counts.
        """
        assert self._pending is not None
        pending, self._pending, self._is_decided = self._pending, None, True
        rows = self._finish(pending)
        flags = _any(rows)
        if self._run.training_log.exchange is not None:
            num_losses = training.loss.num_losses
            self._run.training_log.exchange.count_losses(num_losses, num_losses - self._losses_before)
        if flags & Flag.DROP:
            self.was_left = True
            self._raise_agreed(StopRun(self._run.stop_reason or "") if self.stops else EndEpoch())
        self._ends_epoch = bool(flags & Flag.END_EPOCH)
        if flags & Flag.COUNTS and flags & Flag.MEANS:
            raise _mixed(rows)
        losses = int(sum(row[2] for row in rows))
        self.had_loss = self.had_loss or losses > 0
        count: Any = sum(row[3] for row in rows) if flags & Flag.COUNTS else None
        if flags & Flag.DEVICE_COUNT:
            count = self._add_up_on_device(training.loss.count)
        training.loss.share(losses, count, self.num_processes)
        return losses

    def veto(self, flow: ControlFlow) -> None:
        """Keep control flow that came between a window's vector and its step, for `vote`. Local."""
        self._veto = self._veto or flow

    def vote(self) -> None:
        """Let all drop a step that one of them drops. Collective where a callback may do so.

        Raises:
            SkipBatch, EndEpoch, StopRun: what one asks for, in all of them.
            ConfigError: control flow came from where nothing was agreed to steer.
        """
        flow, self._veto = self._veto, None
        if not self._votes[BEFORE_STEP]:
            if flow is not None:
                raise ConfigError(
                    f"{type(flow).__name__} was raised before a step by a callback with steers=False, or by a function "
                    "that was registered during the run. Other processes can't follow: set steers, register it before."
                ) from flow
            return
        self._request(flow)
        rows = self._exchange("agree on a veto")
        flags = _any(rows)
        self.nonfinite_elsewhere = bool(flags & Flag.NONFINITE) and not isinstance(flow, NonFiniteSkip)
        if flags & Flag.STOP_NOW:
            self._raise_agreed(StopRun(self._run.stop_reason or ""))
        if flags & Flag.END_EPOCH:
            self._raise_agreed(EndEpoch())
        if flags & Flag.SKIP:
            raise SkipBatch

    def leave(self, training: Training, flow: EndEpoch | StopRun) -> None:
        """Go on with control flow that left a window on this process. Collective where its step was not agreed on yet.

        Raises:
            EndEpoch, StopRun: what all do; nothing where the next boundary decides.
        """
        if flow is self._agreed_flow:
            raise flow
        self._request(flow)
        if self._window.closes and not self._is_decided and not self._is_manual:
            self._run.gradient_state.sync_gradients = True
            self.send(Flag.DROP)
            self._run.strategy.take_part(self._run.model)
            self.receive(training)

    # At a boundary.

    def close_window(self) -> bool:
        """Agree on what was asked for since a window's vector. Collective where a callback may have.

        Returns:
            Whether the pass ends with this window.
        Raises:
            EndEpoch, StopRun: what one asks for, in all of them.
        """
        window, flow, self._veto = self._window, self._veto, None
        self._request(flow)  # out of a step that overflowed, on which there was no vote
        if self._votes[AFTER_STEP] or not window.closes:
            losses = 0 if self._run.training is None else self._run.training.loss.num_losses
            rows = self._exchange("agree at a step's end", Flag.ENDED if window.is_last else NOTHING, losses)
            self.had_loss = self.had_loss or any(row[2] for row in rows)
            flags = _any(rows)
            if flags & Flag.STOP_NOW:
                raise StopRun(self._run.stop_reason or "")
            self._ends_epoch = self._ends_epoch or bool(flags & Flag.END_EPOCH)
        if self._ends_epoch:
            raise EndEpoch
        return self.ends_pass

    @contextmanager
    def following(self, *, always: bool = False) -> Iterator[None]:
        """A context for what is due at a boundary: who raises `StopRun` in it takes the others along. Collective.

        Args:
            always: ask even where no callback may steer.
        Raises:
            StopRun: one raised it, in all of them.
        """
        try:
            yield
        except StopRun as flow:
            if flow is self._agreed_flow:
                raise  # from a context inside this one, on all processes
            self._request(flow)
        if (always or self._votes[WHEN_DUE]) and _any(self._exchange("agree after what was due")) & Flag.STOP_NOW:
            self._raise_agreed(StopRun(self._run.stop_reason or ""))

    def settle(self) -> None:
        """Agree on whether the run ends. Collective."""
        self._exchange("agree at a boundary")

    # Inside.

    def _exchange(self, what: str, flags: int = NOTHING, losses: float = 0.0) -> Rows:
        return self._finish(self._start(what, flags, losses=losses))

    def _start(self, what: str, flags: int, *, losses: float = 0.0, count: float = 0.0) -> PendingVector:
        run, state = self._run, self._run.state
        flags, self._flags = flags | self._flags, NOTHING
        if run.stop_reason is not None and not self.stops:
            flags |= Flag.STOP
        if run.signal is not None:
            flags |= Flag.SIGNAL
        samples, tokens, self._samples, self._tokens = self._samples, self._tokens, 0, 0
        return start_vector(
            (int(flags), state.own_seconds, losses, count, samples, tokens, state.batch, state.micro_step), what
        )

    def _finish(self, pending: PendingVector) -> Rows:
        rows = pending.read()
        run, state, flags = self._run, self._run.state, _any(rows)
        state.agreed_seconds = rows[0][1]  # one clock for all
        _, _, _, _, samples, tokens, batches, micro_steps = zip(*rows, strict=True)
        state.samples += int(sum(samples))
        state.tokens += int(sum(tokens))
        # Windows of different length, where the data does not divide evenly: the longest counts.
        state.batch, state.micro_step = int(max(batches)), int(max(micro_steps))
        if flags & Flag.ENDED and not self.ends_pass:
            self.ends_pass = True
            self._warn_of_end(rows)
        if flags & Flag.SIGNAL and run.signal is None:
            run.signal = "SIGTERM"
        if flags & (Flag.STOP | Flag.STOP_NOW | Flag.SIGNAL) and not self.stops:
            self.stops = True
            self._agree_on_reason()
        return rows

    def _agree_on_reason(self) -> None:
        reasons = exchange(self._run.stop_reason)
        index, reason = next((i, r) for i, r in enumerate(reasons) if r is not None)
        if any(each != reason for each in reasons):
            self._run.stop_reason = reason if reasons[0] == reason else f"process {index}: {reason}"

    def _request(self, flow: ControlFlow | None) -> None:
        if isinstance(flow, SkipBatch):
            self._flags |= Flag.SKIP | (Flag.NONFINITE if isinstance(flow, NonFiniteSkip) else NOTHING)
        elif isinstance(flow, EndEpoch):
            self._flags |= Flag.END_EPOCH
        elif isinstance(flow, StopRun):
            self._flags |= Flag.STOP_NOW
            self._run.stop(str(flow) or "StopRun was raised")

    def _raise_agreed(self, flow: EndEpoch | StopRun) -> None:
        self._agreed_flow = flow
        raise flow

    def _add_up_on_device(self, count: Any) -> Tensor:
        device = self._run.device
        total = torch.as_tensor(0 if count is None else count).to(device, wide_float(device), copy=True)
        with watch.collective("add up the window's count"):
            dist.all_reduce(total)
        return total

    def _steers_from(self, events: Sequence[str]) -> bool:
        run = self._run
        listening = [
            callback for callback in run.callbacks if callback.steers and set(overridden(callback)) & set(events)
        ]
        return bool(listening) or any(f.event.__name__ in events for f in run.trainer.functions)

    def _warn_of_end(self, rows: Rows) -> None:
        ended = [index for index, row in enumerate(rows) if int(row[0]) & Flag.ENDED]
        if len(ended) < self.num_processes and not self._warned_of_end and rows[0][7] > 0:
            self._warned_of_end = True
            warnings.warn(
                f"the data of processes {ended} ended in epoch {self._run.state.epoch} while others had more, which is "
                "left out: an epoch ends with the first process. Give each process as many batches.",
                stacklevel=2,
            )


def _any(rows: Rows) -> int:
    flags = NOTHING
    for row in rows:
        flags |= int(row[0])
    return flags


def _size(training: Training, batch: Any) -> int:
    """The samples of a batch, 1 where they can't be told."""
    try:
        return training.count_samples(batch) or 1
    except AmbiguousBatchSizeError:
        return 1


def _mixed(rows: Rows) -> TaskError:
    kinds = {Flag.COUNTS: "(loss_sum, count)", Flag.MEANS: "a mean loss"}
    shown = [f"process {i}: {kind}" for i, row in enumerate(rows) for flag, kind in kinds.items() if int(row[0]) & flag]
    return TaskError(
        f"training_step returned different kinds of losses in one window ({', '.join(shown)}), which can't be weighted "
        "against each other. Return the same kind for every batch."
    )
