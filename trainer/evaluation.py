"""Evaluation: validation inside and outside of training, test, and prediction.

```
evaluate: on_<stage>_start -> per batch on_<stage>_batch_start -> <stage>_step -> on_<stage>_batch_end -> on_<stage>_end
```
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..callbacks.bus import Event
from ..callbacks.callback import Callback, EndEpoch, SkipBatch
from ..data.sizes import AmbiguousBatchSizeError
from ..data.window import check_length
from ..distributed import watch
from ..distributed.nested import send_to_device
from ..distributed.numbers import to_numbers
from ..distributed.operations import gather_object
from .metric_exchange import MetricExchange
from .metrics import MetricLog
from .roll_call import in_turns
from .run import EvaluationData, Run, Training, refused
from .sealed import sealed
from .showing import showing_weights
from .signature import bind_step, sample_counter


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of evaluation: its name and its events."""

    name: str
    step: str
    """The task's method."""
    start: Event
    batch_start: Event
    batch_end: Event
    end: Event


VALIDATION = Stage(
    "validation", "validation_step", Callback.on_validation_start, Callback.on_validation_batch_start,
    Callback.on_validation_batch_end, Callback.on_validation_end,
)  # fmt: skip
TEST = Stage(
    "test", "test_step", Callback.on_test_start, Callback.on_test_batch_start,
    Callback.on_test_batch_end, Callback.on_test_end,
)  # fmt: skip
PREDICT = Stage(
    "predict", "predict_step", Callback.on_predict_start, Callback.on_predict_batch_start,
    Callback.on_predict_batch_end, Callback.on_predict_end,
)  # fmt: skip


def validate(run: Run, training: Training) -> None:
    """Validation inside training. It leaves no trace there; its metrics become a record at the current step."""
    assert training.validation is not None
    with run.clock.part("validation"), refused(SkipBatch, EndEpoch):
        evaluate(run, VALIDATION, training.validation)
    training.validated_at = (run.state.micro_step, run.state.step)
    training.validation_due = False


def evaluate(run: Run, stage: Stage, data: EvaluationData) -> dict[str, float]:
    """One pass over the data of a stage.

    Returns:
        The means over all samples, by name, with what callbacks added to them.
    """
    metrics: dict[str, float] = {}
    run.strategy.synchronize_buffers(run.model)
    paired = run.paired(stage.start, stage.end, lambda: (metrics,), holds_stop=True)
    with ending_together(run), evaluating(run, stage, data) as log, paired:
        with in_turns(run, paired.held) as turns, closing(batches_of(run, stage, data, log)) as batches:
            for step, batch, index in batches:
                run_batch(run, stage, turns.of(step), batch, index)
                turns.after_batch()
        metrics.update(to_numbers(log.epoch_values()))
        run.remember(metrics)
        shown = run.trainer.progress_metrics
        shown.update({name: value for name, value in metrics.items() if name in shown})
    log.see("", 1)
    metrics.update(to_numbers(log.epoch_values()))  # what the end event logged
    if metrics:
        run.record(metrics)
    return metrics


def sanity_check(run: Run, data: EvaluationData, num_batches: int) -> None:
    """Try the first batches of each loader before training, so that an error in validation costs no epoch.

    No event fires and no metric is kept.
    """
    with evaluating(run, VALIDATION, data, name="sanity") as log:
        try:
            _try_batches(run, data, log, num_batches)
            run.strategy.finish_evaluation()
        except BaseException as error:
            error.add_note(
                f"raised while validation was tried on {num_batches} batches before training; sanity_val_batches=0 "
                "leaves this out"
            )
            raise
        log.epoch_values()


def _try_batches(run: Run, data: EvaluationData, log: MetricLog, num_batches: int) -> None:
    for (suffix, loader), limit in zip(data.loaders.items(), data.limits, strict=True):
        step = step_of(run, VALIDATION, data, suffix)
        count = num_batches if limit is None else min(num_batches, limit)
        log.see(suffix, 0)
        with closing(_first_of(loader, count)) as batches:
            for index, batch in enumerate(batches):
                log.samples = samples_of(run, batch)
                log.see(suffix, 1)
                step(batch, index)


def _first_of(loader: Any, count: int) -> Generator[Any]:
    yield from islice(loader, count)


