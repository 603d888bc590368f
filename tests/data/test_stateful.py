"""Loaders that save their position: torchdata's, and any other with the same methods."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader
from loopwright.distributed.errors import ConfigError
from loopwright.distributed.imports import is_installed
from loopwright.distributed.process import ProcessState

needs_torchdata = pytest.mark.skipif(not is_installed("torchdata"), reason="torchdata is not installed")


@dataclass
class Place:
    process_index: int
    num_processes: int


class Counter:
    """Counts to 6, from where it was."""

    def __init__(self) -> None:
        self.given = self.start = 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.start = self.start, 0
        while self.given < 6:
            self.given += 1
            yield self.given - 1
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.given = state["given"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def prepared(loader: Any, index: int = 0, w: int = 1, **options: Any) -> PreparedLoader:
    configuration = DataLoaderConfiguration(**{"dispatch_batches": False, "data_seed": 1} | options)
    return prepare_loader(
        loader, process=Place(index, w), configuration=configuration, device=torch.device("cpu"), active=[]
    )


def states(loader: PreparedLoader) -> tuple[list[Any], list[Any]]:
    """Each batch of a pass, and the state while it is used."""
    batches, kept = [], []
    for batch in loader:
        batches.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        kept.append(loader.state_dict())
    return batches, kept


@pytest.mark.parametrize("lookahead", [1, 3])
def test_the_position_is_behind_what_was_given_out(lookahead: int) -> None:
    loader = prepared(Counter())
    loader.lookahead = lookahead
    assert loader.state_dict()["loader"] == {"given": 0}
    batches, kept = states(loader)
    assert batches == [0, 1, 2, 3, 4, 5]
    assert [state["loader"]["given"] for state in kept] == [1, 2, 3, 4, 5, 0]
    assert [state["iteration"] for state in kept] == [0, 0, 0, 0, 0, 1]
    again = prepared(Counter())
    again.load_state_dict(kept[2])
    assert [list(again), list(again)] == [[3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert loader.state_dict() == {"version": 1, "iteration": 1, "loader": {"given": 0}}


@needs_torchdata
@pytest.mark.parametrize(("w", "index"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_a_pass_goes_on_and_the_next_one_is_whole(kind: str, w: int, index: int) -> None:
    def make() -> PreparedLoader:
        data: Any = Stream() if kind == "stream" else list(range(12))
        inner: DataLoader[Any] = DataLoader(data, batch_size=2, **({} if kind == "stream" else {"shuffle": True}))
        return prepared(inner, index, w, use_stateful_dataloader=True)

    loader = make()
    passes = [states(loader) for _ in range(3)]
    assert [len(batches) for batches, _ in passes] == [6 // w] * 3
    for stop in range(6 // w):
        again = make()
        again.load_state_dict(passes[1][1][stop])
        rest = passes[1][0][stop + 1 :] or passes[2][0]
        assert states(again)[0] == rest, stop
        if stop + 1 < 6 // w:
            assert states(again)[0] == passes[2][0], stop


@needs_torchdata
def test_a_loader_that_is_stateful_stays_and_shuffles_seedably() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
        from torchdata.stateful_dataloader import StatefulDataLoader

        inner = StatefulDataLoader(list(range(8)), batch_size=2, shuffle=True)
    plain = prepared(DataLoader(list(range(8)), batch_size=2, shuffle=True))
    loader = prepared(inner, use_stateful_dataloader=True)
    assert type(loader.loader) is StatefulDataLoader
    assert states(loader)[0] == [batch.tolist() for batch in plain]


def test_loaders_without_a_position_say_so() -> None:
    loader = prepared(DataLoader(list(range(4))))
    with pytest.raises(ConfigError, match=r"a DataLoader can't say where it is\. Use DataLoaderConfiguration\(use_st"):
        loader.state_dict()
    with pytest.raises(ConfigError, match=r"a loader's state is \{'given': 1\}\. Expected what PreparedLoader"):
        prepared(Counter()).load_state_dict({"given": 1})  # type: ignore[typeddict-item]


def handed_out() -> Any:
    """The rest of a pass after two rounds, on a new loader."""

    def make() -> PreparedLoader:
        return prepare_loader(
            Batches(),
            process=ProcessState(cpu=True),
            configuration=DataLoaderConfiguration(dispatch_batches=True),
            device=torch.device("cpu"),
            active=[],
        )

    loader = make()
    state = None
    for number, _ in enumerate(loader):
        if number == 0:
            state = loader.state_dict()
    assert state is not None
    again = make()
    again.load_state_dict(state)
    return [batch.tolist() for batch in again]


class Batches(Counter):
    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([number]) for number in super().__iter__())


def test_the_dispatcher_goes_on_behind_what_it_handed_out(two_processes: Any) -> None:
    assert two_processes(handed_out) == [[[2], [4]], [[3], [5]]]
