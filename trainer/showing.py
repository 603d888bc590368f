"""What a training shows of itself: other weights in evaluations and files, and its data once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..distributed.errors import ConfigError
from ..distributed.random import preserved_random_state
from .sealed import preserved_generators, preserved_gradient_state

if TYPE_CHECKING:
    from .run import Run, Training


@contextmanager
def showing_weights(run: Run) -> Iterator[None]:
    """A context in which the task has the weights that a callback wants evaluated and saved, if one does. Local.

    Afterwards the weights of the training are back. Outside of a training, and inside another such context, nothing
    changes.

    Raises:
        ConfigError: several callbacks want theirs.
    """
    if run.training is None or run.shown_weights is not None:
        yield
        return
    trainer: Any = run.trainer
    task: Any = run.task
    asked = [(type(each).__name__, each.evaluation_weights(trainer, task)) for each in run.callbacks]
    wanted = [(name, context) for name, context in asked if context is not None]
    if len(wanted) > 1:
        raise ConfigError(
            f"{', '.join(name for name, _ in wanted)} each want weights of theirs evaluated in the place of the "
            "training's. Keep one of them, or let the others return None from evaluation_weights."
        )
    if not wanted:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(wanted[0][1])
        run.shown_weights = stack
        try:
            yield
        finally:
            run.shown_weights = None


def show_training_weights(run: Run) -> None:
    """Give the task the weights of its training back before such a context ends, if there is one. Local."""
    if run.shown_weights is not None:
        run.shown_weights.close()


def batches_again(run: Run, training: Training) -> Iterator[Any]:
    """One more pass over this process's training batches, on the device. Local or collective as the loader is.

    Random states, those of the loader too, and the training loader's flags are as before once the pass is over.
    """
    loader = training.loader
    loader.set_epoch(run.state.epoch + 1)  # a whole pass, also where the run has stopped or resumed inside an epoch
    with (
        preserved_random_state(run.device),
        preserved_generators([loader]),
        preserved_gradient_state(run.gradient_state),
    ):
        yield from islice(loader, training.batch_limit)
