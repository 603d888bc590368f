"""Reading of tensors into memory that is there, against the reader of safetensors itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopwright.checkpoint.tensor_file import TensorFile
from loopwright.distributed.errors import CheckpointError


def write(path: Path) -> dict[str, Tensor]:
    """More small tensors than one call may read, and large ones of several pieces between them."""
    tensors: dict[str, Tensor] = {f"small.{index:04}": torch.randn(3) for index in range(1300)}
    tensors |= {f"small.{index:04}.large": torch.randn(1_200_000 + index) for index in (5, 700, 1299)}
    tensors |= {"empty": torch.empty(0, 4), "half": torch.randn(7).half(), "flag": torch.tensor(True)}
    save_file(tensors, path)
    return tensors


@pytest.mark.parametrize("share", [1.0, 0.5, 0.01])
def test_tensors_are_read_wherever_they_lie_and_in_any_order(tmp_path: Path, share: float) -> None:
    expected = write(tmp_path / "a.safetensors")
    names = random.Random(1).sample(sorted(expected), int(share * len(expected)))
    targets = {name: torch.ones_like(expected[name]) for name in names}
    targets[names[0]] = torch.ones(*expected[names[0]].shape, 2, dtype=expected[names[0]].dtype)[..., 0]  # with gaps
    TensorFile(tmp_path / "a.safetensors").read_into(targets)
    assert len(targets) == len(names) > 10
    assert all(torch.equal(targets[name], expected[name]) for name in names)


def test_memory_that_means_other_values_than_its_bytes_is_filled_right(tmp_path: Path) -> None:
    value = torch.complex(torch.randn(3), torch.randn(3))
    save_file({"a": value, "empty": torch.empty(0, dtype=torch.complex64)}, tmp_path / "a.safetensors")
    targets = {"a": torch.zeros_like(value).conj(), "empty": torch.empty(0, dtype=torch.complex64)}
    TensorFile(tmp_path / "a.safetensors").read_into(targets)
    assert torch.equal(targets["a"].resolve_conj(), value)


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path)
    file, targets = TensorFile(path), load_file(path)
    with path.open("rb+") as opened:
        opened.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"a.safetensors' can't be read as safetensors \(it ends early\)"):
        file.read_into(targets)
