"""What processes do with each other's data, with the names of Accelerate's `utils.operations`.

In one process each gives what it would give in a world of one. All check their input there as well, so that what can't
be sent is an error before the script is started on many devices.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from . import watch, xla
from .comparing import check_tensors
from .errors import ConfigError, DistributedError, ShapeMismatchError, suggest
from .exchange import broadcast_encoded, gather_bytes, gather_encoded
from .group import rank, world_size
from .nested import flatten, map_leaves
from .sending import as_bytes, gather_rows, in_own_memory, joined, meet, rows_of, send, sum_row, sum_tensors

REDUCTIONS = ("mean", "sum", "none")


def gather(tensor: Any) -> Any:
    """Every process's tensors, joined along dimension 0 on every process. Collective.

    Args:
        tensor: nested tensors, each of shape (items, ...); the shapes are equal on all processes, see
            `pad_across_processes`. One without dimensions counts as one item.
    Returns:
        The same nesting, process 0's items first, outside the graph of autograd; in one process the tensors themselves.
    Raises:
        TypeError: on every process: a leaf is no tensor on one of them; see `gather_object`.
        ShapeMismatchError: on every process: structure, shapes or types differ; shows all processes.
    """
    leaves, rebuild = flatten(tensor)
    if world_size() == 1:
        check_tensors(leaves, "gather")
        return tensor
    tensors = [leaf for _, leaf in leaves]
    parts = meet(leaves, "gather", counts_scalars_as_one=True)
    if parts is None:
        with watch.collective("gather"):
            rows = gather_rows(tensors)
    else:
        rows = rows_of(parts, tensors)
    return rebuild([joined(row, tensor) for row, tensor in zip(rows, tensors, strict=True)])


def gather_object(object: Any) -> Any:
    """Every process's list of picklable objects, joined on every process. Collective. In one process: the same.

    Args:
        object: a list, or something else that can be iterated: the joined list has its items (of a mapping the keys).
    Raises:
        TypeError: it can't be iterated; or, on every process, one of them has an item that can't be pickled.
    """
    if world_size() == 1:
        if not isinstance(object, Iterable):
            raise TypeError(_no_items(object))
        return object

    def encode() -> bytes:
        if not isinstance(object, Iterable):
            raise TypeError(_no_items(object))
        return pickle.dumps(list(object))

    return list(chain.from_iterable(pickle.loads(part) for part in gather_encoded(encode, "gather_object")))


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """One process's tensors on every process. Collective.

    Args:
        tensor: nested tensors, of the same shapes on all processes. Contiguous ones are filled in place.
        from_process: the index of the process whose values count, the same on all processes.
    Returns:
        The same nesting: the tensors themselves, or filled copies of those that are not contiguous.
    Raises:
        TypeError: on every process: a leaf is no tensor on one of them; see `broadcast_object_list`.
        ConfigError: there is no such process.
        DistributedError: on every process: they name different ones.
        ShapeMismatchError: on every process: structure, shapes or types differ; shows all processes.
    """
    _check_source("broadcast", from_process)
    leaves, rebuild = flatten(tensor)
    if world_size() == 1:
        check_tensors(leaves, "broadcast")
        return tensor
    operation = f"broadcast(from_process={from_process})"
    parts = meet(leaves, operation, encloses=rank() == from_process)
    targets = [in_own_memory(leaf) for _, leaf in leaves]
    if parts is None:
        with watch.collective(operation):
            for target in targets:
                send(target, from_process)
    elif rank() != from_process:
        for target, row in zip(targets, rows_of([parts[from_process]], targets), strict=True):
            as_bytes(target).copy_(row[0])
    return rebuild(targets)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """One process's picklable objects on every process: the list is changed in place, and returned. Collective.

    Raises:
        TypeError: it is no list, so that it can't be changed in place; or, on every process, an item can't be pickled.
        ConfigError: there is no such process.
        DistributedError: on every process: they name different ones.
    """
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list got a {type(object_list).__name__}. Expected a list, which it fills.")
    _check_source("broadcast_object_list", from_process)
    if world_size() > 1:
        operation = f"broadcast_object_list(from_process={from_process})"
        payload = broadcast_encoded(lambda: pickle.dumps(object_list), from_process, operation)
        if rank() != from_process:
            object_list[:] = pickle.loads(payload)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Tensors added up over processes, or averaged, on every process. Collective.

    Args:
        tensor: nested tensors, of the same shapes on all processes. They are not changed.
        reduction: `"sum"`, `"mean"`, or `"none"` for this process's own.
        scale: accepted as Accelerate has it; only XLA multiplies by it.
    Returns:
        The same nesting, of new tensors of the same types; the sum of booleans says whether any is true.
    Raises:
        ConfigError: the reduction is unknown.
        TypeError: on every process: a leaf is no tensor on one of them, or of a type that torch can't add up.
        DistributedError: on every process: the mean of integers over several processes, or different reductions.
        ShapeMismatchError: on every process: structure, shapes or types differ; shows all processes.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduce(reduction={reduction!r}) is unknown. {suggest(reduction, REDUCTIONS)}")
    leaves, rebuild = flatten(tensor)
    if world_size() == 1 or reduction == "none":
        check_tensors(leaves, "reduce")
        return rebuild([leaf.clone() for _, leaf in leaves])
    operation = f"reduce(reduction={reduction!r})"
    parts = meet(leaves, operation)
    for name, leaf in leaves:
        if reduction == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
            raise DistributedError(
                f"reduce(reduction='mean') got a tensor of {leaf.dtype}{name and f' at {name}'}, which holds no "
                "fractions. Convert it by .float(), or use reduction='sum'."
            )
    tensors = [leaf for _, leaf in leaves]
    if parts is None:
        with watch.collective(operation):
            sums = sum_tensors(tensors)
    else:
        sums = [sum_row(row, tensor) for row, tensor in zip(rows_of(parts, tensors), tensors, strict=True)]
    return rebuild([each / world_size() if reduction == "mean" else each for each in sums])


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Tensors filled up to the largest size that a dimension has on any process. Collective.

    Args:
        tensor: nested tensors; each is padded on its own. One without that dimension stays as it is.
        dim: the dimension.
        pad_index: the value to fill with.
        pad_first: fill at the beginning.
    Raises:
        ConfigError: `dim` is no integer.
        TypeError: on every process: a leaf is no tensor on one of them.
        ShapeMismatchError: on every process: the structure differs, or numbers of dimensions do; shows all processes.
    """
    if not isinstance(dim, int):
        raise ConfigError(f"pad_across_processes(dim={dim!r:.80}). Expected an integer.")
    leaves, rebuild = flatten(tensor)

    def encode() -> bytes:
        check_tensors(leaves, "pad_across_processes")
        return pickle.dumps({name: list(leaf.shape) for name, leaf in leaves})

    everyone = [pickle.loads(part) for part in gather_encoded(encode, "pad_across_processes")]
    if world_size() == 1:
        return tensor
    if len({tuple((name, len(shape)) for name, shape in shapes.items()) for shapes in everyone}) > 1:
        lines = "\n".join(f"- Process {index}: {shapes.get('', shapes)}" for index, shapes in enumerate(everyone))
        raise ShapeMismatchError(
            "pad_across_processes needs tensors of the same structure and numbers of dimensions on all processes.\n"
            f"Operation: pad_across_processes\nShapes:\n{lines}"
        )
    padded = []
    for name, leaf in leaves:
        has_dimension = -leaf.ndim <= dim < leaf.ndim
        largest = max(shapes[name][dim] for shapes in everyone) if has_dimension else 0
        padded.append(_padded(leaf, dim, largest, pad_index, pad_first) if has_dimension else leaf)
    return rebuild(padded)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Tensors filled up with zeros, so that a batch can be cut into equal parts for all processes. Local.

    Args:
        tensor: nested tensors that have `batch_size` items in the dimension; others stay as they are.
        batch_size: the items of the batch, at least 1.
        num_processes: into how many parts it will be cut.
        dim: the dimension.
    Raises:
        ConfigError: a number is below 1.
        TypeError: a leaf is no tensor.
    """
    if batch_size < 1 or num_processes < 1:
        raise ConfigError(
            f"pad_input_tensors(batch_size={batch_size}, num_processes={num_processes}). Expected integers >= 1."
        )
    size = math.ceil(batch_size / num_processes) * num_processes

    def pad(name: str, leaf: Any) -> Tensor:
        check_tensors([(name, leaf)], "pad_input_tensors")
        tensor: Tensor = leaf
        is_batch = -tensor.ndim <= dim < tensor.ndim and tensor.shape[dim] == batch_size
        return _padded(tensor, dim, size, 0, False) if is_batch else tensor

    return map_leaves(tensor, pad)


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """A tensor that one process has, on the devices of all of them. Collective.

    Args:
        tensor: the tensor on the process that has it, None on the others.
    Raises:
        TypeError: on every process: what one of them has is neither a tensor nor None.
        DistributedError: on every process: none has a tensor, or several have.
    """

    def encode() -> bytes:
        if tensor is None:
            return pickle.dumps(None)
        check_tensors([("", tensor)], "copy_tensor_to_devices")
        return pickle.dumps((tensor.shape, tensor.dtype, tensor.device.type))

    everyone = [pickle.loads(part) for part in gather_encoded(encode, "copy_tensor_to_devices")]
    owners = [index for index, found in enumerate(everyone) if found is not None]
    if len(owners) != 1:
        raise DistributedError(
            f"copy_tensor_to_devices got a tensor on the processes {owners} of {len(everyone)}. Give it on one of them,"
            " and None on the others."
        )
    shape, dtype, device = everyone[owners[0]]
    if world_size() == 1:
        assert tensor is not None
        return tensor
    target = torch.empty(shape, dtype=dtype, device=device) if tensor is None else in_own_memory(tensor)
    with watch.collective("copy_tensor_to_devices"):
        send(target, owners[0])
    return target


def wait_for_everyone() -> None:
    """Return when every process has arrived here. Collective.

    Raises:
        DistributedError: others are in another operation, such as `gather`; shows which.
    """
    if xla.is_started():
        xla.sync(wait=True)  # what was recorded so far has run then
    gather_bytes(b"", "wait_for_everyone")


def _padded(tensor: Tensor, dim: int, size: int, value: int, is_first: bool) -> Tensor:
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_full(shape, value)
    return torch.cat([filling, tensor] if is_first else [tensor, filling], dim=dim)


def _check_source(operation: str, from_process: int) -> None:
    count = world_size()
    if not 0 <= from_process < count:
        raise ConfigError(
            f"{operation}(from_process={from_process}): there are {count} processes. Expected an index from 0 to "
            f"{count - 1}."
        )


def _no_items(object: Any) -> str:
    return f"gather_object got a {type(object).__name__} ({object!r:.80}). Expected a list, whose items are joined."
