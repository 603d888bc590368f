"""The counters of a run: what every interval, callback, tracker row and checkpoint counts in."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class RunState:
    """Where a run is. All counts start at 0 and count what is finished.

    One number axis serves everything that is logged: `step`, the optimizer steps that were applied.
    """

    epoch: int = 0
    """Epochs that are finished; while one is running, its index."""
    batch: int = 0
    """Micro-batches finished in the running epoch."""
    micro_step: int = 0
    """Micro-batches finished in the whole run, by each process."""
    step: int = 0
    """Optimizer steps applied. With several optimizers in manual mode, one per loop step."""
    skipped_steps: int = 0
    """Optimizer steps that were due and not applied: a gradient overflow in fp16, or a window without a loss."""
    samples: int = 0
    """Samples seen in training, by all processes together; within an accumulation window, up to its beginning."""
    tokens: int = 0
    """Tokens seen in training by all processes: the counts of `(loss_sum, count)`, or what the task reports."""
    stage: str = "idle"
    """What is running: "idle", "train", "sanity", "validation", "test" or "predict"."""
    batches_per_epoch: int | None = None
    """Micro-batches in an epoch, None when the loader has no length."""
    epoch_ended: bool = False
    """Whether the running epoch has trained its last batch; validation at an epoch's end sees True."""
    seconds_before: float = 0.0
    """Training time of the earlier legs of this run, in seconds."""
    started_at: float | None = None
    """`time.monotonic()` at the start of this leg, None when nothing runs."""
    agreed_seconds: float | None = None
    """The time on process 0 at the newest step boundary, so that several processes find the same due. None: alone."""

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run so far, in seconds, over all its legs; with several processes, as agreed last."""
        return self.own_seconds if self.agreed_seconds is None else self.agreed_seconds

    @property
    def own_seconds(self) -> float:
        """The same by this process's clock."""
        running = 0.0 if self.started_at is None else time.monotonic() - self.started_at
        return self.seconds_before + running

    @property
    def epochs_done(self) -> float:
        """Finished epochs with the fraction of the running one; whole numbers only where the length is unknown."""
        if self.epoch_ended:
            return self.epoch + 1.0
        if not self.batches_per_epoch:
            return float(self.epoch)
        return self.epoch + self.batch / self.batches_per_epoch

    def counters(self) -> dict[str, int]:
        """The saved counters, by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def adopt(self, other: RunState) -> None:
        """Take over the counters of another run."""
        for name in COUNTERS:
            setattr(self, name, getattr(other, name))

    def start(self) -> None:
        """The run's time begins to count, or goes on."""
        self.started_at = time.monotonic()

    def pause(self) -> None:
        """The run's time stops counting."""
        if self.started_at is not None:
            self.seconds_before, self.started_at = self.own_seconds, None


COUNTERS = ("epoch", "batch", "micro_step", "step", "skipped_steps", "samples", "tokens")
