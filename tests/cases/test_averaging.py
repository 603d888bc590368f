"""Cases of the category averaging, by their ids."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.ema import EMA
from loopwright.callbacks.swa import SWA
from loopwright.strategies.precision import ScaledPrecision
from loopwright.trainer.task import Task

from ..callbacks.rising import Rising
from ..trainer.tiny import Watch, fit, ones
from ..trainer.tiny import trainer as make_trainer


class Norm(Task):
    """A batch norm over two batches, and a weight that the loss goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.linear = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.linear(self.norm(batch)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        schedule = LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


PAIRS = [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])]


def test_b82_statistics_are_means_over_the_batches_of_one_pass() -> None:
    task = Norm()
    swa = SWA(0.0)
    fit(task, PAIRS, callbacks=swa)
    assert swa.num_averaged == 1
    assert (task.norm.running_mean, task.norm.running_var) == (torch.tensor([4.0]), torch.tensor([2.0]))
    assert (task.norm.momentum, int(task.norm.num_batches_tracked)) == (0.1, 2)


def save_at_third_validation(trainer: Any, task: Any, metrics: Any) -> None:
    if trainer.state.step == 3:
        trainer.save_state("saved")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_b83_training_goes_on_from_its_own_weights(accumulate: int) -> None:
    data = ones(5 * accumulate)
    options: dict[str, Any] = {"val_every": 1, "accumulate": accumulate}
    whole, first = Rising(), Rising()
    ema = EMA(0.5, final=True)
    fit(whole, data, ones(1), callbacks=ema, **options)
    assert whole.seen == [0.5, 1.25, 2.125, 3.0625, 4.03125]
    assert whole.value == 4.03125

    save = Watch(validation_end=save_at_third_validation)
    fit(first, data, ones(1), max_steps=4, callbacks=[EMA(0.5), save], **options)
    assert load_file(Path("saved/model.safetensors"))["w"].item() == 3.0

    again, found, resumed = Rising(), [], EMA(0.5)

    class Look(Callback):
        after = (EMA,)

        def on_fit_start(self, trainer: Any, task: Any) -> None:
            found.append((task.value, resumed.averages["w"].item(), resumed.num_averaged))

    make_trainer(callbacks=[Look(), resumed], **options).fit(again, data, ones(1), resume_from="saved")
    assert found == [(3.0, 2.125, 3)]
    assert again.seen == [3.0625, 4.03125]
    assert (again.value, resumed.averages["w"].item()) == (5.0, 4.03125)


@pytest.mark.parametrize("scaled", [False, True])
def test_b118_resume_inside_the_averaging_phase(scaled: bool) -> None:
    def leg(swa: SWA, *callbacks: Callback, resume_from: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        task, options = Norm(), {}
        if scaled:
            options["precision"] = ScaledPrecision(torch.device("cpu"), torch.amp.GradScaler("cpu", init_scale=8.0))
        loader = DataLoader(TensorDataset(torch.cat(PAIRS)), batch_size=2, shuffle=True, collate_fn=rows)
        found = make_trainer(max_epochs=4, callbacks=[swa, *callbacks], seed=1, **options)
        found.fit(task, loader, resume_from=resume_from)
        assert (found.state.step, swa.num_averaged) == (8, 2)
        return copy.deepcopy(task.state_dict()), found.strategy.precision.state_dict()

    def save(trainer: Any, task: Any, outputs: Any) -> None:
        if trainer.state.step == 7:
            trainer.save_state("saved")

    counts = []
    resumed = SWA("2 epochs", lr=0.01)
    first = Watch(batch_start=lambda *values: counts.append(resumed.num_averaged))
    wanted = leg(SWA("2 epochs", lr=0.01), Watch(batch_end=save))
    found = leg(resumed, first, resume_from="saved")
    assert set(counts) == {1}
    assert [name for name, value in wanted[0].items() if not torch.equal(value, found[0][name])] == []
    assert wanted[1] == found[1]  # as many good steps of the scaler


def rows(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([row for (row,) in samples])


def test_an_average_that_is_due_where_the_run_stops_is_in_the_checkpoint() -> None:
    """Epochs 3 and 4 count; the first leg ends with epoch 3, the last moment at which its weights are there."""
    whole, first, again = Rising(), Rising(), Rising()
    swa, resumed = SWA("2 epochs"), SWA("2 epochs")
    fit(whole, ones(2), ones(1), max_epochs=4, callbacks=swa)
    stop = Watch(stop=lambda trainer, task: trainer.save_state("saved"))
    fit(first, ones(2), ones(1), max_epochs=4, max_steps=6, callbacks=[SWA("2 epochs"), stop])
    make_trainer(max_epochs=4, callbacks=resumed).fit(again, ones(2), ones(1), resume_from="saved")
    assert (whole.value, again.value) == (7.0, 7.0)
    assert whole.seen == [2.0, 4.0, 6.0, 7.0]
    assert again.seen[-1] == 7.0
    assert resumed.num_averaged == 2
