"""`PreparedLoader` and its settings. F: facts of semantics about Accelerate."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.samplers import SeedableRandomSampler, with_seedable_sampler
from loopwright.data.sizes import loader_length
from loopwright.distributed.errors import ConfigError


class Stream(IterableDataset[int]):
    """Counts up to a number; has no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Listening(SequentialSampler):
    """Keeps the epochs that it was told."""

    def __init__(self, data_source: Any) -> None:
        super().__init__(data_source)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def states(loader: PreparedLoader) -> list[tuple[bool, int]]:
    """For each batch of a pass: whether it is the last, and the remainder."""
    return [(loader.end_of_dataloader, loader.remainder) for _ in loader]


def test_f17_the_end_is_known_with_the_last_batch() -> None:
    loader = PreparedLoader(DataLoader(list(range(10)), batch_size=4))
    assert states(loader) == [(False, 2), (False, 2), (True, 2)]
    assert loader.remainder == -1
    assert states(loader) == [(False, 2), (False, 2), (True, 2)]


@pytest.mark.parametrize(
    ("options", "remainder"),
    [
        ({"batch_size": 4}, 2),
        ({"batch_size": 5}, 0),
        ({"batch_size": 4, "drop_last": True}, -1),
        ({"batch_size": None}, -1),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(10)), 4, False)}, 2),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(7)), 4, True)}, -1),
        ({"batch_size": 4, "sampler": RandomSampler(range(10), num_samples=7)}, 3),
    ],
)
def test_remainder(options: dict[str, Any], remainder: int) -> None:
    loader = PreparedLoader(DataLoader(list(range(10)), **options))
    assert {found for _, found in states(loader)} == {remainder}


def test_loaders_without_length_end_as_others_do() -> None:
    loader = PreparedLoader(DataLoader(Stream(3), batch_size=2))
    assert states(loader) == [(False, -1), (True, -1)]
    assert loader.length is None
    assert loader.total_dataset_length is None
    with pytest.raises(TypeError, match="has no len"):
        len(loader)


@pytest.mark.parametrize("lookahead", [1, 2, 5])
def test_what_is_left_is_known_as_far_as_it_is_looked_ahead(lookahead: int) -> None:
    loader = PreparedLoader(range(4), lookahead=lookahead)
    assert [loader.batches_known for _ in loader] == [min(left, lookahead + 1) for left in (4, 3, 2, 1)]


def test_a_finished_source_is_not_asked_again() -> None:
    """Some iterators begin anew after their end."""
    asked = []

    class Restarting:
        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            asked.append(len(asked))
            if len(asked) == 3:
                raise StopIteration
            return len(asked)

    assert list(PreparedLoader(Restarting(), lookahead=2)) == [1, 2]
    assert asked == [0, 1, 2]


def test_passes_are_counted_and_told() -> None:
    sampler = Listening(range(4))
    loader = PreparedLoader(DataLoader(list(range(4)), sampler=sampler, batch_size=2))
    list(loader)
    list(loader)
    for _ in loader:
        break  # a pass that was left is not over
    list(loader)
    assert sampler.epochs == [0, 1, 2, 2]
    assert loader.iteration == 3
    loader.set_epoch(7)
    list(loader)
    assert sampler.epochs[-2:] == [7, 7]
    empty = PreparedLoader([])
    assert (list(empty), empty.iteration) == ([], 0)


def test_samplers_are_told_at_any_depth() -> None:
    class Wrapping:
        def __init__(self, sampler: Any) -> None:
            self.batch_sampler = sampler

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batch_sampler)

        def __len__(self) -> int:
            return len(self.batch_sampler)

    sampler = Listening(range(4))
    inner = BatchSampler(sampler, batch_size=2, drop_last=False)
    loader = PreparedLoader(DataLoader(list(range(4)), batch_sampler=Wrapping(inner)))  # type: ignore[arg-type]
    assert len(list(loader)) == 2
    assert sampler.epochs == [0]


def test_what_the_wrapped_loader_says() -> None:
    generator = torch.Generator()
    inner = DataLoader(list(range(5)), batch_size=2, drop_last=True, generator=generator, collate_fn=list)
    loader = PreparedLoader(inner)
    assert (loader.batch_size, loader.total_batch_size, loader.total_dataset_length) == (2, 2, 5)
    assert (loader.drop_last, loader.num_workers, loader.pin_memory) == (True, 0, False)
    assert (loader.collate_fn, loader.generator, loader.dataset) == (list, generator, inner.dataset)
    assert (loader.sampler, loader.batch_sampler) == (inner.sampler, inner.batch_sampler)
    plain = PreparedLoader([1, 2])
    assert (plain.batch_size, plain.sampler, plain.collate_fn, plain.num_workers, len(plain)) == (
        None,
        None,
        None,
        0,
        2,
    )


