"""Cases of the category accumulation, by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loopwright.callbacks.callback import Callback
from loopwright.strategies.outcome import StepOutcome
from loopwright.strategies.strategy import Strategy

from ..trainer.tiny import Loss, Scalar, Watch, Weighed, batches, fit, ones, tracked, trainer


def test_b01_a_short_last_window_is_averaged_over_its_real_size() -> None:
    task = Scalar()
    found = fit(task, ones(5), accumulate=2)
    assert (task.value, found.state.step) == (-3, 3)


def test_b02_a_short_last_window_is_stepped_and_does_not_leak() -> None:
    gradients: list[Any] = []
    task = Scalar()
    found = fit(
        task, ones(5), accumulate=2, max_epochs=2,
        callbacks=Watch(epoch_start=lambda trainer, task: gradients.append(task.w.grad)),
    )  # fmt: skip
    assert found.state.step == 6
    assert gradients == [None, None]
    assert task.value == -6


@pytest.mark.parametrize("place", ["validation", "callback"])
def test_b04_validation_does_not_flip_the_flags_of_training(place: str) -> None:
    flags: list[bool] = []

    class Evaluates(Callback):
        """Runs a whole prepared loader in the middle of the training epoch, after each second batch."""

        def on_batch_end(self, trainer: Any, task: Any, outputs: Any) -> None:
            state = trainer.strategy.gradient_state
            flags.append(state.sync_gradients)
            if place == "callback" and trainer.state.micro_step % 2 == 0:
                for _ in trainer.strategy.setup_dataloader(ones(5)):
                    pass
                assert state.sync_gradients is flags[-1]

    task = Scalar()
    found = fit(
        task, ones(5), ones(5), accumulate=4, val_every="2 batches" if place == "validation" else None,
        callbacks=Evaluates(),
    )  # fmt: skip
    assert flags == [False, False, False, True, True]  # the full window, and the rest
    assert (found.state.step, task.value) == (2, -2)


def test_b05_micro_batches_weigh_by_their_tokens() -> None:
    window = [(torch.tensor([4.0, 9, 9]), torch.tensor([1.0, 0, 0])), (torch.tensor([1.0, 1, 1]), torch.ones(3))]
    records = tracked(task := Weighed(), window, accumulate=2, log_every=1)
    assert records[0][1]["loss"] == 1.75
    assert task.w.item() == pytest.approx(-1.75, abs=1e-6)

    single = [(torch.tensor([4.0, 1, 1, 1]), torch.ones(4))]
    fit(one := Weighed(), single)
    torch.testing.assert_close(one.w, task.w, atol=1e-6, rtol=0)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_b07_the_logged_loss_does_not_depend_on_the_accumulation(accumulate: int) -> None:
    records = tracked(Loss(), batches(*[2] * 8), accumulate=accumulate, log_every=1)
    assert [metrics["loss"] for _, metrics in records] == [2.0] * (8 // accumulate)


def test_b07_the_logged_loss_of_a_window_is_its_mean() -> None:
    (record,) = tracked(Loss(), batches(1, 2, 3, 6), accumulate=4, log_every=1)
    assert record == (1, {"loss": 3.0, "epoch": 1})


def test_b86_an_epoch_shorter_than_the_window_is_said() -> None:
    task = Scalar()
    with pytest.warns(UserWarning, match=r"accumulate=4 but an epoch has 2 batches: each step averages over 2"):
        found = fit(task, ones(2), accumulate=4, max_epochs=4)
    assert (found.state.step, task.value) == (4, -4)


def test_b86_or_the_window_goes_on_over_epochs() -> None:
    task = Scalar()
    found = fit(task, ones(2), accumulate=4, max_epochs=4, accumulate_across_epochs="carry")
    assert (found.state.step, task.value) == (2, -2)


@final
class Engine(Strategy):
    """Keeps books of its own, as engines do, from what it is told: each backward, and whether it closes a window."""

    def __init__(self) -> None:
        self.windows: list[int] = []
        self.open = 0

    def setup(
        self, model: nn.Module, optimizers: Sequence[Optimizer], method: str | None = "forward"
    ) -> tuple[nn.Module, list[Optimizer]]:
        return model, list(optimizers)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        self.open += 1

    def step(self, optimizer: Optimizer) -> StepOutcome:
        outcome = super().step(optimizer)
        if outcome is StepOutcome.APPLIED:
            self.windows.append(self.open)
            self.open = 0
        return outcome


def test_b88_engine_and_trainer_agree_where_a_window_ends() -> None:
    engine = Engine()
    found = trainer(strategy=engine, accumulate=4, max_epochs=2)
    found.fit(task := Scalar(), ones(6))
    assert engine.windows == [4, 2, 4, 2]
    assert found.state.step == len(engine.windows) == 4
    assert task.value == -4
