"""The state of an `Accelerator` as trees: what a checkpoint keeps beside the weights, and how it comes back.

Three trees: `accelerator`, what all processes share; `optimizers`; and one `process-...` for each process, with what is
its own: random states, the positions of its loaders, the gradients of a window that is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.names import plain_names
from ..checkpoint.sharded import local_part, part_like
from ..data.geometry import dealing_of
from ..data.position import checked_position
from ..data.stateful import is_stateful
from ..distributed.errors import CheckpointError
from ..distributed.random import random_tree, restore_random_tree
from .optimizer_state import add_missing_groups, check_groups, check_kinds, optimizer_trees
from .preparation import Preparation

VERSION = 1
"""Of the trees' content."""
COMMON = "accelerator"
OPTIMIZERS = "optimizers"


@dataclass(kw_only=True)
class SavedState:
    """What a checkpoint holds of an `Accelerator`, beside the weights."""

    common: Mapping[str, Any]
    """The tree that all processes share."""
    optimizers: Sequence[Mapping[str, Any]]
    own: Mapping[str, Any] | None
    """The tree of this process; None where the earlier leg had another number of processes."""
    first: Mapping[str, Any]
    """The tree of process 0."""
    world_size: int
    """How many processes saved it."""
    inexact: list[str] = field(default_factory=list)
    """Why going on can't be equal bit for bit to never having stopped."""


def model_name(index: int) -> str:
    """The name of a model's weights: `model`, `model_1`, ... Local."""
    return f"model_{index}" if index else "model"


def common_tree(preparation: Preparation, custom: Sequence[Any]) -> dict[str, Any]:
    """What all processes share. Local."""
    strategy = preparation.strategy
    return {
        "version": VERSION,
        "schedulers": [
            {"kind": type(each.scheduler).__name__, "state": each.state_dict(), "calls": each.accumulated_calls}
            for each in preparation.schedulers
        ],
        "precision": strategy.precision.state_dict(),
        "custom": [{"kind": type(each).__name__, "state": each.state_dict()} for each in custom],
        "micro_steps": strategy.gradient_state.micro_steps,
        "window_size": strategy.gradient_state.window_size,
    }


def optimizers_tree(preparation: Preparation) -> list[dict[str, Any]]:
    """The optimizers' states, with the names of the parameters in their groups. Collective."""
    names = {id(parameter): name for name, parameter in named_parameters(preparation).items()}
    trees = []
    for each in preparation.optimizers:
        state_of = partial(preparation.strategy.optimizer_state, _model_of(preparation, each.optimizer))
        trees += optimizer_trees([each.optimizer], names, state_of)
    return trees


def process_tree(preparation: Preparation) -> dict[str, Any]:
    """What is this process's own. Local."""
    strategy = preparation.strategy
    return {
        "random": random_tree(strategy.device),
        "loaders": [loader.current_position() for loader in preparation.loaders],
        "gradients": _gradients(preparation) if is_window_open(preparation) else None,
        "strategy": [strategy.process_state(model, _optimizers_of(preparation, model)) for model in preparation.models],
    }


def is_window_open(preparation: Preparation) -> bool:
    """Whether gradients were accumulated on which no optimizer has stepped. Local."""
    state = preparation.strategy.gradient_state
    return state.micro_steps % state.num_steps != 0


def named_parameters(preparation: Preparation) -> dict[str, nn.Parameter]:
    """The parameters of all models by plain names behind that of the model: `model.weight`, `model_1.weight`."""
    found: dict[str, nn.Parameter] = {}
    for index, model in enumerate(preparation.models):
        inner = preparation.strategy.unwrap(model)
        parameters = dict(inner.named_parameters())
        names = plain_names(inner, parameters)
        found |= {f"{model_name(index)}.{names[name]}": parameter for name, parameter in parameters.items()}
    return found


def check_saved(saved: SavedState, preparation: Preparation, custom: Sequence[Any]) -> None:
    """Refuse a state that does not fit what was prepared, before anything is changed. Local.

    States of more optimizers or schedulers than were prepared are left out, and it is noted: an evaluation needs none.

    Raises:
        CheckpointError: other optimizers, schedulers or registered objects, or groups of other parameters.
        ConfigError: a loader of another kind than before.
    """
    objects = saved.common["custom"]
    if len(objects) != len(custom):
        raise CheckpointError(
            f"the checkpoint has the states of {len(objects)} objects {[each['kind'] for each in objects]}, and "
            f"{len(custom)} are registered here {[type(each).__name__ for each in custom]}. Call "
            "register_for_checkpointing with the same objects, in the same order, before load_state."
        )
    check_kinds("registered objects", _known(objects, custom), custom)
    schedulers = [each.scheduler for each in preparation.schedulers]
    states = _as_many(saved, "schedulers", saved.common["schedulers"], schedulers)
    check_kinds("schedulers", _known(states, schedulers), schedulers)
    optimizers = [each.optimizer for each in preparation.optimizers]
    states = _as_many(saved, "optimizers", saved.optimizers, optimizers)
    check_kinds("optimizers", _known(states, optimizers), optimizers)
    parameters = named_parameters(preparation)
    for optimizer, each in zip(optimizers, states, strict=True):
        if each["groups"] is None:
            _check_sizes(optimizer, each["state"])
        else:
            check_groups(optimizer, each["groups"], parameters)
    for loader, position in zip(preparation.loaders, _positions(saved), strict=False):
        checked_position(position, dealing_of(loader))


