"""Positions: a loader goes on where another one was, equal bit for bit, or with each sample left once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler, TensorDataset

from loopwright.data.combined import CombinedLoader
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import Presharded
from loopwright.data.skip import skip_first_batches
from loopwright.data.window import WindowReader
from loopwright.distributed.errors import ConfigError, DataError

from .resumable import (
    MAKERS,
    OTHERS,
    SIZE,
    Noisy,
    NoisyShuffledStream,
    NoisyStream,
    OwnLoader,
    RaggedBatches,
    StatefulStream,
    draws,
    plain,
    prepared,
    read,
    stateful,
)

WORKERS: dict[str, dict[str, Any]] = {
    "0": {}, "2": {"num_workers": 2}, "persistent": {"num_workers": 1, "persistent_workers": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def child_signal() -> Iterator[None]:
    """torch handles the end of worker processes by a handler, which it leaves."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def made(make: Callable[..., Any], seed: int = 5, **options: Any) -> PreparedLoader:
    torch.manual_seed(seed)  # a loader of torchdata draws the seed of its sampler
    return prepared(make(**options))


def check_resume(make: Callable[[], PreparedLoader], stops: tuple[int, ...]) -> None:
    """Stopped in the second of three passes and resumed, twice in it and at its edge, against uninterrupted ones."""
    whole = make()
    passes = [read(whole, epoch) for epoch in range(3)]
    assert passes[0] != passes[1] != passes[2]
    for stop in stops:
        first = make()
        read(first, 0)
        before = draws()
        assert read(first, 1, stop) == passes[1][:stop]
        assert draws() == before, "reading leaves the training's random states alone"
        position = first.position(stop)
        second = make()
        torch.manual_seed(99)
        assert second.resume(position) == []
        assert second.first_batch == stop
        iterator = second.raw_iterator()
        assert list(map(plain, islice(iterator, 2))) == passes[1][stop : stop + 2]
        again = second.position(stop + 2)
        assert list(map(plain, iterator)) == passes[1][stop + 2 :]
        assert read(second, 2) == passes[2], "the next pass is whole"
        third = make()
        assert third.resume(again) == []
        assert list(map(plain, third.raw_iterator())) == passes[1][stop + 2 :]
    last = make()
    read(last, 0)
    read(last, 1)
    for position in (last.position(len(passes[1]), epoch=1), last.position(0, epoch=2)):
        edge = make()
        assert edge.resume(position) == []
        assert read(edge, 2) == passes[2], "at the edge of an epoch the next one is whole"


@pytest.mark.parametrize("kind", MAKERS)
def test_a_pass_goes_on_where_it_was(kind: str) -> None:
    check_resume(lambda: made(MAKERS[kind]), (0, 1, 4))


@pytest.mark.parametrize("kind", OTHERS)
def test_passes_of_other_loaders_go_on_where_they_were(kind: str) -> None:
    check_resume(lambda: made(OTHERS[kind]), (0, 1, 3))


@pytest.mark.parametrize("workers", ["2", "persistent"])
@pytest.mark.parametrize("kind", ["together", "shuffled_stream", "stateful_loader_stream"])
def test_a_pass_goes_on_where_it_was_with_workers(kind: str, workers: str) -> None:
    check_resume(lambda: made(MAKERS[kind], **WORKERS[workers]), (3,))


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["2", "persistent"])
@pytest.mark.parametrize("kind", MAKERS)
def test_every_pass_goes_on_where_it_was_with_workers(kind: str, workers: str) -> None:
    check_resume(lambda: made(MAKERS[kind], **WORKERS[workers]), (0, 1, 4))


def test_b20_pain_7_another_process_goes_on_in_the_same_order_whatever_it_drew() -> None:
    first = prepared(DataLoader(Noisy(48), batch_size=4, shuffle=True))
    whole = read(prepared(DataLoader(Noisy(48), batch_size=4, shuffle=True)), 1)
    read(first, 0)
    read(first, 1, 5)
    torch.manual_seed(1234)
    data = Noisy(48)
    second = prepared(DataLoader(data, batch_size=4, shuffle=True), data_seed=77)
    second.resume(first.position(5))
    rest = list(map(plain, second.raw_iterator()))
    assert rest == whole[5:]
    assert data.read == [int(row[0]) for batch in whole[5:] for row in batch], "nothing that was seen is read"


