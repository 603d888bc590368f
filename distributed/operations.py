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
import torch.distributed as dist
from torch import Tensor

from . import watch
from .comparing import check_alike, check_tensors, is_debug_mode
from .errors import ConfigError, DistributedError, ShapeMismatchError, suggest
from .exchange import broadcast_encoded, exchange, gather_bytes, gather_encoded
from .group import rank, world_size
from .nested import flatten, map_leaves
from .slots import gather_into

REDUCTIONS = ("mean", "sum", "none")

_SMALL_BYTES = 64 * 1024
"""Up to this many bytes of one process, tensors are sent together, and sums are made by each process itself."""
# What gloo can add up; tensors of other types are gathered and added here.
_GLOO_SUMS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


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
    check_alike(leaves, "gather", counts_scalars_as_one=True)
    with watch.collective("gather"):
        return rebuild(_gather_tensors([leaf for _, leaf in leaves]))


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
        from_process: the index of the process whose values count.
    Returns:
        The same nesting: the tensors themselves, or filled copies of those that are not contiguous.
    Raises:
        TypeError: a leaf is no tensor; see `broadcast_object_list`.
        ConfigError: there is no such process.
        ShapeMismatchError: in debug mode: structure, shapes or types differ; shows all processes.
    """
    _check_source("broadcast", from_process)
    leaves, rebuild = flatten(tensor)
    check_tensors(leaves, "broadcast")
    if world_size() == 1:
        return tensor
    if is_debug_mode():
        check_alike(leaves, "broadcast")
    with watch.collective("broadcast"):
        return rebuild([_broadcast_tensor(leaf, from_process) for _, leaf in leaves])


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """One process's picklable objects on every process: the list is changed in place, and returned. Collective.

    Raises:
        TypeError: it is no list, so that it can't be changed in place; or, on every process, an item can't be pickled.
        ConfigError: there is no such process.
    """
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list got a {type(object_list).__name__}. Expected a list, which it fills.")
    _check_source("broadcast_object_list", from_process)
    if world_size() > 1:
        payload = broadcast_encoded(lambda: pickle.dumps(object_list), from_process, "broadcast_object_list")
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
        DistributedError: the mean of integers over several processes.
        TypeError: a leaf is no tensor.
        ShapeMismatchError: in debug mode: structure, shapes or types differ; shows all processes.
    """
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduce(reduction={reduction!r}) is unknown. {suggest(reduction, REDUCTIONS)}")
    leaves, rebuild = flatten(tensor)
    check_tensors(leaves, "reduce")
    if world_size() == 1 or reduction == "none":
        return rebuild([leaf.clone() for _, leaf in leaves])
    if is_debug_mode():
        check_alike(leaves, "reduce")
    for name, leaf in leaves:
        if reduction == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
            raise DistributedError(
                f"reduce(reduction='mean') got a tensor of {leaf.dtype}{name and f' at {name}'}, which holds no "
                "fractions. Convert it by .float(), or use reduction='sum'."
            )
    with watch.collective("reduce"):
        sums = [_sum_tensor(leaf) for _, leaf in leaves]
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
        TypeError: a leaf is no tensor.
        ShapeMismatchError: on every process: the structure differs, or numbers of dimensions do; shows all processes.
    """
    if not isinstance(dim, int):
        raise ConfigError(f"pad_across_processes(dim={dim!r:.80}). Expected an integer.")
    leaves, rebuild = flatten(tensor)
    check_tensors(leaves, "pad_across_processes")
    if world_size() == 1:
        return tensor
    everyone = exchange({name: list(leaf.shape) for name, leaf in leaves}, "pad_across_processes")
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
        TypeError: it is neither a tensor nor None.
        DistributedError: on every process: none has a tensor, or several have.
    """
    if tensor is not None:
        check_tensors([("", tensor)], "copy_tensor_to_devices")
    own = None if tensor is None else [list(tensor.shape), str(tensor.dtype), tensor.device.type]
    everyone = exchange(own, "copy_tensor_to_devices")
    owners = [index for index, found in enumerate(everyone) if found is not None]
    if len(owners) != 1:
        raise DistributedError(
            f"copy_tensor_to_devices got a tensor on the processes {owners} of {len(everyone)}. Give it on one of them,"
            " and None on the others."
        )
    shape, dtype, device = everyone[owners[0]]
    if tensor is None:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
    if world_size() == 1:
        return tensor
    with watch.collective("copy_tensor_to_devices"):
        return _broadcast_tensor(tensor, owners[0])


def wait_for_everyone() -> None:
    """Return when every process has arrived here. Collective.

    Raises:
        DistributedError: others are in another operation, such as `gather`; shows which.
    """
    gather_bytes(b"", "wait_for_everyone")


def _gather_tensors(tensors: list[Tensor]) -> list[Tensor]:
    parts = [_as_bytes(tensor) for tensor in tensors]
    sizes = [part.numel() for part in parts]
    is_small = sum(sizes) <= _SMALL_BYTES and len({part.device for part in parts}) == 1
    if len(parts) > 1 and is_small:
        rows = list(torch.split(_gather_rows(torch.cat(parts)), sizes, dim=1))
    else:
        rows = [_gather_rows(part) for part in parts]
    return [_joined(row, tensor) for row, tensor in zip(rows, tensors, strict=True)]


def _gather_rows(part: Tensor) -> Tensor:
    """A row of bytes from each process."""
    rows = part.new_empty(world_size(), part.numel())
    if part.numel():
        gather_into(rows.view(-1), part)
    return rows


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in its own memory where it is contiguous. Every backend sends them, whatever the type."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _joined(rows: Tensor, like: Tensor) -> Tensor:
    # A part of a larger row may begin where its type can't.
    memory = (
        rows
        if rows.is_contiguous() and rows.storage_offset() == 0
        else rows.clone(memory_format=torch.contiguous_format)
    )
    shape = like.shape or torch.Size([1])
    return memory.view(-1).view(like.dtype).view(world_size() * shape[0], *shape[1:])


def _broadcast_tensor(tensor: Tensor, from_process: int) -> Tensor:
    is_own_memory = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    target = tensor if is_own_memory else tensor.detach().resolve_conj().resolve_neg().contiguous()
    if target.numel():
        dist.broadcast(_as_bytes(target), from_process)
    return target


def _sum_tensor(tensor: Tensor) -> Tensor:
    is_own_sum = tensor.device.type == "cpu" and (
        tensor.dtype not in _GLOO_SUMS or tensor.numel() * tensor.element_size() <= _SMALL_BYTES
    )
    if is_own_sum:
        rows = _gather_rows(_as_bytes(tensor))
        memory = rows.view(-1).view(tensor.dtype).view(world_size(), *tensor.shape)
        return memory.any(0) if tensor.dtype is torch.bool else memory.sum(0, dtype=tensor.dtype)
    if tensor.dtype is torch.bool:
        return _sum_tensor(tensor.to(torch.uint8)).bool()
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


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
