"""What a user is told of a run that would do nothing, or not what was meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import TaskError
from loopwright.trainer.task import Task

from .tiny import Scalar, fit, ones, tracked, trainer


class TestUnheardEvents:
    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("on_train_epoch_end", "on_epoch_end"),
            ("on_before_optimizer_step", "on_before_step"),
            ("on_stepp", "on_step"),
        ],
    )
    def test_a_callback_with_a_foreign_name(self, name: str, near: str) -> None:
        callback = type("Mine", (Callback,), {name: lambda self, *_: None})()
        with pytest.warns(UserWarning, match=rf"Mine\.{name} is never called: there is no such event"):
            fit(Scalar(), ones(1), callbacks=callback)
        assert near in str(trainer(callbacks=[callback]).plan(Scalar(), ones(1)))

    def test_a_task_that_is_no_callback(self) -> None:
        class Listens(Scalar):
            def on_epoch_end(self, trainer: Any, task: Any, metrics: Any) -> None:
                raise AssertionError

        with pytest.warns(UserWarning, match=r"Listens\.on_epoch_end is never called: only a Callback receives events"):
            fit(Listens(), ones(1))


class TestNothingTrained:
    def test_a_forgotten_return(self) -> None:
        class Forgets(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> None:
                (self.w * batch).mean()

        with pytest.raises(TaskError, match=r"Forgets\.training_step returned None for all 3\. Return the loss"):
            fit(Forgets(), ones(3), max_epochs=5)

    def test_one_loss_is_enough(self) -> None:
        class Rarely(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Any:
                return (self.w * batch).mean() if batch_idx == 2 else None

        found = fit(task := Rarely(), ones(3))
        assert (task.value, found.state.step, found.state.skipped_steps) == (-1, 1, 2)


class OneCycle(Scalar):
    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 1.0, total_steps=self.total), "interval": "step"}]


class TestSchedulesWithAHardEnd:
    @pytest.mark.parametrize(
        ("options", "steps"),
        [
            ({"max_epochs": 2}, 10), ({"max_steps": 10}, 10), ({"max_epochs": 2, "accumulate": 2}, 6),
            ({"max_epochs": 2, "accumulate": 2, "accumulate_across_epochs": "carry"}, 5),
            ({"max_epochs": 2, "accumulate": 2, "accumulate_across_epochs": "drop"}, 4),
        ],
    )  # fmt: skip
    def test_it_must_last_as_long_as_the_run(self, options: Any, steps: int) -> None:
        assert fit(OneCycle(steps), ones(5), **options).state.step == steps
        with pytest.raises(TaskError, match=rf"OneCycleLR ends after {steps - 1} steps .* the run gives it {steps}\."):
            fit(OneCycle(steps - 1), ones(5), **options)

    def test_the_plan_says_so(self) -> None:
        plan = trainer(max_epochs=2).plan(OneCycle(9), ones(5))
        assert "OneCycleLR ends after 9 steps of its own, but the run gives it 10: fit refuses it." in plan.warnings


class TestLastRecord:
    def test_a_run_shorter_than_the_interval(self) -> None:
        class Logs(Scalar):
            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.log("a", float(batch_idx))
                return super().training_step(batch, batch_idx)

        assert tracked(Logs(), ones(3), max_epochs=2) == [(6, {"a": 2, "epoch": 2})]
        seen: list[float] = []
        found = trainer(max_epochs=2)
        found.on("epoch_end", lambda trainer, task, metrics: seen.append(metrics["a"]))
        found.fit(Logs(), ones(3))
        assert seen == [2, 2]
        assert found.metrics["a"] == 2


def test_the_sanity_try_says_that_it_is_one() -> None:
    class Breaks(Scalar):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise ValueError("shapes")

    with pytest.raises(ValueError, match="shapes") as caught:
        fit(Breaks(), ones(1), ones(1), sanity_val_batches=2)
    assert "tried on 2 batches before training; sanity_val_batches=0" in caught.value.__notes__[0]


def test_predict_needs_a_way_to_predict() -> None:
    class Mute(Task):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

    with pytest.raises(TaskError, match="Mute has no predict_step, which predict needs"):
        trainer().predict(Mute(), ones(1))


def test_hyperparameters_of_an_init_whose_self_has_another_name() -> None:
    class This(Task):
        def __init__(this, width: int, net: nn.Module, *, depth: int = 2, **more: Any) -> None:  # noqa: N805
            super().__init__()
            this.save_hyperparameters()

    assert This(3, nn.Linear(1, 1), extra=4).hparams == {"width": 3, "extra": 4, "depth": 2}
