"""Ranges of a tensor's elements: cut into boxes, stored by each process, and read again whole and in other ranges."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from loopwright.checkpoint.boxes import boxes_of_range, index_of
from loopwright.checkpoint.flat import FlatPart
from loopwright.checkpoint.parts import SAVE_KEY, Described, Index, PartedTensors, own_parts, part_file
from loopwright.checkpoint.sharded import fill_part, holds_sharded, is_sharded, local_part, whole
from loopwright.checkpoint.stored import StoredTensor
from loopwright.checkpoint.tensor_file import write_tensors

Run = Callable[..., list[Any]]
SHAPES = [(7, 5), (1, 5), (3, 4, 5), (4,), (2, 3, 2, 3), (5, 0), ()]


def test_a_range_is_few_boxes() -> None:
    draw = random.Random(1)
    for shape in SHAPES * 40:
        numbers = torch.arange(prod(shape)).view(shape)
        begin = draw.randint(0, prod(shape))
        end = draw.randint(begin, prod(shape))
        boxes = boxes_of_range(shape, begin, end)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = [number for box in boxes for number in numbers[index_of(*box)].flatten().tolist()]
        assert found == list(range(begin, end))


def cut(full: Tensor, process: int, count: int) -> FlatPart:
    """The range of one of several processes, in memory of its own; the last ones may have nothing."""
    size = -(-full.numel() // count)
    return FlatPart(full.flatten()[process * size : (process + 1) * size].clone(), process * size, full.shape)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_what_processes_store_is_the_whole(count: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    full = {f"t{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(SHAPES)}
    described: dict[int, Described] = {}
    for process in range(count):
        tensors: dict[str, Tensor] = {name: cut(value, process, count) for name, value in full.items()}
        own = own_parts(tensors, is_main=process == 0)
        described[process] = own.described
        if own.tensors:
            with (tmp_path / part_file("w", process)).open("xb") as file:
                write_tensors(file, own.tensors, {SAVE_KEY: "1"})
    (tmp_path / "w.parts.json").write_text(Index("w", described).text({}, "1"))
    stored = PartedTensors(tmp_path / "w.parts.json")
    for name, value in full.items():
        assert torch.equal(stored.read(name), value)
        for process in range(3):
            target = cut(torch.zeros_like(value, dtype=torch.float64), process, 3)
            StoredTensor(stored, name, value.dtype, value.shape).read_into(target)
            assert torch.equal(target.local, cut(value, process, 3).local.double())


def test_a_part_as_a_tensor() -> None:
    full = torch.arange(12.0).view(3, 4)
    part = cut(full, 1, 2)
    assert (part.shape, part.dtype, part.device, part.nbytes) == (full.shape, full.dtype, full.device, 48)
    assert is_sharded(part)
    assert holds_sharded({"a": [part]})
    assert repr(part) == "FlatPart(6 to 12 of (3, 4), torch.float32)"
    copy = part.detach().to(torch.float64, copy=True)
    assert torch.equal(local_part(copy), torch.arange(6.0, 12.0).double())
    assert part.detach().local.data_ptr() == part.local.data_ptr()
    assert part.clone().local.data_ptr() != part.local.data_ptr()
    part.copy_(-full)
    copy.copy_(part)
    assert torch.equal(copy.local, -torch.arange(6.0, 12.0).double())
    fill_part(part, full)
    assert torch.equal(part.local, torch.arange(6.0, 12.0))
    assert torch.equal(whole(FlatPart(full.flatten(), 0, full.shape)), full)
    with pytest.raises(RuntimeError, match="each process has a part of this tensor alone"):
        part + 1
    with pytest.raises(TypeError, match=r"FlatPart\(0 to 6.* is another range than FlatPart\(6 to 12"):
        part.copy_(cut(full, 0, 2))


def _gathered() -> list[Tensor]:
    full = [torch.randn(5, 3).bfloat16(), torch.tensor([-0.0, 1.0, float("nan"), -0.0])]
    for value in full:
        dist.broadcast(value, 0)
    return [torch.stack([whole(cut(value, dist.get_rank(), 2)), value]) for value in full]


def test_gathered_bit_for_bit(two_processes: Run) -> None:
    for found in two_processes(_gathered):
        for gathered, wanted in found:
            assert torch.equal(gathered.view(torch.uint8), wanted.view(torch.uint8))
