"""Loaders whose workers outlive a pass: where their seed is drawn, and that a resumed run draws nothing else."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from loopwright.data.combined import CombinedLoader
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import Presharded
from loopwright.data.skip import skip_first_batches

from .resumable import plain, prepared


class Told(Dataset[Tensor]):
    """The seed of the worker, torch's initial seed there, and what the streams of the worker draw."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        assert info is not None
        seeds = [info.seed - info.id, torch.initial_seed() - info.id]
        noise = [random.random(), float(numpy.random.rand()), float(torch.rand((), dtype=torch.float64))]
        return torch.tensor([index, *(seed % 2**50 for seed in seeds), *noise], dtype=torch.float64)


@pytest.fixture(autouse=True)
def child_signal() -> Iterator[None]:
    """torch handles the end of worker processes by a handler, which it leaves."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def told(**options: Any) -> DataLoader[Any]:
    return DataLoader(Told(), **({"batch_size": 2, "num_workers": 1, "persistent_workers": True} | options))


def make(loader: Any, seed: int = 5, **options: Any) -> PreparedLoader:
    found = prepared(loader, **{"seed_batches": False} | options)
    torch.manual_seed(seed)
    return found


def read(loader: Any) -> list[Any]:
    """A pass, behind each batch of which the training draws."""
    return [(plain(batch), float(torch.rand(()))) for batch in loader]


def columns(batches: list[Any], *places: int) -> list[list[float]]:
    return [[row[place] for place in places] for batch, _ in batches for row in batch]


def test_the_first_leg_draws_what_torch_does() -> None:
    ours = make(told())
    whole = [read(ours) for _ in range(2)]
    torch.manual_seed(5)
    theirs = told()
    assert whole == [read(theirs) for _ in range(2)]


def test_workers_that_are_started_again_have_their_seed_and_draw_other_numbers() -> None:
    first = make(told())
    whole = [read(first) for _ in range(3)]
    assert columns(whole[0], 0, 1, 2) == columns(whole[1], 0, 1, 2)
    assert columns(whole[0], 3) != columns(whole[1], 3)
    own = make(told())
    read(own)
    read(own)
    position, state = own.position(0), torch.get_rng_state()
    found = []
    for seed in (8, 9):
        other = make(told(), seed)
        assert other.resume(position) == []
        torch.set_rng_state(state)
        found.append(read(other))
        assert [drawn for _, drawn in found[-1]] == [drawn for _, drawn in whole[2]], "nothing else was drawn"
        assert columns(found[-1], 0, 1, 2) == columns(whole[2], 0, 1, 2)
    assert found[0] == found[1]
    for place in (3, 4, 5):
        drawn = {row[0] for batches in (*whole, found[0]) for row in columns(batches, place)}
        assert len(drawn) == 4 * 6, "no number comes again"


def draws_on(build: Callable[[], Any], num_done: int) -> None:
    """A second pass that is stopped behind some batches, and the third."""
    whole = make(build())
    seen = [read(whole) for _ in range(3)]
    first = make(build())
    read(first)
    iterator = iter(first)
    for _ in range(num_done):
        next(iterator)
        torch.rand(())
    position, state = first.current_position(), torch.get_rng_state()
    other = make(build(), 99)
    assert other.resume(position, whole=True) == []
    torch.set_rng_state(state)
    rest = read(skip_first_batches(other, num_done))
    assert rest == seen[1][num_done:]
    assert read(other) == seen[2]


def plainly(**options: Any) -> DataLoader[Any]:
    """Batches that draw nothing."""
    data: Any = torch.arange(6.0)
    return DataLoader(data, **({"batch_size": 2, "num_workers": 1, "persistent_workers": True} | options))


@pytest.mark.parametrize(
    "build",
    [
        plainly,
        lambda: Presharded(plainly()),
        lambda: CombinedLoader([plainly(), plainly(batch_size=1)], "max_size_cycle"),
        lambda: CombinedLoader([plainly(), plainly()], "sequential"),
        lambda: CombinedLoader([plainly(), plainly(num_workers=0, persistent_workers=False)]),
        lambda: CombinedLoader([plainly(num_workers=0, persistent_workers=False)] * 2, "sequential"),
    ],
    ids=["loader", "presharded", "cycle", "sequential", "together", "without"],
)
@pytest.mark.parametrize("num_done", [1, 2])
def test_the_training_draws_on_as_it_would_have(build: Callable[[], Any], num_done: int) -> None:
    draws_on(build, num_done)


def test_positions_of_earlier_versions() -> None:
    first = make(told())
    position: Any = dict(first.position(0))
    del position["workers"], position["workers_after"]
    again = "it is not known whether persistent workers were there, so that their seed is drawn once more"
    assert make(told()).resume(position) == [again]
    assert make(told(persistent_workers=False)).resume(position) == []
    (other,) = make(told(), seed_batches=True).resume(position)
    assert other == "seed_batches was False and is True, so that the data draws other numbers"


def test_generators_are_those_of_the_user() -> None:
    own = torch.Generator()
    loader = make(told(generator=own, shuffle=True))
    assert loader.generator is own
    assert len(loader.generators) == 1 and loader.generators[0] is own
    assert make(told()).generator is None
