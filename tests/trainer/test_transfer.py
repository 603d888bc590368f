"""The Trainer has the next batch copied while the present one is computed. A pretended stream shows the order.

What only a device shows is in test_gpu.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import EndEpoch, SkipBatch

from ..data.pretend_stream import PretendStream, number
from .tiny import Scalar, Watch, fit, trainer


class Told(Scalar):
    """Writes down which batches it computes."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.told = log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.told.append(f"train {number(batch)}")
        assert type(batch) is Tensor
        return (self.w * batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.told.append(f"val {number(batch)}")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.told.append(f"predict {number(batch)}")
        return batch * 2


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> PretendStream:
    found = PretendStream()
    found.serve(monkeypatch)
    return found


def in_turn(first: int, last: int, use: str = "train") -> list[str]:
    """The log of a pass in which each batch goes ahead of the use of the one before it."""
    log = [f"copy {first}"]
    for current in range(first, last):
        log += [f"ahead {current + 1}", f"{use} {current}", f"take {current + 1}"]
    return [*log, f"{use} {last}"]


@pytest.mark.parametrize("accumulate", [1, 2, 3, 5, 7])
def test_in_a_window_and_from_one_to_the_next(stream: PretendStream, accumulate: int) -> None:
    batches = stream.batches(1, 2, 3, 4, 5)
    fit(Told(stream.log), batches, max_epochs=2, accumulate=accumulate, accumulate_across_epochs="carry")
    assert stream.log == in_turn(1, 5) * 2


def test_one_batch_at_most_is_there_beyond_the_one_in_use(stream: PretendStream) -> None:
    fit(Told(stream.log), stream.batches(*range(1, 10)), accumulate=4)
    assert stream.most_alive == 2


def test_batches_that_are_dropped_are_not_moved(stream: PretendStream) -> None:
    fit(Told(stream.log), stream.batches(1, 2, 3, 4, 5), accumulate=2, accumulate_across_epochs="drop")
    assert stream.log == in_turn(1, 4)


def test_what_was_moved_and_not_trained_is_not_counted(stream: PretendStream) -> None:
    found = fit(Told(stream.log), stream.batches(1, 2, 3, 4, 5), max_steps=2)
    state = found.state
    assert stream.log[-2:] == ["ahead 3", "train 2"]
    assert (state.batch, state.micro_step, state.step, state.samples) == (2, 2, 2, 2)


def test_an_epoch_that_is_cut_forgets_what_was_moved(stream: PretendStream) -> None:
    def cut(trainer: Any, task: Any, batch: Any, index: int) -> None:
        if index == 1:
            raise EndEpoch

    batches = stream.batches(1, 2, 3)
    fit(Told(stream.log), batches, max_epochs=2, callbacks=Watch(batch_start=cut))
    assert stream.log == ["copy 1", "ahead 2", "train 1", "take 2", "ahead 3"] * 2


def test_a_batch_that_is_skipped_has_its_turn(stream: PretendStream) -> None:
    def skip(trainer: Any, task: Any, batch: Any, index: int) -> None:
        if index == 1:
            raise SkipBatch

    fit(Told(stream.log), stream.batches(1, 2, 3), callbacks=Watch(batch_start=skip))
    assert stream.log == [entry for entry in in_turn(1, 3) if entry != "train 2"]


def test_an_error_in_moving_comes_when_the_batch_has_its_turn(stream: PretendStream) -> None:
    found = trainer()
    with pytest.raises(ValueError, match="batch 3 can't be moved"):
        found.fit(Told(stream.log), stream.batches(1, 2, 3, 4, fail=3))
    assert stream.log[-3:] == ["ahead 3", "train 2", "copy 3"]
    assert (found.state.batch, found.state.step) == (2, 2)
    # And not at all where the run ends before it.
    fit(Told(stream.log), stream.batches(1, 2, 3, fail=3), max_steps=2)


def test_validation_and_prediction(stream: PretendStream) -> None:
    val = stream.batches(11, 12, 13)
    found = fit(Told(stream.log), stream.batches(1, 2), val, val_every="1 step")
    head, tail = ["copy 1", "ahead 2", "train 1"], ["take 2", "train 2"]
    assert stream.log == [*head, *in_turn(11, 13, "val"), *tail, *in_turn(11, 13, "val")]
    stream.log.clear()
    outputs = found.predict(Told(stream.log), val)
    assert stream.log == in_turn(11, 13, "predict")
    assert [number(each) for each in outputs] == [22, 24, 26]


def test_weights_order_and_random_states_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)
            self.seen: list[list[float]] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.seen.append(batch.tolist())
            return self.dropout(self.w * batch).mean()

    def run() -> tuple[Any, float, list[float]]:
        task = Net()
        loader = DataLoader(torch.arange(12.0), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        fit(task, loader, loader, max_epochs=2, accumulate=2, seed=3)
        return task.seen, task.value, torch.rand(2).tolist()

    plain = run()
    PretendStream().serve(monkeypatch)
    assert run() == plain
