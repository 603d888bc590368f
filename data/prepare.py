"""The one way from a user's iterable of batches to a loader of this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ..distributed.errors import ConfigError, DataError
from ..distributed.exchange import exchange
from .alike import drawing_alike
from .combined import CombinedLoader
from .configuration import DataLoaderConfiguration
from .counting import CountingCollate
from .dealing import DealtLoader
from .dispatch import DispatchedLoader
from .drawing import reads_here, sampler_may_draw
from .epochs import ToldDataset, ToldIterableDataset, WorkerStart
from .joining import SliceFunction
from .loader import PreparedLoader
from .rounds import Dealer, check_split
from .samplers import index_source, seed_of, shuffles, with_options, with_seedable_sampler
from .seeded import SeededStream, seeded
from .seeding import DataSeeds
from .shards import BatchSamplerShard, DealtSampler, IterableDatasetShard, NativeShard
from .sizes import loader_length
from .stateful import as_stateful
from .workers import WorkersSeed, keeps_workers


class ProcessLike(Protocol):
    """A process among those that get different batches."""

    @property
    def num_processes(self) -> int: ...

    @property
    def process_index(self) -> int: ...


class Presharded:
    """A loader whose batches are this process's own already: it is not dealt out again.

    Args:
        loader: any iterable of batches; processes may have different numbers of them.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        """Batches in a pass. Raises TypeError where the loader has no length."""
        return len(self.loader)  # type: ignore[arg-type]


def prepare_loader(
    loader: Iterable[Any],
    *,
    process: ProcessLike,
    num_peers: int = 1,
    configuration: DataLoaderConfiguration,
    device: torch.device | None,
    active: list[PreparedLoader],
    exact: bool = False,
    ordinal: int = 0,
    slice_fn_for_dispatch: SliceFunction | None = None,
) -> PreparedLoader:
    """The loader of this process: its share of the batches, moved to its device, its end known. Collective.

    Args:
        loader: any iterable of batches, the same on every process; one that is prepared already stays as it is.
        process: this process's place among those that get different batches.
        num_peers: how many processes, one after another, have the same place, and get the same batches.
        configuration: how batches are dealt out.
        device: where batches go; None leaves them where they are.
        active: the owner's stack of loaders that are being iterated.
        exact: deal whole batches in turn, none twice and none left out, whatever the configuration says, as an
            evaluation needs it; processes may get different numbers of batches then.
        ordinal: tells this loader from others of the run, whose workers are to draw other numbers.
        slice_fn_for_dispatch: cuts the parts of what the main process has read; see `parts_of`.
    Raises:
        ConfigError: options that don't go together, or batches that can't be split evenly.
        DataError: no process would get a batch.
    """
    if isinstance(loader, PreparedLoader) and loader.num_processes == process.num_processes:
        if loader.active is active:
            return loader
        prepared = loader.attached_to(active)
        prepared.device, prepared.make_transfer = device, None
        return prepared
    preparing = _Preparing(
        index=process.process_index,
        count=process.num_processes,
        num_peers=num_peers,
        configuration=configuration,
        exact=exact,
        ordinal=ordinal,
        places=device is not None,
        slice_fn=slice_fn_for_dispatch,
    )
    ready = preparing.ready(loader)
    shared, dealer = preparing.share(ready)
    prepared = PreparedLoader(
        shared,
        device=device,
        active=active,
        non_blocking=configuration.non_blocking,
        num_processes=process.num_processes,
        dealer=dealer,
    )
    prepared.shared_generators = preparing.generators
    prepared.seeds = preparing.seeds
    prepared.workers = preparing.workers
    prepared.reads_apart = preparing.draws_by_batch and reads_here(shared)
    return prepared


