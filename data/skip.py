"""`skip_first_batches`: a loader that goes on in the middle of a pass."""

from __future__ import annotations

from typing import Any

from ..distributed.errors import ConfigError, DataError, check_integer
from .loader import PreparedLoader
from .sizes import loader_length
from .skipping import reads_by_index, without_first


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """A loader like this one whose passes begin `num_batches` later. The loader itself is not changed.

    Indices are skipped, so that nothing is loaded for what is left out; iterable datasets are read and thrown away. The
    new loader is in the same pass (`iteration`), and so has the same order.

    Args:
        dataloader: any iterable of batches, prepared or not.
        num_batches: how many batches to leave out.
    Returns:
        A `DataLoader` for one over a map-style dataset, else a `PreparedLoader`.
    Raises:
        ConfigError: the number is negative or no integer, or the loader can't be iterated.
        DataError: the loader has fewer batches.
    """
    check_integer("skip_first_batches(num_batches)", num_batches, 0)
    if not hasattr(dataloader, "__iter__"):
        raise ConfigError(f"skip_first_batches got a {type(dataloader).__name__}. Expected an iterable of batches.")
    length = loader_length(dataloader)
    if length is not None and num_batches > length:
        raise DataError(
            f"skip_first_batches({num_batches}): the loader has {length} batches in a pass. Count the batches of the "
            "current pass alone; whole passes are chosen by loader.set_epoch(epoch)."
        )
    if not isinstance(dataloader, PreparedLoader):
        if reads_by_index(dataloader):
            return without_first(dataloader, num_batches)
        return PreparedLoader(dataloader, skip_batches=num_batches)
    prepared = dataloader.attached_to(dataloader.active)
    prepared.origin = dataloader
    prepared.num_before = dataloader.num_before + num_batches
    prepared.skips_all = num_batches > 0 and num_batches == length
    prepared.end_of_dataloader = False
    # What is read and thrown away already is so before indices are counted.
    if prepared.skip_batches == 0 and reads_by_index(prepared.loader):
        prepared.loader = without_first(prepared.loader, num_batches)  # type: ignore[arg-type]
    else:
        prepared.skip_batches += num_batches
    return prepared
