"""`Trainer.fit` as a whole: counters, limits, reuse, seeds, and what a task gives."""

from __future__ import annotations

import copy
import inspect
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import loopwright.trainer.trainer
from loopwright.callbacks.callback import Callback
from loopwright.callbacks.intervals import Duration
from loopwright.distributed.errors import ConfigError, TaskError
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from .tiny import Recorder, Scalar, Watch, Weighed, batches, fit, ones, trainer


class TestCounters:
    def test_after_a_run(self) -> None:
        # 2 epochs of 5 batches of 3 samples, windows of 2.
        state = fit(Scalar(), [torch.ones(3)] * 5, accumulate=2, max_epochs=2).state
        assert state.counters() == {
            "epoch": 2, "batch": 0, "micro_step": 10, "step": 6, "skipped_steps": 0, "samples": 30, "tokens": 0,
        }  # fmt: skip
        assert (state.stage, state.epochs_done, state.batches_per_epoch) == ("idle", 2, 5)

    def test_inside_an_epoch(self) -> None:
        state = fit(Scalar(), ones(5), accumulate=2, max_steps=4, max_epochs=9).state
        assert (state.epoch, state.batch, state.micro_step, state.step) == (1, 2, 7, 4)
        assert state.epochs_done == pytest.approx(1.4)

    def test_batch_by_batch(self) -> None:
        seen: list[tuple[int, ...]] = []
        watch = Watch(
            batch_end=lambda trainer, task, outputs: seen.append(
                (trainer.state.epoch, trainer.state.batch, trainer.state.micro_step, trainer.state.step)
            )
        )
        fit(Scalar(), ones(3), accumulate=2, max_epochs=2, callbacks=watch)
        assert seen == [(0, 1, 1, 0), (0, 2, 2, 1), (0, 3, 3, 2), (1, 1, 4, 2), (1, 2, 5, 3), (1, 3, 6, 4)]

    def test_stages(self) -> None:
        seen: list[str] = []

        class Stages(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                seen.append(self.trainer.state.stage)
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                seen.append(self.trainer.state.stage)

        found = trainer(sanity_val_batches=1)
        task = Stages()
        found.fit(task, ones(1), ones(1))
        assert found.state.stage == "idle"
        found.validate(task, ones(1))
        assert seen == ["sanity", "train", "validation", "validation"]

    def test_tokens_that_the_task_reports(self) -> None:
        class Counts(Scalar):
            def count_tokens(self, batch: Tensor) -> int:
                return int(batch.sum())

        assert fit(Counts(), batches(1, 2, 4), max_epochs=2).state.tokens == 14

    def test_samples_of_batches_that_have_none(self) -> None:
        assert fit(Scalar(), [torch.tensor(1.0)] * 3).state.samples == 0

    def test_samples_that_the_task_counts(self) -> None:
        class Counts(Scalar):
            def count_samples(self, batch: Tensor) -> int:
                return 7

        assert fit(Counts(), ones(3)).state.samples == 21

    def test_time(self) -> None:
        found = fit(Scalar(), ones(3), callbacks=Watch(batch_end=lambda *_: time.sleep(0.01)))
        assert 0.03 <= found.state.seconds < 5
        assert found.state.seconds == found.state.seconds  # it has stopped


class TestLimits:
    @pytest.mark.parametrize(
        ("limits", "steps", "reason"),
        [
            ({"max_epochs": 2}, 10, "2 epochs reached"),
            ({"max_epochs": "2 epochs"}, 10, "2 epochs reached"),
            ({"max_epochs": 1.4}, 7, "1.4 epochs reached"),
            ({"max_steps": 4}, 4, "4 steps reached"),
            ({"max_steps": 7}, 7, "7 steps reached"),
            ({"max_steps": "6 batches"}, 6, "6 batches reached"),
            ({"max_steps": "12 samples"}, 6, "12 samples reached"),
            ({"max_steps": "11 samples"}, 6, "11 samples reached"),
            ({"max_steps": 4, "max_epochs": 3}, 4, "4 steps reached"),
            ({"max_steps": 100, "max_epochs": 1}, 5, "1 epoch reached"),
            ({"max_steps": 5, "max_epochs": 2}, 5, "5 steps reached"),
        ],
    )
    def test_the_first_that_is_reached_ends_the_run(self, limits: Any, steps: int, reason: str) -> None:
        found = fit(Scalar(), [torch.ones(2)] * 5, **limits)
        assert (found.state.step, found.stop_reason) == (steps, reason)

    def test_epochs_and_accumulation(self) -> None:
        # A limit inside a window holds at its end.
        assert fit(Scalar(), ones(8), accumulate=3, max_epochs=0.5).state.micro_step == 6
        assert fit(Scalar(), ones(8), accumulate=3, max_steps="4 batches").state.step == 2

    def test_tokens(self) -> None:
        data = [(torch.ones(4), torch.ones(4))] * 10
        assert fit(Weighed(), data, max_steps="10 tokens").state.tokens == 12

    def test_time(self) -> None:
        slow = Watch(batch_end=lambda *_: time.sleep(0.02))
        found = fit(Scalar(), ones(1000), max_time="0.1 s", callbacks=slow)
        assert 1 <= found.state.step <= 6
        assert found.stop_reason == "0.1 seconds reached"

    def test_steps_that_are_skipped_do_not_count(self) -> None:
        class Some(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return None if batch.item() == 0 else super().training_step(batch, batch_idx)

        state = fit(Some(), batches(1, 0, 0, 1, 1), max_steps=2).state
        assert (state.step, state.skipped_steps, state.micro_step) == (2, 2, 4)

    def test_without_one(self) -> None:
        with pytest.raises(
            ConfigError, match="fit has no end: none of max_epochs, max_steps, max_time and fast_dev_run"
        ):
            Trainer(trackers=False, progress=False).fit(Scalar(), ones(1))

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"max_epochs": "3 steps"}, r"max_epochs='3 steps' counts steps. Expected one of: epochs"),
            (
                {"max_steps": "2 epochs"},
                r"max_steps='2 epochs' counts epochs. Expected one of: steps, batches, samples",
            ),
            ({"max_time": "3 steps"}, r"max_time='3 steps' counts steps. Expected one of: seconds"),
            ({"max_steps": 0}, r"max_steps=0: a duration of 0 steps is empty or endless"),
            ({"max_steps": -1}, r"max_steps=-1.*Expected a number above 0"),
            ({"max_steps": 2.5}, r"max_steps=2.5: 2.5 steps is not a whole number"),
            ({"max_epochs": True}, r"max_epochs=True is no duration"),
            ({"max_time": "soon"}, r"max_time='soon' can't be read"),
            ({"max_steps": "10 stpes"}, r"max_steps='10 stpes' has an unknown unit 'stpes'. Did you mean 'steps'"),
        ],
    )
    def test_wrong_ones(self, limits: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Trainer(**limits)


class TestStop:
    def test_at_the_next_step_boundary(self) -> None:
        task = Scalar()
        stop = Watch(batch_start=lambda trainer, task, batch, index: trainer.stop("enough"))
        found = fit(task, ones(8), accumulate=4, max_epochs=3, callbacks=stop)
        assert (task.value, found.state.step, found.state.micro_step, found.stop_reason) == (-1, 1, 4, "enough")

    def test_the_first_reason_stands(self) -> None:
        def stop(trainer: Any, *_: Any) -> None:
            trainer.stop("first")
            trainer.stop("second")

        assert fit(Scalar(), ones(3), callbacks=Watch(batch_end=stop)).stop_reason == "first"

    def test_before_the_first_batch(self) -> None:
        for event in ("fit_start", "epoch_start"):
            recorder = Recorder()
            found = fit(Scalar(), ones(3), callbacks=[recorder, Watch(**{event: lambda t, *_: t.stop("no")})])
            assert found.state.step <= 1, event
            assert recorder.log[-2:] == ["fit_end", "teardown"]

    def test_in_validation(self) -> None:
        found = fit(
            Scalar(), ones(5), ones(1), val_every=2, callbacks=Watch(validation_end=lambda t, *_: t.stop("good"))
        )
        assert (found.state.step, found.stop_reason) == (2, "good")

    def test_outside_of_a_run_it_does_nothing(self) -> None:
        found = trainer()
        found.stop("early")
        found.fit(Scalar(), ones(2))
        assert (found.state.step, found.stop_reason) == (2, "1 epoch reached")


class TestReuse:
    def test_a_second_fit_trains_again(self) -> None:
        task, found = Scalar(), trainer(max_epochs=2)
        found.fit(task, ones(3))
        assert (task.value, found.state.step) == (-6, 6)
        found.fit(task, ones(3))
        assert (task.value, found.state.step, found.state.epoch) == (-12, 6, 2)

    def test_another_task(self) -> None:
        found = trainer()
        found.fit(Scalar(), ones(3))
        task = Scalar()
        found.fit(task, ones(2))
        assert (task.value, found.state.step) == (-2, 2)

    def test_after_a_stop(self) -> None:
        found = trainer(callbacks=Watch(batch_end=lambda t, *_: t.stop("enough")))
        for _ in range(2):
            found.fit(Scalar(), ones(3))
            assert (found.state.step, found.stop_reason) == (1, "enough")

    @pytest.mark.parametrize("precision", ["no", "fp16"])
    @pytest.mark.parametrize("event", ["backward", "before_step", "step"])
    def test_after_an_exception_in_the_middle_of_a_window(self, event: str, precision: str) -> None:
        class FailsOnce(Callback):
            failed = False

        def fail(trainer: Any, task: Any, *_: Any) -> None:
            if not FailsOnce.failed and trainer.state.micro_step == 1:
                FailsOnce.failed = True
                raise ValueError("broken")

        setattr(FailsOnce, f"on_{event}", lambda self, *values: fail(*values))
        task, found = Scalar(), trainer(accumulate=2, precision=precision, callbacks=FailsOnce())
        with pytest.raises(ValueError, match="broken"):
            found.fit(task, batches(64, 128))
        task.w.data.zero_()
        found.fit(task, batches(1, 3))
        assert task.value == -2  # no gradient of the run that failed, and none that is still scaled
        assert found.error is None

    def test_a_window_left_open_is_stepped_on_at_the_end_of_the_run(self) -> None:
        task = Scalar()
        found = trainer(accumulate=4, max_steps="6 batches", accumulate_across_epochs="carry")
        for _ in range(2):
            task.w.data.zero_()
            found.fit(task, batches(1, 1, 1, 1, 64, 64))
            assert task.value == -65  # the rest of the data is a window of two

    def test_metrics_are_those_of_the_newest_run(self) -> None:
        found = trainer()
        found.fit(Scalar(), ones(1), batches(3))
        assert found.metrics == {"val": 3, "epoch": 1}
        found.fit(Scalar(), ones(1))
        assert found.metrics == {}

    def test_folders(self) -> None:
        found = trainer(name="mine", project_dir="there")
        folders = []
        for _ in range(3):
            found.fit(Scalar(), ones(1))
            folders.append(found.run_directory)
        assert folders == [Path("there/mine"), Path("there/mine-2"), Path("there/mine-3")]
        assert not Path("there").exists()  # nobody wrote

    def test_folders_are_named_after_the_task(self) -> None:
        found = fit(Scalar(), ones(1))
        assert found.run_directory.parent == Path("runs")
        assert found.run_directory.name.startswith("scalar-20")

    def test_an_evaluation_belongs_to_the_fit_before_it(self) -> None:
        memory = MemoryTracker()
        task, found = Scalar(), trainer(trackers=memory)
        found.fit(task, ones(3))
        folder = found.run_directory
        assert found.validate(task, batches(4)) == {"val": 4}
        assert found.run_directory == folder
        assert (found.state.step, found.state.epoch, found.state.samples) == (3, 1, 3)
        assert memory.runs[-1].records == [(3, {"val": 4, "epoch": 1})]
        assert memory.runs[-1].info == memory.runs[0].info

    def test_one_run_at_a_time(self) -> None:
        found = trainer()
        inner = Watch(batch_end=lambda trainer, task, outputs: found.validate(task, ones(1)))
        found = trainer(callbacks=inner)
        with pytest.raises(ConfigError, match=r"this Trainer is running train of Scalar already. Use another Trainer"):
            found.fit(Scalar(), ones(2))

    def test_another_trainer_inside(self) -> None:
        inner = trainer()
        task = Scalar()
        found = fit(task, ones(2), callbacks=Watch(epoch_end=lambda *_: inner.validate(Scalar(), batches(4))))
        assert inner.metrics["val"] == 4
        assert (task.value, found.state.step) == (-2, 2)


class TestSeeds:
    class Random(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def weights(self, **options: Any) -> Tensor:
        found = trainer(**options)
        task = self.Random()
        found.fit(task, DataLoader(torch.arange(16.0).reshape(8, 2) / 16, batch_size=2, shuffle=True))
        return nn.utils.parameters_to_vector(task.parameters()).detach()

    def test_the_same_seed_gives_the_same_weights(self) -> None:
        first = self.weights(seed=3)
        torch.rand(5)
        assert torch.equal(self.weights(seed=3), first)
        assert not torch.equal(self.weights(seed=4), first)

    def test_without_a_seed_the_state_goes_on(self) -> None:
        first = self.weights()
        assert not torch.equal(self.weights(), first)

    @pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "1"])
    def test_a_wrong_seed(self, seed: Any) -> None:
        with pytest.raises(ConfigError, match=f"seed={seed!r}. Expected an integer from 0"):
            Trainer(max_epochs=1, seed=seed)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_deterministic_algorithms_are_put_back(before: bool, fails: bool) -> None:
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        if fails:
            raise ValueError("broken")

    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        found = trainer(deterministic=True, callbacks=Watch(batch_end=look))
        if fails:
            with pytest.raises(ValueError, match="broken"):
                found.fit(Scalar(), ones(1))
        else:
            found.fit(Scalar(), ones(1))
        after = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True]
    assert after == (before, before)


