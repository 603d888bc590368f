"""The event bus: binds, when a run begins, only the methods that a callback overrides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from ..distributed.errors import suggest
from .callback import Callback, ControlFlow
from .ledger import Cost, CostLedger
from .synchronizations import SynchronizationCounter

Event: TypeAlias = Callable[..., None]
"""An event is named by its method: `Callback.on_step`."""
Emit: TypeAlias = Callable[..., None]
Handler: TypeAlias = Callable[..., Any]
"""Called with the trainer, the task and the event's values."""

EVENTS: dict[str, Event] = {name: method for name, method in vars(Callback).items() if name.startswith("on_")}
"""Every event by the name of its method, in the order of firing."""

CLEAN_UP: frozenset[Event] = frozenset({
    Callback.on_batch_end, Callback.on_epoch_end, Callback.on_fit_end, Callback.on_exception, Callback.on_teardown,
    Callback.on_validation_batch_end, Callback.on_test_batch_end, Callback.on_predict_batch_end,
    Callback.on_validation_end, Callback.on_test_end, Callback.on_predict_end,
})  # fmt: skip
"""Events at which one callback's failure does not keep the others from being called."""


def bind(
    callbacks: Iterable[Callback],
    functions: Iterable[tuple[Event, Handler]],
    trainer: Any,
    task: Any,
    ledger: CostLedger | None = None,
    counter: SynchronizationCounter | None = None,
) -> dict[Event, Emit | None]:
    """For each event the function that calls its handlers in order, or None where nobody handles it.

    The loop asks `if emit := events[Callback.on_step]: emit(outcome)`: an unhandled event costs one look-up.

    Args:
        callbacks: sorted.
        functions: single functions with their event; they run after the callbacks.
        trainer: passed to each handler first.
        task: passed to each handler second.
        ledger: where the time of each handler is added up.
        counter: counts how often each waits for a device.
    """
    ledger = CostLedger() if ledger is None else ledger
    handlers: dict[Event, list[tuple[Handler, Cost]]] = {event: [] for event in EVENTS.values()}
    methods = ((EVENTS[name], getattr(callback, name)) for callback in callbacks for name in overridden(callback))
    for event, handler in [*methods, *functions]:
        cost = ledger.cost_of(handler, event.__name__)
        handlers[event].append((handler if counter is None else counter.counted(handler, cost), cost))
    return {
        event: _emitter(event, found, trainer, task, ledger) if found else None for event, found in handlers.items()
    }


_FOREIGN = {
    "on_train_start": "on_fit_start", "on_train_end": "on_fit_end",
    "on_train_epoch_start": "on_epoch_start", "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_start": "on_batch_start", "on_train_batch_end": "on_batch_end",
    "on_validation_epoch_start": "on_validation_start", "on_validation_epoch_end": "on_validation_end",
    "on_test_epoch_start": "on_test_start", "on_test_epoch_end": "on_test_end",
    "on_after_backward": "on_backward", "on_before_optimizer_step": "on_before_step",
    "on_save_checkpoint": "on_save_state", "on_load_checkpoint": "on_load_state",
}  # fmt: skip
"""What other trainers call these events."""


def unheard_methods(listener: object) -> Iterator[str]:
    """What to say of each method of an object that looks like an event and is never called."""
    cls = type(listener)
    for name in sorted({name for base in cls.__mro__ for name in vars(base) if name.startswith("on_")}):
        if name in EVENTS and isinstance(listener, Callback):
            continue
        place = f"{cls.__name__}.{name} is never called: "
        if name in EVENTS:
            yield place + f"only a Callback receives events. Write `class {cls.__name__}(Task, Callback)`."
        else:
            yield (
                place + f"there is no such event. {suggest(_FOREIGN.get(name, name), EVENTS).partition(' Accepted')[0]}"
            )


def overridden(callback: Callback) -> list[str]:
    """The names of the events that a callback handles, in the order of firing."""
    own = vars(callback)
    return [name for name, event in EVENTS.items() if getattr(type(callback), name) is not event or name in own]


def _emitter(
    event: Event, handlers: Sequence[tuple[Handler, Cost]], trainer: Any, task: Any, ledger: CostLedger
) -> Emit:
    """What calls the handlers in order and adds their time to their costs: here, since a call more would be felt."""
    cleans_up, now = event in CLEAN_UP, time.perf_counter

    def emit(*values: Any) -> None:
        failure: BaseException | None = None
        for handler, cost in handlers:
            others, began = ledger.seconds, now()
            try:
                handler(trainer, task, *values)
            except BaseException as error:
                failure = _joined(failure, error, cost, trainer)
                if not cleans_up:
                    raise
            finally:
                took = now() - began
                own = took - (ledger.seconds - others)
                ledger.seconds += own
                cost.seconds += own
                cost.calls += 1
                if took > cost.longest:
                    cost.longest = took
        if failure is not None:
            raise failure

    return emit


def _joined(failure: BaseException | None, error: BaseException, cost: Cost, trainer: Any) -> BaseException:
    """What goes on its way of two exceptions: the first that is no control flow. It says which callback raised it,
    where, at which step, and what failed as well.
    """
    if isinstance(error, ControlFlow):
        return failure or error
    if failure is None or isinstance(failure, ControlFlow):
        error.add_note(f"raised by {cost.owner} in {cost.event}, at step {trainer.state.step}")
        return error
    failure.add_note(f"{cost.owner}.{cost.event} failed as well: {type(error).__name__}: {error}")
    return failure
