"""Cases of training on two processes, each by its id in the list of cases."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from loopwright.callbacks.nan_guard import NaNGuard
from loopwright.data.prepare import Presharded
from loopwright.distributed.errors import MetricError
from loopwright.distributed.group import rank
from loopwright.trackers.memory import MemoryTracker

from ..trainer.tiny import Scalar, batches, fit, ones, trainer


class LogsLoss(Scalar):
    """Logs its loss, and the numbers 3.0 and 2; `seen` holds the loss before and after that."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.w * 0.0 + 3.0 + rank()
        before = loss.item()
        self.log("loss", loss)
        self.log("three", 3.0)
        self.log("two", 2)
        self.seen = (before, loss.item(), loss.requires_grad)
        return loss


def log_the_loss() -> tuple[Any, dict[str, float]]:
    task = LogsLoss()
    trainer = fit(task, ones(4), log_every=1)
    return task.seen, trainer.metrics


def test_b46_logging_leaves_the_loss_as_it_is(two_processes: Any) -> None:
    (first, metrics), (second, others) = two_processes(log_the_loss)
    assert first == (3.0, 3.0, True)
    assert second == (4.0, 4.0, True)
    assert metrics == others
    assert (metrics["loss"], metrics["three"], metrics["two"]) == (3.5, 3.0, 2.0)


class LogsMore(Scalar):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("a", 1.0)
        if rank() == 0:
            self.log("b", 1.0)
        return super().training_step(batch, batch_idx)


def log_other_keys() -> str:
    try:
        fit(LogsMore(), ones(4), log_every=1)
    except MetricError as error:
        return str(error)
    return ""


def test_b47_names_that_differ_are_an_error_on_both(two_processes: Any) -> None:
    for text in two_processes(log_other_keys):
        assert text.startswith("log('b'): processes [0] logged it and processes [1] did not.")


class NotFinite(Scalar):
    """Its loss is NaN on process 1 in the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if rank() == 1 and batch_idx == 1 else loss


class LeavesOut(Scalar):
    """Process 1 has no loss in the second batch, and logs none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if rank() == 1 and batch_idx == 1:
            return None
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def stop_or_skip_alone() -> list[Any]:
    results: list[Any] = []
    task: Scalar = NotFinite()
    trainer = fit(task, Presharded(ones(4)), callbacks=NaNGuard("stop"))
    results.append((trainer.state.step, trainer.state.skipped_steps, task.value))
    task = LeavesOut()
    trainer = fit(task, Presharded(batches(*[1 + 2 * rank()] * 4)), log_every=1)
    results.append((trainer.state.step, trainer.state.skipped_steps, task.value))
    return results


def test_b52_no_process_stops_or_skips_alone(two_processes: Any) -> None:
    first, second = two_processes(stop_or_skip_alone)
    assert first == second
    (step, _, value), (steps, skipped, moved) = first
    assert step == 1
    assert value == -1.0
    assert (steps, skipped) == (4, 0)
    assert moved == -(2.0 + 1.0 + 2.0 + 2.0)  # alone, process 0 has its own gradient, of 1


def end_with_the_shortest() -> tuple[int, float, list[str]]:
    task = Scalar()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(task, Presharded(ones(3 if rank() == 0 else 5)))
    return trainer.state.step, task.value, [str(each.message) for each in caught]


def test_b62_training_ends_with_the_shortest_process(two_processes: Any) -> None:
    """`Presharded` loaders in the Trainer: "stop at shortest". "pad" is `Accelerator.join_uneven_inputs`."""
    for steps, value, told in two_processes(end_with_the_shortest):
        assert (steps, value) == (3, -3.0)
        assert any("the data of processes [0] ended in epoch 0 while others had more" in text for text in told)


def open_a_tracker() -> int:
    memory = MemoryTracker()
    trainer = fit(Scalar(), ones(4), trackers=memory)
    trainer.fit(Scalar(), ones(4))
    return len(memory.runs)


def test_b71_the_second_process_never_opens_a_run(two_processes: Any) -> None:
    assert two_processes(open_a_tracker) == [2, 0]


class DrawsDropout(Scalar):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.drawn = torch.rand(()).item()
        self.samples = [*getattr(self, "samples", []), *batch.tolist()]
        return (self.w * batch.float()).mean()


def draw(seed: int | None) -> tuple[float, list[int], float]:
    task = DrawsDropout()
    fit(task, torch.utils.data.DataLoader(list(range(8)), shuffle=True), seed=seed)  # type: ignore[arg-type]
    return task.drawn, task.samples, task.value


def test_b59_draws_differ_and_the_shuffle_is_shared(two_processes: Any) -> None:
    for seed in (3, None):
        (one, samples, value), (other, others, weight) = two_processes(draw, seed)
        assert one != other
        assert sorted(samples + others) == list(range(8))
        assert value == weight


def _predict() -> tuple[float, list[float]]:
    data = DataLoader(torch.arange(5.0), batch_size=1)  # type: ignore[arg-type]
    found = trainer()
    mean = found.validate(Scalar(), data)["val"]
    return mean, [output.item() / 2 for output in found.predict(Scalar(), data)]


def test_b41_predictions_in_the_order_of_the_data_and_each_sample_once(
    two_processes: Any, three_processes: Any
) -> None:
    right = (2.0, [0.0, 1.0, 2.0, 3.0, 4.0])
    assert _predict() == right
    assert two_processes(_predict) == [right] * 2
    assert three_processes(_predict) == [right] * 3