def test_pain_30_a_million_batches_are_skipped_in_a_second() -> None:
    data = TensorDataset(torch.arange(1_000_010))
    for options in ({"shuffle": True}, {}):
        loader = prepared(DataLoader(data, batch_size=1, **options))
        loader.set_epoch(0)
        position = loader.position(0) | {"batch": 1_000_000}
        loader.resume(position)
        began = time.process_time()
        assert len(list(islice(loader.raw_iterator(), 10))) == 10
        assert time.process_time() - began < 5, "a second on a free machine"


def indices(batches: list[Any]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def resumed(position: Any, w: int, batch_size: int, data: Any = None, **options: Any) -> list[list[Any]]:
    """What is left of the pass for each of `w` processes, and the next pass."""
    found = []
    for index in range(w):
        make = DataLoader(Noisy() if data is None else data, batch_size=batch_size, shuffle=data is None)
        loader = prepared(make, index, w, even_batches=False, **options)
        inexact = loader.resume(position)
        assert len(inexact) == 1
        assert inexact[0].startswith("the data came in batches of ")
        found.append(list(map(plain, loader.raw_iterator())))
        assert loader.first_batch == -(-position["samples"] // (batch_size * w))
    return found


def rounds(parts: list[list[Any]]) -> list[Any]:
    """The batches of all processes, round by round."""
    longest = max(map(len, parts))
    return [part[index] for index in range(longest) for part in parts if index < len(part)]


@pytest.mark.parametrize(("w", "v", "batch_size"), [(1, 1, 2), (1, 2, 2), (2, 1, 1), (2, 3, 1), (2, 2, 3), (1, 2, 1)])
def test_pain_9_other_batches_and_processes_see_what_is_left_once(w: int, v: int, batch_size: int) -> None:
    order = indices(read(prepared(DataLoader(Noisy(), batch_size=1, shuffle=True)), 1))
    first = [
        prepared(DataLoader(Noisy(), batch_size=1, shuffle=True), index, w, even_batches=False) for index in range(w)
    ]
    seen = indices(rounds([read(loader, 1, 2) for loader in first]))
    assert seen == order[: 2 * w]
    position = first[0].position(2)
    assert (position["samples"], position["batches"]) == (2 * w, 2 * w)
    if (w, batch_size) == (v, 1):
        return
    rest = rounds(resumed(position, v, batch_size))
    assert indices(rest) == order[2 * w :]


def test_three_legs_with_other_batches_each() -> None:
    order = indices(read(prepared(DataLoader(Noisy(), batch_size=1, shuffle=True)), 0))
    one = prepared(DataLoader(Noisy(), batch_size=1, shuffle=True))
    seen = indices(read(one, 0, 3))
    two = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))
    two.resume(one.position(3))
    assert two.first_batch == 2
    seen += indices(list(islice(two.raw_iterator(), 1)))
    position = two.position(3)
    assert (position["samples"], position["origin"]) == (5, {"batch": 2, "unit": "samples", "count": 3})
    whole = [plain(batch) for batch in two.raw_iterator()]
    again = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))
    assert again.resume(position) == []
    rest = list(map(plain, again.raw_iterator()))
    assert indices(rest) == order[5:]
    assert (again.pass_length, len(again), len(whole)) == (7, 7, 7)
    three = prepared(DataLoader(Noisy(), batch_size=3, shuffle=True))
    assert len(three.resume(position)) == 1
    assert indices(list(map(plain, three.raw_iterator()))) == order[5:]


