"""`loopwright verify-resume`: what is exact is found equal, what is not is found with its first difference."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.cli.proof import PARTS, Evidence, differences, tree_differences
from loopwright.cli.proof_leg import Leg, digest_of, run_leg
from loopwright.cli.verify_resume import draw_stops, run_verify_resume
from loopwright.distributed.errors import ConfigError

FILE = """\
task: {class_path: resumable.Net}
data:
  class_path: resumable.Loaders
  init_args: {own: OWN, fresh: FRESH}
trainer:
  max_epochs: 3
  val_every: 2 steps
  log_every: 1
  callbacks:
    - class_path: loopwright.ModelCheckpoint
      init_args: {every: 3 steps, directory: mine}
    - class_path: loopwright.ThroughputMonitor
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path, *, own: bool = False, fresh: bool = False) -> Path:
    shutil.copy(Path(__file__).with_name("resumable.py"), folder / "resumable.py")
    path = folder / "run.yaml"
    path.write_text(FILE.replace("OWN", str(own).lower()).replace("FRESH", str(fresh).lower()))
    return path


def evidence(file: Path, folder: str, stops: Sequence[tuple[Any, int]] = ()) -> Evidence:
    """What legs in this process leave behind."""
    place = file.parent / folder
    place.mkdir()
    legs = []
    for number, (kind, at) in enumerate([*stops, (None, 0)]):
        leg = Leg(
            file=str(file), flags=[["trainer.seed", "0"]], steps=12, folder=str(place), name=f"leg-{number}",
            resume_from=str(legs[-1].checkpoint) if legs else None, stop=kind, stop_at=at,
        )  # fmt: skip
        torch.manual_seed(number)
        run_leg(leg)
        legs.append(leg)
    return Evidence(legs)


def unequal(whole: Evidence, other: Evidence) -> dict[str, str]:
    found = {part: next(differences(whole, other, part), None) for part in PARTS}
    return {part: str(first) for part, first in found.items() if first is not None and "_per_second" not in str(first)}


def test_what_is_exact_is_equal(file: Path) -> None:
    whole = evidence(file, "whole")
    legs = evidence(file, "legs", [("stop", 3), ("validation", 5)])
    differing = unequal(whole, legs)
    differing.pop("tracker rows", None)  # Throughput's rates
    assert differing == {}
    assert (len(whole.batches), len(legs.batches)) == (12, 12)
    assert not Path("mine").exists()


def test_an_unsaved_generator_is_found(tmp_path: Path) -> None:
    file = written(tmp_path, own=True)
    whole, again = evidence(file, "whole"), evidence(file, "again")
    assert "order of samples" not in unequal(whole, again)
    differing = unequal(whole, evidence(file, "legs", [("stop", 3)]))
    assert differing["order of samples"].startswith("batch 3 (number 3 of epoch 0): ")
    assert {"weights", "optimizers"} <= differing.keys()


def test_stops_are_drawn_in_their_order(file: Path) -> None:
    whole = evidence(file, "whole")
    for seed in range(20):
        stops = draw_stops(whole, 3, random.Random(seed))
        points = [at for _, at in stops]
        assert points == sorted(set(points))
        assert {kind for kind, _ in stops} <= {"stop", "validation", "kill"}
    with pytest.raises(ConfigError, match=r"--stops=12: the run has 12 batches. Train more"):
        draw_stops(whole, 12, random.Random(0))


def test_differences_name_their_places() -> None:
    before = {"a": [1, {"b": torch.zeros(2)}], "c": float("nan"), "d": 1}
    now = {"a": [1, {"b": torch.tensor([0.0, 0.5])}], "c": float("nan"), "e": True}
    assert [str(each) for each in tree_differences(before, now)] == [
        "a[1].b: 1 of 2 values differ, by 0.5 at most", "d: 1 became nothing", "e: nothing became True",
    ]  # fmt: skip
    assert [str(each) for each in tree_differences({"x": torch.zeros(1)}, {"x": torch.zeros(2)})] == [
        "x: torch.float32 (1,) became torch.float32 (2,)"
    ]
    assert [each.path for each in tree_differences([1], [1.0])] == ["[0]"]


def test_digests_see_values_types_and_structure() -> None:
    batches = [
        torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0]), [torch.zeros(2)],
        {"x": torch.zeros(2)}, {"y": torch.zeros(2)}, "text", (torch.zeros(1), torch.zeros(1)), torch.zeros(0),
    ]  # fmt: skip
    digests = [digest_of(each) for each in batches]
    assert len(set(digests)) == len(batches)
    assert digest_of([torch.zeros(2)]) == digests[3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no file is given. Expected: loopwright verify-resume FILE.yaml"),
        (["run.yaml", "--steps=1"], "--steps=1. Expected an integer >= 2"),
        (["run.yaml", "--stops=few"], "--stops=few. Expected an integer >= 1"),
        (["run.yaml", "--trainer.max_epoch=3"], "max_epoch"),
    ],
)
def test_bad_arguments(file: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_verify_resume(arguments)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verify_resume(["--help"]) == 0
    assert "usage: loopwright verify-resume FILE.yaml [--steps 30]" in capsys.readouterr().out


def verify(file: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "loopwright", "verify-resume", str(file), "--steps", "14", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_finds_a_run_equal(file: Path) -> None:
    code, said = verify(file, "--stops", "3", "--trainer.accumulate=2")
    assert code == 0, said
    assert "EQUAL bit for bit: order of samples, tracker rows, weights, optimizers, random states" in said
    for word in ("killed behind its checkpoint", "stopped inside the next validation", "left out"):
        assert word in said
    assert not (file.parent / "runs").exists()
    assert not (file.parent / "mine").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"own": True}, "NOT EQUAL: the resumed run differs. The first difference is in the order of samples"),
        ({"fresh": True}, "NOT REPEATABLE: two runs that nobody stopped differ already"),
    ],
)
def test_the_command_names_the_first_difference(tmp_path: Path, options: dict[str, bool], says: str) -> None:
    code, said = verify(written(tmp_path, **options), "--stops", "1")
    assert code == 1, said
    assert says in said
    assert "order of samples: batch" in said
    shutil.rmtree(said.rpartition(" are in ")[2].strip().rstrip("."))
