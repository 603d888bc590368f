"""`EMA`, and what it shares with `SWA`: the averages themselves, who sees them, and what comes back."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from loopwright.callbacks.callback import Callback, StopRun
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.ema import EMA
from loopwright.callbacks.order import sort_callbacks
from loopwright.callbacks.swa import SWA
from loopwright.checkpoint.weights import load_weights
from loopwright.distributed.errors import CheckpointError, ConfigError
from loopwright.strategies.precision import ScaledPrecision
from loopwright.trainer.task import Task

from ..trainer.tiny import Scalar, Watch, batches, fit, ones, trainer
from .rising import Rising

Run = Callable[..., list[Any]]


class Net(Task):
    """Has dropout, a batch norm, tied weights, a mask of infinities and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))
        self.register_buffer("cache", torch.ones(1000), persistent=False)
        self.fails_at: int | None = None

    def forward(self, batch: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(batch)), 0.5, self.training)
        result: Tensor = self.frozen(self.second(hidden))
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self(batch).square().mean())
        if self.trainer.state.step == self.fails_at:
            raise OSError("validation failed")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def numbers(count: int, size: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, generator=generator) for _ in range(count)]


def copies(task: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in task.state_dict().items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# The numbers.


def test_by_hand_once_per_step_and_only_validation_sees_it() -> None:
    task, ema = Rising(), EMA(0.5)
    fit(task, ones(6), ones(1), callbacks=ema, val_every=1, accumulate=2)
    assert task.seen == [0.5, 1.25, 2.125]
    assert (task.value, ema.averages["w"].item(), ema.num_averaged) == (3.0, 2.125, 3)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"start": 2}, [0.0, 0.0, 2.5, 3.25]),  # it begins with the weights of step 2
        ({"every": 2}, [0.0, 1.0, 1.0, 2.5]),
        ({"start": "0.5 epochs"}, [0.0, 0.0, 2.5, 3.25]),
        ({"every": "1 epoch"}, [0.0, 0.0, 0.0, 2.0]),
    ],
)
def test_start_and_every(options: dict[str, Any], wanted: list[float]) -> None:
    ema, found = EMA(0.5, **options), []

    class Validated(Rising):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            found.append(ema.averages["w"].item() if ema.num_averaged else 0.0)

    fit(Validated(), ones(4), ones(1), callbacks=ema, val_every=1)
    assert found == wanted


def test_a_skipped_step_does_not_move_it() -> None:
    precision = ScaledPrecision(torch.device("cpu"), torch.amp.GradScaler("cpu", init_scale=65536.0))
    task, ema = Rising(), EMA(0.5)
    found = fit(task, [*batches(float("inf")), *ones(2)], callbacks=ema, precision=precision)
    assert (found.state.step, found.state.skipped_steps, ema.num_averaged) == (2, 1, 2)
    assert ema.averages["w"].item() == 1.25


def test_the_same_as_torch() -> None:
    task, ema = Net(), EMA(0.9)
    reference = AveragedModel(copy.deepcopy(task), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    reference.update_parameters(task)  # torch's first update copies
    watch = Watch(step=lambda trainer, task, outcome: reference.update_parameters(task))
    fit(task, numbers(5), callbacks=[ema, watch])
    wanted = dict(reference.module.named_parameters())
    assert [name for name in ema.averages if "norm.running" not in name] == [
        name for name, p in wanted.items() if p.requires_grad
    ]
    for name, average in ema.averages.items():
        if name in wanted:
            assert torch.equal(average, wanted[name]), name


def test_which_buffers_are_averaged() -> None:
    task, ema = Net(), EMA(0.0)
    fit(task, numbers(2), callbacks=ema)
    assert {name for name in ema.averages if name not in dict(task.named_parameters())} == {
        "norm.running_mean",
        "norm.running_var",
    }
    assert torch.equal(ema.averages["norm.running_mean"], task.norm.running_mean)
    task, ema = Net(), EMA(use_buffers=False)
    fit(task, numbers(2), callbacks=ema)
    assert set(ema.averages) < set(dict(task.named_parameters()))


def test_half_precision_is_averaged_in_float32() -> None:
    class Half(Rising):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(256.0, dtype=torch.bfloat16))

    task, ema = Half(), EMA(0.999)
    fit(task, [torch.full((1,), 2.0, dtype=torch.bfloat16)] * 3, ones(1), callbacks=ema, val_every=1)
    average, exact = ema.averages["w"], 256.0
    for weight in (258.0, 260.0, 262.0):
        exact += 0.001 * (weight - exact)
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(exact, abs=1e-4)  # each step is lost in bfloat16
    assert (task.w.dtype, task.value) == (torch.bfloat16, 262.0)


# What training does to the weights' places.


