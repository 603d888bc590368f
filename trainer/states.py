"""The state of a training as trees: what a checkpoint keeps beside the weights, and how it comes back.

Three trees: `state`, the small part that all processes share; `optimizers`; and one `process-...` for each process,
with what is its own: random states, position in the data, sums of logged metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks.callback import Callback
from ..callbacks.order import state_keys
from ..callbacks.state import COUNTERS
from ..checkpoint.reading import Checkpoint
from ..checkpoint.sharded import local_part, part_like
from ..checkpoint.stored import read_all
from ..distributed.errors import CheckpointError
from ..distributed.random import random_tree
from ..strategies.optimizer import parameters_of
from ..strategies.outcome import StepOutcome
from .metric_state import log_tree
from .optimizer_state import add_missing_groups, check_groups, check_kinds, optimizer_trees

if TYPE_CHECKING:
    from .run import Run, Training

VERSION = 1
"""Of the trees' content, which `migrated` brings up to date."""
COMMON = "state"
OPTIMIZERS = "optimizers"


def process_tree_name(index: int) -> str:
    """The name of the tree of one process."""
    return f"process-{index:05}"


def progress_of(run: Run, training: Training) -> dict[str, Any]:
    """The counters at the newest step boundary. Local."""
    run.read_tokens()
    return training.boundary(run.state) | {"seconds": run.state.seconds}


def common_tree(run: Run, training: Training) -> dict[str, Any]:
    """What all processes share, and `on_save_state` may add to. Fires the event. Local."""
    callbacks = {key: state for key, each in state_keys(run.trainer.callbacks).items() if (state := state_of(each))}
    tree = {
        "version": VERSION,
        "progress": progress_of(run, training),
        "epoch_ended": run.has_ended_epoch,
        "validation_due": training.validation_due,
        "due_since": training.due_since(run.state),
        "schedulers": [
            {"kind": type(rate.scheduler).__name__, "state": rate.scheduler.state_dict(), "seen_at": rate.seen_at}
            for rate in training.schedulers
            if hasattr(rate.scheduler, "state_dict")
        ],
        "precision": run.precision.state_dict(),
        "callbacks": callbacks,
        "frozen": [name for name, p in run.task.named_parameters() if not p.requires_grad],
        "trackers": run.trackers.state_dict(),
        "metrics": {
            "values": dict(run.trainer.metrics),
            "updated": dict(run.updated),
            "last_values": training.last_values,
            "last_values_at": training.last_values_at,
            "validated_at": training.validated_at,
            "logged_at": training.logged_at,
        },
        "loss": {"num_none": training.loss.num_none, "reference": training.loss.reference},
        **({} if training.splitting is None else {"part_size": training.splitting.sizes.most}),
    }
    own = dict(tree)
    run.emit(Callback.on_save_state, tree)
    if changed := sorted(name for name in own if tree.get(name) is not own[name]):
        raise CheckpointError(
            f"on_save_state removed or replaced {changed} of the state. Add entries under other names, and leave these."
        )
    return tree


def state_of(callback: Callback) -> Any:
    """The state of a callback; what it raises says whose it is. Local."""
    try:
        return callback.state_dict()
    except Exception as error:
        error.add_note(f"raised by {type(callback).__name__}.state_dict")
        raise


def optimizers_tree(run: Run, training: Training) -> list[dict[str, Any]]:
    """The optimizers' states, with the names of the parameters in their groups. Collective."""
    names = {id(parameter): name for name, parameter in run.task.named_parameters()}
    return optimizer_trees(training.optimizers, names, partial(run.strategy.optimizer_state, run.model))


def process_tree(run: Run, training: Training) -> dict[str, Any]:
    """What is this process's own. Local."""
    agreement, share = run.agreement, run.strategy.data_share
    return {
        "share": {"peers": share.num_peers, "twins": share.num_twins},
        "random": random_tree(run.device),
        "data": training.position(run.state),
        "validation": training.validation_positions(),
        "log": log_tree(run.training_log, run.task),
        "seen": {} if run.training_log.exchange is None else run.training_log.exchange.state_dict(),
        "had_loss": agreement is not None and agreement.had_loss,
        "strategy": run.strategy.process_state(run.model, training.optimizers),
        "gradients": pending_gradients(run, training),
    }


