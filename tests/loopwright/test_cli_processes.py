"""The commands that run a YAML file, on two processes that a launcher started."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loopwright.cli.main import main

Run = Callable[..., list[Any]]

MORE = """

class Twice(Line):
    def predict_step(self, batch, batch_idx, dataloader_idx):
        return batch[0] * 10 ** dataloader_idx


def several():
    first = DataLoader(TensorDataset(torch.tensor([[1.0], [2.0]])), batch_size=2)
    second = DataLoader(TensorDataset(torch.arange(5.0).unsqueeze(1)), batch_size=1)
    return {"predict": {"first": first, "second": second, "third": first}}
"""
FILE = """
task:
  class_path: task.Line
data:
  class_path: task.loaders
trainer:
  max_epochs: 1
  progress: false
  trackers: csv
  seed: 7
  name: one
"""


def _outcome(arguments: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(arguments)
    return code, out.getvalue()


def test_each_command_speaks_once(two_processes: Run, project: Any) -> None:
    file = str(project.write(FILE))
    (code, said), (other, nothing) = two_processes(_outcome, ["fit", file])
    assert (code, other, nothing) == (0, 0, "")
    assert said.count("The files of this run are in") == 1
    for command in ("validate", "test"):
        (code, said), (other, nothing) = two_processes(_outcome, [command, file])
        assert (code, other, nothing) == (0, 0, "")
        assert len(said.splitlines()) == 1
    (code, said), (other, nothing) = two_processes(_outcome, ["plan", file])
    assert (code, other, nothing) == (0, 0, "")
    assert said.startswith("Processes   2, a step takes 4 samples of all")


def test_the_files_of_a_run_are_written_once(two_processes: Run, project: Any, working_folder: Path) -> None:
    two_processes(_outcome, ["fit", str(project.write(FILE))])
    names = sorted(path.name for path in working_folder.rglob("one/*"))
    assert names == ["config.yaml", "metrics.csv", "metrics.run.json"]


def test_predictions_are_complete_and_in_order(two_processes: Run, project: Any, working_folder: Path) -> None:
    (project.folder / "task.py").write_text((project.folder / "task.py").read_text() + MORE)
    file = str(project.write(FILE.replace("task.Line", "task.Twice").replace("task.loaders", "task.several")))
    output = working_folder / "predictions.jsonl"
    (code, said), (other, nothing) = two_processes(_outcome, ["predict", file, "--output", str(output)])
    assert (code, other, nothing) == (0, 0, "")
    assert said == f"9 predictions. They are in {output}.\n"
    # Process 1 gets no batch of the first and the third loader.
    expected = [[1.0], [2.0], [0.0], [10.0], [20.0], [30.0], [40.0], [100.0], [200.0]]
    assert [json.loads(line) for line in output.read_text().splitlines()] == expected
    assert [path.name for path in working_folder.iterdir() if path.name.startswith("predictions")] == [output.name]


def test_predictions_are_counted_over_all(two_processes: Run, project: Any) -> None:
    (code, said), (other, nothing) = two_processes(_outcome, ["predict", str(project.write(FILE))])
    assert (code, other, nothing) == (0, 0, "")
    assert said.startswith("8 predictions. ")


def test_bad_input_is_refused_by_all(two_processes: Run, project: Any) -> None:
    file = str(project.write(FILE))
    assert [code for code, _ in two_processes(_outcome, ["fit", file, "--trainer.accumulate=0"])] == [2, 2]