class Growing(Task):
    """Two weights, the second of which is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(()), requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return -sum(p.mean() for p in self.parameters() if p.requires_grad)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_weight_that_is_unfrozen_joins_with_the_value_that_it_had() -> None:
    def act(trainer: Any, task: Any, batch: Any, index: int) -> None:
        if index == 1:
            task.b.requires_grad_(True)
        if index == 2:
            task.a.requires_grad_(False)
            task.c = nn.Parameter(torch.full((), 4.0))
            trainer.optimizers[0].add_param_group({"params": [task.c]})

    ema = EMA(0.5)
    fit(Growing(), ones(3), callbacks=[ema, Watch(batch_start=act)])
    # a: 1, 2, 2.  b: 0, 1, 2.  c: 5 after one step from 4.
    assert {name: value.item() for name, value in ema.averages.items()} == {"a": 1.625, "b": 1.25, "c": 4.5}


def test_a_weight_of_another_shape_is_refused_by_name() -> None:
    def act(trainer: Any, task: Any, batch: Any, index: int) -> None:
        if index == 1:
            task.a = nn.Parameter(torch.zeros(2))
            trainer.optimizers[0].add_param_group({"params": [task.a]})

    with pytest.raises(ConfigError, match=r"EMA averages 'a' of shape \(\), which has the shape \(2,\) now. Weights"):
        fit(Growing(), ones(2), callbacks=[EMA(), Watch(batch_start=act)])


def test_a_lazy_layer_is_refused_by_name() -> None:
    class Lazy(Scalar):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LazyLinear(1)

    with pytest.raises(ConfigError, match=r"EMA can't average 'net.weight', which has no shape yet"):
        fit(Lazy(), ones(1), callbacks=EMA())


def test_nothing_to_average_is_an_error() -> None:
    class Manual(Scalar):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return None

    with pytest.raises(ConfigError, match="EMA found nothing to average: no optimizer has a parameter"):
        fit(Manual(), ones(1), callbacks=EMA())


def test_it_hears_of_a_step_in_which_another_callback_ended_the_run() -> None:
    def stop(trainer: Any, task: Any, outcome: Any) -> None:
        raise StopRun

    ema = EMA(0.5)
    fit(Rising(), ones(3), callbacks=[Watch(step=stop), ema])
    assert (ema.num_averaged, ema.averages["w"].item()) == (1, 0.5)


def test_a_window_that_only_the_runs_end_closes_counts() -> None:
    task, ema = Rising(), EMA(0.5)
    fit(task, ones(3), ones(1), callbacks=ema, accumulate=2, accumulate_across_epochs="carry", val_every="last")
    assert (ema.num_averaged, task.seen) == (2, [1.25])


# Nothing is changed by it.


@pytest.mark.parametrize("make", [EMA, lambda: SWA(0.25, every=2)])
def test_training_is_bit_equal_with_and_without(make: Callable[[], Callback]) -> None:
    found = []
    for callbacks in ([], [make()]):
        torch.manual_seed(3)
        task, kept = Net(), []
        watch = Watch(fit_end=lambda trainer, task, kept=kept: kept.append(copies(task)))  # before SWA's last act
        fit(task, numbers(6), numbers(2), max_epochs=2, callbacks=[*callbacks, watch], val_every=1)
        found.append(kept[0])
    assert_equal(found[1], found[0])


def test_validation_that_fails_gives_the_weights_back() -> None:
    kept: list[dict[str, Tensor]] = []
    task, ema = Net(), EMA(0.9)
    task.fails_at = 2
    watch = Watch(step=lambda trainer, task, outcome: kept.append(copies(task)))
    with pytest.raises(OSError, match="validation failed"):
        fit(task, numbers(4), numbers(1), callbacks=[ema, watch], val_every=1)
    assert len(kept) == 2
    assert_equal(copies(task), kept[1])


def test_a_buffer_that_validation_replaces_is_put_back() -> None:
    class Replacing(Rising):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1))

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean = torch.full((1,), 7.0)

    task = Replacing()
    mine = task.mean
    fit(task, ones(2), ones(1), callbacks=EMA())
    assert task.mean is mine
    assert task.mean.item() == 0


# After fit.


def test_the_average_after_fit() -> None:
    task, ema = Rising(), EMA(0.5)
    with pytest.raises(ConfigError, match=r"EMA has averaged nothing so far. Call fit first"):
        ema.applied_to(task)
    found = fit(task, ones(3), callbacks=ema)
    found.validate(task, ones(1))
    other = Rising()
    with ema.applied_to(task), ema.applied_to(other):
        found.validate(task, ones(1))
        assert other.value == 2.125
    assert (task.seen, task.value, other.value) == ([3.0, 2.125], 3.0, 0.0)
    with pytest.raises(ConfigError, match=r"EMA averages 'w' of shape .., which is gone now"):
        ema.applied_to(Growing()).__enter__()


def test_final_leaves_the_average_of_a_run_that_ends_in_order() -> None:
    task = Rising()
    found = fit(task, ones(3), callbacks=EMA(0.5, final=True))
    assert task.value == 2.125
    with pytest.raises(CheckpointError, match="EMA has left the averages in the task, so that a training that goes on"):
        found.save_state("state")
    assert load_file(found.save_model("weights"))["w"].item() == 2.125


def test_final_leaves_the_weights_of_a_run_that_fails() -> None:
    def end(trainer: Any, task: Any, batch: Any, index: int) -> None:
        if index == 2:
            raise OSError("no more")

    task = Rising()
    with pytest.raises(OSError, match="no more"):
        fit(task, ones(4), callbacks=[EMA(0.5, final=True), Watch(batch_start=end)])
    assert task.value == 2


def test_final_leaves_the_weights_of_a_run_that_a_signal_ends() -> None:
    def end(trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    task = Rising()
    with pytest.raises(SystemExit, match="143"):
        fit(task, ones(4), callbacks=[EMA(0.5, final=True), Watch(step=end)])
    assert task.value == 2


def test_a_second_fit_begins_anew() -> None:
    task, ema = Rising(), EMA(0.5)
    found = fit(task, ones(3), callbacks=ema)
    found.fit(task, ones(1))
    assert (ema.num_averaged, ema.averages["w"].item()) == (1, 3.5)


# Files.


def test_files_of_weights_hold_the_average() -> None:
    saved: list[float] = []

    def save(trainer: Any, task: Any, outcome: Any) -> None:
        saved.append(load_file(trainer.save_model("weights"))["w"].item())

    saver = ModelCheckpoint(monitor="val", save_weights_only=True)
    task, ema = Rising(), EMA(0.5)
    fit(task, ones(3), ones(1), callbacks=[Watch(step=save), saver, ema], val_every=1)
    assert saved == [0.5, 1.25, 2.125]
    assert saver.best_score == 0.5
    other = Scalar()
    load_weights(other, saver.best_path or "")
    assert other.value == 0.5
    assert task.value == 3


def test_without_evaluates_it_only_watches() -> None:
    saved: list[float] = []

    def save(trainer: Any, task: Any, outcome: Any) -> None:
        saved.append(load_file(trainer.save_model("weights"))["w"].item())

    task, ema = Rising(), EMA(0.5, evaluates=False)
    fit(task, ones(2), ones(1), callbacks=[Watch(step=save), ema], val_every=1)
    assert (task.seen, saved, ema.averages["w"].item()) == ([1.0, 2.0], [1.0, 2.0], 1.25)


def test_a_checkpoint_of_a_validation_that_fails_holds_the_training_weights() -> None:
    class Failing(Rising):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            if self.value > 1:
                raise OSError("validation failed")

    saver = Watch(exception=lambda trainer, task, error: trainer.save_state("saved"))
    task, ema = Failing(), EMA(0.5)
    with pytest.raises(OSError, match="validation failed"):
        fit(task, ones(4), ones(1), callbacks=[ema, saver], val_every=1)
    assert load_file("saved/model.safetensors")["w"].item() == task.value == 2.0
    assert task.seen == [0.5, 1.25]


# Several of them, and others.


def test_two_that_evaluate_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"EMA, SWA would each evaluate their averages, of which a run has one. Keep"):
        fit(Rising(), ones(2), callbacks=[EMA(), SWA()])


def test_another_callback_may_give_the_weights() -> None:
    class Zero(Callback):
        def evaluation_weights(self, trainer: Any, task: Any) -> Any:
            return average.applied_to(task)

    average, other_task = EMA(0.0), Rising()
    fit(other_task, ones(1), callbacks=average)
    task = Rising()
    fit(task, ones(3), ones(1), callbacks=Zero())
    assert (task.seen, task.value) == ([1.0], 3.0)
    with pytest.raises(ConfigError, match="Zero, EMA each want weights of theirs evaluated in the place"):
        fit(task, ones(3), ones(1), callbacks=[Zero(), EMA()])


def test_two_decays_at_once() -> None:
    task, slow, fast = Rising(), EMA(0.5), EMA(0.0, evaluates=False)
    fit(task, ones(3), ones(1), callbacks=[fast, slow])
    assert task.seen == [2.125]
    assert fast.averages["w"].item() == 3


def test_it_runs_before_what_saves_whatever_the_list_says() -> None:
    saver, ema, swa = ModelCheckpoint(), EMA(), SWA()
    assert sort_callbacks([saver, ema, swa]) == [ema, swa, saver]
    assert not (ema.steers or swa.steers)


# State.


def test_state_goes_on_and_is_kept_until_the_run_begins() -> None:
    first, ema = Net(), EMA(0.9)
    fit(first, numbers(3), callbacks=ema)
    state = copy.deepcopy(ema.state_dict())
    again = EMA(0.9)
    again.load_state_dict(state)
    assert again.state_dict() is state
    seen: list[Any] = []

    def look(trainer: Any, task: Any) -> None:
        seen.append((again.num_averaged, copies_of(again)))

    watch = Watch(fit_start=look)
    watch.after = (EMA,)
    fit(Net(), numbers(1), callbacks=[watch, again])
    assert seen[0][0] == 3
    assert_equal(seen[0][1], copies_of(ema))


def copies_of(ema: EMA) -> dict[str, Tensor]:
    return {name: average.clone() for name, average in ema.averages.items()}


@pytest.mark.parametrize(
    ("averages", "message"),
    [
        ({"x": torch.zeros(())}, "averages of EMA for weights that Rising lacks: x. Resume with the task"),
        ({"w": torch.zeros(2)}, r"an average of EMA for 'w' of shape \(2,\), and Rising has \(\)"),
    ],
)
def test_state_of_another_model_is_refused(averages: Any, message: str) -> None:
    ema = EMA()
    ema.load_state_dict({"num_averaged": 1, "newest_step": 1, "averages": averages})
    with pytest.raises(CheckpointError, match=message):
        fit(Rising(), ones(1), callbacks=ema)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(1.0), r"EMA\(decay=1.0\). Expected a number from 0 to below 1"),
        (lambda: EMA(True), r"EMA\(decay=True\)"),
        (lambda: EMA(every="30 s"), r"EMA\(every\)='30 s'. Expected whole optimizer steps or epochs"),
        (lambda: EMA(every="0.5 epochs"), r"EMA\(every\)='0.5 epochs'"),
        (lambda: EMA(every="last"), r"EMA\(every\)='last'"),
        (lambda: EMA(start=-1), r"EMA\(start\)=-1"),
        (lambda: EMA(start=False), r"EMA\(start\)=False"),
        (lambda: EMA(final="no"), r"EMA\(final='no'\). Expected True or False"),
        (lambda: EMA(use_buffers=1), r"EMA\(use_buffers=1\)"),
        (lambda: EMA(evaluates=None), r"EMA\(evaluates=None\)"),
    ],
)
def test_arguments(make: Callable[[], EMA], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# Several processes.


class Shared(Task):
    """Its buffer grows by the mean of each batch, so that each process has another one until they are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.total += batch.mean()  # type: ignore[operator, has-type]
        return -self.w * batch.mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append((self.w.item(), self.total.item()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _two() -> dict[str, Any]:
    from torch.utils.data import DataLoader

    def end(trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 2 and trainer.process.process_index == 1:
            raise StopRun

    task, ema = Shared(), EMA(0.5)
    loader = DataLoader(torch.arange(8.0), batch_size=1)  # type: ignore[arg-type]
    fit(task, loader, DataLoader(torch.zeros(2)), callbacks=[Watch(step=end), ema], val_every=1)  # type: ignore[arg-type]
    return {
        "average": ema.averages["w"].item(),
        "seen": task.seen,
        "weights": (task.w.item(), ema.num_averaged),
    }


def test_two_processes_average_and_evaluate_alike(two_processes: Run) -> None:
    first, second = two_processes(_two)
    # Steps on the means of (0, 1) and (2, 3): w = 0.5, 3. Process 0's buffer: 0, 2; its averages 0 and 1.
    assert first == {"average": 1.625, "seen": [(0.25, 0.0)], "weights": (3.0, 2)}
    assert second == first


def _resumed() -> list[dict[str, Tensor]]:
    from torch.utils.data import DataLoader

    def save(trainer: Any, task: Any, outputs: Any) -> None:
        if trainer.state.step == 3:
            trainer.save_state("saved")

    found = []
    for resume_from in (None, "saved"):
        task, ema = Net(), EMA(0.9)
        loader = DataLoader(torch.cat(numbers(4)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        watches = [Watch(batch_end=save)] if resume_from is None else []
        running = trainer(callbacks=[ema, *watches], max_epochs=2, seed=1)
        running.fit(task, loader, [torch.ones(2, 3)], resume_from=resume_from)
        found += [copies(task), copies_of(ema)]
    return found


def test_two_processes_go_on_with_the_same_averages(two_processes: Run) -> None:
    first, second = two_processes(_resumed)
    assert_equal(first[2], first[0])
    assert_equal(first[3], first[1])
    assert_equal(second[2], second[0])
    for averages in (second[1], second[3]):  # but for the statistics of its own batches, which are not evaluated
        weights = {name for name in averages if "running" not in name}
        assert_equal({name: averages[name] for name in weights}, {name: first[1][name] for name in weights})
