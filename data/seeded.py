"""Samplers, datasets and loaders whose random numbers begin anew with each batch; see `seeding`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, get_worker_info

from .around import DatasetAround, IndicesAround
from .combined import CombinedLoader
from .drawing import dataset_may_draw, reads_here, sampler_may_draw
from .epochs import WorkerStart
from .samplers import SamplerAround, SkippingSampler, index_source, with_options
from .seeding import CarriedStream, DataSeeds, derived_seed
from .shards import undealt
from .starting import begins_anywhere, items_from
from .stateful import has_state
from .streams import seed_all

_END = object()


class Numbered(NamedTuple):
    """The indices of a batch, or one index, with the seed that its reading begins from."""

    seed: int
    indices: Any


class Numbering:
    """The base of what numbers the batches of one process, and reads or has read each from the seed of its number.

    Args:
        seeds: where seeds come from.
        num_processes: how many processes share the numbers.
        process_index: the index of this one.
        part: tells these numbers from those of another loader with the same seeds.
    """

    def __init__(self, seeds: DataSeeds, num_processes: int, process_index: int, part: str) -> None:
        self.seeds = seeds
        self.num_processes = num_processes
        self.process_index = process_index
        self.part = part
        self.num_left_out = 0
        """Numbers before the first one of each pass: what the user's own loader leaves out."""
        self.first = 0
        """Batches of this process before the next pass, where it goes on in the middle of one with other batches."""
        self.num_given = 0
        """Those of the passes of this epoch that are over: a `CombinedLoader` may begin one again."""

    def set_epoch(self, epoch: int) -> None:
        """Count from 0 again."""
        self.num_given = 0

    def seed_of(self, pass_seed: int, index: int) -> int:
        """The seed of this process's batch number `index`."""
        number = self.num_left_out + index * self.num_processes + self.process_index
        return derived_seed(pass_seed, self.part, number)


class NumberedSampler(Numbering, IndicesAround, SamplerAround):
    """A sampler or batch sampler whose items carry the seeds of their numbers, and which draws from its own stream.

    Args:
        sampler: what gives indices, or lists of them.
        seeds: as for each `Numbering`; so are the next ones.
        unpacks: give the items alone: only the sampler draws.
    """

    def __init__(
        self,
        sampler: Any,
        seeds: DataSeeds,
        num_processes: int = 1,
        process_index: int = 0,
        *,
        part: str = "",
        unpacks: bool = False,
    ) -> None:
        Numbering.__init__(self, seeds, num_processes, process_index, part)
        SamplerAround.__init__(self, sampler)
        self.unpacks = unpacks
        self.num_left_out = _left_out(sampler) * (num_processes if getattr(sampler, "split_batches", False) else 1)

    @property
    def begins_anywhere(self) -> bool:
        """See `starting.begins_anywhere`."""
        return begins_anywhere(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, num_skipped: int) -> Iterator[Any]:
        """The items behind the first `num_skipped` ones, each with the seed of its own number."""
        pass_seed, index = self.seeds.pass_seed, self.first + self.num_given + num_skipped
        for item in self._items(num_skipped):
            yield item if self.unpacks else Numbered(self.seed_of(pass_seed, index), item)
            index += 1
        self.num_given = index - self.first

    def _items(self, num_skipped: int) -> Iterator[Any]:
        if not sampler_may_draw(self.sampler):
            yield from items_from(self.sampler, num_skipped)
            return
        stream = CarriedStream(derived_seed(self.seeds.pass_seed, self.part, "order", self.num_given))
        iterator = stream.draw(lambda: items_from(self.sampler, num_skipped))
        while (item := stream.draw(lambda: next(iterator, _END))) is not _END:
            yield item


def _left_out(sampler: Any) -> int:
    """Items that the user's sampler leaves out at the beginning."""
    sampler = undealt(sampler)
    return sampler.num_skipped + _left_out(sampler.sampler) if isinstance(sampler, SkippingSampler) else 0


class SeededDataset(DatasetAround, Dataset[Any]):
    """A map-style dataset that is read by `Numbered` indices, each batch from its seed.

    Args:
        dataset: the user's, or what stands around it.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Samples in the dataset."""
        return len(self.dataset)

    def __getitem__(self, numbered: Numbered) -> Any:
        seed_all(numbered.seed)
        return self.dataset[numbered.indices]

    def __getitems__(self, numbered: Numbered) -> Any:
        """The samples of a batch."""
        seed_all(numbered.seed)
        several = getattr(self.dataset, "__getitems__", None)
        if several:
            return several(numbered.indices)
        return [self.dataset[index] for index in numbered.indices]


