"""Optimizers' states with the names of their parameters, so that no state goes to another parameter than its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..distributed.errors import CheckpointError

_REMEDY = "Configure the same ones in the same order, or begin anew from the weights alone."


def optimizer_trees(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], state_of: Callable[[Optimizer], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What a checkpoint keeps of optimizers.

    Args:
        optimizers: torch's own, in order.
        names: of the parameters, by `id`.
        state_of: gives an optimizer's full state; where it is collective, so is this.
    """
    return [
        {"kind": type(each).__name__, "groups": group_names(each, names), "state": state_of(each)}
        for each in optimizers
    ]


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """For each group the names of its parameters; those of no known model have their place and shape. Local."""
    return [
        [names.get(id(p), f"parameter {index} of {list(p.shape)}") for index, p in enumerate(group["params"])]
        for group in optimizer.param_groups
    ]


def check_kinds(what: str, saved: Sequence[Mapping[str, Any]], own: Sequence[object]) -> None:
    """Refuse other optimizers or schedulers than those that were saved. Local.

    Raises:
        CheckpointError: their classes, or their number, differ; shows both.
    """
    before, now = [each["kind"] for each in saved], [type(each).__name__ for each in own]
    if before != now:
        raise CheckpointError(f"the checkpoint has the {what} {before}, and here are {now}. {_REMEDY}")


def check_groups(optimizer: Optimizer, groups: Sequence[Sequence[str]], parameters: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer whose groups hold other parameters than those that were saved. Local; changes nothing.

    Groups that `add_missing_groups` can add may be missing.

    Raises:
        CheckpointError: names the first group, and the parameters.
    """
    now = group_names(optimizer, {id(parameter): name for name, parameter in parameters.items()})
    added = groups[len(now) :] if _can_be_added(groups[len(now) :], now, parameters) else []
    saved = [list(group) for group in groups]
    if [*now, *map(list, added)] != saved:
        raise CheckpointError(f"{type(optimizer).__name__}: {_difference(saved, now)}")


def add_missing_groups(optimizer: Optimizer, groups: Sequence[Sequence[str]], parameters: Mapping[str, Tensor]) -> None:
    """Add the groups again that were added during the earlier leg, by the names of their parameters. Local."""
    for group in groups[len(optimizer.param_groups) :]:
        optimizer.add_param_group({"params": [parameters[name] for name in group]})


def _can_be_added(
    groups: Sequence[Sequence[str]], now: Sequence[Sequence[str]], parameters: Mapping[str, Tensor]
) -> bool:
    taken = {name for group in now for name in group}
    return all(name in parameters and name not in taken for group in groups for name in group)


def _difference(saved: list[list[str]], now: list[list[str]]) -> str:
    if len(saved) != len(now):
        return f"the checkpoint has {len(saved)} parameter groups, and here are {len(now)}. Build them as they were."
    group = next(i for i, (a, b) in enumerate(zip(saved, now, strict=True)) if a != b)
    gone = [name for name in saved[group] if name not in now[group]][:10]
    new = [name for name in now[group] if name not in saved[group]][:10]
    found = f"only in the checkpoint {gone}, only here {new}" if gone or new else "in another order"
    return f"group {group} holds other parameters: {found}. Build the groups as they were."