@dataclass(kw_only=True, slots=True)
class _Preparing:
    """The steps from a loader to this process's share of it, with the arguments of `prepare_loader`."""

    index: int
    count: int
    num_peers: int
    configuration: DataLoaderConfiguration
    exact: bool
    ordinal: int
    places: bool
    """Whether batches go to a device."""
    slice_fn: SliceFunction | None
    generators: list[torch.Generator] = field(default_factory=list)
    """Found by `ready`, as the seeds are: those whose state processes have to share before each pass."""
    seeds: DataSeeds | None = None
    workers: list[WorkersSeed] = field(default_factory=list)
    """Those of the loaders whose workers outlive a pass."""

    def __post_init__(self) -> None:
        by_batch = bool(self.configuration.seed_batches)
        if not by_batch and self.is_alone:
            return
        seed = self.configuration.data_seed
        if seed is None:
            seed = torch.initial_seed()
            if (by_batch and not self.is_alone) or self.num_peers > 1:
                seed = exchange(seed, "agreeing on the seed of a loader's data")[0]
        self.seeds = DataSeeds(seed, self.index, ordinal=self.ordinal, by_batch=by_batch)

    @property
    def is_alone(self) -> bool:
        """Whether no other process reads the data."""
        return self.count * self.num_peers == 1

    def ready(self, loader: Any, dispatches: bool | None = None) -> Any:
        """The loader as it is shared: shuffling alike on all processes, with workers that are told the epoch.

        Args:
            loader: the user's, or a part of it.
            dispatches: whether the main process alone will read it; None: by its kind.
        """
        if dispatches is None:
            dispatches = not self.is_alone and not self.exact and self._dispatches(_is_stream(loader))
        if isinstance(loader, CombinedLoader):
            parts = [self.ready(part, dispatches) for part in loader.loaders]
            is_same = all(part is own for part, own in zip(parts, loader.loaders, strict=True))
            return loader if is_same else loader.with_loaders(parts)
        if isinstance(loader, Presharded):
            own = self._with_own_seeds(loader.loader) if self.draws_by_batch else loader.loader
            return Presharded(self._with_kept_workers(own))
        return self._ready_loader(loader, dispatches) if isinstance(loader, DataLoader) else loader

    def _ready_loader(self, loader: DataLoader[Any], dispatches: bool) -> Any:
        if not self.is_alone:
            _refuse_dealt_samples(loader)
        if shuffles(loader) and self.configuration.use_seedable_sampler:
            loader = with_seedable_sampler(loader, self._agreed_seed(loader))
        elif not self.is_alone and not dispatches and not self._orders_by_seed(loader):
            loader, generator = drawing_alike(loader, torch.initial_seed() + self.ordinal)
            self.generators += [] if generator is None else [generator]
        loader = _with_told_workers(loader)
        loader = self._with_kept_workers(self._with_own_seeds(loader, dispatches))
        return as_stateful(loader) if self.configuration.use_stateful_dataloader else loader

    def share(self, loader: Any) -> tuple[Any, Dealer | None]:
        """This process's share of the loader, and what deals it; None where there is one share alone."""
        if self.is_alone:
            return self.seeded(loader), None
        if isinstance(loader, Presharded):
            return self.seeded(loader.loader, shared=True), NativeShard(self.count, self.index)
        is_loader = isinstance(loader, DataLoader)
        is_stream = _is_stream(loader)
        if self.count == 1 and (self.exact or not self._dispatches(is_stream)):
            return self.seeded(loader), None
        if self.exact:
            return self._share_exactly(loader, by_index=is_loader and not is_stream)
        self._check_rounds(loader)
        if self._dispatches(is_stream):
            return self._dispatched(loader)
        if not is_loader or (is_stream and loader.batch_size is None):
            return self._dealt(loader)
        return self._sharded_stream(loader) if is_stream else self._sharded(loader)

    def _share_exactly(self, loader: Any, *, by_index: bool) -> tuple[Any, Dealer]:
        """Whole batches in turn, or their indices."""
        if not by_index:
            dealt = DealtLoader(self.seeded(loader), self.count, self.index, even_batches=False)
            return dealt, dealt
        name, sampler = index_source(loader)
        shard = DealtSampler(sampler, self.count, self.index)
        return self.seeded(with_options(loader, **{name: shard}), shared=True), shard

    def _sharded(self, loader: DataLoader[Any]) -> tuple[Any, Dealer]:
        """A map-style loader whose indices are shared."""
        name, sampler = index_source(loader)
        shard = BatchSamplerShard(
            sampler, self.count, self.index, self.configuration.split_batches, self.configuration.even_batches
        )
        return self.seeded(with_options(loader, **{name: shard}), shared=True), shard

    def _sharded_stream(self, loader: DataLoader[Any]) -> tuple[Any, Dealer]:
        """A loader of an iterable dataset, of which each process reads all, or its own part where it has parts."""
        split, size = self.configuration.split_batches, loader.batch_size
        assert size is not None
        if not split and _num_shards(loader.dataset) >= self.count:
            part = loader.dataset.shard(self.count, self.index)  # type: ignore[attr-defined]
            return self.seeded(with_options(loader, dataset=part), shared=True), NativeShard(self.count, self.index)
        loader = self.seeded(loader)
        shard = IterableDatasetShard(
            loader.dataset,
            size,
            loader.drop_last,
            self.count,
            self.index,
            split,
            even_batches=self.configuration.even_batches,
        )
        size = size // self.count if split else size
        batches = BatchSampler(loader.sampler, size, loader.drop_last)
        collate = CountingCollate(loader.collate_fn, shard, draws_apart=isinstance(loader.dataset, SeededStream))
        start = WorkerStart(loader.worker_init_fn)
        clone = with_options(
            loader, dataset=shard, batch_sampler=batches, batch_size=size, collate_fn=collate, worker_init_fn=start
        )
        return clone, shard

    def _dealt(self, loader: Any) -> tuple[Any, Dealer]:
        """Whole batches of what can't be shared otherwise, in turn."""
        if isinstance(loader, CombinedLoader) and any(isinstance(part, PreparedLoader) for part in loader.loaders):
            raise ConfigError(
                "a CombinedLoader of prepared loaders can't be shared among processes: its loaders are already. "
                "Combine the loaders first and prepare the CombinedLoader, or iterate it without preparing it."
            )
        dealt = DealtLoader(
            self.seeded(loader),
            self.count,
            self.index,
            split_batches=self.configuration.split_batches,
            even_batches=self.configuration.even_batches,
            drop_last=bool(getattr(loader, "drop_last", False)),
        )
        return dealt, dealt

    def _dispatches(self, is_stream: bool) -> bool:
        wanted = self.configuration.dispatch_batches
        if wanted and not self.places:
            raise ConfigError(
                "dispatch_batches=True for a loader whose batches stay where they are (device_placement=False). Let "
                "them be moved to the device, or leave dispatch_batches out."
            )
        return (is_stream and self.places) if wanted is None else wanted

    def _dispatched(self, loader: Any) -> tuple[Any, Dealer]:
        if not self.configuration.even_batches:
            warnings.warn(
                "even_batches=False has no effect on a loader that the main process reads for all: its last round is "
                "always completed. Use dispatch_batches=False, so that each process reads its own batches.",
                stacklevel=4,
            )
        split, size = self.configuration.split_batches, getattr(loader, "batch_size", None)
        if split and size is not None and size > 1:
            check_split(size, self.count, type(loader).__name__)
        dispatched = DispatchedLoader(
            self.seeded(loader),
            self.count,
            self.index,
            num_peers=self.num_peers,
            split_batches=split,
            drop_last=bool(getattr(loader, "drop_last", False)),
            slice_fn=self.slice_fn,
            pins=bool(getattr(loader, "pin_memory", False)) and torch.accelerator.is_available(),
        )
        return dispatched, dispatched

    def _check_rounds(self, loader: Any) -> None:
        """Refuse a loader of which drop_last leaves nothing: its only round is not full."""
        total = loader_length(loader)
        drops = getattr(loader, "drop_last", False) and not self.configuration.split_batches
        if drops and total is not None and 0 < total < self.count:
            raise DataError(
                f"the {type(loader).__name__} has {total} batches for {self.count} processes, and drop_last=True "
                "leaves out a round that is not full, so that no process would get one. Use drop_last=False, smaller "
                "batches, or fewer processes."
            )

    def seeded(self, loader: Any, *, shared: bool = False) -> Any:
        """The loader, what its data draws being decided by (seed, epoch, batch), where that is asked for.

        Args:
            loader: what is read.
            shared: its batches are this process's own ones, those of the other processes being between them; else it
                is read as a whole.
        """
        if self.seeds is None or not self.seeds.by_batch:
            return loader
        if isinstance(loader, Presharded):
            loader = loader.loader
        return seeded(loader, self.seeds, *((self.count, self.index) if shared else (1, 0)))

    @property
    def draws_by_batch(self) -> bool:
        """Whether the data has its own random stream."""
        return self.seeds is not None and self.seeds.by_batch

    def _orders_by_seed(self, loader: DataLoader[Any]) -> bool:
        """Whether what the sampler draws is decided by (seed, epoch), and so the same on all processes."""
        return self.draws_by_batch and sampler_may_draw(index_source(loader)[1])

    def _with_own_seeds(self, loader: Any, dispatches: bool = False) -> Any:
        """The loader, the seeds of its workers being those of this process."""
        if self.seeds is None or not isinstance(loader, DataLoader):
            return loader
        # Where the main process reads for all, the loader's own generator is its sampler's alone, as in Accelerate.
        self.seeds.replaced.append(None if dispatches else loader.generator)
        return with_options(loader, generator=self.seeds.generator)

    def _with_kept_workers(self, loader: Any) -> Any:
        """The loader, the seed of its workers being kept where they outlive a pass."""
        if not isinstance(loader, DataLoader) or not keeps_workers(loader):
            return loader
        self.workers.append(WorkersSeed(loader.generator))
        return self.workers[-1].attached_to(loader)

    def _agreed_seed(self, loader: DataLoader[Any]) -> int:
        """The seed of process 0. Collective, unless the configuration has it."""
        if self.configuration.data_seed is not None:
            return self.configuration.data_seed
        seed = seed_of(loader.sampler)
        return seed if self.is_alone else exchange(seed, "agreeing on the order of a loader")[0]


