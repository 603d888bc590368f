"""The byte-level GPT under DeepSpeed: as one process, and resumed in the middle on another number of processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright import MemoryTracker, Trainer
from loopwright.recipes.bytes_gpt.data import library_loaders
from loopwright.recipes.bytes_gpt.task import BytesGPT

from .test_deepspeed_trainer import stage

Run = Callable[..., list[Any]]


def _losses(
    folder: str, strategy: Any, accumulate: int, num_steps: int, stops_after: int | None = None, **resume: Any
) -> list[float]:
    """Bits per byte of each optimizer step, 32 rows a step on one process and on two; where it stops, it is saved."""
    tracker = MemoryTracker()
    trainer = Trainer(
        max_steps=stops_after or num_steps, accumulate=accumulate, clip_norm=1.0, seed=0, log_every=1,
        trackers=tracker, progress=False, strategy=strategy, project_dir=folder,
    )  # fmt: skip
    task = BytesGPT(width=32, num_layers=2, num_heads=2, context=32, warmup_steps=10, total_steps=50)
    loader = library_loaders(batch_size=8, context=32, max_bytes=100_000)["train"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the resumed run can't be equal bit for bit")
        trainer.fit(task, loader, **resume)
    if stops_after:
        trainer.save_state(f"{folder}/middle")
    return [value for _, value in tracker.runs[0].series("train/bits_per_byte")] if tracker.runs else []


def _each(folder: str, stages: list[int], num_steps: int) -> Any:
    return [_losses(folder, stage(number), 2, num_steps) for number in stages]


@pytest.mark.parametrize(("num_steps", "stages"), [(8, [3]), pytest.param(50, [1, 2, 3], marks=pytest.mark.slow)])
def test_losses_of_one_process(two_processes: Run, tmp_path: Path, num_steps: int, stages: list[int]) -> None:
    wanted = _losses(str(tmp_path), "single", 4, num_steps)
    assert wanted[-1] < wanted[0] - 0.04 * num_steps
    for found in two_processes(_each, str(tmp_path), stages, num_steps, timeout=100)[0]:
        assert found == pytest.approx(wanted, abs=1e-5)
    first = two_processes(_losses, str(tmp_path), stage(3), 2, num_steps, num_steps // 2)[0]
    second = _losses(str(tmp_path), "single", 4, num_steps, resume_from=f"{tmp_path}/middle")
    assert [*first, *second] == pytest.approx(wanted, abs=1e-5)
