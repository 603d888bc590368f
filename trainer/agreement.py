"""`Agreement`: what the processes of a run decide together.

A run ends, an epoch ends and a step is dropped on all processes or on none. What one of them knows (a stop that was
asked for, a signal, the end of its data, a batch without a loss) travels in small vectors, a `Row` from each process.
Every process reads the same rows and draws the same conclusion from them; nobody decides for the others. Intervals and
limits need no message: the counters that they go by, and the clock, are taken out of the rows.

A vector is sent only where all processes know that all of them send it. In the order of a run:

| method        | when it sends                                    | why all know                                      |
| ------------- | ------------------------------------------------ | ------------------------------------------------- |
| begin_fit     | when the task was placed                         | all call the Trainer's methods in the same order, |
|               |                                                  | which `join_others` has looked at                 |
| settle        | before the first epoch, and after each           | an epoch follows until `stops` or an agreed limit |
| begin_pass    | at the begin of an epoch, also without a window  | as above                                          |
| open_window   | before a window, with "carry" and uneven data    | setting and kind of loader are equal everywhere   |
| send          | before the last backward of a window that closes | windows close together (open_window); who has no  |
|               |                                                  | loss or leaves the window sends all the same      |
| receive       | reads that before the optimizer steps            | as above                                          |
| vote          | before a step, where a callback steers there     | begin_fit told where; whether there is a step is  |
|               |                                                  | known by `receive` and the reduced gradients      |
| close_window  | after a window, where a callback steers there,   | begin_fit told where; open_window told which      |
|               | and after each one that is left open             | windows stay open                                 |
| following     | after a record or a validation that was due,     | begin_fit told where; agreed counters tell what   |
|               | where a callback steers there; at the end of     | is due                                            |
|               | each evaluation                                  |                                                   |
| roll_call     | in an evaluation about twice a second, and when  | all count batches, also those that they don't     |
|               | its batches are over                             | have; the last vector told where the next is due  |

So a step costs one vector, which overlaps with the backward. What callbacks decide after it was sent takes effect at
the same step as in one process: where one that may steer (`Callback.steers`) listens to such an event, `vote`,
`close_window` or `following` sends one more. Where processes split batches together (`SplittingTogether`), they agree
on the parts before each micro-batch, and meet in its passes until these have fitted. Two messages may follow a vector,
where its rows ask for them: why the run ends, once, and the sum of counts that are on devices. In manual optimization
there is no backward to wait for: `send` and `receive` are left out, and `close_window` sends after each window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..callbacks.callback import ControlFlow, EndEpoch, SkipBatch, StopRun
from ..data.sizes import AmbiguousBatchSizeError
from ..data.window import Window
from ..distributed import watch
from ..distributed.errors import ConfigError, DataError, TaskError
from ..distributed.exchange import PendingVector, exchange
from ..distributed.numbers import wide_float
from .consensus import Consensus
from .loss import WindowLoss
from .metric_exchange import MetricExchange
from .roll_call import RollCall
from .rows import NOTHING, Flag, Row, flags_of, saying
from .steering import Steering

if TYPE_CHECKING:
    from .run import Run, Training


class Agreement:
    """Decides for one run of several processes.

    Args:
        run: of this process.
        metrics: takes what is logged in training over all processes.
    """

    def __init__(self, run: Run, metrics: MetricExchange) -> None:
        self._run = run
        self._metrics = metrics
        self._num_processes = run.trainer.process.num_processes
        self._share = run.strategy.data_share
        self.consensus = Consensus(run)
        self.roll_call = RollCall(self.consensus, self._leave)
        """Ends evaluations on all processes behind the same batch."""
        self.was_left = False
        """Whether all left the newest window, since control flow left it on one before its gradients were reduced."""
        self.had_loss = False
        """Whether any process has had a loss in this run."""
        self.is_batch_done = False
        """Whether the newest batch is over, and counts whatever comes."""
        self.seed = 0
        """Process 0's seed, from which each process has its own random numbers in training."""
        self._newest = 0, 0
        """The samples and tokens of the newest batch, which count from before it is trained: they travel with it."""
        self._is_manual = False
        self._steering = Steering()
        self._pending: PendingVector | None = None
        """The open window's vector, between `send` and `receive`."""
        self._window = Window([], 1, True, False)
        self._is_decided = True
        """Whether the window's vector was read."""
        self._ends_epoch = False
        """Whether any process asked in the window for the end of the epoch."""
        self._agreed_flow: ControlFlow | None = None
        """The exception that is on its way out of this object on all processes."""
        self._veto: ControlFlow | None = None
        """Control flow that came too late for the window's vector."""
        self._losses_before = 0  # of the open window, in the epoch before

    # At a run's beginning and at those of its passes.

    def begin_fit(self, *, is_manual: bool) -> None:
        """Agree on after which events callbacks may steer, and on how long an epoch is. Collective.

        Args:
            is_manual: the task steps its optimizers itself.
        """
        self._is_manual = is_manual
        found = exchange([Steering.of(self._run, is_manual=is_manual), self._run.state.batches_per_epoch])
        self._steering = Steering.any_of(own for own, _ in found)
        lengths = [length for _, length in found]
        self._run.state.batches_per_epoch = None if None in lengths else min(lengths)  # it ends with the first process
        if not is_manual:
            self._metrics.begin_counting_losses()

    def begin_pass(self, training: Training, window: Window | None) -> Window | None:
        """The first window of a pass, None where the run is to stop before it. Collective.

        Raises:
            DataError: some processes have a window and others have none.
        """
        self.consensus.ends_pass = False
        size = 0 if window is None else _size(training, window.batches[0])
        rows = self.consensus.exchange("begin an epoch", Flag.ENDED if window is None else NOTHING, size=size)
        empty = saying(Flag.ENDED, rows)
        if empty and len(empty) < self._num_processes and not self.consensus.stops:
            raise DataError(
                f"processes {empty} of {self._num_processes} got no batch in epoch {self._run.state.epoch}, and the "
                "others did: the loader gives fewer batches than there are processes. Use fewer processes, or smaller "
                "batches."
            )
        if training.loss.reference is None:
            training.loss.refer_to(max(row.size for row in rows))
        return None if self.consensus.stops else window

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
        self._is_decided = self.was_left = self._ends_epoch = False
        self.consensus.nonfinite_elsewhere = self.consensus.nonfinite_here = False
        self._agreed_flow = self._veto = None
        self._losses_before = training.loss.num_losses
        if not training.carried:
            self._metrics.begin_window()
        return window

    def count(self, samples: object, tokens: int) -> None:
        """Count what this process sees of a window; the counters get the sum over all at its end. Local."""
        watch.stand("training_step", self._run.state.step)
        self._newest = samples if type(samples) is int else 0, tokens
        self.is_batch_done = False
        self.consensus.samples += self._newest[0]
        self.consensus.tokens += tokens

    @property
    def is_last_backward(self) -> bool:
        """Whether the next backward is the last of its window, in automatic optimization."""
        return not self._is_manual and self._run.strategy.gradient_state.sync_gradients

    def send(self, flags: int = NOTHING) -> None:
        """Send this process's row of a window, before its last backward, and don't wait. Collective with `receive`.

        Args:
            flags: what it says beside what the window tells.
        """
        loss, count = self._loss, 0.0
        if loss.count is not None:
            on_device = isinstance(loss.count, Tensor) and loss.count.device.type != "cpu"
            flags |= Flag.COUNTS | (Flag.DEVICE_COUNT if on_device else NOTHING)
            count = 0.0 if on_device else float(loss.count)
        elif loss.num_losses:
            flags |= Flag.MEANS
        if self._window.is_last:
            flags |= Flag.ENDED
        self._pending = self.consensus.send("agree on a step", flags, size=loss.num_losses, count=count)

    @property
    def is_sent(self) -> bool:
        """Whether the open window's vector is on its way."""
        return self._pending is not None

    def receive(self, training: Training) -> int:
        """Read the vector that `send` has sent, before the step. Collective.

        Returns:
            The losses of the window on all processes; at 0 there is nothing to step on.
        Raises:
            EndEpoch, StopRun: a process left the window, so that all do.
            TaskError: some processes return mean losses and others counts.
        """
        assert self._pending is not None
        pending, self._pending, self._is_decided = self._pending, None, True
        rows = self.consensus.read(pending)
        flags = flags_of(rows)
        num_losses = training.loss.num_losses
        self._metrics.count_losses(num_losses, num_losses - self._losses_before)
        if flags & Flag.DROP:
            self.was_left = True
            self._raise_agreed(StopRun(self._run.stop_reason or "") if self.consensus.stops else EndEpoch())
        self._ends_epoch = bool(flags & Flag.END_EPOCH)
        if flags & Flag.COUNTS and flags & Flag.MEANS:
            raise _mixed(rows)
        counted = self._share.by_losses(rows)
        losses = int(sum(row.size for row in counted))
        self.had_loss = self.had_loss or losses > 0
        count: Any = sum(row.loss_count for row in counted) if flags & Flag.COUNTS else None
        if flags & Flag.DEVICE_COUNT:
            count = self._add_up_on_device(training.loss.count)
        training.loss.share(losses, count, self._share.num_losses)
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
        if not self._steering.before_step:
            if flow is not None:
                raise ConfigError(
                    f"{type(flow).__name__} was raised before a step by a callback or function with steers=False, or "
                    "by a function that was registered during the run. Other processes can't follow: set steers, "
                    "register it before."
                ) from flow
            return
        self.consensus.ask_for(flow)
        rows = self.consensus.exchange("agree on a veto")
        flags = flags_of(rows)
        if flags & Flag.STOP_NOW:
            self._leave()
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
        self.consensus.ask_for(flow)
        if not self.is_batch_done and not self.is_sent:
            self.consensus.samples -= self._newest[0]
            self.consensus.tokens -= self._newest[1]
        if self._window.closes and not self._is_decided and not self._is_manual:
            self._run.gradient_state.sync_gradients = True
            is_done = training.trained_nothing(self._run)
            self.send(Flag.DROP)
            if not is_done:
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
        self.consensus.ask_for(flow)  # out of a step that overflowed, on which there was no vote
        if self._steering.after_step or not window.closes:
            ended = Flag.ENDED if window.is_last else NOTHING
            rows = self.consensus.exchange("agree at a step's end", ended, size=self._loss.num_losses)
            self.had_loss = self.had_loss or any(row.size for row in rows)
            flags = flags_of(rows)
            if flags & Flag.STOP_NOW:
                raise StopRun(self._run.stop_reason or "")
            self._ends_epoch = self._ends_epoch or bool(flags & Flag.END_EPOCH)
        if self._ends_epoch:
            raise EndEpoch
        return self.consensus.ends_pass

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
            self.consensus.ask_for(flow)
        if always or self._steering.when_due:
            rows = self.consensus.exchange("agree after what was due")
            if flags_of(rows) & Flag.STOP_NOW:
                self._leave()

    def settle(self) -> None:
        """Agree on whether the run ends: `stops` tells. Collective, before the first epoch and after each."""
        self.consensus.exchange("agree at a boundary")

    # Inside.

    @property
    def _loss(self) -> WindowLoss:
        assert self._run.training is not None
        return self._run.training.loss

    def _leave(self) -> NoReturn:
        self._raise_agreed(StopRun(self._run.stop_reason or ""))

    def _raise_agreed(self, flow: EndEpoch | StopRun) -> NoReturn:
        self._agreed_flow = flow
        raise flow

    def _add_up_on_device(self, count: Any) -> Tensor:
        device = self._run.device
        total = torch.as_tensor(0 if count is None else count).to(device, wide_float(device), copy=True)
        with watch.collective("add up the window's count"):
            dist.all_reduce(total)
        return total if self._share.num_twins == 1 else total / self._share.num_twins


def _size(training: Training, batch: Any) -> int:
    """The samples of a batch, 1 where they can't be told."""
    try:
        return training.count_samples(batch) or 1
    except AmbiguousBatchSizeError:
        return 1


def _mixed(rows: list[Row]) -> TaskError:
    return TaskError(
        f"training_step returned different kinds of losses in one window ((loss_sum, count) on processes "
        f"{saying(Flag.COUNTS, rows)}, a mean loss on processes {saying(Flag.MEANS, rows)}), which can't be weighted "
        "against each other. Return the same kind for every batch."
    )