def predict(run: Run, data: EvaluationData, writer: Callable[[Any, Any, int], None] | None = None) -> list[Any]:
    """The outputs of `predict_step`, batch by batch in the order of the data.

    Args:
        writer: takes each batch's outputs, the batch and its index, so that nothing is kept in memory; with several
            processes each writes its own batches, those that get the same ones once.
    Returns:
        The outputs of all processes, on each of them; none where a writer took them.
    """
    kept: list[Any] = []
    run.strategy.synchronize_buffers(run.model)
    paired = run.paired(PREDICT.start, PREDICT.end, holds_stop=True)
    with (
        ending_together(run),
        evaluating(run, PREDICT, data) as log,
        paired,
        in_turns(run, paired.held) as turns,
        closing(batches_of(run, PREDICT, data, log)) as batches,
    ):
        for step, batch, index in batches:
            outputs = run_batch(run, PREDICT, turns.of(step), batch, index)
            if data.is_first_peer:
                if writer is None:
                    kept.append((log.suffix, index, outputs))
                else:
                    writer(outputs, batch, index)
            turns.after_batch()
    return in_order(run, data, kept)


def in_order(run: Run, data: EvaluationData, kept: list[tuple[str, int, Any]]) -> list[Any]:
    """The outputs of all processes in the order of the data, on this process's device. Collective."""
    if run.agreement is not None:
        there = send_to_device(kept, "cpu")
        kept = send_to_device(sorted(gather_object(there), key=lambda each: _rank(data, each)), run.device)
    return [outputs for _, _, outputs in kept]


def _rank(data: EvaluationData, output: tuple[str, int, Any]) -> tuple[int, int]:
    return list(data.loaders).index(output[0]), output[1]


@contextmanager
def ending_together(run: Run) -> Iterator[None]:
    """A context that one process may leave by `StopRun`: the others follow."""
    if run.agreement is None:
        yield
        return
    with run.agreement.following(always=True):
        yield


@contextmanager
def evaluating(run: Run, stage: Stage, data: EvaluationData, name: str | None = None) -> Iterator[MetricLog]:
    """The seal around an evaluation, with the stage's own log of metrics in the place of the outer one.

    It goes around the weights that a callback wants evaluated, if one does.
    """
    outer = (run.state.stage, run.log)
    with showing_weights(run), sealed(run.task, run.device, run.gradient_state, data.loaders.values()):
        if run.shown_weights is not None:
            run.strategy.synchronize_buffers(run.model)  # of these weights, after those of the training
        run.state.stage = name or stage.name
        shown = {} if name == "sanity" else run.trainer.progress_metrics
        exchange = None if run.agreement is None else MetricExchange(run.strategy.data_share)
        run.log = MetricLog(stage.name, shown, exchange)
        run.evaluation = data
        try:
            yield run.log
        except BaseException:
            run.log.reset()  # torchmetrics objects begin the next pass with nothing of this one
            raise
        finally:
            run.state.stage, run.log = outer
            watch.stand(run.state.stage, run.state.step)
            run.evaluation = None


def batches_of(
    run: Run, stage: Stage, data: EvaluationData, log: MetricLog
) -> Generator[tuple[Callable[..., Any], Any, int]]:
    """Each batch of each loader, with the step for it and its index in its loader. Once it is closed, no worker reads
    for it, whoever keeps an exception that came out of the loop over it.
    """
    for (suffix, loader), limit in zip(data.loaders.items(), data.limits, strict=True):
        log.suffix = suffix
        step = step_of(run, stage, data, suffix)
        index = -1
        log.see(suffix, 0)
        for index, batch in enumerate(islice(loader, limit)):
            log.samples, log.window = samples_of(run, batch), index
            log.see(suffix, 1)
            if run.agreement is not None:
                watch.stand(stage.step, run.state.step)
            yield step, batch, data.number_of(index)
        check_length(loader, index + 1, limit)
        if index < 0 and data.process_index == 0:  # which gets the first batch, if there is any
            warnings.warn(f"the {stage.name} loader{suffix} gave no batch, so that it has no metrics.", stacklevel=2)
    log.suffix = ""  # what the end event logs belongs to all of them


def run_batch(run: Run, stage: Stage, step: Callable[..., Any], batch: Any, index: int) -> Any:
    """One batch with its two events."""
    outputs = None
    try:
        if emit := run.events[stage.batch_start]:
            emit(batch, index)
        outputs = step(batch, index)
    except BaseException as error:
        run.fail(error)
        run.finish_despite(error, stage.batch_end, outputs)
        raise
    if emit := run.events[stage.batch_end]:
        emit(outputs)
    return outputs


def step_of(run: Run, stage: Stage, data: EvaluationData, suffix: str) -> Callable[..., Any]:
    """The task's method for one loader, called with a batch and its index."""
    number = list(data.loaders).index(suffix)
    through = run.strategy.evaluation_method(run.model, stage.step)
    return bind_step(getattr(run.task, stage.step), run.precision, through, dataloader_idx=number)


def samples_of(run: Run, batch: Any) -> int | AmbiguousBatchSizeError | None:
    """Samples in the batch, or the error that says why they can't be told: it is raised where they are needed."""
    try:
        return sample_counter(run.task)(batch)
    except AmbiguousBatchSizeError as error:
        return error
