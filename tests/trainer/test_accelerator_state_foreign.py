"""`load_state` of folders that Hugging Face Accelerate wrote, and the files of both packages side by side."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from loopwright.distributed.errors import CheckpointError
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.project import ProjectConfiguration

from ..nursery import nursery
from .test_accelerator_state_saving import Counter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")

SCRIPT = Path(__file__).with_name("accelerate_states.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The project of a run of Accelerate, and what it computed behind its checkpoints."""
    folder = tmp_path_factory.mktemp("accelerate")
    done = nursery().run(SCRIPT, str(folder), timeout=100)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def build(folder: Path | None = None) -> Any:
    """The same objects here, with other weights."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=folder is not None)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(99)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = DataLoader(TensorDataset(torch.arange(36.0).reshape(12, 3) / 36), batch_size=2)
    accelerator.register_for_checkpointing(counter := Counter())
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader), counter


def go_on(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any, counter: Counter) -> Any:
    """One epoch. Gives what the script prints of its second one."""
    assert counter.count == 7
    losses = []
    for (inputs,) in loader:
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": [parameter.tolist() for parameter in model.parameters()]}


@pytest.mark.parametrize("number", [0, 1], ids=["safetensors", "pickle"])
def test_a_run_of_accelerate_goes_on_here(written: Any, number: int) -> None:
    """Weights, optimizer, schedule, dropout's random states and registered objects: equal to the last bit."""
    folder, expected = written
    built = build()
    with pytest.warns(UserWarning, match=r"Accelerate's checkpoints hold no position in the data"):
        built[0].load_state(folder / "checkpoints" / f"checkpoint_{number}")
    assert go_on(*built) == expected


def test_numbers_go_on_too(written: Any, tmp_path: Path) -> None:
    shutil.copytree(written[0], tmp_path / "project")
    built = build(tmp_path / "project")
    with pytest.warns(UserWarning, match="no position"):
        built[0].load_state()
    assert built[0].save_iteration == 2
    built[0].save_state()
    again = build(tmp_path / "project")
    again[0].load_state()
    assert again[0].save_iteration == 3
    assert go_on(*again) == written[1]


def test_names_of_wrappers_are_taken_out(written: Any, tmp_path: Path) -> None:
    """Accelerate leaves those of DDP and of the compiler in its checkpoints."""
    copied = Path(shutil.copytree(written[0] / "checkpoints" / "checkpoint_0", tmp_path / "state"))
    state = {f"module._orig_mod.{name}": value for name, value in load_file(copied / "model.safetensors").items()}
    save_file(state, copied / "model.safetensors", metadata={"format": "pt"})
    built = build()
    with pytest.warns(UserWarning, match="no position"):
        built[0].load_state(copied)
    assert go_on(*built) == written[1]


class Malicious:
    """What runs code when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.file),)


def test_no_pickle_is_run(written: Any, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(written[0] / "checkpoints" / "checkpoint_0", tmp_path / "state"))
    torch.save({"count": Malicious(str(tmp_path / "ran"))}, copied / "custom_checkpoint_0.pkl")
    built = build()
    weight = built[1][0].weight.tolist()
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl.*would run their code"):
        built[0].load_state(copied)
    assert not (tmp_path / "ran").exists()
    assert built[1][0].weight.tolist() == weight
    (copied / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps({"count": 1})[:5])
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl' can't be read"):
        built[0].load_state(copied)


def test_what_does_not_fit_is_refused_before_anything_is_changed(written: Any) -> None:
    path = written[0] / "checkpoints" / "checkpoint_0"
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model[0].parameters()))
    weight = prepared[0].weight.tolist()
    with pytest.raises(CheckpointError, match=r"states of 1 objects .* and 0 are registered"):
        accelerator.load_state(path)
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match=r"AdamW: its groups had \[4\] parameters and have \[2\]"):
        accelerator.load_state(path)
    other = Accelerator(cpu=True)
    other.register_for_checkpointing(Counter())
    other.prepare(nn.Linear(3, 4))
    with pytest.raises(CheckpointError, match=r"do not fit Linear: missing \(2\).* unexpected \(4\)"):
        other.load_state(path)
    assert (prepared[0].weight.tolist(), optimizer.state_dict()["state"]) == (weight, {})


def test_shards_have_the_names_and_index_of_accelerates(written: Any, tmp_path: Path) -> None:
    folder, _ = written
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)), tmp_path, max_shard_size=60
    )
    names = sorted(entry.name for entry in (folder / "sharded").iterdir())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    ours, theirs = (json.loads((place / names[-1]).read_text()) for place in (tmp_path, folder / "sharded"))
    assert ours["weight_map"] == theirs["weight_map"]
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