class TestLimitBatches:
    def steps(self, **options: Any) -> tuple[int, int]:
        recorder = Recorder()
        found = fit(Scalar(), ones(10), ones(8), callbacks=recorder, **options)
        return found.state.step, recorder.count("validation_batch_end")

    @pytest.mark.parametrize(
        ("limit", "expected"),
        [
            (None, (10, 8)), (3, (3, 3)), (0.5, (5, 4)), (1.0, (10, 8)), (1, (1, 1)), (99, (10, 8)),
            ({"train": 2}, (2, 8)), ({"val": 2}, (10, 2)), ({"train": 0.25, "val": 0.25}, (2, 2)),
            ({"val": 0}, (10, 0)),
        ],
    )  # fmt: skip
    def test_in_fit(self, limit: Any, expected: tuple[int, int]) -> None:
        assert self.steps(limit_batches=limit) == expected

    def test_an_epoch_is_as_long_as_the_limit_says(self) -> None:
        seen: list[int] = []
        watch = Watch(validation_end=lambda trainer, task, metrics: seen.append(trainer.state.step))
        found = fit(
            Scalar(), ones(10), ones(1), limit_batches={"train": 4}, accumulate=3, max_epochs=2, callbacks=watch
        )
        assert seen == [2, 4]  # windows of 3 and 1
        assert found.state.batches_per_epoch == 4

    def test_a_long_stream_is_not_read_beyond_the_limit(self) -> None:
        read: list[int] = []

        class Stream:
            def __iter__(self) -> Any:
                for index in range(100):
                    read.append(index)
                    yield torch.ones(1)

        fit(Scalar(), Stream(), limit_batches=3)
        assert read == [0, 1, 2]

    def test_test_and_predict(self) -> None:
        found = trainer(limit_batches={"test": 2, "predict": 0.5})
        assert found.test(Scalar(), batches(1, 3, 100)) == {"test": 2}
        assert len(found.predict(Scalar(), batches(1, 2, 3, 4))) == 2

    def test_every_loader_of_a_validation(self) -> None:
        found = trainer(limit_batches={"val": 2})
        metrics = found.validate(Scalar(), {"a": batches(1, 3, 100), "b": batches(5, 7, 100)})
        assert metrics == {"val/a": 2, "val/b": 6}

    @pytest.mark.parametrize(
        ("limit", "message"),
        [
            (-1, r"limit_batches\['train'\]=-1. Expected a number of batches"),
            (1.5, r"limit_batches\['train'\]=1.5. Expected a number of batches .* or a fraction"),
            (True, r"limit_batches\['train'\]=True"),
            ({"trian": 3}, r"limit_batches names the stage 'trian'. Did you mean 'train'"),
            ({"val": "3"}, r"limit_batches\['val'\]='3'"),
        ],
    )
    def test_wrong_ones(self, limit: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Trainer(max_epochs=1, limit_batches=limit)


class TestOverfit:
    def test_the_same_batches_in_every_epoch(self) -> None:
        seen: list[list[float]] = [[], []]
        watch = Watch(
            batch_start=lambda trainer, task, batch, index: seen[0].append(batch.item()),
            validation_batch_start=lambda trainer, task, batch, index: seen[1].append(batch.item()),
        )
        loader = DataLoader(torch.arange(10.0), batch_size=1, shuffle=True)
        fit(Scalar(), loader, ones(5), overfit_batches=2, max_epochs=3, callbacks=watch)
        assert seen[0] == seen[0][:2] * 3
        assert seen[1] == seen[0]

    def test_without_validation(self) -> None:
        recorder = Recorder()
        fit(Scalar(), ones(5), overfit_batches=2, callbacks=recorder)
        assert (recorder.count("batch_end"), recorder.count("validation_start")) == (2, 0)

    @pytest.mark.parametrize("value", [0, -1, 0.5, True])
    def test_wrong_ones(self, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"overfit_batches={value!r}. Expected an integer >= 1"):
            Trainer(max_epochs=1, overfit_batches=value)

    def test_not_with_a_limit_of_training_batches(self) -> None:
        with pytest.raises(ConfigError, match="overfit_batches=2 and limit_batches for 'train' both limit"):
            Trainer(max_epochs=1, overfit_batches=2, limit_batches=3)


class TestFastDevRun:
    def test_one_batch_of_everything_and_no_file(self) -> None:
        recorder, memory, task = Recorder(), MemoryTracker(), Scalar()
        found = fit(
            task, ones(9), ones(9), fast_dev_run=True, max_epochs=50, val_every="100 steps", sanity_val_batches=2,
            callbacks=recorder, trackers=memory,
        )  # fmt: skip
        assert (task.value, found.state.step, found.state.epoch) == (-1, 1, 1)
        assert recorder.count("validation_batch_end") == 1
        assert memory.runs == []
        assert not Path("runs").exists()
        assert found.is_fast_dev_run
        assert found.test(task, batches(4, 100)) == {"test": 4}
        assert len(found.predict(task, ones(9))) == 1

    def test_several(self) -> None:
        recorder = Recorder()
        found = fit(Scalar(), ones(9), ones(9), fast_dev_run=3, callbacks=recorder)
        assert (found.state.step, recorder.count("validation_batch_end")) == (3, 3)

    def test_it_needs_no_other_limit(self) -> None:
        assert Trainer(fast_dev_run=True, progress=False).limits.max_epochs == Duration(1, "epochs")

    def test_together_with_the_other_limits(self) -> None:
        assert fit(Scalar(), ones(9), ones(9), fast_dev_run=True, overfit_batches=4).state.step == 1
        assert fit(Scalar(), ones(9), ones(9), fast_dev_run=True, limit_batches=4).state.step == 1

    def test_what_is_left_out_stays_out(self) -> None:
        recorder = Recorder()
        fit(Scalar(), ones(9), ones(9), fast_dev_run=True, limit_batches={"val": 0}, callbacks=recorder)
        assert recorder.count("validation_start") == 0

    def test_off(self) -> None:
        assert fit(Scalar(), ones(3), fast_dev_run=False, max_epochs=1).state.step == 3

    @pytest.mark.parametrize("value", [-1, 1.5, "yes"])
    def test_wrong_ones(self, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"fast_dev_run={value!r}. Expected an integer >= 0"):
            Trainer(fast_dev_run=value)


class TestTask:
    def test_its_own_loaders(self) -> None:
        class Owner(Scalar):
            def train_dataloader(self) -> Any:
                return ones(3)

            def val_dataloader(self) -> Any:
                return batches(5)

            def test_dataloader(self) -> Any:
                return batches(6)

            def predict_dataloader(self) -> Any:
                return batches(7)

        task, found = Owner(), trainer()
        found.fit(task)
        assert (task.value, found.metrics["val"]) == (-3, 5)
        assert found.validate(task) == {"val": 5}
        assert found.test(task) == {"test": 6}
        assert found.predict(task) == [torch.tensor([14.0])]
        # What is passed comes first.
        found.fit(task, ones(1), batches(8))
        assert (task.value, found.metrics["val"]) == (-4, 8)

    def test_configure_model_is_called_once_before_the_optimizers(self) -> None:
        log: list[str] = []

        class Late(Task):
            def configure_model(self) -> None:
                log.append("model")
                self.w = nn.Parameter(torch.zeros(()))

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return (self.w * batch).mean()

            def configure_optimizers(self) -> Any:
                log.append("optimizers")
                return torch.optim.SGD(self.parameters(), lr=1.0)

        task, found = Late(), trainer()
        found.fit(task, ones(2))
        found.fit(task, ones(2))
        assert log == ["model", "optimizers", "optimizers"]
        assert task.w.item() == -4

    @pytest.mark.parametrize("kind", ["batch", "both", "any", "default", "keyword", "lambda", "loader"])
    def test_how_a_step_may_be_declared(self, kind: str) -> None:
        seen: list[Any] = []
        task = Scalar()

        def loss(batch: Tensor, *more: Any) -> Tensor:
            seen.append(more)
            return (task.w * batch).mean()

        def loader(batch: Tensor, batch_idx: int, dataloader_idx: int) -> Tensor:
            return loss(batch, batch_idx, dataloader_idx)

        def keyword(batch: Tensor, batch_idx: int, *, extra: int = 3) -> Tensor:
            return loss(batch, batch_idx)

        forms: dict[str, Any] = {
            "batch": lambda batch: loss(batch),
            "both": lambda batch, batch_idx: loss(batch, batch_idx),
            "any": lambda *values: loss(*values),
            "default": lambda batch, batch_idx=0: loss(batch, batch_idx),
            "keyword": keyword,
            "lambda": lambda x, i: loss(x, i),
            "loader": loader,
        }
        task.__dict__["training_step"] = forms[kind]
        fit(task, ones(2))
        assert task.value == -2
        expected = {"batch": [(), ()], "loader": [(0, 0), (1, 0)]}.get(kind, [(0,), (1,)])
        assert seen == expected

    @pytest.mark.parametrize(
        "step",
        [lambda: 1, lambda batch, batch_idx, more: 1, lambda batch, *, needed: 1],
        ids=["none", "three", "keyword"],
    )
    def test_how_a_step_may_not_be_declared(self, step: Any) -> None:
        task = Scalar()
        task.__dict__["training_step"] = step
        with pytest.raises(TaskError, match=r"takes \[.*\]. Expected \(batch, batch_idx\), \(batch\), or"):
            fit(task, ones(1))

    def test_a_trainer_only_while_it_runs(self) -> None:
        task = Scalar()
        seen: list[Any] = []
        found = fit(task, ones(1), callbacks=Watch(setup=lambda trainer, task: seen.append(task.trainer)))
        assert seen == [found]
        with pytest.raises(TaskError, match=r"Scalar.trainer: no trainer runs this task now"):
            _ = task.trainer
        with pytest.raises(TaskError, match=r"self.log\('a', ...\) outside of fit, validate, test and predict"):
            task.log("a", 1)

    def test_copies_and_pickles_leave_the_trainer_behind(self) -> None:
        copies: list[Scalar] = []

        def copy_task(trainer: Any, task: Any, *_: Any) -> None:
            copies.extend([copy.deepcopy(task), pickle.loads(pickle.dumps(task))])

        task = Scalar()
        fit(task, ones(1), callbacks=Watch(batch_start=copy_task))
        assert [c.value for c in copies] == [0, 0]
        assert all(c._trainer is None for c in copies)
        assert task.value == -1

    def test_hyperparameters_go_to_the_trackers(self) -> None:
        class Sized(Scalar):
            def __init__(self, width: int = 3, depth: int = 2, **more: Any) -> None:
                super().__init__()
                self.save_hyperparameters(ignore=["depth"])
                self.hparams["extra"] = "yes"

        memory = MemoryTracker()
        task = Sized(5, name="it")
        assert task.hparams == {"width": 5, "name": "it", "extra": "yes"}
        fit(task, ones(1), trackers=memory, max_epochs=1, accumulate=2, accumulate_across_epochs="carry")
        config = memory.runs[0].config
        assert config["task"] == {"class": "Sized", "width": 5, "name": "it", "extra": "yes"}
        assert (config["trainer"]["accumulate"], config["trainer"]["max_epochs"]) == (2, 1)

    def test_hyperparameters_by_name(self) -> None:
        class Sized(Scalar):
            def __init__(self, width: int, depth: int) -> None:
                super().__init__()
                self.save_hyperparameters("width")

        assert Sized(1, 2).hparams == {"width": 1}

        class Wrong(Scalar):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.save_hyperparameters("widht")

        with pytest.raises(TaskError, match=r"save_hyperparameters: \['widht'\] are no arguments of __init__"):
            Wrong(1)
        with pytest.raises(TaskError, match=r"has to be called in the task's own __init__"):
            Scalar().save_hyperparameters()

    def test_its_device(self) -> None:
        assert Scalar().device == torch.device("cpu")
        assert Task().device == torch.device("cpu")


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # in torch's own compiler
def test_compiled_modules_keep_their_names_and_are_compiled_once() -> None:
    class Net(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).mean()

    task, compiled = Net(), []
    with torch.compiler.set_stance("force_eager"):  # compiling itself is torch's business
        for _ in range(2):
            fit(task, [torch.ones(2, 1)], compile=True)
            compiled.append(vars(task.net)["forward"])
    assert compiled[0] is compiled[1]
    assert list(task.state_dict()) == ["w", "net.weight", "net.bias"]


def test_frames_and_files_between_fit_and_the_task() -> None:
    frames: list[inspect.FrameInfo] = []

    class Looks(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            frames.extend(inspect.stack(0)[1:])
            return super().training_step(batch, batch_idx)

    fit(Looks(), ones(1), accumulate=2, accumulate_across_epochs="carry")
    trainer_file = loopwright.trainer.trainer.__file__
    last = next(i for i, frame in enumerate(frames) if (frame.filename, frame.function) == (trainer_file, "fit"))
    between = frames[: last + 1]  # from what calls training_step to Trainer.fit itself
    assert len(between) <= 6, [frame.function for frame in between]
    assert len({frame.filename for frame in between}) <= 3


def test_a_trainer_without_any_callback_trains() -> None:
    task = Scalar()
    found = fit(task, ones(2))
    assert found.callbacks == ()
    assert task.value == -2


def test_readings_of_a_run() -> None:
    task = Scalar()
    found = trainer(accumulate=2)
    for name in ("model", "optimizers", "schedulers"):
        with pytest.raises(ConfigError, match=rf"trainer.{name} before the first run"):
            getattr(found, name)
    with pytest.raises(ConfigError, match=r"trainer.log outside of fit"):
        found.log("a", 1)
    found.fit(task, ones(2), ones(3))
    assert found.model is task
    assert found.unwrapped_model() is task
    assert [type(optimizer) for optimizer in found.optimizers] == [torch.optim.SGD]
    assert (found.schedulers, found.window_size) == ([], 2)
    assert found.data_wait_seconds > 0
    assert found.process.is_main_process


def test_validation_batches_are_known_while_it_runs() -> None:
    seen: list[Any] = []

    def look(trainer: Any, *_: Any) -> None:
        seen.append(trainer.num_evaluation_batches)

    class Stream:
        def __iter__(self) -> Any:
            return iter(ones(4))

    for val, limit in [
        (ones(3), None),
        (ones(3), 2),
        ({"a": ones(3), "b": ones(4)}, None),
        (Stream(), None),
        (None, 1),
    ]:
        fit(
            Scalar(),
            ones(2),
            val,
            callbacks=Watch(validation_start=look),
            limit_batches={"val": limit} if limit else None,
        )
    fit(Scalar(), ones(2), Stream(), callbacks=Watch(validation_start=look), limit_batches={"val": 2})
    assert seen == [3, 2, 7, None, 2]
