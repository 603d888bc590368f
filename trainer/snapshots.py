"""Snapshots: the state of a training in memory, to which it can go back at a later step boundary."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..distributed.random import random_tree, restore_random_tree
from . import states
from .metric_state import log_tree, restore_log
from .optimizer_step import forget_gradients

if TYPE_CHECKING:
    from .run import Run, Training

_COUNTERS = ("step", "skipped_steps", "samples", "tokens")
"""Those that go back. The others say where the data stands, which goes on."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a training at a step boundary, in memory of its own: on the devices of what it was taken from."""

    counters: Mapping[str, int]
    weights: Mapping[str, Any]
    optimizers: Any
    schedulers: Any
    precision: Mapping[str, Any]
    random: Mapping[str, Any]
    log: Mapping[str, Any]
    loss: Mapping[str, Any]
    process: Mapping[str, Any]
    callbacks: Mapping[int, Any]
    """By their places in the order of callbacks."""


def take_snapshot(run: Run, training: Training) -> Snapshot:
    """The state at this boundary. Takes as much memory again as the weights and the optimizers' states. Collective."""
    run.read_tokens()
    states_of_callbacks = {index: each.rollback_state() for index, each in enumerate(run.callbacks)}
    return Snapshot(
        counters={name: getattr(run.state, name) for name in _COUNTERS},
        weights=copied(run.strategy.model_state(run.model)),
        optimizers=copied(states.optimizers_tree(run, training)),
        schedulers=copied([_schedule(rate.scheduler) for rate in training.schedulers]),
        precision=copied(run.precision.state_dict()),
        random=random_tree(run.device),
        log=copied(log_tree(run.training_log, run.task)),
        loss={"num_none": training.loss.num_none, "reference": training.loss.reference},
        process=copied(run.strategy.process_state(run.model, training.optimizers)),
        callbacks={index: copied(state) for index, state in states_of_callbacks.items() if state is not None},
    )


def go_back_to(run: Run, training: Training, snapshot: Snapshot) -> None:
    """Put a training back to where a snapshot was taken, but for its place in the data. Collective.

    Called at a step boundary of the same epoch. The snapshot can be gone back to again.
    """
    forget_gradients(run, training)
    # Loaded, and not written into `model_state`, which may be a copy: of converted layers, or on the host. Tensors are
    # copied by that; other state would be the module's from now on.
    weights = {name: each if isinstance(each, Tensor) else copied(each) for name, each in snapshot.weights.items()}
    with run.strategy.writing_weights(run.model):
        run.strategy.unwrap(run.model).load_state_dict(weights)
    for name, value in snapshot.counters.items():
        setattr(run.state, name, value)
    states.restore_optimizers(run, training.optimizers, copied(snapshot.optimizers))
    for rate, saved in zip(training.schedulers, copied(snapshot.schedulers), strict=True):
        if saved is not None:
            rate.scheduler.load_state_dict(saved)
    run.precision.load_state_dict(copied(snapshot.precision))
    run.strategy.load_process_state(run.model, training.optimizers, copied(snapshot.process))
    training.loss.num_none, training.loss.reference = snapshot.loss["num_none"], snapshot.loss["reference"]
    run.training_log.metrics.clear()
    restore_log(run.training_log, [copied(snapshot.log)], run.task, run.device)
    callbacks = run.callbacks
    for index, state in snapshot.callbacks.items():
        callbacks[index].roll_back(run.trainer, copied(state))
    training.begin_schedules(run.state, None)
    for function in run.trainer.functions:
        function.reset(run.state)
    restore_random_tree(snapshot.random, run.device)


def _schedule(scheduler: Any) -> Any:
    return scheduler.state_dict() if hasattr(scheduler, "state_dict") else None


def copied(value: Any) -> Any:
    """A copy of nested values that shares no memory with them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(each) for each in value)
    return copy.deepcopy(value)