def test_batches_of_any_sizes_are_dealt_on_to_another_number_of_processes() -> None:
    order = read(prepared(DataLoader(Noisy(), batch_sampler=RaggedBatches())), 0)
    one = prepared(DataLoader(Noisy(), batch_sampler=RaggedBatches()))
    read(one, 0, 1)
    position = one.position(1)
    assert (position["samples"], position["batches"]) == (None, 1)
    rest = []
    for index in range(2):
        loader = prepared(DataLoader(Noisy(), batch_sampler=RaggedBatches()), index, 2, even_batches=False)
        assert loader.resume(position) == [
            "the data came in batches for 1 process and comes in batches for 2 processes now"
        ]
        rest.append(list(map(plain, loader.raw_iterator())))
    assert sorted(indices(rounds(rest))) == sorted(indices(order[1:]))
    with pytest.raises(DataError, match="the pass can't go on in the middle: the data came in batches for 1 process"):
        prepared(DataLoader(Noisy(), batch_size=2)).resume(position)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("split", [False, True])
def test_the_last_round_is_completed_as_in_the_whole_pass(index: int, split: bool) -> None:
    def make() -> PreparedLoader:
        return prepared(DataLoader(Noisy(), batch_size=2, shuffle=True), index, 2, split_batches=split)

    whole = read(make(), 0)
    for stop in range(len(whole)):
        loader = make()
        loader.resume(make().position(0) | {"batch": stop})
        assert list(map(plain, loader.raw_iterator())) == whole[stop:]
        dealt = make()
        dealt.resume(make().position(0) | {"batch": stop})
        assert [dealt.remainder for _ in dealt][-1] == 1, "one sample in the last round"


@pytest.mark.parametrize("index", [0, 1])
def test_dealt_loaders_go_on(index: int) -> None:
    def make() -> PreparedLoader:
        return prepared([torch.tensor([[float(number)]]) for number in range(5)], index, 2)

    whole = read(make(), 0)
    loader = make()
    loader.resume(make().position(0) | {"batch": 1})
    assert list(map(plain, loader.raw_iterator())) == whole[1:]
    one = prepared([torch.tensor([[float(number)]]) for number in range(5)])
    read(one, 0, 3)
    position = one.position(3)
    assert position["batches"] == 3
    loader = make()
    assert len(loader.resume(position)) == 1
    assert list(map(plain, loader.raw_iterator())) == [[[float(3 + index)]]]


def test_stateful_datasets_read_nothing_twice() -> None:
    data = StatefulStream()
    first = prepared(DataLoader(StatefulStream(), batch_size=2))
    read(first, 0, 3)
    second = prepared(DataLoader(data, batch_size=2))
    second.resume(first.position(3))
    assert indices(list(map(plain, second.raw_iterator()))) == list(range(6, SIZE))
    assert data.num_read == SIZE - 6
    other = prepared(DataLoader(StatefulStream(), batch_size=4))
    assert len(other.resume(first.position(3))) == 1
    assert (other.first_batch, indices(list(map(plain, other.raw_iterator())))) == (2, list(range(6, SIZE)))


def test_streams_without_a_state_are_read_and_thrown_away_by_samples() -> None:
    class Numbers(NoisyStream):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.tensor([float(index)]) for index in range(self.size))

    first = prepared(DataLoader(Numbers(), batch_size=2))
    read(first, 0, 3)
    assert first.position(3)["samples"] == 6
    assert indices(rounds(resumed(first.position(3), 1, 4, Numbers()))) == list(range(6, SIZE))
    assert indices(rounds(resumed(first.position(3), 2, 2, Numbers()))) == list(range(6, SIZE))
    workers = prepared(DataLoader(Numbers(), batch_size=4, num_workers=1))
    with pytest.raises(DataError, match=r"behind 6 samples in other batches .* since its workers read parts of it"):
        workers.resume(first.position(3) | {"num_workers": 1})
    told = prepared(DataLoader(Numbers(), batch_size=2, num_workers=1)).resume(first.position(3))
    assert told == [
        "the iterable dataset was read by 0 workers and is by 1 now: if they share it, samples of this epoch are seen "
        "twice or not at all"
    ]


