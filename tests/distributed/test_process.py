"""What a process says of itself, as one of several it would be as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopwright import PartialState
from loopwright.distributed.process import ProcessMethods, ProcessState
from loopwright.trainer.accelerator import Accelerator


class Placed(ProcessMethods):
    """A place in a world that was not started."""

    def __init__(self, index: int, count: int, local_index: int, device: str) -> None:
        self.num_processes, self.process_index, self.local_process_index = count, index, local_index
        self.device = torch.device(device)


# Two machines of two processes each.
WORLD = [Placed(index, 4, index % 2, "cpu") for index in range(4)]


def test_each_process_knows_its_place() -> None:
    assert [p.is_main_process for p in WORLD] == [True, False, False, False]
    assert [p.is_local_main_process for p in WORLD] == [True, False, True, False]
    assert [p.is_last_process for p in WORLD] == [False, False, False, True]
    assert [p.use_distributed for p in (*WORLD, ProcessState())] == [True] * 4 + [False]
    assert [p.multi_device for p in (WORLD[0], Placed(0, 2, 0, "meta"), Placed(0, 1, 0, "meta"))] == [
        False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("decorate", "runs_on"),
    [
        (lambda process, function: process.on_main_process(function), [0]),
        (lambda process, function: process.on_local_main_process(function), [0, 2]),
        (lambda process, function: process.on_last_process(function), [3]),
        (lambda process, function: process.on_process(function, process_index=2), [2]),
        (lambda process, function: process.on_process(process_index=2)(function), [2]),
        (lambda process, function: process.on_local_process(function, local_process_index=1), [1, 3]),
        (lambda process, function: process.on_local_process(local_process_index=1)(function), [1, 3]),
    ],
)
def test_decorated_functions_run_where_they_should(decorate: Any, runs_on: list[int]) -> None:
    def double(value: int) -> int:
        return 2 * value

    results = [decorate(process, double)(4) for process in WORLD]
    assert results == [8 if index in runs_on else None for index in range(4)]


def test_printing_and_dealing_out(capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for index, process in enumerate(WORLD):
        process.print(index)
        with process.split_between_processes([1, 2, 3, 4, 5]) as share:
            shares.append(share)
    assert capsys.readouterr().out == "0\n2\n"
    assert shares == [[1, 2], [3], [4], [5]]


def test_partial_state_is_the_process_state() -> None:
    process = PartialState(cpu=True)
    assert type(process) is ProcessState
    assert (process.num_processes, process.process_index, process.device.type) == (1, 0, "cpu")
    tensor = torch.ones(1)
    assert process.gather(tensor) is tensor


def test_an_accelerator_stands_where_its_process_does() -> None:
    accelerator = Accelerator(cpu=True)
    state = accelerator.state
    for name in ("num_processes", "process_index", "local_process_index", "device"):
        assert getattr(accelerator, name) == getattr(state, name)
