"""What callbacks of several processes settle among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
