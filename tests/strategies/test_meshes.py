"""Meshes of copies, parts and layers on four processes, against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .test_tensor_parallel import PLAN, _train, close

OPTIONS = {"max_epochs": 2, "accumulate": 2, "clip_norm": 0.5, "val_every": 3}


def _train_each(cases: list[tuple[dict[str, int], int]]) -> list[Any]:
    strategies = [{"name": "fsdp", "mesh": mesh, "tensor_plan": PLAN} for mesh, _ in cases]
    return [
        _train(size, OPTIONS | {"strategy": strategy}, count=48)
        for strategy, (_, size) in zip(strategies, cases, strict=True)
    ]


@pytest.mark.slow
def test_numbers_of_one_process(worker_pools: Callable[[int], Any], working_folder: Path) -> None:
    # Two shares of the data: each process has batches of half the size.
    losses, metrics, weights, counters, _ = _train(8, OPTIONS, count=48)
    cases = [({"shard": 2, "tensor": 2}, 4), ({"replicate": 2, "shard": 1, "tensor": 2}, 4)]
    found = worker_pools(4).run(_train_each, cases, folder=working_folder, timeout=110)
    for process in found:
        for own_losses, own_metrics, _, own_counters, _ in process:
            assert own_losses == pytest.approx(losses, abs=1e-5)
            assert own_metrics == pytest.approx(metrics, abs=1e-5)
            assert own_counters == counters
    for each in found[0]:
        close(each[2], weights)
