"""How often callbacks wait for a device: what `EventTimer(synchronizations=True)` counts."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.event_timer import EventTimer
from loopwright.callbacks.ledger import Cost
from loopwright.callbacks.synchronizations import SynchronizationCounter, waits
from loopwright.distributed.errors import ConfigError

from ..trainer.tiny import Scalar, fit, ones

aten = torch.ops.aten
OPERATIONS: list[tuple[Callable[[Tensor], Any], int]] = [
    (lambda t: t.sum().item(), 1), (lambda t: float(t[0]) + int(t[1]), 2), (lambda t: bool((t > 0).all()), 1),
    (lambda t: t.nonzero(), 1), (lambda t: t[t > 1], 1), (lambda t: t.masked_select(t > 1), 1),
    (lambda t: torch.equal(t, t + 1), 1), (lambda t: t[torch.tensor([0, 1], device=t.device)], 0),
    (lambda t: torch.where(t > 1, t, 0), 0), (lambda t: t.to(torch.float64).sum(), 0), (lambda t: t.unique(), 1),
]  # fmt: skip


def count(handler: Callable[..., Any], *values: Any) -> int:
    cost = Cost("", "")
    SynchronizationCounter().counted(handler, cost)(*values)
    return cost.synchronizations


@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
def test_reads_are_counted(operation: int) -> None:
    handler, expected = OPERATIONS[operation]
    assert count(handler, torch.arange(4.0)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("operation", range(len(OPERATIONS)))
def test_what_is_counted_is_what_cuda_waits_for(operation: int) -> None:
    handler, _ = OPERATIONS[operation]
    values = torch.arange(4.0, device="cuda")
    handler(values)  # its first call may wait for other things
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handler(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (count(handler, values) > 0) is any("synchronizing" in str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (aten._to_copy.default, ("elsewhere",), {"device": torch.device("cpu")}, True),
        (aten._to_copy.default, ("elsewhere",), {"device": "cpu", "non_blocking": True}, False),
        (aten._to_copy.default, ("elsewhere",), {"dtype": torch.float64}, False),
        (aten._to_copy.default, ("here",), {"device": torch.device("meta")}, False),
        (aten.copy_.default, ("here", "elsewhere"), {}, True),
        (aten.copy_.default, ("here", "elsewhere", True), {}, False),
        (aten.copy_.default, ("elsewhere", "here"), {}, False),
        (aten.copy_.default, ("here", "here"), {}, False),
    ],
)
def test_copies_to_the_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool) -> None:
    tensors = {"here": torch.zeros(1), "elsewhere": torch.zeros(1, device="meta")}
    assert waits(func, [tensors.get(each, each) for each in args], kwargs) is expected


class Parent(Callback):
    """Reads twice itself, and logs between, which others hear."""

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        float(task.w.detach())
        trainer._run.record({"read": 1.0})
        float(task.w.detach())


class Child(Callback):
    def on_log(self, trainer: Any, task: Any, metrics: Any, step: int) -> None:
        for _ in range(3):
            float(task.w.detach())


def test_each_callback_has_its_own_and_the_table_shows_them() -> None:
    stream = io.StringIO()
    timer = EventTimer(synchronizations=True, stream=stream)
    trainer = fit(Scalar(), ones(4), callbacks=[Parent(), Child(), timer], log_every="never")
    counted = {cost.owner: (cost.calls, cost.synchronizations) for cost in trainer.callback_costs}
    assert counted["Parent"] == (4, 8)
    assert counted["Child"] == (4, 12)
    header, *lines = stream.getvalue().splitlines()
    assert header.split()[-1] == "waits"
    assert {line.split()[0]: line.split()[-1] for line in lines}.items() >= {("Parent", "8"), ("Child", "12")}


def test_a_function_that_is_bound_in_an_event_keeps_its_own() -> None:
    class Binds(Callback):
        def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
            if trainer.state.step == 1:
                trainer.on("log", look)
            trainer._run.record({"read": 1.0})

    def look(trainer: Any, task: Any, *_: Any) -> None:
        float(task.w.detach())

    timer = EventTimer(synchronizations=True, stream=io.StringIO())
    trainer = fit(Scalar(), ones(4), callbacks=[Binds(), timer], log_every="never")
    counted = {cost.owner: (cost.calls, cost.synchronizations) for cost in trainer.callback_costs}
    assert (counted["Binds"], counted["look"]) == ((4, 0), (4, 4))


def test_without_it_nothing_is_counted() -> None:
    trainer = fit(Scalar(), ones(4), callbacks=[Parent(), EventTimer(stream=io.StringIO())])
    assert {cost.synchronizations for cost in trainer.callback_costs} == {0}


def test_an_error_passes_and_the_next_handler_is_counted() -> None:
    counter, cost = SynchronizationCounter(), Cost("", "")

    def fail(value: Tensor) -> None:
        raise ValueError(f"it was {value.item()}")

    with pytest.raises(ValueError, match="it was 2"):
        counter.counted(fail, cost)(torch.tensor(2))
    counter.counted(float, cost)(torch.tensor(2.0))
    assert cost.synchronizations == 2


def test_the_option_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match=r"EventTimer\(synchronizations='yes'\)"):
        EventTimer(synchronizations="yes")  # type: ignore[arg-type]
