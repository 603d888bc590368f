"""What processes do with each other's data, with the names of Accelerate's `utils.operations`.

In one process each gives what it would give in a world of one. All check their input there as well, so that what can't
be sent is an error before the script is started on many devices.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import ConfigError, suggest
from .nested import recursively_apply

REDUCTIONS = ("mean", "sum", "none")


def gather(tensor: Any) -> Any:
    """Every process's tensors, joined along dimension 0 on every process. Collective.

    Args:
        tensor: nested tensors, each of shape (items, ...); the shapes are equal on all processes, see
            `pad_across_processes`.
    Returns:
        The same nesting; in one process the tensors themselves.
    Raises:
        TypeError: a leaf is no tensor; see `gather_object`.
    """
    return recursively_apply(_same, tensor, error_on_other_type=True, operation="gather")


def gather_object(object: Any) -> Any:
    """Every process's list of picklable objects, joined on every process. Collective. In one process: the same."""
    return object


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """One process's tensors on every process. Collective.

    Args:
        tensor: nested tensors, of the same shapes on all processes.
        from_process: the index of the process whose values count.
    Raises:
        TypeError: a leaf is no tensor; see `broadcast_object_list`.
    """
    return recursively_apply(_same, tensor, error_on_other_type=True, operation="broadcast")


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """One process's picklable objects on every process: the list is changed in place, and returned. Collective.

    Raises:
        TypeError: it is no list, so that it can't be changed in place.
    """
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list got a {type(object_list).__name__}. Expected a list, which it fills.")
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Tensors added up over processes, or averaged, on every process. Collective.

    Args:
        tensor: nested tensors, of the same shapes on all processes. They are not changed.
        reduction: `"sum"`, `"mean"`, or `"none"` for this process's own.
        scale: accepted as Accelerate has it; only XLA multiplies by it.
    Returns:
        The same nesting, of new tensors.
    Raises:
        ConfigError: the reduction is unknown.
        TypeError: a leaf is no tensor.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduce(reduction={reduction!r}) is unknown. {suggest(reduction, REDUCTIONS)}")
    return recursively_apply(Tensor.clone, tensor, error_on_other_type=True, operation="reduce")


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors filled up to the largest size that a dimension has on any process. Collective.

    Args:
        tensor: nested tensors; each is padded on its own. One without that dimension stays as it is.
        dim: the dimension.
        pad_index: the value to fill with.
        pad_first: fill at the beginning.
    Raises:
        TypeError: a leaf is no tensor.
    """
    return recursively_apply(_same, tensor, error_on_other_type=True, operation="pad_across_processes")


def wait_for_everyone() -> None:
    """Return when every process has arrived here. Collective."""


def _same(tensor: Tensor) -> Tensor:
    return tensor
