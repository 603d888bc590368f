"""The pains that several processes show: 2, 11, 12, 23, 24, and the two-process halves of 3, 4, 13, 16, 26 and 27.

Each function below runs in every process of a gloo group, and gives what the test compares.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from loopwright.callbacks.callback import Callback, EndEpoch, StopRun
from loopwright.callbacks.early_stopping import EarlyStopping
from loopwright.callbacks.nan_guard import NaNGuard
from loopwright.data.prepare import Presharded
from loopwright.distributed.errors import LoopwrightError
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from ..trainer.tiny import Loss, Scalar, Scheduled, Watch, batches, fit, ones, trainer

NAN = float("nan")
A = torch.tensor([1.0, NAN, NAN])  # one valid token with gradient 1
B = torch.tensor([0.0, 0.0, 0.0])  # three with gradient 0
NONE = torch.tensor([NAN, NAN])


class Tokens(Task):
    """Each token's loss is w * x; NaN tokens are none."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        valid = batch[~batch.isnan()]
        pair = (self.w * valid).sum(), valid.numel()
        self.log("loss", pair)
        return pair

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _train_on_tokens(data: list[Tensor], accumulate: int) -> tuple[float, float]:
    task, memory = Tokens(), MemoryTracker()
    fit(task, data, accumulate=accumulate, trackers=memory, log_every=1)
    records = memory.runs[0].records if memory.runs else [(1, {"loss": NAN})]
    return task.w.item(), records[0][1]["loss"]


@pytest.mark.parametrize(
    ("data", "accumulate", "moved", "loss"),
    [
        ([A, B], 1, 0.25, 0.25),
        ([B, A], 1, 0.25, 0.25),
        ([A, NONE], 1, 1.0, 1.0),
        ([A, B, NONE, B], 2, 1 / 7, 1 / 7),
        ([NONE, NONE], 1, 0.0, NAN),  # the mean of nothing
    ],
    ids=["AB", "BA", "one without tokens", "windows of two", "no token at all"],
)
def test_pain_02_token_counts_over_processes(
    two_processes: Any, data: list[Tensor], accumulate: int, moved: float, loss: float
) -> None:
    (w, logged), (other, _) = two_processes(_train_on_tokens, data, accumulate)
    assert w == other == pytest.approx(1 - moved, abs=1e-6)
    assert logged == pytest.approx(loss, abs=1e-6, nan_ok=True)


def _train_ones(count: int, accumulate: int) -> tuple[float, int, list[float]]:
    task, memory = Loss(), MemoryTracker()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulate=8 but an epoch has 3 batches")
        found = fit(task, batches(*[2.0] * count), accumulate=accumulate, trackers=memory, log_every=1)
    return task.w.item(), found.state.step, [m["loss"] for _, m in memory.runs[0].records] if memory.runs else []


@pytest.mark.parametrize(("count", "accumulate", "steps"), [(10, 2, 3), (9, 2, 3), (6, 8, 1)])
def test_pain_03_a_short_last_window(two_processes: Any, count: int, accumulate: int, steps: int) -> None:
    (w, done, losses), (other, *_) = two_processes(_train_ones, count, accumulate)
    assert w == other == -steps
    assert done == steps
    assert losses == [2.0] * steps


def _rates(count: int) -> list[float]:
    task = Scheduled(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: min(k + 1, 10) / 10), interval="step")
    rates: list[float] = []
    fit(task, ones(count), callbacks=Watch(before_step=lambda *_: rates.append(task.rate)), accumulate=2)
    return rates


def test_pain_04_a_warm_up_counts_optimizer_steps_on_any_number_of_processes(two_processes: Any) -> None:
    alone = _rates(24)
    assert two_processes(_rates, 48) == [alone, alone]
    assert alone[9] == 1.0 and alone[8] == pytest.approx(0.9)


