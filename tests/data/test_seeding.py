"""The data's own random stream: by (seed, epoch, batch) alone, and beside the training's."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from loopwright.data.combined import CombinedLoader
from loopwright.data.drawing import dataset_may_draw, reads_here, sampler_may_draw
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import Presharded
from loopwright.data.samplers import index_source
from loopwright.data.seeding import CarriedStream, DataSeeds, derived_seed
from loopwright.data.streams import seed_all

from .resumable import (
    MAKERS,
    OTHERS,
    DrawingSampler,
    Noisy,
    NoisyStream,
    OwnLoader,
    RaggedBatches,
    draws,
    jittered,
    noise,
    plain,
    prepared,
    read,
)


@pytest.fixture(autouse=True)
def child_signal() -> Iterator[None]:
    """torch handles the end of worker processes by a handler, which it leaves."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def values(batches: list[Any]) -> list[float]:
    """All noise of the batches of a pass."""
    return [number for batch in batches for row in batch for number in row[1:]]


@pytest.mark.parametrize("kind", ["shuffle", "together", "own_sampler", "ragged", "single"])
def test_workers_draw_what_one_process_draws(kind: str) -> None:
    alone = [read(prepared(MAKERS[kind]()), epoch) for epoch in range(2)]
    workers = prepared(MAKERS[kind](num_workers=2))
    assert [read(workers, epoch) for epoch in range(2)] == alone


def test_numbers_are_distinct_over_batches_and_epochs() -> None:
    loader = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))
    found = [values(read(loader, epoch)) for epoch in range(2)]
    assert len({*found[0], *found[1]}) == 2 * 13 * 3
    other = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True), data_seed=4)
    assert not set(values(read(other, 0))) & set(found[0])


def test_two_processes_draw_for_their_batches_what_one_draws() -> None:
    alone = read(prepared(DataLoader(Noisy(12), batch_size=2, shuffle=True)), 1)
    parts = [
        read(prepared(DataLoader(Noisy(12), batch_size=2, shuffle=True, num_workers=index), index, 2), 1)
        for index in range(2)
    ]
    assert [batch for both in zip(*parts, strict=True) for batch in both] == alone


def test_processes_that_read_all_of_a_stream_read_the_same() -> None:
    parts = [read(prepared(DataLoader(NoisyStream(12), batch_size=2), index, 2), 0) for index in range(2)]
    alone = read(prepared(DataLoader(NoisyStream(12), batch_size=2)), 0)
    assert [batch for both in zip(*parts, strict=True) for batch in both] == alone
    collated = [
        read(prepared(DataLoader(NoisyStream(12), batch_size=2, collate_fn=jittered), index, 2), 0)
        for index in range(2)
    ]
    jitter = [
        batch[0][1] - own[0][1]
        for both, owns in zip(collated, parts, strict=True)
        for batch, own in zip(both, owns, strict=True)
    ]
    assert len(set(jitter)) == 6, "what is drawn for a batch, and not for a sample, is this process's own"
    dealt = [read(prepared(OwnLoader(), index, 2), 0) for index in range(2)]
    assert [batch for both in zip(*dealt, strict=True) for batch in both] == read(prepared(OwnLoader()), 0)


def test_samplers_that_draw_are_alike_on_all_processes() -> None:
    for make in (MAKERS["own_sampler"], MAKERS["ragged"]):
        seen = [row[0] for index in range(2) for batch in read(prepared(make(), index, 2), 0) for row in batch]
        assert set(seen) == set(range(13))


def test_loaders_that_are_no_shares_draw_other_numbers_on_each_process() -> None:
    parts = [read(prepared(Presharded(DataLoader(Noisy(), batch_size=2)), index, 2), 0) for index in range(2)]
    assert not set(values(parts[0])) & set(values(parts[1]))


def test_parts_of_a_combined_loader_draw_other_numbers() -> None:
    loader = prepared(
        CombinedLoader([DataLoader(Noisy(6), batch_size=2), DataLoader(Noisy(2), batch_size=2)], "max_size_cycle")
    )
    found = read(loader, 0)
    assert len(set(values([part for both in found for part in both]))) == 2 * 6 * 3, "also where one begins again"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffle", "together", "own_sampler", "generator", "stream"])
