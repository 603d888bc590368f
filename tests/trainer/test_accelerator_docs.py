"""The example of docs/from-accelerate.md is a script that runs, and prints the same on one process and on two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-accelerate.md"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def numbers_printed(command: list[str], folder: Path) -> list[float]:
    """The losses and accuracies that the example prints, run in a folder of its own."""
    folder.mkdir()
    (script,) = re.findall(r"^```python\n(import torch\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "train.py").write_text(script)
    environment = os.environ | {"LOOPWRIGHT_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "circle" / "model.safetensors").is_file()
    assert list((folder / "runs" / "circle").glob("events.*"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    return [float(number) for line in lines for number in re.findall(r"\d\.\d{4}", line)]


@pytest.mark.slow
def test_the_example_gives_the_same_numbers_on_one_process_and_on_two(tmp_path: Path) -> None:
    alone = numbers_printed([sys.executable], tmp_path / "alone")
    assert len(alone) == 10
    assert alone[-1] > 0.9
    assert numbers_printed(LAUNCHER, tmp_path / "two") == pytest.approx(alone, abs=1e-3)


@pytest.mark.parametrize("name", ["Accelerator", "DataLoaderConfiguration", "debug_launcher", "notebook_launcher"])
def test_what_the_page_imports_is_public(name: str) -> None:
    assert name in __import__("loopwright").__all__


def test_the_settings_of_the_group_reach_torch_and_end_training_leaves_it(tmp_path: Path) -> None:
    script = Path(__file__).with_name("accelerator_group.py")
    done = subprocess.run([*LAUNCHER, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found == [{"timeout": 77.0, "backend": "gloo", "sum": 3, "is_left": True}] * 2
