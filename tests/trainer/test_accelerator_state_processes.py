"""`save_state` and `load_state` of an `Accelerator` on several processes.

What runs in the workers returns plain values; process 0's stand first in the lists that the tests compare.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopwright.checkpoint.reading import open_checkpoint
from loopwright.distributed.errors import CheckpointError
from loopwright.trainer.project import ProjectConfiguration

from .trained import build, train, weights


def train_whole(folder: str, steps: int) -> Any:
    """Train, and save in the middle of an epoch; dropout draws other numbers on each process."""
    trained = build(gradient_accumulation_steps=steps)
    torch.manual_seed(10 + trained.accelerator.process_index)
    random.seed(20 + trained.accelerator.process_index)
    seen = train(trained, epochs=range(3), save_at=(1, 2), path=folder)
    return seen[5:], weights(trained), random.random()


def resume(folder: str, steps: int, batch_size: int = 2) -> Any:
    """Go on in other objects."""
    trained = build(seed=99, batch_size=batch_size, gradient_accumulation_steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained.accelerator.load_state(folder)
    seen = train(trained, epochs=range(1, 3), skipped=2)
    return seen, weights(trained), random.random(), [str(each.message) for each in caught]


def test_two_processes_go_on_bit_for_bit(two_processes: Any, tmp_path: Path) -> None:
    """In the middle of a window too, whose gradients each process has for itself."""
    for steps in (1, 4):
        folder = str(tmp_path / f"state {steps}")
        whole = two_processes(train_whole, folder, steps)
        resumed = two_processes(resume, folder, steps)
        assert resumed == [(*each, []) for each in whole]
    manifest = open_checkpoint(tmp_path / "state 1").manifest
    assert (manifest.world_size, manifest.strategy) == (2, "DDPStrategy")
    assert whole[0][0] != whole[1][0]  # other samples, and other losses


def test_another_number_of_processes_goes_on_with_a_warning(two_processes: Any, tmp_path: Path) -> None:
    whole = two_processes(train_whole, str(tmp_path / "two"), 1)
    seen, _, _, caught = resume(str(tmp_path / "two"), 1, batch_size=4)
    assert len(caught) == 1 and "2 processes saved it, and 1 go on" in caught[0]
    assert "random states are not restored" in caught[0]
    before = [number for each in whole for epoch, numbers, _ in each[0] if epoch == 1 for number in numbers]
    assert sorted(seen[0][1]) == sorted(before)  # what was left of the epoch
    assert [epoch for epoch, _, _ in seen] == [1, 2, 2, 2]
    whole_state = open_checkpoint(tmp_path / "two").weights()["0.weight"].tolist()
    single = build(seed=99)
    with pytest.warns(UserWarning, match="2 processes saved it"):
        single.accelerator.load_state(tmp_path / "two")
    assert weights(single)["0.weight"] == whole_state


def fail(folder: str) -> list[str]:
    """What each process is told when one of them can't save, and when the checkpoint does not fit."""
    trained = build()
    trained.accelerator.save_state(folder)
    texts = []
    holder = nn.Module()
    if trained.accelerator.process_index == 1:
        trained.accelerator.strategy.process_state = lambda *_: {"wrong": holder}  # type: ignore[method-assign]
    try:
        trained.accelerator.save_state(folder)
    except CheckpointError as error:
        texts.append(str(error))
    wide = build(width=5)
    try:
        wide.accelerator.load_state(folder)
    except CheckpointError as error:
        texts.append(str(error))
    try:
        wide.accelerator.load_state(f"{folder}/nothing")
    except CheckpointError as error:
        texts.append(str(error))
    if trained.accelerator.process_index == 1:
        trained.accelerator.register_for_checkpointing(nn.Linear(1, 1))
    try:
        trained.accelerator.load_state(folder)
    except CheckpointError as error:
        texts.append(str(error))
    return texts


def test_errors_are_told_to_all(two_processes: Any, tmp_path: Path) -> None:
    first, second = two_processes(fail, str(tmp_path / "state"))
    assert first == second
    assert "process 1: process-00001.strategy[0].wrong" in first[0]
    assert "do not fit Sequential: mismatched (3): 0.weight" in first[1]
    assert "is no checkpoint" in first[2]
    assert first[3].startswith("process 1: the checkpoint has the states of 0 objects []")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert open_checkpoint(tmp_path / "state").manifest.sequence == 1


def save_on_two_nodes(folder: str) -> Any:
    """Each process as the only one of a machine, with a disk of its own."""
    trained = build(project_config=ProjectConfiguration(save_on_each_node=True))
    trained.accelerator.process.local_process_index = 0
    index = trained.accelerator.process_index
    torch.manual_seed(10 + index)
    path = f"{folder}/node{index}/state"
    trained.accelerator.register_save_state_pre_hook(lambda *parts: Path(parts[2], f"node{index}").touch())
    seen = train(trained, epochs=range(1), save_at=(0, 2), path=path)
    other = build(seed=99, project_config=ProjectConfiguration(save_on_each_node=True))
    other.accelerator.process.local_process_index = 0
    other.accelerator.load_state(path)
    return train(other, epochs=range(1), skipped=2) == seen[2:], weights(other) == weights(trained)


def test_each_node_may_save_its_own(two_processes: Any, tmp_path: Path) -> None:
    assert two_processes(save_on_two_nodes, str(tmp_path)) == [(True, True)] * 2
    for index in range(2):
        checkpoint = open_checkpoint(tmp_path / f"node{index}" / "state")
        assert checkpoint.tree_names == ("accelerator", "optimizers", f"process-0000{index}")
        assert (checkpoint.weights_names, checkpoint.unlisted_files) == (("model",), (f"node{index}",))
        assert checkpoint.manifest.world_size == 2


def number_them(folder: str) -> Any:
    """Automatic names, a limit, and hooks whose files the main process writes."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1, save_on_each_node=True)
    trained = build(project_config=project)
    seen: list[str] = []

    def hook(models: list[nn.Module], states: list[Any], place: str) -> None:
        seen.append(Path(place).name)
        assert len(models) == len(states) == 1 and next(iter(states[0])) == "0.weight"
        if trained.accelerator.is_main_process:
            (Path(place) / "notes.txt").write_text(place)

    trained.accelerator.register_save_state_pre_hook(hook)
    for _ in range(2):
        trained.accelerator.save_state()
    trained.accelerator.wait_for_everyone()
    trained.accelerator.load_state()
    return seen, trained.accelerator.save_iteration


def test_numbers_limits_and_hooks(two_processes: Any, tmp_path: Path) -> None:
    assert two_processes(number_them, str(tmp_path)) == [(["checkpoint_0", "checkpoint_1"], 2)] * 2
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
    assert open_checkpoint(tmp_path / "checkpoints" / "checkpoint_1").unlisted_files == ("notes.txt",)
