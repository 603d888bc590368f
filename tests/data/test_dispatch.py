"""The dispatcher on two and three processes. F: facts of semantics about Accelerate."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.data.prepare import prepare_loader
from loopwright.data.skip import skip_first_batches
from loopwright.distributed.errors import DataError
from loopwright.distributed.process import ProcessState

Pair = namedtuple("Pair", ["left", "right"])


class Stream(IterableDataset[int]):
    """Counts up to a number; may be read on the main process alone, or fail there."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at

    def __iter__(self) -> Iterator[int]:
        assert ProcessState(cpu=True).is_main_process, "read elsewhere"
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError(f"sample {number} is damaged")
            yield number


def dispatched(loader: Any, slice_fn: Any = None, **options: Any) -> PreparedLoader:
    return prepare_loader(
        loader,
        process=ProcessState(cpu=True),
        configuration=DataLoaderConfiguration(**{"dispatch_batches": True} | options),
        device=torch.device("cpu"),
        active=[],
        slice_fn_for_dispatch=slice_fn,
    )


def passed(loader: PreparedLoader) -> tuple[list[Any], list[int]]:
    """Each batch of a pass, and the remainder with it."""
    batches, remainders = [], []
    for batch in loader:
        batches.append(batch.tolist())
        remainders.append(loader.remainder)
    return batches, remainders


def stream(count: int, batch_size: int = 2, skip: int = 0, **options: Any) -> tuple[list[Any], list[int]]:
    drops = options.pop("drop_last", False)
    loader = dispatched(DataLoader(Stream(count), batch_size=batch_size, drop_last=drops), **options)
    return passed(skip_first_batches(loader, skip) if skip else loader)


def on_two() -> dict[str, Any]:
    found: dict[str, Any] = {
        "10": stream(10),
        "9": stream(9),
        "7": stream(7),
        "8": stream(8),
        "1": stream(1),
        "0": stream(0),
        "split": stream(9, 4, split_batches=True),
        "dropped": stream(9, drop_last=True),
        "dropped whole": stream(10, drop_last=True),
        "skipped": stream(10, skip=1),
        "by default": stream(7, dispatch_batches=None),
        "items": passed(dispatched([torch.tensor(number) for number in range(3)])),
    }
    again = dispatched(DataLoader(Stream(4), batch_size=2))
    found["again"] = [passed(again), passed(again), again.iteration]
    indexed = dispatched(DataLoader(list(range(5)), batch_size=2, shuffle=True), data_seed=42)
    found["length"] = [len(indexed), len(skip_first_batches(indexed, 1)), indexed.is_even, indexed.even_batches]
    found["shuffled"] = passed(indexed)[0]
    return found


def test_f9_the_main_process_hands_out_what_it_reads(two_processes: Any) -> None:
    first, second = two_processes(on_two)
    assert [first["10"][0], second["10"][0]] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    assert [first["9"][0][-1], second["9"][0][-1]] == [[8], [0]]
    assert [first["7"][0], second["7"][0]] == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert [first["8"][0], second["8"][0]] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [first["1"][0], second["1"][0]] == [[[0]], [[0]]]
    assert first["0"] == second["0"] == ([], [])
    assert [found["10"][1][-1] for found in (first, second)] == [2, 2]
    assert [found["9"][1][-1] for found in (first, second)] == [1, 1]
    assert [found["7"][1][-1] for found in (first, second)] == [3, 3]
    assert [first["split"], second["split"]] == [
        ([[0, 1], [4, 5], [8]], [-1, -1, 1]),
        ([[2, 3], [6, 7], [0]], [-1, -1, 1]),
    ]
    for dropped in ("dropped", "dropped whole"):
        assert [first[dropped][0], second[dropped][0]] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [first["skipped"][0], second["skipped"][0]] == [[[4, 5], [8]], [[6, 7], [9]]]
    assert first["by default"] == first["7"]
    assert [first["items"], second["items"]] == [([0, 2], [-1, 1]), ([1, 0], [-1, 1])]
    assert first["again"] == [([[0, 1]], [4])] * 2 + [2]
    assert first["length"] == second["length"] == [2, 1, True, None]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(42)).tolist()
    assert first["shuffled"] + second["shuffled"] == [order[:2], order[4:], order[2:4], order[:1]]


def on_three() -> Any:
    return stream(10)


def test_f9_on_three_processes(three_processes: Any) -> None:
    found = three_processes(on_three)
    assert [batches[-1] for batches, _ in found] == [[6, 7], [8, 9], [0, 1]]
    assert [remainders[-1] for _, remainders in found] == [4, 4, 4]