def restore(saved: SavedState, preparation: Preparation, custom: Sequence[Any]) -> None:
    """Put everything back but the weights; random states last. Collective.

    Raises:
        DataError: a stateful loader can't go on where it was.
    """
    strategy = preparation.strategy
    _restore_optimizers(saved, preparation)
    for scheduler, each in zip(preparation.schedulers, saved.common["schedulers"], strict=False):
        scheduler.load_state_dict(each["state"])
        scheduler.accumulated_calls = each["calls"]
    _restore_loaders(saved, preparation)
    if saved.common["precision"]:
        strategy.precision.load_state_dict(saved.common["precision"])
    strategy.gradient_state.micro_steps = saved.common["micro_steps"]
    strategy.gradient_state.window_size = saved.common["window_size"] or strategy.gradient_state.num_steps
    for item, each in zip(custom, saved.common["custom"], strict=True):
        item.load_state_dict(each["state"])
    own = saved.own
    for model, each in zip(preparation.models, () if own is None else own["strategy"], strict=False):
        strategy.load_process_state(model, _optimizers_of(preparation, model), each)
    _restore_gradients(saved, preparation)
    if own is None:
        saved.inexact.append("random states are not restored, as another number of processes saved them")
        return
    if own["random"] is not None and (missing := restore_random_tree(own["random"], strategy.device)):
        saved.inexact.append(f"the checkpoint has no random state of {missing}, which go on as they are")


def _restore_optimizers(saved: SavedState, preparation: Preparation) -> None:
    parameters = named_parameters(preparation)
    for gated, each in zip(preparation.optimizers, saved.optimizers, strict=False):
        optimizer = gated.optimizer
        if each["groups"] is not None:
            add_missing_groups(optimizer, each["groups"], parameters)
        preparation.strategy.load_optimizer_state(_model_of(preparation, optimizer), optimizer, each["state"])


def _restore_loaders(saved: SavedState, preparation: Preparation) -> None:
    positions = _positions(saved)
    if (saved.own or saved.first)["loaders"] is not None and len(positions) != len(preparation.loaders):
        saved.inexact.append(
            f"the checkpoint has the positions of {len(positions)} loaders, and {len(preparation.loaders)} are prepared"
        )
    for loader, position in zip(preparation.loaders, positions, strict=False):
        # Of a plain loader the script skips what is done, as under Accelerate; a stateful one goes on by itself.
        saved.inexact += loader.resume(position, whole=not is_stateful(loader.loader))


def _positions(saved: SavedState) -> Sequence[Any]:
    """Those of this process's loaders; none where they were not saved."""
    return (saved.own or saved.first)["loaders"] or []


def _restore_gradients(saved: SavedState, preparation: Preparation) -> None:
    """Put the gradients of an open window back; without one there are none."""
    gradients = None if saved.own is None else saved.own["gradients"]
    state = preparation.strategy.gradient_state
    if gradients is None and saved.first["gradients"] is not None:
        saved.inexact.append("the open window begins anew, as another number of processes accumulated its gradients")
        state.micro_steps -= state.micro_steps % state.num_steps
    for name, parameter in named_parameters(preparation).items():
        gradient = (gradients or {}).get(name)
        parameter.grad = None if gradient is None else part_like(parameter, gradient)


def _gradients(preparation: Preparation) -> dict[str, Tensor]:
    parameters = named_parameters(preparation).items()
    return {name: local_part(parameter.grad) for name, parameter in parameters if parameter.grad is not None}


def _model_of(preparation: Preparation, optimizer: Optimizer) -> nn.Module:
    """The prepared model whose parameters an optimizer has; the first where it has others."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = (model for model in preparation.models if any(id(p) in own for p in model.parameters()))
    return next(found, preparation.models[0] if preparation.models else nn.Module())


def _optimizers_of(preparation: Preparation, model: nn.Module) -> list[Optimizer]:
    optimizers = [gated.optimizer for gated in preparation.optimizers]
    return [each for each in optimizers if _model_of(preparation, each) is model]


def _as_many(
    saved: SavedState, what: str, states: Sequence[Mapping[str, Any]], own: Sequence[object]
) -> Sequence[Mapping[str, Any]]:
    """The states of as many as there are here."""
    if len(states) > len(own):
        saved.inexact.append(f"the checkpoint has the states of {len(states)} {what}, and {len(own)} are prepared")
    return states[: len(own)]


def _known(saved: Sequence[Mapping[str, Any]], own: Sequence[object]) -> list[Mapping[str, Any]]:
    """The saved ones with their kinds; where these were not saved, they are taken to be those here."""
    kinds = [type(each).__name__ for each in own]
    return [
        {"kind": kinds[index] if each["kind"] is None and index < len(kinds) else each["kind"]}
        for index, each in enumerate(saved)
    ]


def _check_sizes(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    saved = [len(group["params"]) for group in state["param_groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if saved != now:
        raise CheckpointError(
            f"{type(optimizer).__name__}: its groups had {saved} parameters and have {now}. Build them as they were."
        )
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state["state"].items():
        shapes = {key: value.shape for key, value in values.items() if isinstance(value, torch.Tensor) and value.dim()}
        wrong = [key for key, shape in shapes.items() if key.startswith("exp_avg") and shape != own[number].shape]
        if wrong:
            raise CheckpointError(
                f"{type(optimizer).__name__}: the state {wrong[0]!r} of parameter {number} has the shape "
                f"{list(shapes[wrong[0]])}, and the parameter {list(own[number].shape)}. Build the model as it was."
            )