def test_a_start_that_is_given_up_leaves_nothing_out_of_a_stream() -> None:
    def make(w: int) -> PreparedLoader:
        return prepared(DataLoader(NoisyShuffledStream(), batch_size=2), 0, w)

    whole = read(make(2), 2)
    one = make(1)
    read(one, 1, 2)
    loader = make(2)
    loader.resume(one.position(2))
    assert loader.first_batch == 1
    assert read(loader, 2) == whole
    loader.resume(one.position(2))
    assert [loader.remainder for _ in loader] == [-1, -1, 1], "9 samples are left, in rounds of 4"
    assert read(loader, 2) == whole


def test_what_is_no_position_and_other_loaders_are_refused() -> None:
    loader = prepared(DataLoader(Noisy(), batch_size=2))
    position = loader.position(0)
    with pytest.raises(ConfigError, match=r"a loader's position is \{'batch': 1\}\. Expected what PreparedLoader\.po"):
        loader.resume({"batch": 1})
    with pytest.raises(ConfigError, match=r"a loader's position has version 2\. This version of Loopwright reads 1"):
        loader.resume(position | {"version": 2})
    with pytest.raises(ConfigError, match="a loader that reads samples by their indices, and this one reads w"):
        prepared([1, 2]).resume(position)
    with pytest.raises(ConfigError, match=r"loader\.position\(batch=-1\)\. Expected an integer >= 0"):
        loader.position(-1)
    assert prepared(DataLoader(Noisy(20), batch_size=2)).resume(position) == ["a pass had 13 samples and has 20 now"]
    off = prepared(DataLoader(Noisy(), batch_size=2), seed_batches=False)
    assert off.resume(position) == ["seed_batches was True and is False, so that the data draws other numbers"]
    shuffling = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))
    assert shuffling.resume(position) == [
        "the loader shuffles in another way than before, so that the order of samples is another"
    ]
    own = prepared(Presharded(DataLoader(Noisy(), batch_size=2)), 0, 2)
    read(own, 0, 1)
    with pytest.raises(DataError, match="the samples that were seen can't be counted"):
        loader.resume(own.position(1))


def test_the_state_that_was_loaded_last_counts() -> None:
    loader = prepared(stateful(Noisy(), batch_size=2))
    whole = read(loader, 0)
    iterator = iter(loader)
    next(iterator)
    state, position = loader.state_dict(), loader.position(0) | {"batch": 4}
    other = prepared(stateful(Noisy(), batch_size=2))
    other.resume(position)
    other.load_state_dict(state)
    assert indices([plain(batch) for batch in other]) == indices(whole[1:])


def test_the_state_of_a_stateful_loader_is_kept_for_what_is_ahead() -> None:
    loader = prepared(DataLoader(StatefulStream(40), batch_size=1))
    loader.set_epoch(0)
    iterator = loader.raw_iterator(lookahead=4)
    for _ in islice(iterator, 12):
        pass
    assert [loader.position(batch)["state"]["dataset"]["position"] for batch in (8, 12)] == [8, 12]
    with pytest.raises(ConfigError, match=r"the state of the DataLoader behind batch 2 is not known: it is kept for"):
        loader.position(2)


def test_another_epoch_gives_the_start_up() -> None:
    loader = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))
    passes = [read(loader, epoch) for epoch in range(3)]
    position = loader.position(0, epoch=1) | {"batch": 3}
    loader.resume(position)
    assert loader.first_batch == 3
    loader.set_epoch(1)
    assert loader.first_batch == 3
    assert loader.position(3) == position, "nothing was read since"
    loader.set_epoch(2)
    assert loader.first_batch == 0
    assert list(map(plain, loader.raw_iterator())) == passes[2]


