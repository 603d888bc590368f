"""`ThroughputMonitor`: how fast training goes, where it waits, and how much of the device it uses."""

from __future__ import annotations

import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..distributed.errors import ConfigError, check_integer, check_number
from .callback import Callback
from .peaks import number_format, peak_flops

if TYPE_CHECKING:
    from .view import TaskView, TrainerView


_SHARES = {
    "data": "data_wait", "forward": "forward", "backward": "backward", "step": "step", "callbacks": "callbacks",
    "trackers": "trackers",
}  # fmt: skip
"""The parts of the training that are reported, and what they are called."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """The counters at one moment."""

    seconds: float
    samples: int
    tokens: int
    batches: int
    steps: int
    parts: dict[str, float]
    """The seconds of each part of the training."""


class ThroughputMonitor(Callback):
    """Adds to each record of training how fast it goes, over the newest records; evaluations are left out.

    | name | what |
    |---|---|
    | `throughput/samples_per_second` | also `tokens_per_second` where tokens are counted, `batches_...`, `steps_...` |
    | `throughput/data_wait_share` | the share of the time spent waiting for the next batch, 0 to 1 |
    | `throughput/forward_share` | also of `backward`, `step`, `callbacks` and `trackers`: time on the host |
    | `throughput/flops_per_second` | where the model's operations are known: given here, or as `task.flops_per_batch` |
    | `throughput/mfu` | these as a share of the devices' peak, where that is known too |

    The first record covers the start of training (compiling, first allocations); later ones leave that out.
    Nothing runs per step.

    Args:
        window: over how many records the rates are taken.
        flops_per_sample: floating point operations of forward and backward for one sample.
        flops_per_token: the same for one token; about 6 times the number of parameters in a transformer.
        device_peak_flops: the most operations per second of one device, where `callbacks/peaks.py` doesn't know it.
    Raises:
        ConfigError: an argument is no number above 0, or operations are given both per sample and per token.
    """

    provides = (
        "throughput/samples_per_second", "throughput/tokens_per_second", "throughput/batches_per_second",
        "throughput/steps_per_second", "throughput/data_wait_share", "throughput/forward_share",
        "throughput/backward_share", "throughput/step_share", "throughput/callbacks_share",
        "throughput/trackers_share", "throughput/flops_per_second", "throughput/mfu",
    )  # fmt: skip

    steers = False

    def __init__(
        self,
        *,
        window: int = 10,
        flops_per_sample: float | None = None,
        flops_per_token: float | None = None,
        device_peak_flops: float | None = None,
    ) -> None:
        check_integer("ThroughputMonitor(window)", window, 1, "It counts records.")
        given = {
            "flops_per_sample": flops_per_sample, "flops_per_token": flops_per_token,
            "device_peak_flops": device_peak_flops,
        }  # fmt: skip
        for option, value in given.items():
            if value is not None:
                hint = "Leave it out where it is not known."
                check_number(f"ThroughputMonitor({option})", value, above=0, allows_infinity=False, hint=hint)
        if flops_per_sample is not None and flops_per_token is not None:
            raise ConfigError("ThroughputMonitor has flops_per_sample and flops_per_token. Give one of the two.")
        self._flops_per_sample = flops_per_sample
        self._flops_per_token = flops_per_token
        self._device_peak_flops = device_peak_flops
        self._peak: float | None = None
        self._has_peak = False
        self._readings: deque[_Reading] = deque(maxlen=min(window + 1, sys.maxsize))
        self._start: _Reading | None = None
        self._paused_seconds = 0.0
        self._paused_at: float | None = None

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Start measuring."""
        self._readings.clear()
        self._paused_seconds, self._paused_at = 0.0, None
        self._has_peak = False
        self._start = self._read(trainer)

    def on_validation_start(self, trainer: TrainerView, task: TaskView) -> None:
        """The clock stands still."""
        self._paused_at = time.monotonic()

    def on_validation_end(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float]) -> None:
        """The clock goes on."""
        if self._paused_at is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._paused_at = None

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Records of a later `validate` or `test` have no throughput."""
        self._start = None

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        """Add the rates, once per step."""
        if self._start is None or self._paused_at is not None:
            return
        newest = self._readings[-1] if self._readings else self._start
        if trainer.state.step == newest.steps:  # another record of the same step
            return
        now = self._read(trainer)
        self._readings.append(now)
        oldest = self._readings[0] if len(self._readings) > 1 else self._start
        seconds = now.seconds - oldest.seconds
        if seconds > 0:
            metrics.update(_rates(oldest, now, seconds))
            metrics.update(self._use_of_device(oldest, now, seconds, trainer, task))

    def _read(self, trainer: TrainerView) -> _Reading:
        state = trainer.state
        return _Reading(
            seconds=time.monotonic() - self._paused_seconds, samples=state.samples, tokens=state.tokens,
            batches=state.micro_step, steps=state.step, parts=trainer.training_seconds,
        )  # fmt: skip

    def _use_of_device(
        self, oldest: _Reading, now: _Reading, seconds: float, trainer: TrainerView, task: TaskView
    ) -> dict[str, float]:
        flops = self._flops_between(oldest, now, trainer, task)
        if flops is None:
            return {}
        used = {"throughput/flops_per_second": flops / seconds}
        if not self._has_peak:  # found at the first record, when everything is in its place
            self._peak, self._has_peak = self._device_peak_flops or _known_peak(trainer), True
        if self._peak is not None:
            used["throughput/mfu"] = flops / seconds / (self._peak * trainer.process.num_processes)
        return used

    def _flops_between(self, oldest: _Reading, now: _Reading, trainer: TrainerView, task: TaskView) -> float | None:
        """The operations of all processes between two readings, None where nothing says how many they are."""
        if self._flops_per_sample is not None:
            return self._flops_per_sample * (now.samples - oldest.samples)
        if self._flops_per_token is not None:
            if now.tokens == oldest.tokens:
                warnings.warn(
                    "ThroughputMonitor(flops_per_token=...) is ignored: no tokens are counted. "
                    "Return (loss_sum, count) from training_step, override count_tokens, or give flops_per_sample.",
                    stacklevel=2,
                )
                self._flops_per_token = None
                return None
            return self._flops_per_token * (now.tokens - oldest.tokens)
        per_batch = getattr(task, "flops_per_batch", None)
        if per_batch is None:
            return None
        if not isinstance(per_batch, (int, float)):
            raise ConfigError(
                f"task.flops_per_batch={per_batch!r}. Expected a number: the operations of one micro-batch."
            )
        return per_batch * (now.batches - oldest.batches) * trainer.data_share.num_processes


def _rates(oldest: _Reading, now: _Reading, seconds: float) -> dict[str, float]:
    counted = {
        "samples": now.samples - oldest.samples,
        "tokens": now.tokens - oldest.tokens,
        "batches": now.batches - oldest.batches,
        "steps": now.steps - oldest.steps,
    }
    if not now.tokens:
        del counted["tokens"]
    rates = {f"throughput/{what}_per_second": count / seconds for what, count in counted.items()}
    parts = {
        f"throughput/{_SHARES[name]}_share": min(1.0, (now.parts[name] - oldest.parts[name]) / seconds)
        for name in _SHARES
    }
    return {**rates, **parts}


def _known_peak(trainer: TrainerView) -> float | None:
    """Operations per second of this process's device in the format that the model computes in."""
    if trainer.device.type != "cuda":
        return None
    used = number_format(_compute_dtype(trainer))
    return None if used is None else peak_flops(torch.cuda.get_device_name(trainer.device), used)


def _compute_dtype(trainer: TrainerView) -> torch.dtype:
    """The autocast format, or else that of most of the model's parameters."""
    kind = trainer.device.type
    with trainer.autocast():
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    sizes: dict[torch.dtype, int] = {}
    for parameter in trainer.model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