class Evaluated(Scalar):
    """Logs the mean of 0..4 in each way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.number = MeanMetric(), SumMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", (self.w * 0 + batch).mean())
        self.log("count", float(len(batch)), reduce="sum")
        self.log("largest", batch.max(), reduce="max")
        self.log("pair", (batch.sum(), len(batch)))
        self.mean.update(batch)
        self.log("metric", self.mean)
        self.number.update(torch.ones(len(batch)))
        self.log("number", self.number)


def _evaluate(count: int, batch_size: int) -> dict[str, float]:
    data = DataLoader(torch.arange(float(count)), batch_size=batch_size)  # type: ignore[arg-type]
    return trainer().validate(Evaluated(), data)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("count", "batch_size"), [(5, 2), (5, 1), (2, 2), (7, 3)])
def test_pain_11_evaluation_counts_each_sample_once(
    two_processes: Any, three_processes: Any, size: int, count: int, batch_size: int
) -> None:
    processes = {2: two_processes, 3: three_processes}[size]
    alone = _evaluate(count, batch_size)
    assert alone == {
        "loss": pytest.approx((count - 1) / 2), "count": count, "largest": count - 1,
        "pair": pytest.approx((count - 1) / 2), "metric": pytest.approx((count - 1) / 2), "number": count,
    }  # fmt: skip
    for found in processes(_evaluate, count, batch_size):
        assert found == pytest.approx(alone)


def _log_differently(where: str) -> str:
    class Different(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if where == "step":
                self.log(*(("a", 1.0) if dist.get_rank() == 0 else ("b", 100.0)))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("a", 1.0)
            if dist.get_rank() == 0:
                self.log("b", 100.0, sync=where != "local")

    found = trainer(log_every=1)
    try:
        found.fit(Different(), ones(4), ones(4) if where != "step" else None)
    except LoopwrightError as error:
        return f"{type(error).__name__}: {error}"
    return str(found.metrics)


def test_pain_12_processes_that_log_different_names(two_processes: Any) -> None:
    for text in two_processes(_log_differently, "step"):
        assert text.startswith("MetricError: log('a'): processes [0] logged it and processes [1] did not.")
    for text in two_processes(_log_differently, "validation"):
        assert text.startswith("MetricError: log('b'): processes [0] logged it and processes [1] did not.")
    first, second = two_processes(_log_differently, "local")
    assert "'b': 100.0" in first and "'a': 1.0" in second


def _train_unevenly(accumulate: int, validates: bool) -> tuple[int, float, list[str]]:
    task = Scalar()
    count = 4 if dist.get_rank() == 0 else 6
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(
            task, Presharded(ones(count)), ones(3) if validates else None, accumulate=accumulate, max_epochs=2,
            val_every="3 steps",
        )  # fmt: skip
    return found.state.step, task.value, [str(each.message) for each in caught if "ended in epoch" in str(each.message)]


@pytest.mark.parametrize(("accumulate", "validates", "steps"), [(1, False, 8), (2, False, 4), (1, True, 8)])
def test_pain_23_different_numbers_of_batches(two_processes: Any, accumulate: int, validates: bool, steps: int) -> None:
    for done, w, said in two_processes(_train_unevenly, accumulate, validates):
        assert (done, w) == (steps, -steps)
        assert len(said) == 1
        assert "the data of processes [0] ended in epoch 0 while others had more" in said[0]


class StopsOn(Callback):
    """Stops in one process alone, in a given event and way."""

    def __init__(self, rank: int, event: str, how: str) -> None:
        step = 0 if event.endswith("t_start") else 2

        def act(trainer: Any, task: Any, *values: Any) -> None:
            if dist.get_rank() != rank or trainer.state.step < step:
                return
            if how == "stop":
                trainer.stop("enough")
                return
            raise StopRun("enough") if how == "StopRun" else EndEpoch

        setattr(self, f"on_{event}", act)


def _stop_in(event: str, how: str, rank: int) -> tuple[int, int, float, str | None]:
    task = Scalar()
    found = fit(
        task, ones(20), ones(2), callbacks=StopsOn(rank, event, how), max_epochs=2, val_every="2 steps", log_every=1
    )
    return found.state.step, found.state.epoch, task.value, found.stop_reason


EVENTS = [
    "fit_start", "epoch_start", "batch_start", "before_backward", "backward", "before_step", "step", "batch_end",
    "log", "validation_start", "validation_batch_end", "validation_end", "epoch_end",
]  # fmt: skip


@pytest.mark.parametrize("how", ["stop", "StopRun", "EndEpoch"])
def test_pain_24_one_process_decides_for_all(two_processes: Any, how: str) -> None:
    events = EVENTS if how != "EndEpoch" else EVENTS[2:8]
    for event in events:
        results = two_processes(_stop_in, event, how, 1)
        first, second = (result[:3] for result in results)
        assert first == second, (event, how)
        if how != "EndEpoch":
            assert "enough" in str(results[0][3]), (event, how)
            assert first[0] < 20


def _decide_alike(event: str, how: str) -> tuple[int, int, float]:
    class Decides(Callback):
        pass

    def act(trainer: Any, task: Any, *values: Any) -> None:
        if trainer.state.step >= 2:
            if how == "stop":
                trainer.stop("enough")
            else:
                raise {"StopRun": StopRun("enough"), "EndEpoch": EndEpoch()}[how]

    callback = Decides()
    setattr(callback, f"on_{event}", act)
    task = Scalar()
    found = fit(task, ones(10 * _world()), callbacks=callback, max_epochs=2)
    return found.state.step, found.state.epoch, task.value


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _decide_everywhere() -> list[tuple[int, int, float]]:
    return [_decide_alike(event, how) for how in ("stop", "StopRun", "EndEpoch") for event in EVENTS[2:8]]


def test_pain_24_what_all_decide_takes_effect_where_it_does_in_one_process(two_processes: Any) -> None:
    alone = _decide_everywhere()
    assert two_processes(_decide_everywhere) == [alone, alone]


def _stop_early() -> tuple[int, float]:
    class Monitored(Scalar):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            # The mean over both processes rises from the third validation on; on process 0 alone it falls.
            step = float(self.trainer.state.step)
            self.log("val", -step if dist.get_rank() == 0 else (10 - 2 * step if step <= 2 else 10 * step))

    found = fit(Monitored(), ones(40), ones(2), callbacks=EarlyStopping("val", patience=2), val_every=1, max_epochs=1)
    return found.state.step, found.metrics["val"]


def test_pain_24_a_monitored_value_that_differs(two_processes: Any) -> None:
    (steps, value), other = two_processes(_stop_early)
    assert (steps, value) == other
    assert steps == 4


def _become_nan(policy: str) -> tuple[int, int, float, float, str]:
    class BecomesNaN(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * NAN if self.trainer.state.micro_step == 2 and dist.get_rank() == 1 else loss

    task = BecomesNaN()
    guard = NaNGuard(policy, locate=False)
    found = trainer(callbacks=guard, log_every=1)
    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found.fit(task, ones(10))
        except LoopwrightError as error:
            said = f"{type(error).__name__}: {error}"
    state = found.state
    return state.step, state.skipped_steps, task.value, guard.nonfinite_steps, said


def test_pain_16_a_value_that_is_not_finite_on_one_process(two_processes: Any) -> None:
    for step, skipped, w, counted, _ in two_processes(_become_nan, "skip"):
        assert (step, skipped, w, counted) == (4, 1, -4.0, 1)
    for step, _, w, counted, _ in two_processes(_become_nan, "stop"):
        assert (step, w, counted) == (2, -2.0, 1)


def _fail_everywhere(kind: str) -> tuple[str, list[str], float]:
    log: list[str] = []
    error = {"ValueError": ValueError, "StopIteration": StopIteration, "KeyboardInterrupt": KeyboardInterrupt}[kind](
        "x"
    )

    def fail(*_: Any) -> None:
        raise error

    watch = Watch(
        batch_end=fail, exception=lambda *_: log.append("exception"), teardown=lambda *_: log.append("teardown")
    )
    try:
        fit(Scalar(), ones(4), callbacks=watch)
    except BaseException as raised:  # noqa: BLE001 - also KeyboardInterrupt
        assert raised is error
        total = torch.ones(())
        dist.all_reduce(total)
        return type(raised).__name__, log, total.item()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("kind", ["ValueError", "StopIteration", "KeyboardInterrupt"])
def test_pain_26_an_error_on_all_processes_leaves_the_group_usable(two_processes: Any, kind: str) -> None:
    assert two_processes(_fail_everywhere, kind) == [(kind, ["exception", "teardown"], 2.0)] * 2


def test_pain_27_one_process_writes_and_all_know_the_folder(two_processes: Any) -> None:
    first, second = two_processes(_track_loss)
    assert first[0] == 1 and second[0] == 0
    assert first[2] == second[2]
    steps = [step for step, _ in first[1]]
    assert steps == sorted(steps) and steps[-1] == 4


def _track_loss() -> Any:
    class Both(Loss):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("val", batch.mean())

    memory = MemoryTracker()
    found = fit(Both(on_epoch=True), batches(*range(8)), ones(2), trackers=memory, log_every=1, val_every="2 steps")
    rows = [(step, sorted(metrics)) for step, metrics in memory.runs[0].records] if memory.runs else []
    return len(memory.runs), rows, str(found.run_directory)


class Dropped(Task):
    """A small network with dropout, on shuffled data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch + torch.rand(())).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train_with_dropout(options: dict[str, Any], validates: bool) -> list[float]:
    found = trainer(seed=0, max_epochs=3, **options)
    task = Dropped()
    data = DataLoader(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    found.fit(task, data, DataLoader(torch.randn(5, 3), batch_size=2, shuffle=True) if validates else None)  # type: ignore[arg-type]
    return torch.cat([parameter.detach().flatten() for parameter in task.parameters()]).tolist()


def test_pain_14_validation_changes_no_bit_of_the_training(two_processes: Any) -> None:
    without, other = two_processes(_train_with_dropout, {}, False)
    assert without == other
    for options in ({"val_every": "1 epoch"}, {"val_every": "2 steps"}, {"sanity_val_batches": 2}):
        assert two_processes(_train_with_dropout, options, True) == [without, without]


def _clip(count: int) -> tuple[float, float]:
    task = Scalar()
    norms: list[float] = []
    watch = Watch(before_step=lambda trainer, task, optimizer: norms.append(task.w.grad.item()))
    # The mean gradient of two batches of 4 and 8 is 6, which is clipped to 2.
    fit(task, batches(*[4.0, 8.0] * count), callbacks=watch, clip_norm=2.0, accumulate=2 // _world())
    return task.value, norms[0]


def test_pain_33_clipping_sees_the_gradient_of_all_processes(two_processes: Any) -> None:
    alone = _clip(1)
    assert alone == (pytest.approx(-2.0, abs=1e-5), pytest.approx(2.0, abs=1e-5))
    assert two_processes(_clip, 1) == [alone, alone]