def test_the_accelerators_loop_goes_on_as_well() -> None:
    def make() -> PreparedLoader:
        return prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))

    whole = make()
    passes = [[plain(batch) for batch in whole] for _ in range(2)]
    loader = make()
    loader.resume(make().position(0) | {"batch": 4})
    flags = []
    rest = []
    for batch in loader:
        rest.append(plain(batch))
        flags.append((loader.end_of_dataloader, loader.remainder))
    assert rest == passes[0][4:]
    assert flags == [(False, 1), (False, 1), (True, 1)]
    assert loader.iteration == 1
    assert [plain(batch) for batch in loader] == passes[1]


def test_windows_begin_in_the_middle_of_a_pass() -> None:
    def windows(begin: int, limit: int | None = None) -> list[tuple[int, bool, bool]]:
        loader = prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))
        if begin:
            loader.resume(loader.position(0) | {"batch": begin})
        reader = WindowReader(loader, 3, limit=limit, begin=loader.first_batch)
        return [(len(window.batches), window.closes, window.is_last) for window in reader]

    assert windows(0) == [(3, True, False), (3, True, False), (1, True, True)]
    assert windows(3) == windows(0)[1:]
    assert windows(6) == windows(0)[2:]
    assert windows(3, limit=5) == [(2, True, True)]
    assert windows(3, limit=3) == []