def _refuse_dealt_samples(loader: DataLoader[Any]) -> None:
    """Samples that a sampler has dealt to processes would be dealt once more, and most of them be seen by none."""
    sampler = index_source(loader)[1]
    while sampler is not None:
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ConfigError(
                f"the DataLoader's DistributedSampler gives each of {sampler.num_replicas} processes a part of the "
                "samples, and these parts would be dealt out among the processes once more. Pass the loader without it "
                "(shuffle=True), or keep it and wrap the loader: Presharded(loader), from loopwright.data.prepare."
            )
        sampler = getattr(sampler, "sampler", None)


def _is_stream(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _with_told_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader, its dataset's copies in persistent workers being told the epoch, if it wants to know."""
    dataset = loader.dataset
    is_told = isinstance(dataset, (ToldDataset, ToldIterableDataset))
    if is_told or not (loader.num_workers and loader.persistent_workers and hasattr(dataset, "set_epoch")):
        return loader
    told = ToldIterableDataset(dataset) if isinstance(dataset, IterableDataset) else ToldDataset(dataset)
    return with_options(loader, dataset=told, worker_init_fn=WorkerStart(loader.worker_init_fn))


def _num_shards(dataset: Any) -> int:
    """How many parts the dataset can give by its own `shard`, as those of Hugging Face can; 0: none."""
    if not callable(getattr(dataset, "shard", None)):
        return 0
    number = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 0))
    return number if isinstance(number, int) else 0