def test_the_trainings_streams_are_left_alone(kind: str, workers: int) -> None:
    loader = prepared(MAKERS[kind](num_workers=workers))
    before = draws()
    assert len(read(loader, 0)) == (14 if kind == "stream" and workers else 7)
    assert draws() == before


def test_the_trainings_streams_are_left_alone_by_what_fails() -> None:
    class Failing(Noisy):
        def __getitem__(self, index: int) -> Tensor:
            noise()
            raise ValueError("broken")

    class FailingSampler(DrawingSampler):
        def __iter__(self) -> Iterator[int]:
            noise()
            raise ValueError("broken")
            yield 0

    for loader in (
        DataLoader(Failing(), batch_size=2),
        DataLoader(Noisy(), batch_size=2, sampler=FailingSampler()),
        DataLoader(TensorDataset(torch.zeros(3)), sampler=FailingSampler()),
    ):
        ready = prepared(loader)
        before = draws()
        with pytest.raises(ValueError, match="broken"):
            read(ready, 0)
        assert draws() == before


def test_what_the_training_draws_changes_nothing_in_the_data() -> None:
    whole = read(prepared(DataLoader(Noisy(), batch_size=2, shuffle=True)), 0)
    loader = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))
    loader.set_epoch(0)
    found = []
    for batch in loader.raw_iterator():
        found.append(plain(batch))
        noise()
        seed_all(1)
    assert found == whole


def test_without_it_the_data_draws_from_the_trainings_streams() -> None:
    loader = prepared(DataLoader(Noisy(), batch_size=2), seed_batches=None)
    seed_all(7)
    expected = noise()
    seed_all(7)
    torch.empty((), dtype=torch.int64).random_()  # torch's loader draws the seed of workers, also of none
    assert read(loader, 0, 1)[0][0][1:3] == expected[:2]
    assert type(loader.loader) is DataLoader
    assert loader.seeds is None


class Whose(Dataset[Tensor]):
    """Tells that workers show it, and not what is around it."""

    mark = -1

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor(self.mark)


class WhoseStream(IterableDataset[Tensor]):
    mark = -1

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        yield torch.tensor(self.mark)


