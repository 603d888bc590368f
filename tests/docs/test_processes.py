"""The examples of docs/processes.md: the script on one process and on two, and each snippet in two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright.distributed.errors import MetricError
from loopwright.trainer.trainer import Trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "processes.md"
SCRIPT, *SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
LAUNCHED = [sys.executable, "-m", "loopwright", "launch", "--cpu", "--num_processes", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def printed(command: list[str], folder: Path) -> tuple[int, float]:
    """The number of processes and the loss that the script prints, in a folder of its own."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    environment = os.environ | {"LOOPWRIGHT_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    ((count, loss),) = re.findall(r"^(\d) processes, val/loss (\d\.\d{4})$", done.stdout, re.MULTILINE)
    assert len(list((folder / "runs").iterdir())) == 1  # all processes write to the folder of one run
    return int(count), float(loss)


STARTS = {
    "by_itself": [sys.executable, "train.py", "--devices", "2", "--accumulate", "2"],
    "launched": [*LAUNCHED, "train.py", "--accumulate", "2"],
    "torchrun": [*TORCHRUN, "train.py", "--accumulate", "2"],
}


def check_starts(names: list[str], folder: Path) -> None:
    """Two processes that are started in these ways print the loss of one."""
    one, loss = printed([sys.executable, "train.py"], folder / "one")
    assert one == 1
    assert loss < 0.3
    for name in names:
        assert printed(STARTS[name], folder / name) == (2, pytest.approx(loss, abs=2e-4))


@pytest.mark.slow
def test_the_script_gives_the_same_loss_on_two_processes_that_it_starts_itself(tmp_path: Path) -> None:
    check_starts(["by_itself"], tmp_path)


@pytest.mark.slow
def test_the_script_gives_the_same_loss_on_two_processes_of_a_launcher(tmp_path: Path) -> None:
    check_starts(["launched", "torchrun"], tmp_path)


def _run(snippet: str) -> None:
    """Run a snippet with the names of the script."""
    names: dict[str, Any] = {"__name__": "docs"}
    exec(SCRIPT, names)
    exec(snippet, names)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_each_snippet_runs_on_two_processes(two_processes: Callable[..., list[Any]], snippet: str) -> None:
    two_processes(_run, snippet)


def _log_on_one() -> str:
    """The error of a run in which one process alone logs a name."""
    names: dict[str, Any] = {"__name__": "docs"}
    exec(SCRIPT, names)

    class Faulty(names["Circle"]):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.process.is_main_process:
                self.log("train/extra", 1.0)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(max_epochs=1, progress=False, trackers=False, log_every=1)
    train = names["DataLoader"](names["points"](128, seed=1), batch_size=32)
    try:
        trainer.fit(Faulty(), train)
    except MetricError as error:
        return str(error)
    return ""


def test_the_page_quotes_the_error_of_a_name_that_one_process_lacks(two_processes: Callable[..., list[Any]]) -> None:
    (quoted,) = re.findall(r"`MetricError: (.*?)`", PAGE.read_text())
    assert [text[: len(quoted)] for text in two_processes(_log_on_one)] == [quoted] * 2