def pending_gradients(run: Run, training: Training) -> dict[str, Tensor]:
    """The gradients that a task in manual mode has gathered for a step to come: of optimizers that did not step in the
    newest micro-batch. Local.
    """
    waiting = [gated.optimizer for gated in training.gated if gated.outcome is StepOutcome.ACCUMULATED]
    if training.is_automatic or not waiting:
        return {}
    wanted = {id(parameter) for optimizer in waiting for parameter in parameters_of(optimizer)}
    named = run.task.named_parameters()
    return {name: local_part(p.grad) for name, p in named if id(p) in wanted and p.grad is not None}


def restore_gradients(task: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Put back what `pending_gradients` gave. Local."""
    for name, parameter in task.named_parameters():
        if name in gradients:
            parameter.grad = part_like(parameter, gradients[name])


def restore_counters(run: Run, tree: Mapping[str, Any]) -> None:
    """Put the counters back. Local."""
    for name in COUNTERS:
        setattr(run.state, name, tree["progress"][name])
    run.state.seconds_before = tree["progress"]["seconds"]
    run.state.epoch_ended = tree["epoch_ended"]


def restore_training(run: Run, training: Training, tree: Mapping[str, Any]) -> None:
    """Put back what `common_tree` has of the training itself. Local."""
    training.validation_due = tree["validation_due"]
    metrics, loss = tree["metrics"], tree["loss"]
    run.trainer.metrics.update(metrics["values"])
    run.updated.update(metrics["updated"])
    training.last_values, training.last_values_at = dict(metrics["last_values"]), metrics["last_values_at"]
    training.validated_at = metrics["validated_at"]
    training.logged_at = metrics["logged_at"]
    training.loss.num_none, training.loss.reference = loss["num_none"], loss["reference"]
    if training.splitting is not None:
        training.splitting.sizes.most = tree.get("part_size")
    run.precision.load_state_dict(tree["precision"])
    saved, rates = tree["schedulers"], [rate for rate in training.schedulers if hasattr(rate.scheduler, "state_dict")]
    check_kinds("schedulers", saved, [rate.scheduler for rate in rates])
    for rate, each in zip(rates, saved, strict=True):
        rate.scheduler.load_state_dict(each["state"])
        rate.seen_at = each["seen_at"]


def read_common_tree(checkpoint: Checkpoint, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The tree that all processes share, read but for the states of callbacks that load from disk. Local."""
    tree: dict[str, Any] = checkpoint.stored_tree(COMMON)
    saved = tree.get("callbacks", {})
    unread = [key for key, each in state_keys(callbacks).items() if each.loads_from_disk and key in saved]
    later = {key: saved.pop(key) for key in unread}
    read_all(tree)
    saved |= later
    return tree


def restore_callbacks(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> list[str]:
    """Give the callbacks their states back. Local.

    Returns:
        What did not fit: states of callbacks that are missing now, callbacks that had no state.
    """
    keys = state_keys(callbacks)
    for key, each in keys.items():
        if key in states:
            try:
                each.load_state_dict(states[key])
            except Exception as error:
                error.add_note(f"raised by {type(each).__name__}.load_state_dict")
                raise
    missing = [key for key in states if key not in keys]
    new = [key for key, each in keys.items() if key not in states and each.state_dict()]
    texts = [f"the checkpoint holds the states of {missing}, which are not among the callbacks"] if missing else []
    return texts + ([f"the checkpoint holds no state of {new}, which begin anew"] if new else [])


def restore_frozen(task: nn.Module, frozen: Sequence[str]) -> None:
    """Let the parameters be trained that were trained, and no others. Local."""
    names = set(frozen)
    for name, parameter in task.named_parameters():
        wanted = name not in names
        if parameter.requires_grad != wanted:
            parameter.requires_grad_(wanted)


def restore_optimizers(run: Run, optimizers: Sequence[Optimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Give the optimizers their states back. Collective.

    A group that was added during the earlier leg is added again, by the names of its parameters.

    Raises:
        CheckpointError: other optimizers, or groups of other parameters.
    """
    check_kinds("optimizers", saved, optimizers)
    parameters = dict(run.task.named_parameters())
    for optimizer, each in zip(optimizers, saved, strict=True):
        check_groups(optimizer, each["groups"], parameters)
    for optimizer, each in zip(optimizers, saved, strict=True):
        add_missing_groups(optimizer, each["groups"], parameters)
        run.strategy.load_optimizer_state(run.model, optimizer, each["state"])
        if run.state.step:
            vars(optimizer)["_opt_called"] = True  # torch's schedules warn where no step of this process came first