def set_mark(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.mark = worker_id


@pytest.mark.parametrize("kind", [Whose, WhoseStream])
def test_users_see_their_own_dataset(kind: Any) -> None:
    data = kind()
    loader = prepared(DataLoader(data, num_workers=1, worker_init_fn=set_mark))
    assert loader.dataset is data
    assert {row[0] for row in read(loader, 0)} == {0}


def test_users_see_their_own_samplers() -> None:
    sampler, batches = DrawingSampler(), RaggedBatches()
    assert prepared(DataLoader(Noisy(), batch_size=None, sampler=sampler)).sampler is sampler
    assert prepared(DataLoader(Noisy(), batch_sampler=batches)).batch_sampler is batches


def test_nothing_is_put_around_what_can_not_draw() -> None:
    data = TensorDataset(torch.zeros(4))
    for loader in (DataLoader(data, batch_size=2), DataLoader(data, shuffle=True), DataLoader(Subset(data, [1]))):
        ready = prepared(loader)
        assert not ready.reads_apart
        assert ready.loader.dataset is loader.dataset  # type: ignore[attr-defined]
        assert index_source(ready.loader)[1] is ready.batch_sampler  # type: ignore[arg-type]
    batches = [torch.zeros(2)]
    assert prepared(batches).loader is batches


def test_what_can_draw_is_known() -> None:
    tensors = TensorDataset(torch.zeros(4))
    for quiet in (tensors, ConcatDataset([tensors]), Subset(tensors, [0]), StackDataset(a=tensors), [1], range(3)):
        assert not dataset_may_draw(DataLoader(quiet))  # type: ignore[arg-type]
    for loud in (Noisy(), ConcatDataset([tensors, Noisy()]), Subset(Noisy(), [0]), StackDataset(tensors, Noisy(4))):
        assert dataset_may_draw(DataLoader(loud))
    assert dataset_may_draw(DataLoader(tensors, collate_fn=jittered))
    generator = torch.Generator()
    for sampler in (
        DistributedSampler(tensors, 1, 0),
        SubsetRandomSampler([0], generator=generator),
        WeightedRandomSampler([1.0], 1, generator=generator),
        index_source(DataLoader(tensors, shuffle=True, generator=generator))[1],
        index_source(DataLoader(tensors))[1],
    ):
        assert not sampler_may_draw(sampler)
    for sampler in (DrawingSampler(), SubsetRandomSampler([0]), index_source(DataLoader(tensors, shuffle=True))[1]):
        assert sampler_may_draw(sampler)
    assert reads_here(OwnLoader())
    assert reads_here(CombinedLoader([[1], DataLoader(Noisy())]))
    assert not reads_here(DataLoader(Noisy(), num_workers=1))
    assert not reads_here(PreparedLoader(DataLoader(Noisy())))


def test_a_carried_stream_goes_on_where_it_was_left() -> None:
    seed_all(derived_seed("a"))
    expected = [noise(), noise()]
    before = draws()
    stream = CarriedStream(derived_seed("a"))
    found = []
    for _ in range(2):
        found.append(stream.draw(noise))
        random.random()
        numpy.random.rand()
    assert found == expected
    assert draws() != before, "only what is drawn in the stream is"


def test_seeds_are_of_the_epoch_and_the_loader() -> None:
    def of(**options: int) -> int:
        seeds = DataSeeds(5, options.get("process", 0), ordinal=options.get("ordinal", 0), by_batch=True)
        seeds.set_epoch(options.get("epoch", 0))
        return seeds.pass_seed

    assert of() == of() == of(process=1)
    assert len({of(), of(epoch=1), of(ordinal=1)}) == 3


@pytest.mark.parametrize("kind", ["shuffle", "own_sampler", "own_loader", "stream"])
def test_a_pass_keeps_its_numbers_while_others_begin(kind: str) -> None:
    make = (MAKERS | OTHERS)[kind]
    whole = prepared(make())
    passes = [[plain(batch) for batch in whole] for _ in range(3)]
    loader = prepared(make())
    before = draws()
    outer, inner, ends = [], [], []
    for batch in loader:
        outer.append(plain(batch))
        ends.append(loader.end_of_dataloader)
        if len(inner) < 2:
            inner.append([plain(batch) for batch in loader])
    assert outer == passes[0]
    assert inner == passes[:2], "the first is in the same epoch, whose end it is"
    assert ends == [*[False] * (len(outer) - 1), True]
    assert draws() == before
    beside = prepared(make())
    assert [(plain(a), plain(b)) for a, b in zip(beside, beside, strict=True)] == list(zip(outer, outer, strict=True))


@pytest.mark.parametrize("kind", ["shuffle", "own_sampler", "own_loader", "stream"])
def test_a_loop_that_is_left_early_leaves_nothing(kind: str) -> None:
    make = (MAKERS | OTHERS)[kind]
    whole = prepared(make())
    passes = [[plain(batch) for batch in whole] for _ in range(2)]
    loader = prepared(make())
    before = draws()
    for _ in loader:
        break
    iterator = iter(loader)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert draws() == before
    assert [[plain(batch) for batch in loader] for _ in range(2)] == passes
    assert draws() == before


def test_the_trainings_streams_are_left_alone_by_an_interruption() -> None:
    class Interrupted(DrawingSampler):
        def __iter__(self) -> Iterator[int]:
            noise()
            yield 0
            noise()
            raise KeyboardInterrupt("now")

    class InterruptedLoader(OwnLoader):
        def __iter__(self) -> Iterator[Tensor]:
            noise()
            raise KeyboardInterrupt("now")

    for loader in (DataLoader(TensorDataset(torch.zeros(3)), sampler=Interrupted()), InterruptedLoader()):
        ready = prepared(loader)
        before = draws()
        with pytest.raises(KeyboardInterrupt, match="now"):
            read(ready, 0)
        assert draws() == before
    stream = CarriedStream(4)
    too_short = torch.zeros(3, dtype=torch.uint8)
    stream._own = stream._own._replace(torch_cpu=too_short)  # so that putting them stops halfway
    with pytest.raises(RuntimeError, match="size"):
        stream.draw(noise)
    assert draws() == before
