"""Trainings on two processes: what one of them asks for, all do at the same place."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from loopwright.callbacks.callback import EndEpoch, SkipBatch, StopRun
from loopwright.data.prepare import Presharded
from loopwright.distributed.group import rank

from .tiny import Scalar, Watch, batches, fit, ones, trainer


def state_of(found: Any, task: Scalar) -> dict[str, Any]:
    return found.state.counters() | {"w": task.value, "reason": found._newest_run.stop_reason}


def at(step: int, error: type[Exception], process: int = 1) -> Any:
    """A handler that raises on one process when so many steps were done."""

    def handle(trainer: Any, task: Any, *values: Any) -> None:
        if trainer.state.step == step and rank() == process:
            raise error("why")

    return handle


def leave_a_batch() -> list[Any]:
    """In the events of a batch, in the first and the last of a window, on all processes alike."""
    results = []
    for event in ("batch_start", "before_backward", "batch_end", "step"):
        for error in (EndEpoch, StopRun):
            for place in (1, 2, 3):
                calls: list[int] = []

                def leave(*values: Any, calls: Any = calls, error: Any = error, place: int = place) -> None:
                    calls.append(1)
                    if len(calls) == place:
                        raise error("why")

                task = type("Counts", (Scalar,), {"count_tokens": lambda self, batch: 5})()
                data = Presharded(batches(1, 2, 3, 4, 5))
                found = fit(task, data, max_epochs=2, accumulate=2, callbacks=Watch(**{event: leave}))
                counters = found.state.counters()
                results.append([event, error.__name__, place, {name: counters[name] for name in COUNTED}])
    return results


COUNTED = ("step", "micro_step", "samples", "tokens", "epoch")


def test_a_batch_that_is_left_counts_as_on_one_process(two_processes: Any) -> None:
    wanted = leave_a_batch()
    for *_, counters in wanted:
        counters["samples"], counters["tokens"] = 2 * counters["samples"], 2 * counters["tokens"]
    first, second = two_processes(leave_a_batch)
    assert first == second == wanted


class Manual(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward((self.w * batch).mean())
        self.optimizers().step()
        self.optimizers().zero_grad()


def steer_manually() -> list[Any]:
    results = []
    for error in (SkipBatch, EndEpoch, StopRun):
        task = Manual()
        found = fit(task, Presharded(ones(4)), max_epochs=2, callbacks=Watch(before_step=at(1, error)))
        results.append(state_of(found, task))
    return results


def test_what_drops_a_manual_step_on_one_process_drops_it_on_all(two_processes: Any) -> None:
    """The second step never comes where it is asked for each time."""
    first, second = two_processes(steer_manually)
    assert first == second
    assert [each["w"] for each in first] == [-1.0, -1.0, -1.0]
    assert [each["step"] for each in first] == [1, 1, 1]


class EndsFirst(Scalar):
    """Process 0 raises in its first batch of an epoch, before it logs."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if rank() == 0 and self.trainer.state.epoch == 1 and batch_idx == 0:
            raise self.error("why")
        self.log("loss", batch.mean(), on_epoch=True)
        return super().training_step(batch, batch_idx)


def leave_before_logging() -> list[Any]:
    results = []
    for error in (SkipBatch, EndEpoch, StopRun):
        task = EndsFirst(error)
        found = fit(task, Presharded(ones(2)), max_epochs=2, log_every=1)
        results.append(state_of(found, task) | {"metrics": found.metrics})
    return results


def test_a_process_without_a_loss_need_not_log(two_processes: Any) -> None:
    first, second = two_processes(leave_before_logging)
    assert first == second
    assert [each["w"] for each in first] == [-4.0, -2.0, -2.0]


def end_in_uneven_data(remainder: str) -> list[Any]:
    """Process 0 has a full window where process 1 has a short one, and epochs of other lengths."""
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for count in (1, 2, 3):
            task = Scalar()
            found = trainer(
                max_epochs=2.5, accumulate=2, accumulate_across_epochs=remainder, val_every="0.5 epochs", log_every=1
            )
            found.fit(task, Presharded(ones(5 if rank() == 0 else count)), ones(3))
            results.append(state_of(found, task) | {"length": found.state.batches_per_epoch} | found.metrics)
    return results


def test_uneven_data_ends_windows_and_epochs_on_all_together(two_processes: Any) -> None:
    for remainder in ("flush", "carry"):
        first, second = two_processes(end_in_uneven_data, remainder)
        assert first == second, remainder
        assert [each["length"] for each in first] == [1, 2, 3]