def all_kinds() -> list[Any]:
    batches = [
        {
            "x": torch.full((2, 3), float(index), dtype=torch.bfloat16),
            "pair": Pair(torch.tensor([True, False]), [torch.empty(2, 0), torch.tensor([1j, 2]) * index]),
            "strided": torch.arange(12).reshape(2, 6)[:, ::2] + index,
        }
        for index in range(2)
    ]
    loader = dispatched([*batches, {"lengths": torch.ones(2, 5)}, {"lengths": torch.ones(2, 7)}])
    first, other = list(loader)
    pair = first["pair"]
    return [
        first["x"].dtype, first["x"].float().tolist(), type(pair).__name__, pair.left.tolist(),
        tuple(pair.right[0].shape), pair.right[1].tolist(), first["strided"].tolist(), tuple(other["lengths"].shape),
    ]  # fmt: skip


def test_any_nesting_type_and_shape_is_sent(two_processes: Any) -> None:
    """Batches of one round need not be of one shape, as they have to be in Accelerate."""
    for index, found in enumerate(two_processes(all_kinds)):
        assert found == [
            torch.bfloat16, [[float(index)] * 3] * 2, "Pair", [True, False], (2, 0), [1j * index, 2 * index],
            [[index, 2 + index, 4 + index], [6 + index, 8 + index, 10 + index]], (2, (5, 7)[index]),
        ]  # fmt: skip


class Words(IterableDataset[Any]):
    """A number and its word."""

    def __iter__(self) -> Iterator[Any]:
        yield from enumerate(("zero", "one", "two", "three", "four"))


def texts() -> Any:
    loader = dispatched(DataLoader(Words(), batch_size=1))
    return [(number.tolist(), words, loader.remainder) for number, words in loader]


def test_what_is_no_tensor_is_sent_as_well(two_processes: Any) -> None:
    first, second = two_processes(texts)
    assert first == [([0], ("zero",), -1), ([2], ("two",), -1), ([4], ("four",), 1)]
    assert second == [([1], ("one",), -1), ([3], ("three",), -1), ([0], ("zero",), 1)]


def sliced() -> tuple[list[Any], list[Any]]:
    """Each process takes every second sample of what was read."""
    calls: list[Any] = []

    def every_second(batch: Tensor, part: slice, process_index: int, num_processes: int) -> Tensor:
        calls.append((part.start, part.stop, process_index))
        return batch[process_index::num_processes]

    return passed(dispatched(DataLoader(Stream(8), batch_size=2), every_second))[0], calls


def test_a_slice_function_cuts_the_parts(two_processes: Any) -> None:
    (first, calls), (second, no_calls) = two_processes(sliced)
    assert [first, second] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert (calls[:2], no_calls) == ([(0, 2, 0), (2, 4, 1)], [])


def refused(loader: Any, **options: Any) -> str:
    seen = 0
    try:
        for _ in dispatched(loader, **options):
            seen += 1
    except (DataError, OSError) as error:
        return f"{seen} {type(error).__name__}: {error}"
    return "no error"


def failures() -> list[str]:
    unsendable = [{"x": torch.ones(2), "text": ["a", lambda: "b"]}] * 2
    texts = [{"x": torch.ones(2), "text": ["a", "b"]}] * 2
    return [
        refused(DataLoader(Stream(10, fails_at=5), batch_size=1)),
        refused(unsendable),
        refused([torch.ones(2), torch.ones(2, 3)], split_batches=True),
        refused([torch.tensor(1.0)], split_batches=True),
        refused(texts, split_batches=True),
        refused([torch.ones(2), torch.ones(3, 2)], slice_fn=lambda batch, part, **_: batch[part]),
    ]


def test_what_the_main_process_can_not_read_or_send_is_an_error_on_all(two_processes: Any) -> None:
    first, second = two_processes(failures)
    assert first[0] == "1 OSError: sample 5 is damaged"
    assert second[0].startswith("1 DataError: the main process could not read the next batch")
    assert "OSError: sample 5 is damaged" in second[0]
    for text in (first[1], second[1]):
        assert text.startswith("0 DataError")
        assert "can't hand out a batch, since it holds what can't be pickled" in text
        assert "dispatch_batches=False" in text
    assert first[2] == second[2] == "no error", "each batch is split alone"
    for text in (first[3], second[3]):
        assert "batch is a tensor without a dimension" in text
    for text in (first[4], second[4]):
        assert "batch['text'] is a list" in text
        assert "Leave split_batches out" in text
    for text in (first[5], second[5]):
        assert "batches of one round can't be joined to be split among processes" in text


@pytest.mark.parametrize("count", [5, 6])
def test_one_process_reads_for_itself(count: int) -> None:
    """No dispatcher there: the batches are those of the loader."""
    batches, _ = passed(dispatched(DataLoader(Stream(count), batch_size=2)))
    assert [sample for batch in batches for sample in batch] == list(range(count))