class SeededStream(DatasetAround, IterableDataset[Any]):
    """An iterable dataset whose draws begin anew with each batch, by (seed, epoch, worker, batch of this worker).

    Args:
        dataset: the user's, or what stands around it.
        seeds: where seeds come from.
        batch_size: samples per batch.
        place: tells what is read here from what is read elsewhere, by other processes or of other loaders.
    """

    def __init__(self, dataset: Any, seeds: DataSeeds, batch_size: int, place: str = "") -> None:
        self.dataset = dataset
        self.pass_seed = seeds.shared_pass_seed
        self.batch_size = batch_size
        self.place = place
        self.num_given = 0
        """Samples that were given before the next pass, which goes on in the middle of one."""

    def __len__(self) -> int:
        """Samples in the dataset. Raises TypeError where it has no length."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        seed = derived_seed(int(self.pass_seed), self.place, worker)
        seed_all(derived_seed(seed, "begin"))
        given, self.num_given = self.num_given, 0
        return self._samples(iter(self.dataset), seed, given)

    def _samples(self, iterator: Iterator[Any], seed: int, given: int) -> Iterator[Any]:
        kind = _StatefulSamples if has_state(iterator) else _Samples
        return kind(iterator, seed, self.batch_size, given)


class StatefulSeededStream(SeededStream):
    """The same of a dataset that says where it is."""

    def __init__(self, dataset: Any, seeds: DataSeeds, batch_size: int, place: str = "") -> None:
        super().__init__(dataset, seeds, batch_size, place)
        self._running: _Samples | None = None
        self._restored: Any = None
        self._counted_in = 0
        """The seed of the pass in which samples were given."""

    def state_dict(self) -> dict[str, Any]:
        """Where the dataset is, and how many samples were given."""
        given = self.num_given if self._running is None else self._running.given
        return {"given": given, "pass": self._counted_in, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there in the next pass."""
        self._restored = state["dataset"]
        self.dataset.load_state_dict(self._restored)
        self.num_given, self._counted_in, self._running = state["given"], state["pass"], None

    def _samples(self, iterator: Iterator[Any], seed: int, given: int) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        if restored is not None and id(iterator) == id(self.dataset):
            self.dataset.load_state_dict(restored)  # beginning a pass may have set it back
        if self._counted_in != int(self.pass_seed):
            given = 0  # a state that was saved between two passes counts the samples of the one before
        self._counted_in = int(self.pass_seed)
        samples = super()._samples(iterator, seed, given)
        assert isinstance(samples, _Samples)
        self._running = samples
        return samples


class _Samples:
    """One pass over a `SeededStream`."""

    def __init__(self, iterator: Iterator[Any], seed: int, batch_size: int, given: int) -> None:
        self._iterator: Any = iterator
        self._seed = seed
        self._batch_size = batch_size
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch, position = divmod(self.given, self._batch_size)
        if position == 0:
            seed_all(derived_seed(self._seed, batch))
        sample = next(self._iterator)
        self.given += 1
        return sample


class _StatefulSamples(_Samples):
    """One pass whose iterator says where it is."""

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "iterator": self._iterator.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator.load_state_dict(state["iterator"])
        self.given = state["given"]


class SeededLoader(Numbering):
    """Any iterable of batches, each of which is read from its seed.

    Args:
        loader: the iterable.
        seeds: as for each `Numbering`; so are the next ones.
    """

    def __init__(
        self, loader: Iterable[Any], seeds: DataSeeds, num_processes: int = 1, process_index: int = 0, *, part: str = ""
    ) -> None:
        super().__init__(seeds, num_processes, process_index, part)
        self.loader = loader
        self._index = 0
        """That of the next batch."""
        self._restored: int | None = None

    def __len__(self) -> int:
        """Batches in a pass. Raises TypeError where the loader has no length."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        self._index = index = self.first + self.num_given if restored is None else restored
        pass_seed = self.seeds.pass_seed
        seed_all(derived_seed(pass_seed, self.part, "begin", index))
        return self._batches(iter(self.loader), pass_seed, index)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, and the number of its next batch."""
        return {"number": self._index, "loader": self.loader.state_dict()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there in the next pass."""
        self._restored = state["number"]
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]

    def _batches(self, iterator: Iterator[Any], pass_seed: int, index: int) -> Iterator[Any]:
        while True:
            seed_all(self.seed_of(pass_seed, index))
            batch = next(iterator, _END)
            if batch is _END:
                break
            self._index = index = index + 1
            yield batch
        self.num_given, self._index = index - self.first, 0


def seeded(loader: Any, seeds: DataSeeds, num_processes: int = 1, process_index: int = 0, *, part: str = "") -> Any:
    """The loader, what its data draws being decided by (seed, epoch, batch); as it is where nothing can draw.

    Args:
        loader: any iterable of batches.
        seeds: where seeds come from.
        num_processes: how many processes share the numbers of the batches.
        process_index: the index of this one.
        part: tells the loaders of a `CombinedLoader` from each other.
    """
    place = (num_processes, process_index)
    if isinstance(loader, CombinedLoader):
        return loader.with_loaders(
            [seeded(each, seeds, *place, part=f"{part}{index}/") for index, each in enumerate(loader.loaders)]
        )
    if not isinstance(loader, DataLoader):
        return SeededLoader(loader, seeds, *place, part=part) if reads_here(loader) else loader
    options: dict[str, Any] = {}
    if isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader.dataset, IterDataPipe):  # these have their own way to be seeded
            options["dataset"] = _seeded_stream(loader, seeds, f"{part}{process_index}")
    else:
        name, sampler = index_source(loader)
        draws = dataset_may_draw(loader)
        if draws:
            options["dataset"] = SeededDataset(loader.dataset)
        if draws or sampler_may_draw(sampler):
            options[name] = NumberedSampler(sampler, seeds, *place, part=part, unpacks=not draws)
    if loader.num_workers:
        options["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
    return with_options(loader, **options) if options else loader


def _seeded_stream(loader: DataLoader[Any], seeds: DataSeeds, place: str) -> SeededStream:
    if loader.num_workers and loader.persistent_workers:
        seeds.share()
    kind = StatefulSeededStream if has_state(loader.dataset) else SeededStream
    return kind(loader.dataset, seeds, loader.batch_size or 1, place)
