"""The `bytes_gpt` recipe: its data by hand, its weighting, and a short run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from loopwright import MemoryTracker, Trainer
from loopwright.cli.main import main
from loopwright.recipes.bytes_gpt.data import FILE_START, IGNORED, library_files, library_loaders, sequences
from loopwright.recipes.bytes_gpt.model import BytesModel
from loopwright.recipes.bytes_gpt.task import BytesGPT

UNIFORM_BITS = 8.0
A, B, C, D, E, F = b"abcdef"


def small_task() -> BytesGPT:
    return BytesGPT(width=16, num_layers=1, num_heads=2, context=4)


def test_files_come_in_the_order_of_their_names_up_to_the_cap(tmp_path: Path) -> None:
    for name, text in {"b.py": "bb", "a.py": "aaa", "c.txt": "never", "empty.py": ""}.items():
        (tmp_path / name).write_text(text)
    assert library_files(tmp_path, max_bytes=100) == [b"aaa", b"bb"]
    assert library_files(tmp_path, max_bytes=4) == [b"aaa", b"b"]


def test_each_byte_is_predicted_once() -> None:
    inputs, targets = sequences([b"abcde", b"f"], context=4).tensors
    start, ignored = FILE_START, IGNORED
    assert inputs.tolist() == [[start, A, B, C], [D, start, start, start], [start] * 4]
    assert targets.tolist() == [[A, B, C, D], [E] + 3 * [ignored], [F] + 3 * [ignored]]


def test_every_tenth_file_is_held_out(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.py").write_bytes(bytes([number + 1]))
    loaders = library_loaders(batch_size=20, context=4, folder=str(tmp_path))
    assert [row[0].item() for row in next(iter(loaders["val"]))[1]] == [10, 20]
    assert len(loaders["train"].dataset) == 18  # type: ignore[arg-type]


def test_validation_is_the_mean_over_bytes_and_not_over_batches() -> None:
    rows = sequences([b"abcdefgh", b"x", b"yz"], context=4)  # 4, 4, 1 and 2 bytes a row
    task = small_task()
    trainer = Trainer(max_epochs=1, progress=False, trackers=False)
    found = trainer.validate(task, DataLoader(rows, batch_size=2))["val/bits_per_byte"]

    inputs, targets = rows.tensors
    with torch.no_grad():
        chances = task.model(inputs).log_softmax(dim=-1)
    bits = [-chances[r, i, b].item() / math.log(2) for r, i, b in known(targets)]
    assert len(bits) == 11
    assert found == pytest.approx(sum(bits) / 11, rel=1e-5)


def known(targets: torch.Tensor) -> list[tuple[int, int, int]]:
    """Row, position and byte of each target that counts."""
    return [(r, i, b) for r, row in enumerate(targets.tolist()) for i, b in enumerate(row) if b != IGNORED]


def test_no_output_sees_later_tokens() -> None:
    model = BytesModel(width=16, num_layers=2, num_heads=2, context=8)
    for parameter in model.parameters():  # a new block adds nothing, which would hide what it sees
        nn.init.normal_(parameter)
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:5], after[:5])
    assert (before[5:] != after[5:]).any(dim=1).all()


def test_a_sample_is_the_same_for_its_seed_and_leaves_the_random_state() -> None:
    model = small_task().model
    state = torch.get_rng_state()
    first = model.generate(20, seed=1)
    assert model.generate(20, seed=1) == first
    assert model.generate(20, seed=2) != first
    assert len(first) == 20
    assert torch.equal(torch.get_rng_state(), state)


def test_a_short_run_beats_uniform_bytes_and_writes_a_sample(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"task.init_args": {"width": 64, "num_layers": 2, "context": 64, "total_steps": 60, "warmup_steps": 10}}
    small |= {"data.init_args": {"batch_size": 8, "context": 64, "max_bytes": 400_000}}
    flags = [f"--{group}.{key}={value}" for group, values in small.items() for key, value in values.items()]
    flags += ["--trainer.max_steps=60", "--trainer.val_every=30 steps", "--trainer.limit_batches={val: 10}"]
    flags += ["--trainer.trackers=jsonl", "--trainer.name=run"]
    assert main(["fit", str(repository / "recipes/bytes_gpt/bytes_gpt.yaml"), *flags]) == 0

    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    bits = [row["val/bits_per_byte"] for row in rows if "val/bits_per_byte" in row]
    assert len(bits) == 2
    assert 3.0 < bits[-1] < bits[0] < UNIFORM_BITS - 2  # below 3 after 60 steps: the targets leak into the inputs
    assert "--- a sample of 400 bytes ---" in capsys.readouterr().out


def _losses_of_50_steps(accumulate: int) -> tuple[int, list[tuple[int, float]]]:
    """The number of processes, and the bits per byte of each of 50 optimizer steps."""
    tracker = MemoryTracker()
    trainer = Trainer(
        max_steps=50, accumulate=accumulate, clip_norm=1.0, seed=0, log_every=1, trackers=tracker, progress=False
    )
    task = BytesGPT(width=32, num_layers=2, num_heads=2, context=32, warmup_steps=10, total_steps=50)
    trainer.fit(task, library_loaders(batch_size=8, context=32, max_bytes=100_000)["train"])
    series = tracker.runs[0].series("train/bits_per_byte") if tracker.runs else []
    return trainer.process.num_processes, series


def test_two_processes_have_the_losses_of_one(two_processes: Callable[..., list[Any]]) -> None:
    # 1 process x batch 8 x accumulate 4 and 2 x 8 x 2: the same 32 rows in each step, each byte weighed alike.
    processes, losses = _losses_of_50_steps(4)
    assert processes == 1
    assert [step for step, _ in losses] == list(range(1, 51))
    assert losses[-1][1] < 0.7 * losses[0][1]  # it learns, so that the losses depend on the weights
    (two, found), _ = two_processes(_losses_of_50_steps, 2)
    assert two == 2
    assert [step for step, _ in found] == list(range(1, 51))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in losses], abs=1e-5)
