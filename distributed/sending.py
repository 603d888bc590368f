"""How tensors travel between processes: small ones of CPUs with their description, others after it, as bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .comparing import ENCLOSED_BYTES, Leaves, check_alike
from .group import world_size
from .slots import gather_into

_SMALL_BYTES = 64 * 1024
"""Up to this many bytes of one process, tensors are sent together, and sums are made by each process itself."""
# What gloo can add up; tensors of other types are gathered and added here.
_GLOO_SUMS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def meet(
    leaves: Leaves, operation: str, *, counts_scalars_as_one: bool = False, encloses: bool = True
) -> list[bytes] | None:
    """Check that all processes bring alike tensors; small ones on CPUs arrive with that. Collective.

    Args:
        leaves: this process's.
        operation: what errors call it; one that other processes are in as well.
        counts_scalars_as_one: a tensor without dimensions counts as one of shape (1,).
        encloses: whether this process's values count.
    Returns:
        What each process enclosed, the bytes of one tensor after the other; None: the tensors are still to be sent.
    """
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    is_small = all(tensor.device.type == "cpu" for tensor in tensors) and _size(tensors) <= ENCLOSED_BYTES

    def enclose() -> bytes:
        return b"".join(as_bytes(tensor).numpy().tobytes() for tensor in tensors) if is_small and encloses else b""

    parts = check_alike(leaves, operation, counts_scalars_as_one=counts_scalars_as_one, enclose=enclose)
    return parts if is_small else None


def rows_of(parts: list[bytes], tensors: list[Tensor]) -> list[Tensor]:
    """For each tensor a row of bytes from each part. Local."""
    sizes = [_size([tensor]) for tensor in tensors]
    if not sum(sizes):  # torch makes no tensor of an empty buffer
        return [torch.empty(len(parts), 0, dtype=torch.uint8) for _ in tensors]
    received = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    return list(torch.split(received.view(len(parts), sum(sizes)), sizes, dim=1))


def _size(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def gather_rows(tensors: list[Tensor]) -> list[Tensor]:
    """For each tensor a row of bytes from each process. Collective. Small ones are sent together."""
    parts = [as_bytes(tensor) for tensor in tensors]
    sizes = [part.numel() for part in parts]
    is_small = sum(sizes) <= _SMALL_BYTES and len({part.device for part in parts}) == 1
    if len(parts) > 1 and is_small:
        return list(torch.split(_gather_bytes(torch.cat(parts)), sizes, dim=1))
    return [_gather_bytes(part) for part in parts]


def _gather_bytes(part: Tensor) -> Tensor:
    rows = part.new_empty(world_size(), part.numel())
    if part.numel():
        gather_into(rows.view(-1), part)
    return rows


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in its own memory where it is contiguous. Local.

    Every backend sends bytes, whatever the tensor's type.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.device.type == "xla":  # which has no bytes to look at, and is sent over the host
        plain = plain.cpu()
    # Not `view(-1)`: torch calls one element contiguous whatever its stride, and keeps that.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def joined(rows: Tensor, like: Tensor) -> Tensor:
    """The tensors of all rows, joined along dimension 0. Local."""
    shape = like.shape or torch.Size([1])
    return _in_type(rows, like).view(world_size() * shape[0], *shape[1:]).to(like.device)


def _in_type(rows: Tensor, like: Tensor) -> Tensor:
    """The elements of all processes, one after another."""
    # A part of a larger row may begin where its type can't.
    is_whole = rows.is_contiguous() and rows.storage_offset() == 0
    memory = rows if is_whole else rows.clone(memory_format=torch.contiguous_format)
    return memory.view(-1).view(like.dtype)


def in_own_memory(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is not contiguous, that can be filled as bytes. Local."""
    is_own_memory = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor if is_own_memory else tensor.detach().resolve_conj().resolve_neg().contiguous()


def send(target: Tensor, from_process: int) -> None:
    """Fill a contiguous tensor with one process's. Collective."""
    if not target.numel():
        return
    memory = as_bytes(target)
    dist.broadcast(memory, from_process)
    if memory.device != target.device:
        target.detach().copy_(memory.view(target.dtype).view(target.shape))


def sum_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor added up over processes. Collective."""
    own = [tensor for tensor in tensors if _is_own_sum(tensor)]
    rows = iter(gather_rows(own))
    return [sum_row(next(rows), tensor) if _is_own_sum(tensor) else _all_reduced(tensor) for tensor in tensors]


def _is_own_sum(tensor: Tensor) -> bool:
    """Whether each process adds up by itself what all have."""
    return tensor.device.type == "cpu" and (tensor.dtype not in _GLOO_SUMS or _size([tensor]) <= _SMALL_BYTES)


def sum_row(rows: Tensor, like: Tensor) -> Tensor:
    """The tensors of all rows, added up; of booleans, whether any is true. Local.

    Raises:
        TypeError: torch can't add up this type.
    """
    memory = _in_type(rows, like).view(world_size(), *like.shape)
    try:
        return memory.any(0) if like.dtype is torch.bool else memory.sum(0, dtype=like.dtype)
    except NotImplementedError as error:
        raise TypeError(
            f"reduce got a tensor of {like.dtype}, which torch can't add up. Convert it, for example by .float()."
        ) from error


def _all_reduced(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return _all_reduced(tensor.to(torch.uint8)).bool()
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    total = total.cpu() if total.device.type == "xla" else total
    dist.all_reduce(total)
    return total.to(tensor.device)