def test_batches_go_to_the_device() -> None:
    loader = PreparedLoader(DataLoader(list(range(2))), device=torch.device("meta"))
    assert [batch.device.type for batch in loader] == ["meta", "meta"]
    loader.device = None
    assert [batch.device.type for batch in loader] == ["cpu", "cpu"]
    data = [torch.ones(1)]
    for device in (torch.device("cpu"), None):
        assert next(iter(PreparedLoader(data, device=device))) is data[0]


def test_loader_length_passes_errors_of_other_kinds() -> None:
    class Broken:
        def __len__(self) -> int:
            raise ValueError("no length today")

    with pytest.raises(ValueError, match="no length today"):
        loader_length(Broken())


# Seedable samplers


def order(loader: Any) -> list[int]:
    return [int(batch) for batch in loader]


def test_f18_the_order_is_that_of_the_seed_and_the_epoch() -> None:
    sampler = SeedableRandomSampler(range(6), 42)
    assert list(sampler) == list(sampler) == [0, 3, 2, 4, 1, 5]
    sampler.set_epoch(1)
    assert list(sampler) == [4, 0, 5, 1, 2, 3]
    assert list(SeedableRandomSampler(range(6), 43)) == [4, 0, 5, 1, 2, 3]
    assert list(SeedableRandomSampler(range(6), 2**64 - 1))  # a seed that wraps around with the epoch
    sampler.seed = 2**64 - 1
    assert sorted(sampler) == [0, 1, 2, 3, 4, 5]


def test_the_order_does_not_depend_on_what_was_drawn_before() -> None:
    loader = with_seedable_sampler(DataLoader(list(range(50)), shuffle=True))
    first = order(loader)
    torch.rand(100)
    assert order(loader) == first
    assert first != list(range(50))


def test_the_seed_of_the_loaders_own_generator_counts() -> None:
    loader = DataLoader(list(range(20)), shuffle=True, generator=torch.Generator().manual_seed(5))
    assert order(with_seedable_sampler(loader)) == list(SeedableRandomSampler(range(20), 5))
    assert order(with_seedable_sampler(loader, data_seed=6)) == list(SeedableRandomSampler(range(20), 6))


def test_sampling_options_are_kept() -> None:
    sampler = RandomSampler(range(4), replacement=True, num_samples=9)
    for options in ({"batch_size": 2}, {"batch_size": None}):
        seedable = with_seedable_sampler(DataLoader(list(range(4)), sampler=sampler, **options))
        assert type(seedable.sampler) is SeedableRandomSampler
        assert sum(torch.as_tensor(batch).numel() for batch in seedable) == 9


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(list(range(4))),
        DataLoader(Stream(4)),
        DataLoader(list(range(4)), batch_sampler=BatchSampler(RandomSampler(range(4)), 2, False)),
        [1, 2],
    ],
    ids=["sequential", "stream", "own batch sampler", "list"],
)
def test_loaders_that_shuffle_otherwise_stay_as_they_are(loader: Any) -> None:
    assert with_seedable_sampler(loader) is loader


@pytest.fixture
def child_signal() -> Iterator[None]:
    """torch handles the end of worker processes by a handler, which it leaves."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("child_signal")
def test_workers_read_the_same_order() -> None:
    loader = DataLoader(list(range(8)), shuffle=True, num_workers=1, persistent_workers=True)
    seedable = with_seedable_sampler(loader, data_seed=3)
    alone = with_seedable_sampler(DataLoader(list(range(8)), shuffle=True), data_seed=3)
    assert order(seedable) == order(alone)
    seedable.sampler.set_epoch(1)
    alone.sampler.set_epoch(1)
    assert order(seedable) == order(alone)
    seedable._iterator._shutdown_workers()


def test_configuration_refuses_what_it_can_not_use() -> None:
    assert DataLoaderConfiguration(True, True, False).even_batches is False
    assert DataLoaderConfiguration(dispatch_batches=None, data_seed=0).data_seed == 0
    for option, value in (("even_batches", "false"), ("dispatch_batches", 1), ("split_batches", None)):
        with pytest.raises(ConfigError, match=rf"DataLoaderConfiguration\.{option}=.*Expected True or False"):
            DataLoaderConfiguration(**{option: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"DataLoaderConfiguration\.data_seed=-1\. Expected an integer >= 0"):
        DataLoaderConfiguration(data_seed=-1)
    with pytest.raises(ConfigError, match=r"data_seed=18446744073709551616\. Expected an integer below"):
        DataLoaderConfiguration(data_seed=2**64)