def test_a_resumed_pass_that_ends_early_is_found() -> None:
    class Cut(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 10:
                raise StopIteration
            return super().__getitem__(index)

    loader = prepared(DataLoader(Cut(), batch_size=2))
    loader.resume(loader.position(0) | {"batch": 2})
    with pytest.raises(DataError, match="the loader ended after 5 of its 7 batches"):
        list(WindowReader(loader, 1, begin=2))


def dispatched(kind: str) -> Any:
    """Whole passes that the main process hands out, and the rest of the second after a resume at batch 2."""
    from loopwright.data.configuration import DataLoaderConfiguration
    from loopwright.data.prepare import prepare_loader
    from loopwright.distributed.process import ProcessState

    def make() -> PreparedLoader:
        torch.manual_seed(3)
        return prepare_loader(
            MAKERS[kind](),
            process=ProcessState(cpu=True),
            configuration=DataLoaderConfiguration(dispatch_batches=True, seed_batches=True),
            device=torch.device("cpu"),
            active=[],
        )

    whole = make()
    passes = [read(whole, epoch) for epoch in range(3)]
    first = make()
    read(first, 0)
    read(first, 1, 2)
    position = first.position(2)
    list(first.raw_iterator())  # the processes go on together
    second = make()
    inexact = second.resume(position)
    rest = list(map(plain, second.raw_iterator()))
    return passes, rest, read(second, 2), inexact, {name: position[name] for name in ("samples", "state")}


@pytest.mark.parametrize("kind", ["shuffle", "shuffled_stream", "stateful_stream"])
def test_what_the_main_process_hands_out_goes_on(kind: str, two_processes: Any) -> None:
    found = two_processes(dispatched, kind)
    for passes, rest, after, inexact, position in found:
        assert (rest, after, inexact) == (passes[1][2:], passes[2], [])
        assert position["samples"] == 8
    alone = [read(made(MAKERS[kind]), epoch) for epoch in range(3)]
    together = rounds([each[0][0] for each in found])
    assert together[: len(alone[0]) - 1] == alone[0][:-1], "one process reads the same, noise and all"


def test_a_state_of_all_processes_goes_on_in_one(two_processes: Any) -> None:
    state = two_processes(dispatched, "stateful_stream")[0][4]["state"]
    assert state["dataset"] == {"position": 8}
    data = StatefulStream()
    loader = prepared(DataLoader(data, batch_size=2))
    position = loader.position(0, epoch=1) | {
        "batch": 2, "samples": 8, "batches": 4, "num_processes": 2, "state": state, "is_whole": True,
    }  # fmt: skip
    assert len(loader.resume(position)) == 1
    assert loader.first_batch == 4
    assert indices(list(map(plain, loader.raw_iterator()))) == list(range(8, SIZE))
    assert data.num_read == SIZE - 8


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_combined_loaders_load_nothing_of_what_they_skip(mode: Any) -> None:
    data = [Noisy(12), Noisy(4), Noisy(6)]

    def make() -> PreparedLoader:
        loaders = [
            DataLoader(data[0], batch_size=2, shuffle=True),
            DataLoader(data[1], batch_size=2, sampler=DrawingFour()),
            DataLoader(data[2], batch_size=2, shuffle=True),
        ]
        return prepared(CombinedLoader(loaders, mode))

    whole = read(make(), 1)
    for stop in range(len(whole) + 1):
        loader = make()
        loader.set_epoch(1)
        position = loader.position(0) | {"batch": stop}
        for part in data:
            part.read.clear()
        loader.resume(position)
        assert list(map(plain, loader.raw_iterator())) == whole[stop:], stop
        if stop == len(whole):
            assert len(data[0].read) <= 2, "one more, before the end of another is seen"


class DrawingFour(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(4).tolist())

    def __len__(self) -> int:
        return 4


def test_combined_loaders_that_can_only_be_read_cycle_on() -> None:
    def make() -> PreparedLoader:
        one = DataLoader(Noisy(10), batch_size=1, shuffle=True)
        generator = torch.Generator().manual_seed(4)
        two = DataLoader(Noisy(3), batch_size=1, sampler=SubsetRandomSampler(range(3), generator=generator))
        return prepared(CombinedLoader([one, two, OwnLoader()], "max_size_cycle"))

    whole = read(make(), 0)
    for stop in (2, 3, 4, 7, 10):
        loader = make()
        loader.resume(make().position(0) | {"batch": stop})
        assert list(map(plain, loader.raw_iterator())) == whole[stop:], stop


def test_a_loader_that_skips_when_it_is_prepared_draws_the_same_numbers() -> None:
    for index in range(2):
        whole = read(prepared(DataLoader(Noisy(12), batch_size=2), index, 2), 0)
        skipped = prepared(skip_first_batches(DataLoader(Noisy(12), batch_size=2), 2), index, 2)
        assert read(skipped, 0) == whole[1:]


def test_a_loader_that_is_ones_own_already_goes_on_by_indices() -> None:
    data = Noisy()

    def make(w: int) -> PreparedLoader:
        return prepared(Presharded(DataLoader(data, batch_size=2, shuffle=True)), 0, w)

    for w in (1, 2):
        whole = read(make(w), 0)
        loader = make(w)
        loader.resume(make(w).position(0) | {"batch": 5})
        data.read.clear()
        before = draws()
        assert list(map(plain, loader.raw_iterator())) == whole[5:]
        assert len(data.read) == 3
        assert draws() == before


def continued(position: Any) -> Any:
    """What is left for this one of two processes behind the position of a single one; real processes agree on seeds."""
    from loopwright.data.configuration import DataLoaderConfiguration
    from loopwright.data.prepare import prepare_loader
    from loopwright.distributed.process import ProcessState

    torch.manual_seed(71)
    loader = prepare_loader(
        DataLoader(Noisy(), batch_size=2, shuffle=True),
        process=ProcessState(cpu=True),
        configuration=DataLoaderConfiguration(seed_batches=True, even_batches=False),
        device=torch.device("cpu"),
        active=[],
    )
    told = loader.resume(position)
    first = loader.first_batch
    rest = list(map(plain, loader.raw_iterator()))
    return rest, read(loader, position["epoch"] + 1), first, told


def test_two_real_processes_go_on_where_one_was(two_processes: Any) -> None:
    def make() -> PreparedLoader:
        return prepared(DataLoader(Noisy(), batch_size=2, shuffle=True))

    one = make()
    read(one, 1, 2)
    whole = [read(make(), epoch) for epoch in (1, 2)]
    found = two_processes(continued, one.position(2))
    assert [each[2:] for each in found] == [
        (1, ["the data came in batches of 2 for 1 process and comes in batches of 2 for 2 processes now"])
    ] * 2
    assert rounds([each[0] for each in found]) == whole[0][2:], "noise and all"
    assert rounds([each[1] for each in found]) == whole[1]
