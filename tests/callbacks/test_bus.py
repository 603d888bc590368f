"""The event bus: what is bound, and what becomes of exceptions."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from loopwright.callbacks.bus import CLEAN_UP, EVENTS, bind, overridden
from loopwright.callbacks.callback import Callback, EndEpoch, SkipBatch, StopRun

TRAINER: Any = SimpleNamespace(state=SimpleNamespace(step=7))


class Steps(Callback):
    def __init__(self, log: list[str] | None = None, error: BaseException | None = None, name: str = "") -> None:
        self.log = [] if log is None else log
        self.error, self.name = error, name

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        self.log.append(f"{self.name}{outcome}")
        if self.error is not None:
            raise self.error

    def on_fit_end(self, trainer: Any, task: Any) -> None:
        self.log.append(f"{self.name}end")
        if self.error is not None:
            raise self.error


def bound(*callbacks: Callback, functions: Any = ()) -> Any:
    return bind(callbacks, functions, TRAINER, "task")


def test_only_what_is_overridden_is_bound() -> None:
    events = bound(Steps(), Callback())
    assert {event.__name__ for event, emit in events.items() if emit is not None} == {"on_step", "on_fit_end"}
    assert overridden(Steps()) == ["on_step", "on_fit_end"]
    assert overridden(Callback()) == []


def test_every_event_has_a_place() -> None:
    assert set(bound()) == set(EVENTS.values())
    assert [name for name in vars(Callback) if name.startswith("on_")] == list(EVENTS)
    assert set(EVENTS.values()) >= CLEAN_UP


def test_events_that_end_something_reach_every_callback() -> None:
    assert {event.__name__ for event in CLEAN_UP} == {
        name for name in EVENTS if name.endswith("_end") or name in ("on_exception", "on_teardown")
    }


def test_every_event_is_declared_alike() -> None:
    for name, event in EVENTS.items():
        assert list(inspect.signature(event).parameters)[:3] == ["self", "trainer", "task"], name
        assert (event.__doc__ or "").strip().endswith("."), name


def test_handlers_are_called_in_order_with_the_values() -> None:
    log: list[str] = []

    def write(trainer: Any, task: Any, outcome: Any) -> None:
        log.append(f"{trainer.state.step} {task} {outcome}")

    events = bound(Steps(log, name="a "), Steps(log, name="b "), functions=[(Callback.on_step, write)])
    events[Callback.on_step]("applied")
    assert log == ["a applied", "b applied", "7 task applied"]


def test_a_method_that_one_object_was_given_counts() -> None:
    log: list[str] = []
    callback = Callback()
    callback.on_step = lambda trainer, task, outcome: log.append(outcome)  # type: ignore[method-assign]
    events = bound(callback)
    events[Callback.on_step]("applied")
    assert log == ["applied"]


def test_inherited_handlers_count() -> None:
    class More(Steps):
        pass

    more = More()
    bound(more)[Callback.on_step]("x")
    assert more.log == ["x"]


class TestExceptions:
    def test_a_note_says_who_and_where(self) -> None:
        with pytest.raises(ValueError, match="broken") as caught:
            bound(Steps(error=ValueError("broken")))[Callback.on_step](1)
        assert caught.value.__notes__ == ["raised by Steps in on_step, at step 7"]

    def test_a_function_is_named(self) -> None:
        def report(*_: Any) -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken") as caught:
            bound(functions=[(Callback.on_step, report)])[Callback.on_step](1)
        assert "report in on_step" in caught.value.__notes__[0]

    def test_elsewhere_it_stops_the_event(self) -> None:
        log: list[str] = []
        with pytest.raises(ValueError, match="broken"):
            bound(Steps(log, ValueError("broken"), "a "), Steps(log, name="b "))[Callback.on_step](1)
        assert log == ["a 1"]

    @pytest.mark.parametrize(
        "error", [ValueError("a"), StopIteration("a"), KeyboardInterrupt("a"), SystemExit("a")], ids=repr
    )
    def test_at_an_end_the_others_are_called(self, error: BaseException) -> None:
        log: list[str] = []
        other = RuntimeError("b")
        with pytest.raises(type(error)) as caught:
            bound(Steps(log, error, "a "), Steps(log, other, "b "), Steps(log, name="c "))[Callback.on_fit_end]()
        assert caught.value is error
        assert log == ["a end", "b end", "c end"]
        assert error.__notes__[1] == "Steps.on_fit_end failed as well: RuntimeError: b"

    @pytest.mark.parametrize("steering", [SkipBatch(), EndEpoch(), StopRun("reason")], ids=repr)
    def test_control_flow_has_no_note(self, steering: Exception) -> None:
        for event in (Callback.on_step, Callback.on_fit_end):
            values = (1,) if event is Callback.on_step else ()
            with pytest.raises(type(steering)) as caught:
                bound(Steps(error=steering))[event](*values)
            assert caught.value is steering
            assert not hasattr(steering, "__notes__")

    def test_at_an_end_the_first_control_flow_goes_on_and_an_error_before_it(self) -> None:
        first, second, error = StopRun("first"), StopRun("second"), ValueError("broken")
        with pytest.raises(StopRun, match="first"):
            bound(Steps(error=first), Steps(error=second))[Callback.on_fit_end]()
        with pytest.raises(ValueError, match="broken"):
            bound(Steps(error=first), Steps(error=error))[Callback.on_fit_end]()
        with pytest.raises(ValueError, match="broken"):
            bound(Steps(error=error), Steps(error=first))[Callback.on_fit_end]()
