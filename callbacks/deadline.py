"""What is saved in the time that is left after a signal: all, or the weights alone."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..checkpoint.shards import SUFFIX
from ..distributed.paths import free_path
from ..distributed.units import size_bytes
from .store import OWNER, Store
from .together import by_main_process
from .weight_files import write_together

if TYPE_CHECKING:
    from .view import TrainerView

logger = logging.getLogger("loopwright")

MARGIN = 1.5
"""A save is taken to last this many times as long as was measured: the machine may be busy with its end."""


def save_in_time(trainer: TrainerView, store: Store, left: float) -> None:
    """Save all, or where the time does not suffice the weights alone. Collective.

    The measure is the newest save of this run. Where there was none, the weights are saved first, and how long they
    took tells how long the whole state will.

    Args:
        trainer: of this process.
        store: what asks for whole states.
        left: seconds until the process will be killed.
    Raises:
        CheckpointError: on every process: the weights can't be written.
    """
    store.withdraw(trainer, scored=True)
    began, seconds = time.monotonic(), trainer.save_seconds
    is_finite = store.has_finite_weights(trainer)
    fits, name = by_main_process(
        trainer, lambda: _choose(trainer, store, seconds, left, is_finite), f"{OWNER}: what there is time for"
    )
    if name is not None:
        path = store.folder / name
        write_together(trainer, path)
        taken = time.monotonic() - began
        fits = by_main_process(
            trainer, lambda: _fits_as_well(trainer, path, seconds, taken, left), f"{OWNER}: what time there is left for"
        )
        if fits and trainer.process.is_main_process:
            store.stopgap = path
    if fits:
        store.save_newest(trainer)


def _choose(
    trainer: TrainerView, store: Store, seconds: float | None, left: float, is_finite: bool
) -> tuple[bool, str | None]:
    """Whether a save that takes so long fits, and else the name of the file for the weights. Local."""
    if seconds is not None and seconds * MARGIN < left:
        return True, None
    if not is_finite:
        return False, None
    return False, free_path(store.folder / f"step={trainer.state.step:06d}-weights{SUFFIX}", mark="-v").name


def _fits_as_well(trainer: TrainerView, path: Path, seconds: float | None, taken: float, left: float) -> bool:
    """Whether the whole state fits behind the weights, whose time tells where no save was measured. Local."""
    if seconds is None:
        seconds = taken * _times_the_weights(trainer)
        if seconds * MARGIN < left - taken:
            return True
    logger.warning(
        "%s: %.1f s were left, and a whole checkpoint takes %.1f s: the weights alone are in %s. A run can go on from "
        "the newest earlier checkpoint.",
        trainer.signal,
        left,
        seconds,
        path,
    )
    return False


def _times_the_weights(trainer: TrainerView) -> float:
    """How many times the size of the weights a whole state has."""
    weights = size_bytes(trainer.unwrapped_model().state_dict().values())
    states = [value for each in trainer.optimizers for state in each.state.values() for value in state.values()]
    return 1.0 + size_bytes(value for value in states if isinstance(value, Tensor)) / max(weights, 1)
