"""From what a user gives as data to the loaders of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from ..data.combined import CombinedLoader
from ..data.configuration import DataLoaderConfiguration
from ..data.loader import PreparedLoader
from ..data.sizes import loader_length
from ..distributed.errors import ConfigError, DataError, suggest
from ..strategies.strategy import Strategy
from .run import EvaluationData

STAGES = ("train", "val", "test", "predict")
BatchLimit: TypeAlias = "int | float | Mapping[str, int | float] | None"


def read_batch_limits(limit: BatchLimit, option: str = "limit_batches") -> dict[str, int | float]:
    """The limit of each stage that has one.

    Raises:
        ConfigError: an unknown stage, a negative number, or a fraction above 1.
    """
    if limit is None:
        return {}
    by_stage = dict(limit) if isinstance(limit, Mapping) else dict.fromkeys(STAGES, limit)
    for stage, value in by_stage.items():
        if stage not in STAGES:
            raise ConfigError(f"{option} names the stage {stage!r}. {suggest(stage, STAGES)}")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= (1 if isinstance(value, float) else sys.maxsize):
            raise ConfigError(
                f"{option}[{stage!r}]={value!r}. Expected a number of batches (an integer >= 0) or a fraction (0.0 "
                "to 1.0)."
            )
    return by_stage


def batches_allowed(limit: int | float | None, loader: Iterable[Any], stage: str) -> int | None:
    """How many batches of a loader are used, None: all.

    Raises:
        DataError: a fraction of a loader that has no length.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return None
    if isinstance(limit, int):
        return limit
    length = loader_length(loader)
    if length is None:
        raise DataError(
            f"limit_batches={limit} for {stage} is a fraction of a loader without a length ({type(loader).__name__}). "
            "Give a number of batches, or a loader with __len__."
        )
    return int(length * limit)


def is_loader(data: Any) -> bool:
    """Whether this is a loader, and not a batch, as an item of a list."""
    return isinstance(data, (DataLoader, PreparedLoader, CombinedLoader))


def training_loader(data: Any) -> Iterable[Any]:
    """One loader from an iterable of batches, a mapping of loaders, or a list of loaders.

    Raises:
        DataError: it can't be iterated, or holds nothing.
    """
    if data is None:
        raise DataError("there is no training data. Pass train= to trainer.fit, or give the task a train_dataloader().")
    if isinstance(data, Mapping) or (isinstance(data, (list, tuple)) and data and all(map(is_loader, data))):
        data = CombinedLoader(data, mode="max_size_cycle")
    _check_iterable(data, "training")
    if loader_length(data) == 0:
        raise DataError(
            f"the training loader ({type(data).__name__}) has no batch: its length is 0. Check its dataset, and "
            "drop_last with a batch size larger than the data."
        )
    return data  # type: ignore[no-any-return]


def evaluation_loaders(data: Any, stage: str) -> dict[str, Iterable[Any]]:
    """The loaders of an evaluation, by what is appended to the names of their metrics.

    One loader has no ending; those of a mapping have `/name`, those of a list `/dataloader_idx_0` and so on.

    Raises:
        DataError: one can't be iterated.
    """
    loaders: dict[str, Iterable[Any]]
    if isinstance(data, Mapping):
        loaders = {f"/{name}": loader for name, loader in data.items()}
    elif isinstance(data, (list, tuple)) and data and all(map(is_loader, data)):
        loaders = {f"/dataloader_idx_{index}": loader for index, loader in enumerate(data)}
    else:
        loaders = {"": data}
    if len(loaders) == 1:
        loaders = {"": next(iter(loaders.values()))}
    for loader in loaders.values():
        _check_iterable(loader, stage)
    return loaders


def evaluation_data(
    data: Any, stage: str, limit: int | float | None, strategy: Strategy, configuration: DataLoaderConfiguration
) -> EvaluationData:
    """The prepared loaders of an evaluation with their limits.

    Batch k of a loader goes to process k % n of n, so that each sample is counted once; limits are over all processes.
    Of the configuration, which is that of training, an evaluation takes the seeds and how batches are copied.
    """
    own = DataLoaderConfiguration(
        use_seedable_sampler=configuration.use_seedable_sampler,
        data_seed=configuration.data_seed,
        non_blocking=configuration.non_blocking,
        seed_batches=configuration.seed_batches,
    )
    loaders = evaluation_loaders(data, stage)
    limits = [batches_allowed(limit, loader, stage) for loader in loaders.values()]
    share = strategy.data_share
    index, count = share.process_index, share.num_processes
    return EvaluationData(
        {
            name: strategy.setup_dataloader(loader, own, exact=True, ordinal=1 + position)
            for position, (name, loader) in enumerate(loaders.items())
        },
        [None if limit is None else len(range(index, limit, count)) for limit in limits],
        process_index=index,
        num_processes=count,
        is_first_peer=share.peer == 0,
    )


def first_batches(loader: Iterable[Any], count: int) -> list[Any]:
    """The first batches, kept in memory, as `overfit_batches` trains on them again and again."""
    return list(islice(loader, count))


def _check_iterable(data: Any, stage: str) -> None:
    if isinstance(data, (str, bytes)) or not hasattr(data, "__iter__"):
        raise DataError(
            f"the {stage} data is a {type(data).__name__}, which can't be iterated. Expected an iterable of batches, "
            "such as a DataLoader."
        )
