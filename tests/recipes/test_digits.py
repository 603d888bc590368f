"""The `digits` recipe, whole: it takes seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loopwright.cli.main import main
from loopwright.recipes.digits.data import digit_loaders, digit_splits


def test_the_whole_recipe_reaches_97_percent(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(repository / "recipes/digits/digits.yaml")
    assert main(["fit", recipe, "--trainer.name=run"]) == 0
    run = tmp_path / "runs/run"
    assert list(run.glob("events.out.tfevents*"))
    capsys.readouterr()

    assert main(["test", recipe, "--trainer.name=test", "--weights", str(run / "checkpoints/best.safetensors")]) == 0
    results = dict(line.split(": ") for line in capsys.readouterr().out.strip().splitlines() if ": " in line)
    assert float(results["test/accuracy"]) > 0.97


@pytest.mark.slow
def test_two_processes_reach_the_same_accuracy(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(repository / "recipes/digits/digits.yaml")
    options = ["--devices", "2", "--data.init_args.batch_size", "32", "--trainer.name=run"]
    done = subprocess.run(
        [sys.executable, "-m", "loopwright", "fit", recipe, *options],
        env=os.environ | {"LOOPWRIGHT_USE_CPU": "1"}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    epoch, step = re.findall(r"epoch (\d+)/40  batch 20/20  step (\d+) ", done.stderr)[-1]
    assert int(step) == 20 * int(epoch)  # 2 x 20 batches of 32, for the 20 batches of 64 that one process has
    weights = tmp_path / "runs/run/checkpoints/best.safetensors"
    assert main(["test", recipe, "--trainer.name=test", "--weights", str(weights)]) == 0
    (accuracy,) = re.findall(r"test/accuracy: (\S+)", capsys.readouterr().out)
    assert float(accuracy) > 0.97


def test_the_splits_share_no_image_and_hold_all() -> None:
    train, val, test = (set(split.indices) for split in digit_splits(split_seed=0))
    assert (len(train), len(val), len(test)) == (1258, 180, 359)
    assert train | val | test == set(range(1797))


def test_the_split_depends_on_its_seed_alone() -> None:
    first = digit_splits(split_seed=1)[2].indices
    torch.manual_seed(5)
    assert digit_splits(split_seed=1)[2].indices == first
    assert digit_splits(split_seed=2)[2].indices != first


def test_images_are_real_digits_in_0_to_1() -> None:
    images, labels = next(iter(digit_loaders(batch_size=64)["val"]))
    assert images.shape == (180, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    assert sorted(set(labels.tolist())) == list(range(10))
