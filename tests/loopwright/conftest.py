"""A user's folder for the tests of the command line: a task, its data, and YAML files next to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli.classes import python_path
from loopwright.cli.config import RunConfig
from loopwright.cli.request import read_request
from loopwright.cli.sources import Sources

TASK = '''
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopwright import Callback, Task


class Line(Task):
    """Fits y = 2x.

    Args:
        width: hidden width.
    """

    def __init__(self, width: int = 4, lr: float = 0.05, steps: int = 1, name: str = "line", path: str = "here",
                 is_wide: bool = False, dropout: float | None = 0.1, tags: list[str] | None = None, untyped="text",
                 activation=torch.nn.ReLU()):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/error", (self.net(x) - y).abs().mean())

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test/error", (self.net(x) - y).abs().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Talkative(Line):
    def __init__(self):
        super().__init__()
        print(f"weights sum to {sum(p.sum().item() for p in self.parameters())}")


@dataclass
class Window:
    size: int = 3
    word: str = "w"
    is_open: bool = False


class Windowed(Line):
    def __init__(self, window: Window = Window(), loose=False, choice: str | Window = "none"):
        super().__init__()
        print(window, loose)


class Base(Task):
    def __init__(self, depth: int = 2):
        super().__init__()


class Derived(Base):
    def __init__(self, width: int = 4, **kwargs):
        super().__init__(**kwargs)


class Broken(Line):
    def __init__(self):
        raise ValueError("broken by its author")


class Interrupted(Line):
    def training_step(self, batch, batch_idx):
        raise KeyboardInterrupt


class InterruptedLater(Line):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


class Steps(Callback):
    def on_fit_end(self, trainer, task):
        print(f"{trainer.state.step} steps\\n", end="")  # in one write: processes may share the pipe


class Count(Callback):
    def __init__(self, limit: int, word: str = "w"):
        if limit < 0:
            raise ValueError("limit is negative")
        self.limit = limit


def loaders(batch_size: int = 2, shuffle: bool = False):
    x = torch.arange(8.0).unsqueeze(1) / 8
    data = TensorDataset(x, 2 * x)
    loader = DataLoader(data, batch_size=batch_size, shuffle=shuffle)
    return {"train": loader, "val": DataLoader(data, batch_size=4), "test": DataLoader(data, batch_size=4),
            "predict": DataLoader(data, batch_size=3)}
'''
RUN = """
task:
  class_path: task.Line
data:
  class_path: task.loaders
trainer:
  max_epochs: 2
  progress: false
  trackers: false
  seed: 7
"""


@dataclass(frozen=True)
class Project:
    """A folder with `task.py`."""

    folder: Path

    def write(self, text: str = RUN, name: str = "run.yaml") -> Path:
        """A YAML file in the folder."""
        file = self.folder / name
        file.write_text(text)
        return file


def resolve(file: Path, *flags: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The resolved configuration of `loopwright fit FILE FLAGS`."""
    request = read_request("fit", [str(file), *flags])
    sources = Sources.read(file, request.flags, environment or {})
    with python_path(sources.folders):
        return RunConfig(sources).parse().values


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    return Project(folder)


@pytest.fixture(name="resolve")
def resolve_fixture() -> Any:
    """`resolve`, for tests: files of tests import nothing from each other."""
    return resolve
