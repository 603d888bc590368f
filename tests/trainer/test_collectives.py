"""What a run on two processes sends: nothing but its gradients, one vector per step, and one exchange per record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.distributed.slots import channel
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]
Sends = dict[str, int]

ACCUMULATE = 4


class Logging(Task):
    """One weight, and as many logged values as are asked for."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.num_values = num_values

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).mean()
        for index in range(self.num_values):
            self.log(f"value_{index}", loss, reduce="max" if index % 2 else "mean")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _sends(num_steps: int, num_values: int, log_every: str) -> Sends:
    """What one process sends in a run of one epoch: collectives by their names in torch's profiler, and messages."""
    loader = DataLoader(TensorDataset(torch.zeros(2 * num_steps * ACCUMULATE, 1)), batch_size=1)
    trainer = Trainer(
        max_epochs=1, accumulate=ACCUMULATE, log_every=log_every, progress=False, trackers=False, project_dir="."
    )
    before = channel().num_sent
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.fit(Logging(num_values), loader)
    names = (event.name for event in profiler.events() if event.name.startswith("gloo:"))
    return {**Counter(name.removeprefix("gloo:") for name in names), "message": channel().num_sent - before}


def _more(longer: Sends, shorter: Sends) -> Sends:
    names = longer.keys() | shorter.keys()
    return {name: more for name in names if (more := longer.get(name, 0) - shorter.get(name, 0))}


def _in_steps(num_values: int, log_every: str) -> Sends:
    """What ten steps more send; what a run sends at its ends is left out."""
    _sends(2, num_values, log_every)  # from here on there is room for its longest message
    return _more(_sends(16, num_values, log_every), _sends(6, num_values, log_every))


def test_a_step_sends_its_gradients_and_one_vector(two_processes: Run) -> None:
    for num_values in (0, 9):  # what is logged is not sent in steps without a record
        assert two_processes(_in_steps, num_values, "100 steps") == [{"all_reduce": 10, "message": 10}] * 2


def test_a_record_sends_all_values_together(two_processes: Run) -> None:
    # A record in each second step: five in ten steps. Forty values need more room than there is at first.
    for num_values in (1, 40):
        assert two_processes(_in_steps, num_values, "2 steps") == [{"all_reduce": 10, "message": 15}] * 2
