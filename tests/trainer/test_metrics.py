"""Logged metrics: their values, weights, names and records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import DataError, MetricError
from loopwright.trainer.metrics import MetricLog
from loopwright.trainer.task import Task

from .tiny import Loss, Scalar, Watch, batches, count_calls, fit, ones, tracked, trainer


class Logs(Scalar):
    """Logs in each training and validation step what a function says: `function(log, batch, index)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.function(self.log, batch, batch_idx)
        return self.w * 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.function(self.log, batch, batch_idx)


def epoch_of(function: Callable[..., Any], data: Any) -> dict[str, float]:
    """The means of one validation."""
    return trainer().validate(Logs(function), data)


class TestRecords:
    def test_by_default_training_logs_steps_and_evaluation_its_mean(self) -> None:
        records = tracked(
            Logs(lambda log, batch, index: log("a", batch.mean())), batches(1, 2, 3), batches(5, 7), log_every=1
        )
        assert records == [
            (1, {"a": 1, "epoch": pytest.approx(1 / 3)}),
            (2, {"a": 2, "epoch": pytest.approx(2 / 3)}),
            (3, {"a": 3, "epoch": 1}),
            (3, {"a": 6, "epoch": 1}),
        ]

    def test_both_in_training_have_endings(self) -> None:
        records = tracked(
            Logs(lambda log, batch, index: log("a", batch.mean(), on_epoch=True)), batches(1, 2, 6), log_every="2 steps"
        )
        assert records == [
            (2, {"a_step": 2, "epoch": pytest.approx(2 / 3)}),
            (3, {"a_epoch": 3, "epoch": 1}),
            (3, {"a_step": 6, "epoch": 1}),  # the run's last
        ]

    def test_the_epoch_alone(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean(), on_step=False, on_epoch=True))
        records = tracked(logs, batches(1, 2, 6), log_every=1, max_epochs=2)
        assert [record for record in records if "a" in record[1]] == [
            (3, {"a": 3, "epoch": 1}),
            (6, {"a": 3, "epoch": 2}),
        ]

    def test_neither(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean(), on_step=False))
        assert all("a" not in metrics for _, metrics in tracked(logs, batches(1, 2), log_every=1))

    def test_a_step_record_is_that_of_the_newest_window(self) -> None:
        # Windows (1, 2), (3, 6); each record its own mean, weighted by samples.
        records = tracked(
            Logs(lambda log, batch, index: log("a", batch.mean())), batches(1, 2, 3, 6), accumulate=2, log_every=1
        )
        assert [(step, metrics["a"]) for step, metrics in records] == [(1, 1.5), (2, 4.5)]

    def test_a_window_without_the_metric_has_none(self) -> None:
        records = tracked(
            Logs(lambda log, batch, index: log("a", 1.0) if index % 2 else log("b", 2.0)), batches(1, 2, 3), log_every=1
        )
        assert [sorted(metrics) for _, metrics in records] == [["b", "epoch"], ["a", "epoch"], ["b", "epoch"]]

    @pytest.mark.parametrize(
        ("every", "steps"),
        [
            ("2 steps", [2, 4, 6, 7]), (3, [3, 6, 7]), ("1 epoch", [3, 6, 7]), ("first", [1, 7]), ("last", [7]),
            (["first", "3 steps", "last"], [1, 3, 6, 7]), ("7 steps", [7]), (["7 steps", "last"], [7]), ("never", []),
        ],
    )  # fmt: skip
    def test_when(self, every: Any, steps: list[int]) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean()))
        records = tracked(logs, batches(1, 2, 3), max_steps=7, log_every=every)
        assert [step for step, metrics in records] == steps
        values = {1: 1, 2: 2, 3: 3, 4: 1, 6: 3, 7: 1}
        assert all(metrics["a"] == values[step] for step, metrics in records)

    def test_the_last_step_at_the_end_of_an_epoch(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean(), on_epoch=True))
        records = tracked(logs, batches(1, 2, 6), max_epochs=2, log_every="last")
        assert records == [
            (3, {"a_epoch": 3, "epoch": 1}), (6, {"a_epoch": 3, "epoch": 2}), (6, {"a_step": 6, "epoch": 2}),
        ]  # fmt: skip

    def test_the_last_step_of_a_run_that_was_stopped(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean()))
        stop = Watch(step=lambda trainer, task, outcome: trainer.state.step == 2 and trainer.stop("enough"))
        assert tracked(logs, batches(1, 2, 6), log_every="last", callbacks=stop) == [
            (2, {"a": 2, "epoch": pytest.approx(2 / 3)})
        ]

    def test_the_newest_values_are_on_the_trainer(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean(), on_epoch=True))
        found = fit(logs, batches(1, 2, 6), batches(4), log_every=1)
        assert found.metrics == {"a_step": 6, "a_epoch": 3, "a": 4, "epoch": 1}

    def test_what_is_for_the_progress_bar(self) -> None:
        found = fit(
            Logs(lambda log, batch, index: [log("a", batch.mean(), progress_bar=True), log("b", 1)]), batches(1, 2)
        )
        assert {name: float(value) for name, value in found.progress_metrics.items()} == {"a": 2}

    def test_a_callback_logs(self) -> None:
        class Adds(Callback):
            def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
                trainer.log("step", trainer.state.step)

            def on_validation_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
                trainer.log("seen", 1, reduce="sum")

        assert tracked(Scalar(), ones(2), ones(3), log_every=1, callbacks=Adds()) == [
            (1, {"step": 1, "epoch": 0.5}), (2, {"step": 2, "epoch": 1}), (2, {"val": 1, "seen": 3, "epoch": 1}),
        ]  # fmt: skip

    def test_a_callback_logs_at_starts_and_ends(self) -> None:
        class Adds(Callback):
            def on_fit_start(self, trainer: Any, task: Any) -> None:
                trainer.log("fit", 1)

            def on_epoch_start(self, trainer: Any, task: Any) -> None:
                trainer.log("start", trainer.state.epoch)

            def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
                trainer.log("checked", metrics["val"] + 1)

            def on_epoch_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
                trainer.log("end", trainer.state.epoch)
                task.log("mean", 5, on_step=False, on_epoch=True)

            def on_fit_end(self, trainer: Any, task: Any) -> None:
                trainer.log("done", 1)

        assert tracked(Scalar(), ones(2), ones(3), log_every=1, max_epochs=2, callbacks=Adds()) == [
            (1, {"fit": 1, "start": 0, "epoch": 0.5}), (2, {"epoch": 1}),
            (2, {"val": 1, "checked": 2, "epoch": 1}), (2, {"end": 0, "mean": 5, "epoch": 1}),
            (3, {"start": 1, "epoch": 1.5}), (4, {"epoch": 2}),
            (4, {"val": 1, "checked": 2, "epoch": 2}), (4, {"end": 1, "mean": 5, "epoch": 2}),
            (4, {"done": 1, "epoch": 2}),
        ]  # fmt: skip

    def test_what_is_logged_at_the_end_of_several_loaders_has_no_ending(self) -> None:
        add = Watch(validation_end=lambda trainer, task, metrics: trainer.log("all", 7))
        found = trainer(callbacks=add).validate(Scalar(), {"a": batches(1), "b": batches(2)})
        assert found == {"val/a": 1, "val/b": 2, "all": 7}

    def test_a_window_that_is_carried_over_an_epochs_end(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean(), on_epoch=True))
        records = tracked(
            logs, batches(1, 2, 6), accumulate=2, accumulate_across_epochs="carry", max_epochs=2, log_every=1
        )
        # Windows (1, 2), (6, 1), (2, 6).
        assert [m["a_step"] for step, m in records if "a_step" in m] == [1.5, 3.5, 4]
        assert [m["a_epoch"] for step, m in records if "a_epoch" in m] == [3, 3]

    def test_log_dict(self) -> None:
        class Dict(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log_dict({"a": batch.mean(), "b": 2}, reduce="sum")

        assert trainer().validate(Dict(), batches(1, 2)) == {"a": 3, "b": 4}

    def test_nothing_logged_nothing_recorded(self) -> None:
        assert tracked(Scalar(), ones(2)) == []
        assert trainer().validate(Logs(lambda *_: None), ones(2)) == {}


class TestMeans:
    def test_weighted_by_samples(self) -> None:
        data = [torch.full((4,), 1.0), torch.full((1,), 6.0)]
        assert epoch_of(lambda log, batch, index: log("a", batch.mean()), data) == {"a": 2}

    def test_over_a_window_as_well(self) -> None:
        data = [torch.full((4,), 1.0), torch.full((1,), 6.0)]
        logs = Logs(lambda log, batch, index: log("a", batch.mean()))
        assert tracked(logs, data, accumulate=2, log_every=1) == [(1, {"a": 2, "epoch": 1})]

    def test_by_a_given_weight(self) -> None:
        function = lambda log, batch, index: log("a", batch.mean(), batch_size=index + 1)  # noqa: E731
        assert epoch_of(function, batches(3, 9)) == {"a": 7}

    def test_by_a_weight_on_the_device(self) -> None:
        function = lambda log, batch, index: log("a", batch.mean(), batch_size=torch.tensor(index + 1))  # noqa: E731
        assert epoch_of(function, batches(3, 9)) == {"a": 7}

    def test_of_a_pair_of_sum_and_count(self) -> None:
        pairs = [(4.0, 1), (3.0, 3)]
        assert epoch_of(lambda log, batch, index: log("a", pairs[index]), ones(2)) == {"a": 1.75}
        tensors = [(torch.tensor(4.0), torch.tensor(1)), (torch.tensor(3.0), torch.tensor(3))]
        assert epoch_of(lambda log, batch, index: log("a", tensors[index]), ones(2)) == {"a": 1.75}

    def test_of_a_pair_that_counts_nothing(self) -> None:
        pairs: list[Any] = [(4.0, 2), (0.0, 0), (torch.tensor(0.0), torch.tensor(0))]
        assert epoch_of(lambda log, batch, index: log("a", pairs[index]), ones(3)) == {"a": 2}

    def test_of_numbers_and_tensors_together(self) -> None:
        values: list[Any] = [1, 2.0, torch.tensor(3.0), torch.tensor(6), np.float32(8)]
        assert epoch_of(lambda log, batch, index: log("a", values[index]), ones(5)) == {"a": 4}

    def test_of_many_values(self) -> None:
        # More than are held before they are folded.
        found = epoch_of(lambda log, batch, index: log("a", batch.mean()), batches(*range(1001)))
        assert found == {"a": 500}
        logs = Logs(lambda log, batch, index: log("a", index, on_step=False, on_epoch=True))
        assert tracked(logs, ones(1001), log_every="never") == [(1001, {"a": 500, "epoch": 1})]

    def test_over_an_epoch_with_windows(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", index, on_step=False, on_epoch=True))
        for accumulate in (1, 3, 300):
            with_warning = pytest.warns(UserWarning, match="each step averages") if accumulate == 300 else no_warning()
            with with_warning:
                assert tracked(logs, ones(101), accumulate=accumulate)[-1][1]["a"] == 50

    def test_a_nan_shows(self) -> None:
        assert math.isnan(epoch_of(lambda log, batch, index: log("a", batch.mean()), batches(1, math.nan, 2))["a"])
        assert math.isnan(epoch_of(lambda log, batch, index: log("a", float("nan") if index else 1.0), ones(3))["a"])

    def test_without_a_size_each_batch_counts_once(self) -> None:
        data = [torch.tensor(1.0), torch.tensor(3.0)]
        assert epoch_of(lambda log, batch, index: log("a", batch), data) == {"a": 2}

    def test_the_next_epoch_begins_anew(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean() * self_epoch(logs), on_step=False, on_epoch=True))

        def self_epoch(task: Task) -> int:
            return task.trainer.state.epoch + 1

        assert [m["a"] for _, m in tracked(logs, batches(1, 3), max_epochs=3)] == [2, 4, 6]


class no_warning:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


class TestAmbiguousSizes:
    DATA: ClassVar[Any] = [
        {"context": torch.ones(7), "x": torch.tensor(values)} for values in ([0.0, 1.0], [2.0, 3.0], [4.0])
    ]

    def test_a_mean_over_an_epoch_asks_for_the_weight(self) -> None:
        message = (
            r"log\('a'\): the batch's number of samples can't be told: batch\['context'\] has 7, batch\['x'\] has 2"
        )
        with pytest.raises(MetricError, match=message):
            epoch_of(lambda log, batch, index: log("a", batch["x"].mean()), self.DATA)

    def test_given_it_is_exact(self) -> None:
        found = epoch_of(lambda log, batch, index: log("a", batch["x"].mean(), batch_size=len(batch["x"])), self.DATA)
        assert found == {"a": 2}

    def test_or_counted_by_the_task(self) -> None:
        class Counts(Logs):
            def count_samples(self, batch: Any) -> int:
                return len(batch["x"])

        task = Counts(lambda log, batch, index: log("a", batch["x"].mean()))
        assert trainer().validate(task, self.DATA) == {"a": 2}
        assert fit(task, self.DATA).state.samples == 5

    def test_other_reductions_need_none(self) -> None:
        for reduce, value in (("sum", 7.0), ("min", 0.5), ("max", 4.0)):
            function = lambda log, batch, index, reduce=reduce: log("a", batch["x"].mean(), reduce=reduce)  # noqa: E731
            assert epoch_of(function, self.DATA) == {"a": value}

    def test_training_goes_on_with_one_warning(self) -> None:
        with pytest.warns(
            UserWarning, match=r"state.samples does not count such batches: .*Task.count_samples"
        ) as caught:
            found = fit(Logs(lambda log, batch, index: log("a", batch["x"].mean())), self.DATA, log_every=1)
        assert len(caught) == 1
        assert (found.state.step, found.state.samples, found.metrics["a"]) == (3, 0, 4)

    def test_it_is_a_data_error_too(self) -> None:
        from loopwright.data.sizes import AmbiguousBatchSizeError

        assert issubclass(AmbiguousBatchSizeError, DataError)


class TestReductions:
    @pytest.mark.parametrize("kind", [float, int, torch.tensor, np.float64, lambda v: torch.tensor([v])])
    @pytest.mark.parametrize(("reduce", "expected"), [("sum", 6), ("max", 3), ("min", 1), ("mean", 2)])
    def test_over_batches_whatever_their_size(self, reduce: str, expected: float, kind: Any) -> None:
        function = lambda log, batch, index: log("a", kind([1, 3, 2][index]), reduce=reduce)  # noqa: E731
        assert epoch_of(function, [torch.ones(4)] * 3) == {"a": expected}

    @pytest.mark.parametrize(("reduce", "expected"), [("sum", 9), ("max", 6), ("min", 3), ("mean", 4.5)])
    def test_over_a_window(self, reduce: str, expected: float) -> None:
        logs = Logs(lambda log, batch, index: log("a", batch.mean(), reduce=reduce))
        assert tracked(logs, batches(1, 2, 3, 6), accumulate=2, log_every=2) == [(2, {"a": expected, "epoch": 1})]

    @pytest.mark.parametrize("reduce", ["min", "max"])
    @pytest.mark.parametrize("kind", [float, torch.tensor])
    def test_a_nan_is_not_lost(self, reduce: str, kind: Any) -> None:
        for values in ([1, math.nan, 2], [math.nan, 1, 2], [1, 2, math.nan]):
            function = lambda log, batch, index, v=values: log("a", kind(float(v[index])), reduce=reduce)  # noqa: E731
            assert math.isnan(epoch_of(function, ones(3))["a"])

    def test_an_unknown_one(self) -> None:
        with pytest.raises(MetricError, match=r"log\('a', reduce='avg'\).*Accepted: max, mean, min, sum"):
            epoch_of(lambda log, batch, index: log("a", 1, reduce="avg"), ones(1))


class TestExactness:
    BIG = 2**24 + 1  # not a float32

    @pytest.mark.parametrize(
        "kind",
        [int, torch.tensor, np.int64, lambda v: torch.tensor(v, dtype=torch.int32)],
        ids=["int", "int64", "np", "int32"],
    )
    @pytest.mark.parametrize(("reduce", "expected"), [("sum", 3 * BIG), ("max", BIG), ("min", BIG), ("mean", BIG)])
    def test_above_2_to_the_24(self, reduce: str, expected: int, kind: Any) -> None:
        found = epoch_of(lambda log, batch, index: log("a", kind(self.BIG), reduce=reduce), ones(3))
        assert found == {"a": expected}
        records = tracked(Logs(lambda log, batch, index: log("a", kind(self.BIG), reduce=reduce)), ones(1), log_every=1)
        assert records == [(1, {"a": self.BIG, "epoch": 1})]

    def test_a_sum_of_many_small_float32(self) -> None:
        # In float32 the sum would stop at 2**24.
        class Big(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("a", torch.tensor(float(2**24) if batch_idx == 0 else 1.0), reduce="sum")

        assert trainer().validate(Big(), ones(11)) == {"a": 2**24 + 10}

    def test_weights_above_2_to_the_24(self) -> None:
        function = lambda log, batch, index: log("a", batch.mean(), batch_size=2**24 + index)  # noqa: E731
        expected = (2 * (2**24) + 4 * (2**24 + 1)) / (2 * 2**24 + 1)
        assert epoch_of(function, batches(2, 4))["a"] == pytest.approx(expected, rel=1e-12)

    def test_half_precision_sums_are_wide(self) -> None:
        function = lambda log, batch, index: log("a", torch.tensor(1.0, dtype=torch.bfloat16), reduce="sum")  # noqa: E731
        assert epoch_of(function, ones(1000)) == {"a": 1000}

    def test_bools_count(self) -> None:
        assert epoch_of(lambda log, batch, index: log("a", torch.tensor(index < 3), reduce="sum"), ones(5)) == {"a": 3}
        assert epoch_of(lambda log, batch, index: log("a", index < 3, reduce="sum"), ones(5)) == {"a": 3}


class TestValues:
    def test_a_logged_tensor_may_be_changed_afterwards(self) -> None:
        def function(log: Any, batch: Tensor, index: int) -> None:
            value = torch.tensor(2.0)
            log("a", value)
            value.mul_(100)

        assert epoch_of(function, ones(2)) == {"a": 2}

    def test_logging_leaves_the_loss_alone(self) -> None:
        class Keeps(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                loss = super().training_step(batch, batch_idx) + 3
                self.log("loss", loss, on_epoch=True, progress_bar=True)
                assert loss.requires_grad
                assert loss.item() == 3
                return loss

        task = Keeps()
        fit(task, ones(1))
        assert task.value == -1

    def test_a_graph_is_not_kept(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", (logs.w * batch).sum()))

        class Looks(Callback):
            def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
                entries = trainer._run.training_log.metrics["a"].entries
                assert all(not value.requires_grad for _, value, _ in entries)

        fit(logs, ones(2), callbacks=Looks())

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (torch.ones(2), r"log\('a'\) of a tensor of shape \(2,\). Expected one element"),
            (torch.ones(0), r"log\('a'\) of a tensor of shape \(0,\)"),
            ("3", r"log\('a'\) of a str. Expected a number, a tensor of one element, a torchmetrics object, or a pair"),
            (None, r"log\('a'\) of a NoneType"),
            ([1.0], r"log\('a'\) of a list"),
            (np.ones(2), r"log\('a'\) of a ndarray"),
        ],
        ids=repr,
    )
    def test_wrong_ones(self, value: Any, message: str) -> None:
        with pytest.raises(MetricError, match=message):
            epoch_of(lambda log, batch, index: log("a", value), ones(1))

    def test_options_that_differ(self) -> None:
        logs = Logs(lambda log, batch, index: log("a", 1, on_epoch=bool(index)))
        with pytest.raises(
            MetricError, match=r"log\('a'\) with on_step=None, on_epoch=True, reduce='mean', but earlier"
        ):
            fit(logs, ones(2))

    def test_the_same_name_in_training_and_validation_is_free(self) -> None:
        class Both(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.log("a", 1, reduce="sum", on_step=False, on_epoch=True)
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("a", batch.mean())

        assert tracked(Both(), ones(3), batches(4, 6)) == [(3, {"a": 5, "epoch": 1}), (3, {"a": 3, "epoch": 1})]

    def test_steps_of_an_evaluation_are_warned_of(self) -> None:
        with pytest.warns(UserWarning, match=r"log\('a', on_step=True\) in validation: evaluation has no steps"):
            assert epoch_of(lambda log, batch, index: log("a", batch.mean(), on_step=True), batches(1, 3)) == {"a": 2}

    def test_from_a_helper_of_the_task(self) -> None:
        class Net(nn.Module):
            def __init__(self, task: Task) -> None:
                super().__init__()
                self.tell = [task]

            def forward(self, batch: Tensor) -> Tensor:
                self.tell[0].log("inner", batch.mean())
                return batch

        class Outer(Scalar):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(self)

            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.net(batch)

        assert trainer().validate(Outer(), batches(1, 3)) == {"inner": 2}


class TestTorchmetrics:
    class Task(Scalar):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.train_mean, self.val_mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
            self.options = options

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.train_mean(batch)
            self.log("train", self.train_mean, **self.options)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.val_mean.update(batch)
            self.log("val", self.val_mean)

    def test_the_object_computes(self) -> None:
        data = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])]
        # Its own mean over samples: 12 / 4; steps have the value of their batch.
        assert tracked(self.Task(on_epoch=True), data, data, max_epochs=2, log_every=1) == [
            (1, {"train_step": 2, "epoch": 0.5}), (2, {"train_step": 6, "epoch": 1}),
            (2, {"val": 3, "epoch": 1}), (2, {"train_epoch": 3, "epoch": 1}),
            (3, {"train_step": 2, "epoch": 1.5}), (4, {"train_step": 6, "epoch": 2}),
            (4, {"val": 3, "epoch": 2}), (4, {"train_epoch": 3, "epoch": 2}),
        ]  # fmt: skip

    def test_it_begins_anew_after_each_pass(self) -> None:
        task, found = self.Task(), trainer(sanity_val_batches=2)
        found.fit(task, ones(1), batches(1, 3))
        assert found.metrics["val"] == 2
        assert found.validate(task, batches(10)) == {"val": 10}

    def test_a_collection(self) -> None:
        class Collects(Scalar):
            def __init__(self) -> None:
                super().__init__()
                self.all = torchmetrics.MetricCollection(
                    {"acc": torchmetrics.Accuracy("multiclass", num_classes=3), "mean": torchmetrics.MeanMetric()}
                )

            def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
                self.all["acc"].update(*batch)
                self.all["mean"].update(batch[0].float())
                self.log_dict(self.all)

        data = [(torch.tensor([0, 1]), torch.tensor([0, 2])), (torch.tensor([2]), torch.tensor([2]))]
        assert trainer().validate(Collects(), data) == {"acc": pytest.approx(2 / 3), "mean": 1}

    def test_a_metric_that_gives_several_values(self) -> None:
        class Pair(torchmetrics.Metric):
            def __init__(self) -> None:
                super().__init__()
                self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

            def update(self, batch: Tensor) -> None:
                self.total += batch.sum()

            def compute(self) -> dict[str, Tensor]:
                return {"sum": self.total, "half": self.total / 2}

        class Several(Scalar):
            def __init__(self) -> None:
                super().__init__()
                self.pair = Pair()

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.pair(batch)
                self.log("p", self.pair, on_epoch=True)
                return super().training_step(batch, batch_idx)

        assert tracked(Several(), batches(1, 3), log_every=2) == [
            (2, {"p_step/sum": 3, "p_step/half": 1.5, "epoch": 1}),
            (2, {"p_epoch/sum": 4, "p_epoch/half": 2, "epoch": 1}),
        ]  # fmt: skip

    def test_one_that_is_not_logged_in_every_epoch(self) -> None:
        class First(self.Task):  # type: ignore[name-defined, misc]
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                if self.trainer.state.epoch == 0:
                    self.train_mean(batch)
                    self.log("train", self.train_mean, on_step=False, on_epoch=True)
                return Scalar.training_step(self, batch, batch_idx)

        assert tracked(First(), batches(1, 3), max_epochs=2) == [(2, {"train": 2, "epoch": 1})]


class TestCost:
    def test_no_synchronisation_between_records(self) -> None:
        """Neither `.item()` nor anything else that waits for a device is called before a record is due."""
        seen: list[str] = []

        class Counts(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = getattr(func, "__name__", str(func))
                if name in (
                    "item",
                    "tolist",
                    "__bool__",
                    "__float__",
                    "__int__",
                    "__index__",
                    "numpy",
                    "cpu",
                    "__format__",
                ):
                    seen.append(name)
                return func(*args, **(kwargs or {}))

        class Many(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                for name in "abcde":
                    self.log(name, loss, on_epoch=True, progress_bar=True)
                self.log("pair", (loss, torch.tensor(2)), reduce="mean")
                return loss

        records: list[tuple[int, list[str]]] = []
        watch = Watch(
            log=lambda trainer, task, metrics, step: records.append((step, seen.copy())),
            batch_start=lambda trainer, task, batch, index: seen.clear(),
        )
        with Counts():
            fit(Many(), ones(20), log_every=10, clip_norm=1.0, accumulate=2, callbacks=watch)
        assert [step for step, _ in records] == [10, 10]
        assert records[0][1] == ["tolist"]  # one copy for all values of the record

    def test_python_calls_of_a_log(self) -> None:
        def calls(names: str, **options: Any) -> float:
            class Many(Scalar):
                def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                    loss = super().training_step(batch, batch_idx)
                    for name in names:
                        self.log(name, loss, **options)
                    return loss

            return count_calls(Many())

        bare = calls("")
        for options in ({}, {"on_step": True, "on_epoch": True}, {"progress_bar": True}, {"batch_size": 4}):
            for names in ("a", "abcde"):
                assert (calls(names, **options) - bare) / len(names) < 25

    def test_callbacks_that_do_nothing_cost_nothing(self) -> None:
        class Idle(Callback):
            pass

        class AtTheEnd(Callback):
            def on_fit_end(self, trainer: Any, task: Any) -> None: ...

        def calls(*callbacks: Callback) -> float:
            return count_calls(Scalar(), callbacks=callbacks)

        bare = calls()
        assert calls(*[Idle() for _ in range(10)]) == bare
        assert calls(*[AtTheEnd() for _ in range(10)]) == bare

    def test_a_callback_costs_its_own_call_and_the_events(self) -> None:
        class Steps(Callback):
            def on_step(self, trainer: Any, task: Any, outcome: Any) -> None: ...

        bare = count_calls(Scalar())
        assert count_calls(Scalar(), callbacks=[Steps()]) - bare <= 2
        ten = count_calls(Scalar(), callbacks=[Steps() for _ in range(10)])
        assert ten - bare <= 11


def test_a_log_alone() -> None:
    """`MetricLog` without a Trainer."""
    log = MetricLog("train", {})
    for window, value in enumerate((1.0, 2.0, 6.0)):
        log.window = window
        log.log("a", value, on_epoch=True)
    assert log.step_values() == {"a_step": 6}
    assert log.epoch_values() == {"a_epoch": 3}
    assert log.step_values() == log.epoch_values() == {}


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_logged_loss_does_not_depend_on_the_accumulation(accumulate: int) -> None:
    records = tracked(Loss(on_epoch=True), batches(*[2] * 8), accumulate=accumulate, log_every=1)
    assert {metrics.get("loss_step", metrics.get("loss_epoch")) for _, metrics in records} == {2}
