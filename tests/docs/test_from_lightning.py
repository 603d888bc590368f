"""The two scripts of docs/from-lightning.md run, that of Loopwright with the same numbers on one process and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-lightning.md"
BEFORE, AFTER = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
LAUNCHED = [sys.executable, "-m", "loopwright", "launch", "--cpu", "--num_processes", "2"]


def numbers_printed(script: str, command: list[str], accumulate: int, folder: Path) -> list[tuple[float, float]]:
    """Loss and accuracy of each epoch, as a script prints them in a folder of its own."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    environment = os.environ | {"LOOPWRIGHT_USE_CPU": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*command, "train.py", str(accumulate)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"epoch \d: loss (\d\.\d{4}), accuracy (\d\.\d{4})", done.stdout)
    assert len(found) == 5
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


@pytest.mark.slow
def test_the_script_after_gives_the_same_numbers_on_one_process_and_on_two(tmp_path: Path) -> None:
    alone = numbers_printed(AFTER, [sys.executable], 4, tmp_path / "alone")
    assert alone[-1][1] > 0.93
    two = numbers_printed(AFTER, LAUNCHED, 2, tmp_path / "two")
    for found, expected in zip(two, alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-3)
    for folder in (tmp_path / "alone", tmp_path / "two"):
        assert (folder / "runs/circle/metrics.csv").is_file()
        checkpoints = list((folder / "runs/circle/checkpoints").iterdir())
        assert 1 <= len(checkpoints) <= 2  # the best, and the newest where that is another one
        assert all((path / "model.safetensors").is_file() for path in checkpoints)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_the_script_before_runs_with_lightning(tmp_path: Path) -> None:
    found = numbers_printed(BEFORE, [sys.executable], 4, tmp_path / "before")
    assert found[-1][1] > 0.93


def test_both_scripts_have_the_same_model_and_data() -> None:
    assert BEFORE.count("nn.Linear") == AFTER.count("nn.Linear")
    shared = set(BEFORE.splitlines()) & set(AFTER.splitlines())
    assert len(shared) > 0.6 * len(set(BEFORE.splitlines()))
