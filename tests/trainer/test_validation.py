"""Validation inside training: when it is due, and that it leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import ConfigError, DataError
from loopwright.trainer.task import Task

from .tiny import Recorder, Scalar, Watch, batches, fit, ones, tracked, trainer


def due(train: int, every: Any, **options: Any) -> list[int]:
    """The micro-steps at which validation took place."""
    seen: list[int] = []
    watch = Watch(validation_start=lambda trainer, task: seen.append(trainer.state.micro_step))
    fit(Scalar(), ones(train), ones(1), val_every=every, callbacks=watch, **options)
    return seen


class TestDue:
    @pytest.mark.parametrize(
        ("every", "expected"),
        [
            ("1 epoch", [4, 8, 12]),
            ("2 epochs", [8]),
            ("0.5 epoch", [2, 4, 6, 8, 10, 12]),
            (3, [3, 6, 9, 12]),
            ("5 steps", [5, 10]),
            ("7 batches", [7]),
            ("6 samples", [6, 12]),
            (["5 steps", "1 epoch"], [4, 5, 8, 10, 12]),
            ("first", [1]),
            ("last", [12]),
            (["first", "last"], [1, 12]),
            (["5 steps", "last"], [5, 10, 12]),
            (["4 steps", "last"], [4, 8, 12]),
            (None, []),
            ("100 steps", []),
        ],
    )
    @pytest.mark.filterwarnings("ignore:validation never ran")
    def test_without_accumulation(self, every: Any, expected: list[int]) -> None:
        assert due(4, every, max_epochs=3) == expected

    @pytest.mark.parametrize(
        ("every", "expected"),
        [
            # Windows end at micro-steps 3 6 8, 11 14 16.
            ("2 steps", [6, 11, 16]),
            ("4 batches", [6, 8, 14, 16]),
            ("1 batch", [3, 6, 8, 11, 14, 16]),
            ("0.5 epoch", [6, 8, 14, 16]),
            ("1 epoch", [8, 16]),
            ("7 samples", [8, 14]),
        ],
    )
    def test_with_accumulation(self, every: Any, expected: list[int]) -> None:
        assert due(8, every, accumulate=3, max_epochs=2) == expected

    def test_tenths_of_an_epoch(self) -> None:
        assert due(10, "0.1 epoch", max_epochs=2) == list(range(1, 21))
        assert due(10, "0.3 epoch", max_epochs=2) == [3, 6, 9, 12, 15, 18]

    def test_never_without_data(self) -> None:
        recorder = Recorder()
        fit(Scalar(), ones(2), callbacks=recorder)
        assert recorder.count("validation_start") == 0

    def test_at_the_end_of_a_run_that_was_stopped(self) -> None:
        seen: list[int] = []
        watch = Watch(
            validation_start=lambda trainer, task: seen.append(trainer.state.step),
            step=lambda trainer, task, outcome: trainer.state.step == 3 and trainer.stop("enough"),
        )
        fit(Scalar(), ones(9), ones(1), val_every="last", callbacks=watch)
        assert seen == [3]

    def test_a_fraction_of_an_epoch_without_a_length(self) -> None:
        with pytest.raises(
            DataError, match=r"val_every='0.5 epochs' is a fraction of an epoch, but the training loader"
        ):
            fit(Scalar(), (x for x in ones(3)), ones(1), val_every="0.5 epoch")
        # Nobody validates, so that nobody needs the length.
        fit(Scalar(), (x for x in ones(3)), val_every="0.5 epoch")

    def test_whole_epochs_without_a_length(self) -> None:
        class Stream:
            def __iter__(self) -> Any:
                return iter(ones(3))

        recorder = Recorder()
        fit(Scalar(), Stream(), ones(1), max_epochs=3, callbacks=recorder)
        assert recorder.count("validation_start") == 3

    @pytest.mark.parametrize(
        ("every", "message"),
        [
            (0, r"val_every=0: a duration of 0 steps is empty"),
            ("1 epcoh", r"val_every='1 epcoh' has an unknown unit 'epcoh'. Did you mean 'epoch'"),
            (2.5, r"val_every=2.5: 2.5 steps is not a whole number"),
            (True, r"val_every=True is no duration"),
            (["1 epoch", "often"], r"val_every='often' can't be read"),
        ],
    )
    def test_wrong_ones(self, every: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            trainer(val_every=every)


class Noisy(Task):
    """Draws random numbers wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.01 * (torch.rand(()) + random.random() + np.random.rand())
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        noise = torch.rand(()) + random.random() + np.random.rand()
        self.net[2].train()  # keeps its dropout on purpose
        self.log("val", (self.net(x + noise) - y).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def noisy_weights(validates: bool = True, **options: Any) -> Tensor:
    found = trainer(seed=0, max_epochs=3, **options)
    task = Noisy()
    data = TensorDataset(torch.arange(60.0).reshape(20, 3) / 60, torch.arange(20.0).reshape(20, 1) / 20)
    found.fit(task, DataLoader(data, 4, shuffle=True), DataLoader(data, 5, shuffle=True) if validates else None)
    return nn.utils.parameters_to_vector([*task.parameters(), *(b.float() for b in task.buffers())]).detach()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"val_every": "2 epochs"}, {"val_every": 1}, {"val_every": ["first", "3 batches", "last"]},
        {"sanity_val_batches": 2}, {"limit_batches": {"val": 1}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_weights_are_bit_equal_to_those_without_validation(options: Any, precision: str, accumulate: int) -> None:
    alone = noisy_weights(validates=False, precision=precision, accumulate=accumulate)
    assert torch.equal(noisy_weights(precision=precision, accumulate=accumulate, **options), alone)


def test_a_window_that_is_carried_survives_validation() -> None:
    # Windows of 2 over epochs of 3: the third batch waits over a validation that runs backward itself.
    class Meddles(Scalar):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            with torch.enable_grad():
                (self.w * 100).backward()
            self.trainer.strategy.gradient_state.sync_gradients = True
            self.trainer.strategy.gradient_state.window_size = 77

    task = Meddles()
    found = fit(
        task,
        batches(1, 2, 4),
        ones(2),
        accumulate=2,
        accumulate_across_epochs="carry",
        max_epochs=2,
        val_every="1 batch",
    )
    assert found.state.step == 3
    assert task.value == -(3 / 2 + 5 / 2 + 6 / 2)


class TestModes:
    class Net(Task):
        """A batch norm that is trained, a frozen one, and a dropout that was switched off by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))
            self.trained, self.frozen, self.off = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Dropout(0.5)
            self.frozen.eval()
            self.off.eval()
            self.seen: list[tuple[bool, ...]] = []
            self.fails = False

        def modes(self) -> tuple[bool, ...]:
            return self.training, self.trained.training, self.frozen.training, self.off.training

        def step(self, batch: Tensor) -> Tensor:
            self.seen.append(self.modes())
            return self.off(self.frozen(self.trained(batch))).mean() + self.w

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.step(batch)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            assert not torch.is_grad_enabled()
            self.step(batch)
            if self.fails:
                raise ValueError("broken")

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.w], lr=1.0)

    DATA = [torch.tensor([[1.0, 2.0], [3.0, 5.0]])] * 2
    AS_GIVEN, EVALUATION = (True, True, False, False), (False,) * 4

    def test_in_fit(self) -> None:
        task = self.Net()
        fit(task, self.DATA, self.DATA[:1], sanity_val_batches=1)
        assert task.seen == [self.EVALUATION, self.AS_GIVEN, self.AS_GIVEN, self.EVALUATION]
        assert task.modes() == self.AS_GIVEN
        assert task.frozen.num_batches_tracked == 0
        assert task.trained.num_batches_tracked == 2

    def test_a_task_in_eval_mode_is_trained_and_put_back(self) -> None:
        task = self.Net().eval()
        fit(task, self.DATA)
        assert task.seen == [(True,) * 4] * 2
        assert task.modes() == self.EVALUATION

    @pytest.mark.parametrize("stage", ["validate", "test", "predict"])
    @pytest.mark.parametrize("fails", [False, True])
    def test_in_an_evaluation(self, stage: str, fails: bool) -> None:
        task = self.Net()
        task.fails = fails
        if fails:
            with pytest.raises(ValueError, match="broken"):
                getattr(trainer(), stage)(task, self.DATA)
        else:
            getattr(trainer(), stage)(task, self.DATA)
            assert task.seen == [self.EVALUATION] * 2
        assert task.modes() == self.AS_GIVEN
        assert torch.is_grad_enabled()

    def test_after_an_exception_in_validation_inside_fit(self) -> None:
        task = self.Net()
        task.fails = True
        with pytest.raises(ValueError, match="broken"):
            fit(task, self.DATA, self.DATA)
        assert task.modes() == self.AS_GIVEN

    def test_a_mode_that_validation_changes_is_put_back(self) -> None:
        task = self.Net()
        watch = Watch(validation_start=lambda trainer, task: task.trained.train())
        fit(task, self.DATA, self.DATA[:1], max_epochs=2, callbacks=watch)
        assert task.seen[2] == (False, True, False, False)
        assert task.seen[3] == self.AS_GIVEN

    def test_a_mode_that_training_changes_stays_until_the_end(self) -> None:
        task = self.Net()
        fit(task, self.DATA, self.DATA[:1], callbacks=Watch(epoch_start=lambda trainer, task: task.trained.eval()))
        assert task.seen[:2] == [(True, False, False, False)] * 2
        assert task.modes() == self.AS_GIVEN


def test_autocast_is_not_nested_into_validation() -> None:
    seen: list[bool] = []

    class Looks(Scalar):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

    fit(Looks(), ones(1), ones(1))
    fit(Looks(), ones(1), ones(1), precision="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trainer().validate(Looks(), ones(1))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, True, False]


class TestSanity:
    def test_the_first_batches_without_events_or_metrics(self) -> None:
        seen: list[float] = []

        class Sees(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                seen.append(batch.item())
                self.log("val", batch.mean(), progress_bar=True)

        recorder = Recorder()
        found = trainer(sanity_val_batches=2, callbacks=[recorder, Watch(epoch_start=keep_metrics)])
        found.fit(Sees(), ones(1), batches(1, 2, 3))
        assert seen == [1, 2, 1, 2, 3]
        assert recorder.count("validation_start") == 1
        assert recorder.count("validation_batch_start") == 3
        assert keep_metrics.seen == [({}, {})]
        keep_metrics.seen.clear()

    def test_no_more_than_validation_itself(self) -> None:
        seen: list[float] = []

        class Sees(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                seen.append(batch.item())

        fit(Sees(), ones(1), batches(1, 2, 3), sanity_val_batches=2, limit_batches={"val": 1})
        assert seen == [1, 1]

    def test_an_error_costs_no_epoch(self) -> None:
        class Broken(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                raise ValueError("broken")

        recorder = Recorder()
        with pytest.raises(ValueError, match="broken"):
            fit(Broken(), ones(3), ones(1), sanity_val_batches=2, callbacks=recorder)
        assert recorder.log == ["setup", "fit_start", "exception", "fit_end", "teardown"]

    @pytest.mark.parametrize("value", [-1, 0.5, True, None])
    def test_wrong_ones(self, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"sanity_val_batches={value!r}. Expected an integer >= 0"):
            trainer(sanity_val_batches=value)


def keep_metrics(trainer: Any, task: Any) -> None:
    keep_metrics.seen.append((dict(trainer.metrics), dict(trainer.progress_metrics)))


keep_metrics.seen = []


class TestSeveralLoaders:
    def test_a_mapping_names_its_metrics(self) -> None:
        records = tracked(Scalar(), ones(1), {"a": batches(1, 3), "b": batches(5)})
        assert records == [(1, {"val/a": 2, "val/b": 5, "epoch": 1})]

    def test_a_list_numbers_them(self) -> None:
        loaders = [DataLoader(torch.tensor([1.0, 3.0])), DataLoader(torch.tensor([5.0]))]
        assert trainer().validate(Scalar(), loaders) == {"val/dataloader_idx_0": 2, "val/dataloader_idx_1": 5}

    def test_a_list_of_batches_is_one_loader(self) -> None:
        assert trainer().validate(Scalar(), batches(1, 3)) == {"val": 2}

    def test_one_alone_has_no_ending(self) -> None:
        assert trainer().validate(Scalar(), {"a": batches(1, 3)}) == {"val": 2}
        assert trainer().validate(Scalar(), [DataLoader(torch.tensor([1.0, 3.0]))]) == {"val": 2}

    def test_the_step_may_ask_which_it_is(self) -> None:
        seen: list[tuple[float, int, int]] = []

        class Asks(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
                seen.append((batch.item(), batch_idx, dataloader_idx))

        fit(Asks(), ones(1), {"a": batches(1, 2), "b": batches(3)}, sanity_val_batches=1)
        whole = [(1, 0, 0), (2, 1, 0), (3, 0, 1)]
        assert seen == [(1, 0, 0), (3, 0, 1), *whole]

    def test_one_of_them_empty(self) -> None:
        with pytest.warns(UserWarning, match="the validation loader/b gave no batch"):
            assert trainer().validate(Scalar(), {"a": batches(1), "b": []}) == {"val/a": 1}


def test_a_loader_that_stops_short_is_an_error() -> None:
    # A StopIteration of the dataset must not make the evaluation quietly smaller.
    class Short(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Tensor:
            if index == 3:
                raise StopIteration
            return torch.ones(1)

    with pytest.raises(DataError, match=r"the loader ended after 3 of its 6 batches"):
        trainer().validate(Scalar(), DataLoader(Short(), batch_size=1))
    with pytest.raises(DataError, match=r"the loader ended after 3 of its 6 batches"):
        fit(Scalar(), DataLoader(Short(), batch_size=1))


def test_a_stop_in_validation_lets_it_finish() -> None:
    recorder = Recorder()

    class Stops(Callback):
        def on_validation_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
            trainer.stop("enough")

    found = fit(Scalar(), ones(3), ones(4), val_every=1, callbacks=[recorder, Stops()])
    assert recorder.count("validation_batch_end") == 4
    assert (found.state.step, found.metrics["val"]) == (1, 1)
