"""Loaders that say where they are: torchdata's `StatefulDataLoader`, and any other with the same two methods."""

from __future__ import annotations

import copy
import warnings
from typing import Any, TypedDict

from torch.utils.data import DataLoader, IterableDataset

from ..distributed.imports import require
from .epochs import own_dataset


class LoaderState(TypedDict):
    """The position of a prepared loader in its passes."""

    version: int
    iteration: int
    """The pass that goes on, or begins."""
    loader: Any
    """What the wrapped loader says of the last batch that was given out."""


def has_state(thing: Any) -> bool:
    """Whether it has the two methods."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def is_stateful(loader: Any) -> bool:
    """Whether a loader can say where it is, and, if it reads from another one, whether that can."""
    inner = getattr(loader, "loader", None)
    return has_state(loader) and (inner is None or is_stateful(inner))


def goes_on_by_state(loader: Any) -> bool:
    """Whether a loader goes on in the middle of a pass by the state of something, and not by skipping what was given.

    A stateful loader of a map-style dataset that has no state of its own goes on by its indices, as any other does.
    """
    if not isinstance(loader, DataLoader):
        inner = getattr(loader, "loader", None)
        return has_state(loader) and (inner is None or goes_on_by_state(inner))
    if isinstance(loader.dataset, IterableDataset):
        return has_state(loader) or _is_read_here(loader)
    return has_state(loader) and has_state(own_dataset(loader.dataset))


def state_of(loader: Any) -> Any:
    """The state of a loader, or of the dataset that it reads in this process; None where neither has one. Local."""
    holder = _holder(loader)
    return None if holder is None else copy.deepcopy(holder.state_dict())  # it may change while the pass goes on


def tells_place(state: Any) -> bool:
    """Whether what a loader says of itself holds the place of its dataset, and not only a count of batches."""
    if not isinstance(state, dict):
        return state is not None
    return "_iterator_finished" not in state or _has_dataset_state(state)  # the first: it is not torchdata's


def _has_dataset_state(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    own = any(part.get(name) is not None for name in ("dataset_state", "dataset_iter_state"))
    return own or any(map(_has_dataset_state, part.values()))


def put_state(loader: Any, state: Any) -> None:
    """Let the next pass go on at a state that `state_of` gave. Local."""
    holder = _holder(loader)
    assert holder is not None
    holder.load_state_dict(copy.deepcopy(state))


def _holder(loader: Any) -> Any:
    if has_state(loader):
        return loader
    return loader.dataset if isinstance(loader, DataLoader) and _is_read_here(loader) else None


def _is_read_here(loader: DataLoader[Any]) -> bool:
    is_stream = isinstance(loader.dataset, IterableDataset)
    return is_stream and loader.num_workers == 0 and has_state(loader.dataset)


def as_stateful(loader: DataLoader[Any]) -> Any:
    """The loader as a `StatefulDataLoader` with the same options; one that is stateful stays as it is.

    Raises:
        MissingDependencyError: torchdata is not installed.
    """
    if is_stateful(loader):
        return loader
    with warnings.catch_warnings():
        # torchdata 0.11 calls a function that torch 2.13 has deprecated, when it is imported and at each loader.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        module = require("torchdata.stateful_dataloader", extra="stateful", purpose="use_stateful_dataloader=True")
        return module.StatefulDataLoader(loader.dataset, **_options(loader))


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    if loader.num_workers:
        options |= {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
    if isinstance(loader.dataset, IterableDataset):
        return options | {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return options | {"batch_size": None, "sampler": loader.sampler}
    return options | {"batch_sampler": loader.batch_sampler}
