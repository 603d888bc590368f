"""Whether all processes bring the same structure, shapes and types to one operation.

Backends don't check: tensors of different sizes make them hang, mix up values, or end the process. What processes bring
is compared by digests. A digest fills a small part of a slot, so that small tensors travel in the same one, and need no
collective of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import ShapeMismatchError
from .exchange import exchange, gather_bytes
from .nested import refusal
from .slots import FIRST_CAPACITY

_SHOWN_LEAVES = 5
_DIGEST_BYTES = 16

ENCLOSED_BYTES = FIRST_CAPACITY - _DIGEST_BYTES
"""Up to this many bytes travel with a digest."""

Leaves = Sequence[tuple[str, Any]]
"""Leaves with how each is reached, in the same order on each process; see `nested.flatten`."""


def is_alike_everywhere(description: Any, operation: str) -> bool:
    """Whether all processes describe something in the same way, told by digests. Collective.

    Args:
        description: anything whose `repr` says it all.
        operation: what reports call it.
    """
    return len(set(gather_bytes(_digest(description), operation))) == 1


def check_tensors(leaves: Leaves, operation: str) -> None:
    """Refuse leaves that no collective can send. Local.

    Raises:
        TypeError: one is no dense tensor; names its type and position.
    """
    for name, leaf in leaves:
        if not _is_dense(leaf):
            raise TypeError(refusal(operation, name, leaf))


def check_alike(
    leaves: Leaves,
    operation: str,
    *,
    counts_scalars_as_one: bool = False,
    enclose: Callable[[], bytes] = bytes,
) -> list[bytes]:
    """Refuse leaves that differ between processes, before they are sent. Collective: one small one if all is well.

    Args:
        leaves: this process's.
        operation: what the message calls it.
        counts_scalars_as_one: a tensor without dimensions counts as one of shape (1,).
        enclose: gives up to `ENCLOSED_BYTES` that travel along; called where all leaves are dense tensors.
    Returns:
        What each process enclosed.
    Raises:
        TypeError: on every process: a leaf of one of them is no dense tensor; names its type and position.
        DistributedError: on every process: others are in another operation.
        ShapeMismatchError: on every process: structure, shape, dtype or kind of device differ; shows all processes.
    """
    descriptions = {name: _describe(leaf, counts_scalars_as_one) for name, leaf in leaves}
    refusals = [refusal(operation, name, leaf) for name, leaf in leaves if not _is_dense(leaf)]
    parts = gather_bytes(_digest(descriptions) + (b"" if refusals else enclose()), operation)
    if len({part[:_DIGEST_BYTES] for part in parts}) == 1:
        if refusals:
            raise TypeError(refusals[0])
        return [part[_DIGEST_BYTES:] for part in parts]
    everyone = exchange([descriptions, refusals[:1]], operation)
    refused = [f"process {index}: {texts[0]}" for index, (_, texts) in enumerate(everyone) if texts]
    if refused:
        raise TypeError(f"{operation} can't send what was given. {' '.join(refused)}")
    raise ShapeMismatchError(_mismatch(operation, [found for found, _ in everyone]))


def _digest(description: Any) -> bytes:
    return hashlib.blake2b(repr(description).encode(), digest_size=_DIGEST_BYTES).digest()


def _is_dense(leaf: Any) -> bool:
    is_strided = isinstance(leaf, Tensor) and leaf.layout is torch.strided
    return is_strided and not (leaf.is_quantized or leaf.is_nested)


def _describe(leaf: Any, counts_scalars_as_one: bool) -> str:
    if not _is_dense(leaf):
        return f"{type(leaf).__name__}, no dense tensor"
    shape = list(leaf.shape) or ([1] if counts_scalars_as_one else [])
    return f"{shape} {str(leaf.dtype).removeprefix('torch.')} on {leaf.device.type}"


def _mismatch(operation: str, everyone: Sequence[dict[str, str]]) -> str:
    names = sorted(set().union(*everyone))
    differing = [name for name in names if len({found.get(name) for found in everyone}) > 1]
    lines = []
    for index, found in enumerate(everyone):
        shown = [f"{name} {found.get(name, 'nothing')}".strip() for name in differing[:_SHOWN_LEAVES]]
        lines.append(f"- Process {index}: {'; '.join(shown)}")
    more = len(differing) - _SHOWN_LEAVES
    if more > 0:
        lines.append(f"({more} more tensors differ)")
    return (
        f"{operation} needs tensors of the same structure, shapes and types on all processes. Pad them by "
        "pad_across_processes, or send them by gather_object.\n"
        f"Operation: {operation}\nShapes:\n" + "\n".join(lines)
    )