def stop_at_the_end_of_one() -> dict[str, Any]:
    task = Scalar()
    callback = Watch(batch_end=at(1, StopRun, process=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fit(task, Presharded(ones(3 if rank() == 0 else 1)), callbacks=callback, max_epochs=2)
    return state_of(found, task)


def test_a_stop_at_the_last_batch_of_one_process_counts_alike(two_processes: Any) -> None:
    first, second = two_processes(stop_at_the_end_of_one)
    assert first == second
    assert (first["epoch"], first["batch"], first["step"]) == (0, 1, 1)


def stop_in_the_validation_after_an_early_end() -> dict[str, Any]:
    class Task(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if rank() == 0 and batch_idx == 1:
                raise EndEpoch
            self.log("loss", batch.mean(), on_epoch=True)
            return super().training_step(batch, batch_idx)

    task = Task()
    found = fit(
        task, Presharded(ones(3)), ones(2), max_epochs=2, log_every=5, callbacks=Watch(validation_end=at(1, StopRun))
    )
    return state_of(found, task) | {"metrics": found.metrics}


def test_an_epoch_that_was_ended_early_is_closed_before_a_stop(two_processes: Any) -> None:
    first, second = two_processes(stop_in_the_validation_after_an_early_end)
    assert first == second
    assert (first["epoch"], first["step"], first["reason"]) == (1, 1, "process 1: why")


class CarriedLoss(Scalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", batch.mean())
        return super().training_step(batch, batch_idx)


def carry(count: int) -> list[Any]:
    records: list[Any] = []
    note = Watch(log=lambda trainer, task, metrics, step: records.append((step, dict(metrics))))
    mine = batches(*range(6))[rank() :: count]
    fit(
        CarriedLoss(), Presharded(mine), max_epochs=2, accumulate=8 // count, accumulate_across_epochs="carry",
        log_every=1, callbacks=note,
    )  # fmt: skip
    return records


def test_a_carried_window_is_recorded_once(two_processes: Any) -> None:
    one = carry(1)
    first, second = two_processes(carry, 2)
    assert json.dumps(first) == json.dumps(second) == json.dumps(one)
    assert one[0][1]["loss"] == (15 + 0 + 1) / 8


class NoLoss(Scalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if rank() == 1 else super().training_step(batch, batch_idx)


def train_on_one_alone() -> dict[str, Any]:
    task = NoLoss()
    return state_of(fit(task, Presharded(ones(2))), task)


def test_a_process_without_a_loss_in_the_first_epoch_is_no_error_where_others_have_one(two_processes: Any) -> None:
    first, second = two_processes(train_on_one_alone)
    assert first == second
    assert first["w"] == -2.0


def lose_in_a_carried_window() -> dict[str, Any]:
    task = NoLoss()
    options: dict[str, Any] = {"accumulate": 2, "accumulate_across_epochs": "carry", "max_epochs": 2}
    return state_of(fit(task, Presharded(ones(1)), **options), task)


def stop_late() -> list[Any]:
    results = []
    for event in ("fit_end", "log"):
        task = CarriedLoss()
        callback = Watch(**{event: at(2, StopRun)})
        found = fit(task, Presharded(ones(2)), log_every=2, callbacks=callback)
        results.append(state_of(found, task) | {"reason": None} | found.metrics)
    return results


def test_a_carried_window_with_a_loss_elsewhere_is_no_error(two_processes: Any) -> None:
    first, second = two_processes(lose_in_a_carried_window)
    assert first == second
    assert (first["step"], first["w"]) == (1, -1.0)


def test_a_stop_at_the_very_end_of_one_process_leaves_nobody_behind(two_processes: Any) -> None:
    first, second = two_processes(stop_late)
    assert first == second
    assert [each["loss"] for each in first] == [1.0, 1.0]


class Normalised(Scalar):
    """With buffers that differ between the processes until an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.norm(batch[:, None]) * self.w).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.norm(batch[:, None]).mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(batch[:, None]).flatten()


def go_through_all() -> list[Any]:
    data = [torch.arange(4.0) + 10 * index for index in range(6)]
    task, results = Normalised(), []
    for index in range(2):  # two Trainers in one script
        found = trainer(max_epochs=1, sanity_val_batches=2, seed=index, overfit_batches=None)
        found.fit(task, data, data[:3])
        results += [found.metrics["val"], found.validate(task, data[:5]), found.test(task, data[:3])]
        results.append([each.tolist() for each in found.predict(task, data[:5])])
        results.append([each.tolist() for each in found.predict(task, [data[0], data[1]])])
    return results


def test_evaluations_after_training_are_equal_on_all(two_processes: Any) -> None:
    first, second = two_processes(go_through_all)
    assert first == second
    assert [len(first[3]), len(first[4])] == [5, 2]
    assert first[3] == sorted(first[3])


def limit() -> list[Any]:
    results = []
    for options in ({"limit_batches": {"train": 2, "val": 3}}, {"overfit_batches": 2}, {"fast_dev_run": 1}):
        seen: list[float] = []
        task = Scalar()
        count = Watch(validation_batch_start=lambda trainer, task, batch, index, seen=seen: seen.append(float(batch)))
        found = fit(task, batches(*range(8)), batches(*range(5)), callbacks=count, **options)
        results.append((found.state.step, task.value, seen))
    return results


def test_limits_of_training_are_per_process_and_those_of_evaluation_over_all(two_processes: Any) -> None:
    first, second = two_processes(limit)
    assert [each[:2] for each in first] == [each[:2] for each in second]
    assert first[0] == (2, -((0 + 1) / 2 + (2 + 3) / 2), [0.0, 2.0])
    assert second[0][2] == [1.0]
    assert first[1] == (1, -0.5, [0.0])
    assert second[1][2] == [1.0]
    assert (first[2][0], first[2][2] + second[2][2]) == (1, [0.0])
