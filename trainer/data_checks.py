"""What training finds out about its data and its task only while it runs, said once and with the remedy."""

from __future__ import annotations

import warnings

from ..data.sizes import AmbiguousBatchSizeError
from ..data.window import WindowReader
from ..distributed.errors import DataError, TaskError
from .run import Run, Training


def refuse_empty_pass(run: Run, training: Training, reader: WindowReader) -> None:
    """A pass without a window: an error in the first epoch, the end of the run later.

    Raises:
        DataError: there never was a batch, or all of them are left out.
    """
    if reader.num_fetched:
        raise DataError(
            f"an epoch has {reader.num_fetched} batches, fewer than accumulate={training.window_size}, and "
            "accumulate_across_epochs='drop' leaves them all out. Use 'flush' or 'carry', or a smaller accumulate."
        )
    if run.state.micro_step == 0:
        raise DataError(
            "the training loader gave no batch. Check its dataset, its sampler, drop_last and limit_batches."
        )
    warnings.warn(
        f"the training loader gave no batch in epoch {run.state.epoch}: it can be iterated only once. "
        f"Training ends at step {run.state.step}. Pass an iterable that begins anew each time.",
        stacklevel=2,
    )
    run.stop("the training data is used up")


def check_first_epoch(run: Run, training: Training) -> None:
    """A task whose first epoch trained nothing would go on so for hours.

    Raises:
        TaskError: automatic optimization never got a loss.
    """
    state, name = run.state, type(run.task).__name__
    if training.is_automatic and 0 < state.micro_step == training.loss.num_none:
        raise TaskError(
            f"no batch of the first epoch gave a loss: {name}.training_step returned None for all {state.micro_step}. "
            "Return the loss."
        )
    if not training.is_automatic and state.step + state.skipped_steps == 0:
        warnings.warn(
            f"no optimizer stepped in the first epoch. {name} has automatic_optimization = False: call "
            "self.manual_backward(loss) and step() of self.optimizers() in training_step.",
            stacklevel=2,
        )


def not_counted(run: Run, error: AmbiguousBatchSizeError) -> AmbiguousBatchSizeError:
    """Say once that the sample counter passes over batches whose number of samples can't be told."""
    if not run.warned_of_samples:
        run.warned_of_samples = True
        warnings.warn(f"state.samples does not count such batches: {error}", stacklevel=2)
    return error


def hint_at_single_sample(error: BaseException, samples: object, index: int) -> None:
    """Batch norm can't train on one sample, and torch does not say which batch that was."""
    is_of_batch = not getattr(error, "__notes__", ())  # and of no part of it, which a note says then
    if is_of_batch and isinstance(error, ValueError) and "more than 1 value per channel" in str(error):
        error.add_note(
            f"batch {index} has {samples} sample(s), too few for batch norm. Use drop_last=True in the DataLoader, "
            "or a batch size that does not leave a single sample at the end."
        )
