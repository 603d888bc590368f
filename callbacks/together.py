"""What callbacks of several processes settle among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..distributed.errors import CheckpointError
from ..distributed.exchange import exchange

if TYPE_CHECKING:
    from .view import TrainerView


def of_main_process(trainer: TrainerView, value: Any, operation: str) -> Any:
    """The main process's value. Collective, except while an exception ends the run: each keeps its own then.

    Args:
        trainer: of this process.
        value: as `exchange` takes it.
        operation: what reports call it.
    """
    if trainer.process.num_processes == 1 or trainer.error is not None:
        return value
    return exchange(value, operation)[0]


def by_main_process(trainer: TrainerView, act: Callable[[], Any], operation: str) -> Any:
    """What the main process's part gave. Collective, except while an exception ends the run: others get None then.

    Args:
        trainer: of this process.
        act: the part, which gives what `exchange` takes.
        operation: what reports call it.
    Raises:
        CheckpointError: on every process: the part has raised it.
    """
    failure: CheckpointError | None = None
    told: list[Any] = [None, None]
    if trainer.process.is_main_process:
        try:
            told = [None, act()]
        except CheckpointError as error:
            failure, told = error, [str(error), None]
    reason, value = of_main_process(trainer, told, operation)
    if reason is not None:
        raise failure or CheckpointError(reason)
    return value
