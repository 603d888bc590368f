"""A small GPT with its layers cut over two processes: 50 steps, and a resume in the middle without the cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright import MemoryTracker, Trainer
from loopwright.recipes.bytes_gpt.data import library_loaders
from loopwright.recipes.bytes_gpt.task import BytesGPT

PLAN = {
    "model.blocks.*.attention_input": "colwise_gather",
    "model.blocks.*.attention_output": "rowwise_split",
    "model.blocks.*.mlp_input": "colwise",
    "model.blocks.*.mlp_output": "rowwise",
}
TENSOR = {"name": "fsdp", "wrap": "Block", "mesh": {"tensor": 2}, "tensor_plan": PLAN}


def _losses(last: int, options: dict[str, Any], resume_from: str | None = None, save: str | None = None) -> list[float]:
    """The bits per byte of each step until the last."""
    tracker = MemoryTracker()
    trainer = Trainer(max_steps=last, clip_norm=1.0, seed=0, log_every=1, trackers=tracker, progress=False, **options)
    task = BytesGPT(width=32, num_layers=2, num_heads=2, context=32, warmup_steps=10, total_steps=50)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the resumed run can't be equal bit for bit")
        data = library_loaders(batch_size=8, context=32, max_bytes=100_000)["train"]
        trainer.fit(task, data, resume_from=resume_from)
    if save is not None:
        trainer.save_state(save)
    return [loss for _, loss in tracker.runs[0].series("train/bits_per_byte")] if tracker.runs else []


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one_and_go_on_otherwise(
    two_processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    wanted = _losses(50, {"accumulate": 4})
    assert wanted[-1] < 0.7 * wanted[0]
    cut, _ = two_processes(_losses, 50, {"accumulate": 4, "strategy": TENSOR})
    assert cut == pytest.approx(wanted, abs=1e-5)

    path = str(tmp_path / "middle")
    begun, _ = two_processes(_losses, 25, {"accumulate": 4, "strategy": TENSOR}, None, path)
    assert _losses(50, {"accumulate": 4}, path) == pytest.approx(wanted[25:], abs=1e-5)
    again, _ = two_processes(_losses, 50, {"accumulate": 4, "strategy": TENSOR}, path)
    assert begun + again == cut
    found, _ = two_processes(_losses, 50, {"accumulate": 2, "strategy": "fsdp"}, path)
    assert found == pytest.approx(wanted[25:], abs=1e-5)
