"""What a process says of itself, as one of several it would be as well."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loopwright import PartialState
from loopwright.distributed.kinds import DistributedType
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


def test_the_kind_of_processes() -> None:
    kinds = [Placed(0, count, 0, device).distributed_type for count, device in [(1, "cuda"), (2, "cpu"), (2, "cuda")]]
    assert kinds == [DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU]


def test_f32_what_is_split_stays_as_it_was() -> None:
    inputs = {"a": [1, 2, 3], "b": torch.arange(3)}
    with Placed(1, 2, 1, "cpu").split_between_processes(inputs, apply_padding=True) as share:
        assert share["a"] == [3, 3]
        assert share["b"].tolist() == [2, 2]
    assert inputs["a"] == [1, 2, 3]
    with Placed(1, 2, 1, "cpu").split_between_processes("text") as share:
        assert share == "text"


def _methods() -> Any:
    state = ProcessState(cpu=True)
    r = state.process_index
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        state.print("here", r)
    triggers = []
    for step in range(3):  # F39
        if r == 1 and step == 1:
            state.set_trigger()
        triggers.append(state.check_trigger())
    with state.split_between_processes([0, 1, 2]) as share:
        state.wait_for_everyone()
    return (
        (state.num_processes, r, state.local_process_index, state.is_last_process, state.distributed_type),
        shown.getvalue(), triggers, share, state.on_main_process(lambda: r)(),
        state.gather(torch.tensor([r])).tolist(), state.reduce(torch.tensor([r])).tolist(),
        state.pad_across_processes(torch.ones(1 + r)).tolist(),
    )  # fmt: skip


def test_methods_on_two_processes(two_processes: Any) -> None:
    first, second = two_processes(_methods)
    shared: list[Any] = [[0, 1], [1]]
    triggers = [False, True, False]
    assert first == ((2, 0, 0, False, "MULTI_CPU"), "here 0\n", triggers, [0, 1], 0, *shared, [1, 0])
    assert second == ((2, 1, 1, True, "MULTI_CPU"), "", triggers, [2], None, *shared, [1, 1])


def _main_first(how: str, fails: str) -> Any:
    state = ProcessState(cpu=True)
    marker = Path(f"{how}-{fails}")
    text = "fine"
    try:
        with getattr(state, how)():
            if state.is_main_process:
                time.sleep(0.2)
                marker.touch()
            saw = marker.exists()
            if fails == "all" or (fails == "main" and state.is_main_process):
                raise ValueError(f"body of {state.process_index}")
    except ValueError as error:
        text = str(error)
    return saw, text, state.gather(torch.tensor([state.process_index])).tolist()


@pytest.mark.parametrize("how", ["main_process_first", "local_main_process_first"])
@pytest.mark.parametrize("fails", ["none", "main", "all"])
def test_the_main_process_goes_first_also_when_it_fails(two_processes: Any, how: str, fails: str) -> None:
    first, second = two_processes(_main_first, how, fails)
    assert first == (True, "fine" if fails == "none" else "body of 0", [0, 1])
    assert second == (True, "body of 1" if fails == "all" else "fine", [0, 1])


def _arrivals() -> float:
    state = ProcessState(cpu=True)
    if state.process_index == 1:
        time.sleep(0.2)
        Path("arrived").touch()
    state.wait_for_everyone()
    return Path("arrived").exists() and dist.get_rank() == state.process_index


def test_everyone_waits_for_the_last(two_processes: Any) -> None:
    assert two_processes(_arrivals) == [True, True]
