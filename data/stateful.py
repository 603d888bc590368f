"""Loaders that say where they are: torchdata's `StatefulDataLoader`, and any other with the same two methods."""

from __future__ import annotations

import warnings
from typing import Any, TypedDict

from torch.utils.data import DataLoader, IterableDataset

from ..distributed.imports import require


class LoaderState(TypedDict):
    """The position of a prepared loader in its passes."""

    version: int
    iteration: int
    """The pass that goes on, or begins."""
    loader: Any
    """What the wrapped loader says of the last batch that was given out."""


def is_stateful(loader: Any) -> bool:
    """Whether a loader can say where it is, and, if it reads from another one, whether that can."""
    can_say = callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
    inner = getattr(loader, "loader", None)
    return can_say and (inner is None or is_stateful(inner))


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
