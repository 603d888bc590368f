"""Batches joined and cut: what a round of batches becomes where it is shared by samples. Local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from ..distributed.errors import DataError
from ..distributed.nested import concatenate, named_leaves, slice_tensors
from .sizes import AmbiguousBatchSizeError, find_batch_size

SliceFunction: TypeAlias = Callable[..., Any]
"""Called as `slice_fn(batch, slice, process_index=..., num_processes=...)`; returns that process's part."""


def parts_of(
    batches: Sequence[Any], first: Sequence[Any], num_parts: int, slice_fn: SliceFunction | None = None
) -> tuple[list[Any], int]:
    """Batches joined and cut into equal parts, filled up with samples of the pass's first batches.

    Args:
        batches: at least one, of one nesting.
        first: the batches that samples for filling up are taken from, from the beginning, again and again.
        num_parts: how many parts.
        slice_fn: cuts a part out of the joined batches; by default each tensor is cut in its first dimension.
    Returns:
        The parts, and the samples in them without those that fill up.
    Raises:
        DataError: they can't be joined or cut; says why.
    """
    whole = _joined(batches)
    size = _size_to_cut(whole)
    missing = -size % num_parts
    if missing:
        source = _joined(first)
        available = _size_to_cut(source)
        pieces = [
            slice_tensors(source, slice(0, min(available, missing - had))) for had in range(0, missing, available)
        ]
        whole = _joined([whole, *pieces])
    each = (size + missing) // num_parts
    slices = [slice(each * index, each * (index + 1)) for index in range(num_parts)]
    if slice_fn is None:
        return [slice_tensors(whole, part) for part in slices], size
    return [slice_fn(whole, s, process_index=index, num_processes=num_parts) for index, s in enumerate(slices)], size


def can_be_joined(batches: Sequence[Any]) -> bool:
    """Whether the batches consist of tensors alone that agree in nesting, type and all dimensions but the first."""
    layouts = [_layout(batch) for batch in batches]
    return layouts[0] is not None and all(layout == layouts[0] for layout in layouts)


def samples_in(batches: Sequence[Any]) -> int:
    """The samples in all batches; one that has no first dimension counts as one. -1 where a number can't be told."""
    try:
        sizes = [find_batch_size(batch) for batch in batches]
    except AmbiguousBatchSizeError:  # the number serves to trim what is gathered, and that is one's own choice
        return -1
    return sum(1 if size is None else size for size in sizes)


def _joined(batches: Sequence[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    try:
        return concatenate(batches)
    except (RuntimeError, TypeError, LookupError) as error:
        raise DataError(
            f"batches of one round can't be joined to be split among processes: {error}. Make them of the same nesting "
            "and shape (the first dimension apart), for example by padding; or use split_batches=True, so that each "
            "batch is split alone; or dispatch_batches=False, so that each process reads its own."
        ) from error


def _size_to_cut(batch: Any) -> int:
    for path, leaf in named_leaves(batch, "batch"):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            what = "tensor without a dimension" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise DataError(
                f"a batch can't be split among processes: {path} is a {what}. Expected tensors of shape (samples, "
                "...). Leave split_batches out, so that whole batches are dealt, or collate to tensors."
            )
    size = find_batch_size(batch)
    if not size:
        raise DataError(f"a batch can't be split among processes: it holds no sample ({batch!r:.80}).")
    return size


def _layout(batch: Any) -> list[tuple[str, Any, Any]] | None:
    """How its tensors are nested and shaped; None where it can't be cut."""
    layout: list[tuple[str, Any, Any]] = []
    sizes = set()
    for path, leaf in named_leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            return None
        sizes.add(leaf.shape[0])
        layout.append((path, leaf.shape[1:], leaf.dtype))
    return layout if len(sizes) == 1 and sizes != {0} else None
