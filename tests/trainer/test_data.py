"""What a Trainer takes as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loopwright.data.combined import CombinedLoader
from loopwright.distributed.errors import DataError
from loopwright.trainer.task import Task

from .tiny import Recorder, Scalar, Watch, batches, fit, ones


class Seen(Scalar):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(plain(batch))
        return self.w * 1


def plain(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.item() if batch.numel() == 1 else batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch


class Again:
    """Can be iterated any number of times, and has no length."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Tensor]:
        return iter(batches(*self.values))


@pytest.mark.parametrize(
    "data",
    [
        batches(1, 2), tuple(batches(1, 2)), Again(1, 2), DataLoader(torch.tensor([1.0, 2.0])),
        DataLoader(torch.tensor([[1.0], [2.0]]), batch_size=None),
    ],
    ids=["list", "tuple", "iterable", "loader", "unbatched"],
)  # fmt: skip
def test_any_iterable_of_batches(data: Any) -> None:
    task = Seen()
    fit(task, data, max_epochs=2)
    assert task.seen == [1, 2, 1, 2]


@pytest.mark.parametrize("make", [lambda: (b for b in batches(1, 2)), lambda: iter(batches(1, 2))])
def test_a_one_shot_iterator_is_one_epoch(make: Any) -> None:
    task = Seen()
    fit(task, make())
    assert task.seen == [1, 2]
    with pytest.warns(UserWarning, match="the training loader gave no batch in epoch 1: it can be iterated only once"):
        found = fit(Seen(), make(), max_epochs=3)
    assert (found.state.step, found.state.epoch, found.stop_reason) == (2, 1, "the training data is used up")


def test_samplers_are_told_the_epoch() -> None:
    class Sampler(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            self.epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch, self.epoch])

        def __len__(self) -> int:
            return 2

    class Data(Dataset[Tensor]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index * 10.0 + self.epoch])

        def __len__(self) -> int:
            return 100

    task = Seen()
    fit(task, DataLoader(Data(), sampler=Sampler()), max_epochs=3)
    assert task.seen == [0, 0, 11, 11, 22, 22]


def test_shuffling_differs_between_epochs_and_repeats_with_the_seed() -> None:
    runs = []
    for _ in range(2):
        task = Seen()
        fit(task, DataLoader(torch.arange(12.0), shuffle=True), max_epochs=2, seed=5)
        runs.append(task.seen)
    assert runs[0] == runs[1]
    first, second = runs[0][:12], runs[0][12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_the_window_is_fetched_before_its_first_batch_is_used() -> None:
    log: list[str] = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            for index in range(4):
                log.append(f"fetch {index}")
                yield torch.ones(1)
            log.append("end")

    watch = Watch(batch_start=lambda trainer, task, batch, index: log.append(f"use {index}"))
    fit(Scalar(), Loader(), accumulate=2, callbacks=watch)
    assert log == [
        "fetch 0", "fetch 1", "fetch 2", "use 0", "use 1", "fetch 3", "end", "use 2", "use 3",
    ]  # fmt: skip


def test_waiting_for_data_is_measured() -> None:
    import time

    class Slow:
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(3):
                time.sleep(0.02)
                yield torch.ones(1)

    found = fit(Scalar(), Slow(), max_epochs=2)
    assert 0.12 <= found.data_wait_seconds < found.state.seconds + 0.01


class TestCombined:
    def test_a_mapping_is_read_as_one_loader(self) -> None:
        task = Seen()
        fit(task, {"a": batches(1, 2, 3), "b": batches(10, 20)})
        assert task.seen == [{"a": 1, "b": 10}, {"a": 2, "b": 20}, {"a": 3, "b": 10}]

    def test_a_list_of_loaders_as_well(self) -> None:
        task = Seen()
        fit(task, [DataLoader(torch.tensor([1.0, 2.0])), DataLoader(torch.tensor([10.0]))])
        assert task.seen == [[1, 10], [2, 10]]

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("min_size", [[1, 10], [2, 20]]),
            ("max_size_cycle", [[1, 10], [2, 20], [3, 10]]),
            ("max_size", [[1, 10], [2, 20], [3, None]]),
            ("sequential", [1, 2, 3, 10, 20]),
        ],
    )
    def test_in_every_mode(self, mode: Any, expected: list[Any]) -> None:
        task = Seen()
        found = fit(task, CombinedLoader([batches(1, 2, 3), batches(10, 20)], mode), max_epochs=2, accumulate=2)
        assert task.seen == expected * 2
        assert found.state.epoch == 2
        assert found.state.batches_per_epoch == len(expected)

    def test_shuffled_loaders_are_told_the_epoch(self) -> None:
        class Data(Dataset[Tensor]):
            epoch = -1

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __getitem__(self, index: int) -> Tensor:
                return torch.tensor([float(self.epoch)])

            def __len__(self) -> int:
                return 1

        task = Seen()
        fit(task, {"a": DataLoader(Data(), collate_fn=lambda items: items[0])}, max_epochs=3)
        assert [batch["a"] for batch in task.seen] == [0, 1, 2]


