"""The warm workers of tests/processes.py themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


def _sum_of_ranks(factor: int) -> tuple[int, float, str]:
    total = torch.tensor(float(dist.get_rank() * factor))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getcwd()


def _fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom")


def test_a_function_runs_in_each_process(two_processes: Any, tmp_path: Path) -> None:
    assert two_processes(_sum_of_ranks, 10) == [(0, 10.0, str(tmp_path)), (1, 10.0, str(tmp_path))]


def test_a_failure_shows_the_traceback_and_the_pool_starts_anew(two_processes: Any) -> None:
    with pytest.raises(AssertionError, match="boom"):
        two_processes(_fails_on_one)
    assert [rank for rank, *_ in two_processes(_sum_of_ranks, 1)] == [0, 1]
