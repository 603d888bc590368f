"""Whether all processes bring the same structure, shapes and types to one operation.

Backends don't check: tensors of different sizes make them hang, mix up values, or end the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .environment import read_flag
from .errors import ShapeMismatchError
from .exchange import exchange, gather_bytes
from .nested import refusal

_SHOWN_LEAVES = 5

Leaves = Sequence[tuple[str, Any]]
"""Leaves with how each is reached, in the same order on each process; see `nested.flatten`."""


def is_debug_mode() -> bool:
    """Whether every collective compares shapes first: `LOOPWRIGHT_DEBUG_MODE`. Local."""
    return bool(read_flag("DEBUG_MODE"))


def is_alike_everywhere(description: Any, operation: str) -> bool:
    """Whether all processes describe something in the same way, told by digests. Collective.

    Args:
        description: anything whose `repr` says it all.
        operation: what reports call it.
    """
    digest = hashlib.blake2b(repr(description).encode(), digest_size=16).digest()
    return len(set(gather_bytes(digest, operation))) == 1


def check_tensors(leaves: Leaves, operation: str) -> None:
    """Refuse leaves that no collective can send. Local.

    Raises:
        TypeError: one is no dense tensor; names its type and position.
    """
    for name, leaf in leaves:
        if not _is_dense(leaf):
            raise TypeError(refusal(operation, name, leaf))


def check_alike(leaves: Leaves, operation: str, *, counts_scalars_as_one: bool = False) -> None:
    """Refuse leaves that differ between processes, before they are sent. Collective: one small one if all is well.

    Args:
        leaves: this process's.
        operation: what the message calls it.
        counts_scalars_as_one: a tensor without dimensions counts as one of shape (1,).
    Raises:
        TypeError: on every process: a leaf of one of them is no dense tensor; names its type and position.
        DistributedError: on every process: others are in another operation.
        ShapeMismatchError: on every process: structure, shape, dtype or kind of device differ; shows all processes.
    """
    descriptions = {name: _describe(leaf, counts_scalars_as_one) for name, leaf in leaves}
    is_alike = is_alike_everywhere(descriptions, operation)
    refusals = [refusal(operation, name, leaf) for name, leaf in leaves if not _is_dense(leaf)]
    if is_alike and refusals:
        raise TypeError(refusals[0])
    if is_alike:
        return
    everyone = exchange([descriptions, refusals[:1]], operation)
    refused = [f"process {index}: {texts[0]}" for index, (_, texts) in enumerate(everyone) if texts]
    if refused:
        raise TypeError(f"{operation} can't send what was given. {' '.join(refused)}")
    raise ShapeMismatchError(_mismatch(operation, [found for found, _ in everyone]))


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


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