class TestEmpty:
    class Nothing(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(())

    @pytest.mark.parametrize("make", [list, lambda: DataLoader([]), lambda: CombinedLoader([[], ones(1)])])
    def test_a_length_of_0(self, make: Any) -> None:
        with pytest.raises(
            DataError, match=r"the training loader \(\w+\) has no batch: its length is 0. Check its dataset"
        ):
            fit(Scalar(), make())

    def test_drop_last_that_leaves_nothing(self) -> None:
        with pytest.raises(DataError, match=r"has no batch.*drop_last with a batch size larger than the data"):
            fit(Scalar(), DataLoader(torch.ones(3), batch_size=4, drop_last=True))

    @pytest.mark.parametrize("make", [lambda: DataLoader(TestEmpty.Nothing()), lambda: iter(()), lambda: Again()])
    def test_a_stream_of_nothing(self, make: Any) -> None:
        recorder = Recorder()
        with pytest.raises(DataError, match=r"the training loader gave no batch. Check its dataset, its sampler"):
            fit(Scalar(), make(), callbacks=recorder)
        assert recorder.log == ["setup", "fit_start", "epoch_start", "exception", "epoch_end", "fit_end", "teardown"]

    @pytest.mark.parametrize("limit", [0, 0.0, 0.1])
    def test_a_limit_that_leaves_nothing(self, limit: Any) -> None:
        with pytest.raises(DataError, match=r"limit_batches leaves no training batch. Give at least one"):
            fit(Scalar(), ones(5), limit_batches={"train": limit})

    @pytest.mark.parametrize("val", [[], DataLoader([]), DataLoader(Nothing())], ids=["list", "loader", "stream"])
    def test_validation_alone(self, val: Any) -> None:
        recorder = Recorder()
        with pytest.warns(UserWarning, match="the validation loader gave no batch"):
            found = fit(Scalar(), ones(2), val, callbacks=recorder)
        assert found.state.step == 2
        assert "val" not in found.metrics
        assert recorder.count("validation_start") == recorder.count("validation_end") == 1


class TestWrong:
    @pytest.mark.parametrize("data", [3, "data", b"data", object()])
    def test_what_can_not_be_iterated(self, data: Any) -> None:
        with pytest.raises(
            DataError, match=r"the training data is a \w+, which can't be iterated. Expected an iterable"
        ):
            fit(Scalar(), data)
        with pytest.raises(DataError, match=r"the val data is a \w+, which can't be iterated"):
            fit(Scalar(), ones(1), data)

    def test_no_data(self) -> None:
        with pytest.raises(DataError, match=r"there is no training data. Pass train= to trainer.fit, or give the task"):
            fit(Scalar())

    @pytest.mark.parametrize(
        "options",
        [{"max_epochs": 1.5}, {"log_every": "0.5 epoch"}, {"limit_batches": 0.5}],
        ids=["epochs", "log", "limit"],
    )
    def test_a_loader_without_a_length_where_one_is_needed(self, options: Any) -> None:
        with pytest.raises(DataError, match=r"(?s)(max_epochs=1.5|log_every='0.5 epochs'|limit_batches=0.5).*length"):
            fit(Scalar(), Again(1, 2), **options)

    def test_validation_needs_its_step(self) -> None:
        class Bare(Scalar):
            validation_step = Task.validation_step

        with pytest.raises(
            TypeError, match=r"there is validation data, but Bare has no validation_step. Override it, or"
        ):
            fit(Bare(), ones(1), ones(1))


def test_a_dataset_that_raises_stop_iteration_is_an_error() -> None:
    class Short(Dataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Tensor:
            if index == 3:
                raise StopIteration
            return torch.ones(1)

    for options in ({}, {"accumulate": 2}, {"limit_batches": 5}):
        with pytest.raises(DataError, match=r"ended after 3 of its 6 batches. Its dataset or collate function raised"):
            fit(Scalar(), DataLoader(Short()), **options)
    assert fit(Scalar(), DataLoader(Short()), limit_batches=3).state.step == 3


def test_a_loader_whose_length_is_an_estimate() -> None:
    class Estimate(Again):
        def __len__(self) -> int:
            return 10

    assert fit(Scalar(), Estimate(1, 2, 3), max_epochs=2).state.step == 6

    class Longer(Again):
        def __len__(self) -> int:
            return 2

    assert fit(Scalar(), Longer(1, 2, 3), max_epochs=2).state.step == 6
