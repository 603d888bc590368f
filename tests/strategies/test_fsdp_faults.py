"""A checkpoint of parts of which one is gone or damaged: the one before is taken, and the reason is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.callbacks.checkpoint import ModelCheckpoint

from .sharded import fit, loader, make, state_of

Run = Callable[..., list[Any]]


def run(folder: str, max_steps: int, resume_from: Any = None) -> tuple[dict[str, Tensor], int | None, list[str]]:
    """A checkpoint after each step. Gives the weights, the step that it went on from, and the warnings."""
    saver = ModelCheckpoint("1 step", top_k=-1, directory=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(
            make(1 if resume_from is None else 5), loader(48, 4), strategy="fsdp", max_epochs=None,
            max_steps=max_steps, callbacks=[saver], resume_from=resume_from,
        )  # fmt: skip
    return state_of(trainer), trainer.resumed_step, [str(each.message) for each in caught]


PARTS = ["model.part-00001.safetensors", "optimizers.part-00000.safetensors", "model.parts.json"]


@pytest.mark.parametrize("part", PARTS)
def test_two_processes_go_on_from_the_checkpoint_before(two_processes: Run, tmp_path: Path, part: str) -> None:
    expected = two_processes(run, str(tmp_path / "whole"), 5)[0][0]
    two_processes(run, str(tmp_path / "legs"), 3)
    (tmp_path / "legs" / "step=000003" / part).unlink()
    found = two_processes(run, str(tmp_path / "legs"), 5, "latest")
    assert [each[1] for each in found] == [2, 2]
    state = found[0][0]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    named = [text for text in found[0][2] if "step=000003" in text and part in text]
    assert len(named) == 1, found[0][2]
    assert found[1][2] == []
