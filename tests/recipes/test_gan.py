"""The `gan` recipe: two optimizers, one step a batch, and images that come closer to real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from loopwright import Trainer
from loopwright.cli.main import main
from loopwright.recipes.gan.data import gan_loaders
from loopwright.recipes.gan.draw import as_text
from loopwright.recipes.gan.frechet import frechet_distance
from loopwright.recipes.gan.task import DigitGAN


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def test_both_optimizers_move_and_a_batch_is_one_step() -> None:
    task = DigitGAN(latent=4, width=16)
    generator, critic = weights(task.generator), weights(task.critic)
    trainer = Trainer(max_epochs=2, progress=False, trackers=False)
    trainer.fit(task, gan_loaders(batch_size=128)["train"])
    assert trainer.state.step == trainer.state.micro_step == 18  # 1,258 images: 9 full batches of 128 an epoch
    assert (weights(task.generator) != generator).all()
    assert (weights(task.critic) != critic).any()


def test_drawn_images_come_closer_to_real_ones(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(repository / "recipes/gan/gan.yaml")
    quick = ["--trainer.trackers=false", "--trainer.progress=false"]
    assert main(["validate", recipe, *quick]) == 0
    before = float(capsys.readouterr().out.split("val/frechet: ")[1].split()[0])

    assert main(["fit", recipe, "--trainer.max_epochs=20", "--trainer.name=run", *quick]) == 0
    assert "@" in capsys.readouterr().out  # the drawing
    weights = tmp_path / "runs/run/checkpoints/best.safetensors"
    assert main(["validate", recipe, *quick, "--weights", str(weights)]) == 0
    after = float(capsys.readouterr().out.split("val/frechet: ")[1].split()[0])
    assert after < before / 2


@pytest.mark.slow
def test_two_processes_come_as_close(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(repository / "recipes/gan/gan.yaml")
    options = ["--devices", "2", "--data.init_args.batch_size", "32", "--trainer.max_epochs=20", "--trainer.name=run"]
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", "fit", recipe, *options, "--trainer.trackers=false"],
        env=os.environ | {"LOOPWRIGHT_USE_CPU": "1"}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "@" in done.stdout  # the drawing
    assert (
        main(["validate", recipe, "--weights", "runs/run/checkpoints/best.safetensors", "--trainer.progress=false"])
        == 0
    )
    (distance,) = re.findall(r"val/frechet: (\S+)", capsys.readouterr().out)
    assert float(distance) < 3  # about 6 untrained


def test_the_frechet_distance_by_hand() -> None:
    one = torch.tensor([[0.0], [2.0]])  # mean 1, variance 2
    other = torch.tensor([[1.0], [5.0]])  # mean 3, variance 8
    # (1 - 3)^2 + 2 + 8 - 2 sqrt(2 * 8) = 6
    assert frechet_distance(one, other).item() == pytest.approx(6.0)
    images = torch.rand(50, 1, 2, 2)
    assert frechet_distance(images, images).item() == pytest.approx(0.0, abs=1e-9)


def test_images_as_text() -> None:
    images = torch.tensor([[[[0.0, 1.0], [1 / 3, 0.0]]], [[[1.0, 1.0], [0.0, 0.0]]]])
    assert as_text(images) == "  @@  @@@@\n--        "
