"""Scripts under an `Accelerator`, drawn by a seed, that leave after saves and go on: bit for bit as without a stop.

A registered object says what was done of an epoch. The script skips that much, also where it is the whole epoch.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.distributed.random import set_seed
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.project import ProjectConfiguration

from .resuming import Samples

EPOCHS = 3
Setting = dict[str, Any]


class Progress:
    """How far the script is."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.total = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def drawn(seed: int) -> Setting:
    """The setting of a seed."""
    draw = random.Random(seed)
    augments = draw.random() < 0.5
    return {
        "accumulate": draw.choice([1, 2, 3]), "precision": draw.choice(["no", "bf16", "fp16"]),
        "schedule": draw.choice(["lambda", "one cycle", "step"]), "augments": augments,
        "seed_batches": augments or None, "workers": draw.choice([0, 0, 2]), "shuffle": draw.random() < 0.8,
        "own_generator": draw.random() < 0.3, "batch_size": draw.choice([2, 3, 4]), "samples": draw.choice([10, 13]),
        "clips": draw.random() < 0.5, "validates": draw.choice([1, 2, 3]), "limit": draw.choice([None, 1, 2]),
        "saves_at": draw.sample(range(1, 10), 2), "saves_last": draw.random() < 0.7, "split": draw.random() < 0.3,
    }  # fmt: skip


def schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    if name == "lambda":
        return rates.LambdaLR(optimizer, lambda count: 0.9**count)
    return rates.OneCycleLR(optimizer, 0.1, total_steps=90) if name == "one cycle" else rates.StepLR(optimizer, 2, 0.8)


class Script:
    """The objects of one leg, all made anew and from another seed."""

    def __init__(self, setting: Setting, folder: Path, leg: int) -> None:
        self.setting = setting
        data = DataLoaderConfiguration(seed_batches=setting["seed_batches"], split_batches=setting["split"])
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=setting["limit"])
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=setting["accumulate"], mixed_precision=setting["precision"],
            project_config=project, dataloader_config=data,
        )  # fmt: skip
        set_seed(10 + leg)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        generator = torch.Generator().manual_seed(leg) if setting["own_generator"] else None
        size = setting["batch_size"] * (self.accelerator.num_processes if setting["split"] else 1)
        train = DataLoader(
            Samples(setting["samples"], setting["augments"]), batch_size=size, shuffle=setting["shuffle"],
            num_workers=setting["workers"], generator=generator,
        )  # fmt: skip
        val = DataLoader(Samples(9, augments=False), batch_size=size, shuffle=True)
        prepared = self.accelerator.prepare(
            model, optimizer, train, val, schedule(setting["schedule"], optimizer)
        )  # fmt: skip
        self.model, self.optimizer, self.train, self.val, self.schedule = prepared
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        set_seed(20 + leg + self.accelerator.process_index)
        self.seen: list[Any] = []
        if leg:
            self.accelerator.load_state()

    def step(self, values: Any, labels: Any) -> float:
        with self.accelerator.accumulate(self.model):
            loss = F.cross_entropy(self.model(values), labels)
            self.accelerator.backward(loss)
            if self.setting["clips"] and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return loss.item()

    def validate(self) -> Any:
        self.model.eval()
        found = []
        for numbers, values, _ in self.val:
            with torch.no_grad():
                found.append(self.accelerator.gather_for_metrics((numbers, self.model(values) + torch.rand(()))))
        self.model.train()
        return [(numbers.tolist(), outputs.tolist()) for numbers, outputs in found]

    def run(self, save_at: int | None = None) -> None:
        """Train to the end, or save behind a micro-batch and leave."""
        progress = self.progress
        for epoch in range(progress.epoch, EPOCHS):
            loader = self.train
            if progress.batch:
                loader = self.accelerator.skip_first_batches(self.train, progress.batch)
            for numbers, values, labels in loader:
                loss = self.step(values, labels)
                progress.batch += 1
                progress.total += 1
                rate = self.optimizer.param_groups[0]["lr"]
                self.seen.append((epoch, progress.batch, numbers.tolist(), loss, rate))
                if progress.total % self.setting["validates"] == 0:
                    self.seen.append(self.validate())
                if progress.total == save_at:
                    self.accelerator.save_state()
                    return
            self.seen.append(self.validate())
            progress.epoch, progress.batch = epoch + 1, 0

    def end(self) -> Any:
        """All that a run comes to."""
        states = [self.model.state_dict(), self.optimizer.state_dict()["state"], self.schedule.state_dict()]
        scaler = self.accelerator.scaler
        draws = (torch.rand(2).tolist(), random.random(), float(np.random.rand()))
        return repr((states, None if scaler is None else scaler.state_dict(), draws, self.accelerator.step))


def whole_and_legs(setting: Setting, folder: str) -> tuple[Any, Any]:
    """What is seen, and comes out, in one go and in legs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.set_printoptions(precision=20, threshold=10_000)
        whole = Script(setting, Path(folder, "whole"), 0)
        whole.run()
        expected = whole.seen, whole.end()
        per_epoch = whole.progress.total // EPOCHS
        saves = {1 + (at - 1) % whole.progress.total for at in setting["saves_at"]}
        legs, seen = 0, []
        for at in sorted(saves | ({per_epoch} if setting["saves_last"] else set())):
            script = Script(setting, Path(folder, "legs"), legs)
            script.run(save_at=at)
            seen += script.seen
            legs += 1
        script = Script(setting, Path(folder, "legs"), legs)
        script.run()
        found = seen + script.seen, script.end()
        torch.set_printoptions(profile="default")
    return expected, found


@pytest.mark.parametrize("seed", range(8))
def test_f18b_a_drawn_script_goes_on_bit_for_bit(tmp_path: Path, seed: int) -> None:
    whole, legs = whole_and_legs(drawn(seed), str(tmp_path))
    assert legs == whole


def all_of(settings: list[Setting], folder: str) -> list[bool]:
    return [
        whole == legs
        for number, setting in enumerate(settings)
        for whole, legs in [whole_and_legs(setting, f"{folder}/{number}")]
    ]


def test_two_processes_go_on_bit_for_bit(two_processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    settings = [drawn(seed) | {"workers": 0} for seed in range(20, 24)]
    assert two_processes(all_of, settings, str(tmp_path)) == [[True] * 4] * 2
