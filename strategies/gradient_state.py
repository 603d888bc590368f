"""`GradientState`: where a micro-batch stands in its accumulation window and in its loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..distributed.errors import check_boolean, check_integer

if TYPE_CHECKING:
    from ..data.loader import PreparedLoader


@dataclass(frozen=True, slots=True)
class GradientAccumulationPlugin:
    """How gradients are accumulated under `Accelerator`; the names and their order are Accelerate's."""

    num_steps: int = 1
    """Micro-batches per optimizer step."""
    adjust_scheduler: bool = False
    """True: the schedule was planned in micro-batches, so an optimizer step advances it by those of its window."""
    sync_with_dataloader: bool = True
    """A loader's end closes an open window; False: the window goes on with the next pass."""
    sync_each_batch: bool = False
    """Reduce gradients over processes on every micro-batch: less memory, more communication, the same result."""
    exact_last_window: bool = False
    """Divide a short last window by its real size, not by `num_steps`; needs a prepared loader."""

    def __post_init__(self) -> None:
        check_num_steps(self.num_steps, "GradientAccumulationPlugin.num_steps")
        for name in ("adjust_scheduler", "sync_with_dataloader", "sync_each_batch", "exact_last_window"):
            check_boolean(f"GradientAccumulationPlugin.{name}", getattr(self, name))


def check_num_steps(value: int, option: str) -> int:
    """The number of micro-batches per step, if it is one.

    Raises:
        ConfigError: it is not an integer of at least 1.
    """
    check_integer(option, value, 1, "Leave it out to step on every batch.")
    return value


class GradientState:
    """Where a micro-batch stands in its window and in its loader. One object per `Accelerator`; no singleton.

    The Trainer sets `sync_gradients` and `window_size` from windows that it has fetched; under `Accelerator.accumulate`
    they follow from the counter and the active loader.
    """

    def __init__(self, plugin: GradientAccumulationPlugin | None = None) -> None:
        self.plugin = plugin or GradientAccumulationPlugin()
        self.num_steps = self.plugin.num_steps
        """Micro-batches per full window."""
        self.sync_gradients = True
        """Whether the current micro-batch closes its window, so that the optimizer steps after it."""
        self.window_size = self.num_steps
        """What a loss of the current window is divided by: its number of micro-batches."""
        self.micro_steps = 0
        """Micro-batches since the last closed window, under `Accelerator.accumulate`."""
        self.loaders: list[PreparedLoader] = []
        """The prepared loaders that are being iterated, the innermost last."""

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's end closes an open window."""
        return self.plugin.sync_with_dataloader

    @property
    def adjust_scheduler(self) -> bool:
        """Whether an optimizer step advances a schedule by the micro-batches of its window."""
        return self.plugin.adjust_scheduler

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self.loaders)

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The innermost loader that is being iterated."""
        return self.loaders[-1] if self.loaders else None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch."""
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the active loader's short last batch over all processes, 0 where there is none, -1 if unknown."""
        return self.loaders[-1].remainder if self.loaders else -1

    @property
    def is_exact(self) -> bool:
        """Whether a window that a loader's end cuts is divided by its real size."""
        return self.plugin.exact_last_window and self.sync_with_dataloader

    def change_num_steps(self, value: int) -> None:
        """Set the micro-batches per window, from the next backward on.

        Raises:
            ConfigError: it is not an integer of at least 1.
        """
        self.num_steps = self.window_size = check_num_steps(value, "gradient_accumulation_steps")

    def advance(self) -> None:
        """Count one micro-batch and decide whether it closes its window. Called by `Accelerator.accumulate`."""
        is_first = self.micro_steps % self.num_steps == 0
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.micro_steps, self.sync_gradients = 0, True
        else:
            self.micro_steps += 1
            self.sync_gradients = self.micro_steps % self.num_steps == 0
        if is_first:
            self.window_size = min(self.num_steps, self._batches_left())

    def _batches_left(self) -> int:
        """Micro-batches that this window can have at most, as far as they have to be known."""
        if self.is_exact and self.loaders:
            return self.loaders[-1].batches_known
        return self.num_steps
