"""Cases of the category data on two processes, by their ids; what a loader alone shows of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SubsetRandomSampler, WeightedRandomSampler

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader
from loopwright.data.skip import skip_first_batches
from loopwright.distributed.process import ProcessState


def prepared(loader: Any, *, exact: bool = False, **options: Any) -> PreparedLoader:
    """The loader of this process."""
    return prepare_loader(
        loader,
        process=ProcessState(cpu=True),
        configuration=DataLoaderConfiguration(**options),
        device=torch.device("cpu"),
        active=[],
        exact=exact,
    )


def in_step_order(first: list[list[int]], second: list[list[int]]) -> list[int]:
    return [sample for step in zip(first, second, strict=True) for batch in step for sample in batch]


class Noise(Dataset[Tensor]):
    """Each item is its index and a random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand((), dtype=torch.float64)], dtype=torch.float64)


def draws() -> list[list[float]]:
    """Seed 0 on both processes, one worker each, two passes."""
    loader = prepared(DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=1))
    return [row for _ in range(2) for batch in loader for row in batch.tolist()]


def test_b59_processes_draw_different_augmentations_of_disjoint_samples(two_processes: Any) -> None:
    found = two_processes(draws)
    noise = [number for rows in found for _, number in rows]
    assert len(set(noise)) == 16
    for start in (0, 4):
        indices = [index for rows in found for index, _ in rows[start : start + 4]]
        assert sorted(indices) == list(range(8))
    assert two_processes(draws) == found


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7, -1, -1))

    def __len__(self) -> int:
        return 8


def orders() -> dict[str, list[list[list[int]]]]:
    """Two passes each of what shuffles; the processes have drawn different numbers before."""
    torch.manual_seed(100 + ProcessState(cpu=True).process_index)
    data = list(range(8))
    weighted = WeightedRandomSampler([1.0] * 8, 8)
    own = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(torch.initial_seed()))
    loaders = {
        "custom": prepared(DataLoader(data, batch_size=2, sampler=Backwards())),
        "shuffle": prepared(DataLoader(data, batch_size=2, shuffle=True)),
        "torch's": prepared(DataLoader(data, batch_size=2, shuffle=True), use_seedable_sampler=False),
        "weighted": prepared(DataLoader(data, batch_size=2, sampler=weighted)),
        "own generator": prepared(DataLoader(data, batch_size=2, sampler=own)),
        "subset": prepared(DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(data))),
        "exact": prepared(DataLoader(data, batch_size=2, shuffle=True), exact=True),
    }
    found = {}
    for name, loader in loaders.items():
        found[name] = [[batch.tolist() for batch in loader]]
        torch.rand(ProcessState(cpu=True).process_index)
        found[name].append([batch.tolist() for batch in loader])
    return found


def test_b61_samplers_keep_their_order_and_shuffle_alike(two_processes: Any) -> None:
    first, second = two_processes(orders)
    together = {name: [in_step_order(*pair) for pair in zip(first[name], second[name], strict=True)] for name in first}
    assert together["custom"] == [list(range(7, -1, -1))] * 2
    for name in ("shuffle", "torch's", "subset", "exact"):
        assert [sorted(order) for order in together[name]] == [list(range(8))] * 2, name
    for name in ("shuffle", "torch's", "weighted", "own generator", "subset", "exact"):
        assert together[name][0] != together[name][1], name
    # The order is that of process 0: its seed, and for samplers with a generator of their own its state.
    expected = torch.randperm(8, generator=torch.Generator().manual_seed(100)).tolist()
    assert together["shuffle"][0] == expected
    drawn = WeightedRandomSampler([1.0] * 8, 8, generator=torch.Generator().manual_seed(100))
    assert together["own generator"] == [list(drawn), list(drawn)]


def resumed() -> list[list[int]]:
    """The second pass after its first batch, of a loader that is made anew."""
    torch.manual_seed(ProcessState(cpu=True).process_index)

    def make() -> PreparedLoader:
        return prepared(DataLoader(list(range(12)), batch_size=2, shuffle=True), data_seed=42)

    whole = make()
    list(whole)
    second = [batch.tolist() for batch in whole]
    again = make()
    again.set_epoch(1)
    assert [batch.tolist() for batch in skip_first_batches(again, 1)] == second[1:]
    return second


def test_f18b_a_pass_goes_on_with_the_samples_that_are_left(two_processes: Any) -> None:
    first, second = two_processes(resumed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(43)).tolist()
    assert in_step_order(first, second) == order


class Uneven(IterableDataset[Tensor]):
    """Shards itself into 3 and 5 items."""

    n_shards = 2

    def __init__(self, items: range = range(8)) -> None:
        self.items = items

    def shard(self, num_shards: int, index: int) -> Uneven:
        return Uneven(range(3) if index == 0 else range(3, 8))

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(item) for item in self.items)


def uneven() -> Any:
    native = prepared(DataLoader(Uneven(), batch_size=1), dispatch_batches=False)
    handed_out = prepared(DataLoader(Uneven(), batch_size=1))
    dealt = prepared([torch.tensor([item]) for item in range(7)])
    return [(loader.is_even, [batch.tolist() for batch in loader]) for loader in (native, handed_out, dealt)]


def test_b62_uneven_shards_are_known_as_such_or_completed(two_processes: Any) -> None:
    first, second = two_processes(uneven)
    assert first[0] == (False, [[0], [1], [2]])
    assert second[0] == (False, [[3], [4], [5], [6], [7]])
    assert [first[1], second[1]] == [(True, [[0], [2], [4], [6]]), (True, [[1], [3], [5], [7]])]
    assert [first[2], second[2]] == [(True, [[0], [2], [4], [6]]), (True, [[1], [3], [5], [0]])]
