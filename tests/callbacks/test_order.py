"""The declared order of callbacks."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.order import sort_callbacks, state_keys
from loopwright.distributed.errors import CallbackOrderError, ConfigError

from ..trainer.tiny import Scalar, ones, trainer


class Named(Callback):
    def __init__(self, name: str = "") -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name or type(self).__name__


class Provider(Named):
    provides = ("m",)


class Reader(Named):
    reads = ("m",)


class Needer(Named):
    needs = ("m",)


class Saver(Named):
    after = (Reader, "Needer")


class First(Named):
    before = (Provider,)


def names(*callbacks: Callback) -> list[str]:
    return [repr(callback) for callback in sort_callbacks(callbacks)]


def test_without_declarations_the_given_order_holds() -> None:
    assert names(Named("c"), Named("a"), Named("b")) == ["c", "a", "b"]


@pytest.mark.parametrize("order", list(permutations([First, Provider, Reader, Saver])))
def test_any_list_gives_the_declared_order(order: Any) -> None:
    assert names(*(make() for make in order)) == ["First", "Provider", "Reader", "Saver"]


def test_among_equals_the_given_order_holds() -> None:
    assert names(Reader("r1"), Named("x"), Reader("r2"), Provider("p"), Named("y")) == ["x", "p", "r1", "r2", "y"]


def test_what_reads_needs_no_provider() -> None:
    assert names(Reader(), Named("x")) == ["Reader", "x"]


def test_what_needs_has_to_have_one() -> None:
    with pytest.raises(
        CallbackOrderError, match=r"Needer needs the metric 'm', which no callback provides. Nothing is"
    ):
        sort_callbacks([Needer(), Named("x")])

    class Near(Named):
        provides = ("mm", "other")

    with pytest.raises(ConfigError, match=r"Needer needs the metric 'm'.*Did you mean 'mm'\? Accepted: mm, other"):
        sort_callbacks([Needer(), Near()])


def test_nobody_provides_for_itself() -> None:
    class Both(Named):
        provides = needs = ("own",)

    with pytest.raises(CallbackOrderError, match=r"Both needs the metric 'own', which no callback provides"):
        sort_callbacks([Both()])


def test_every_provider_comes_before() -> None:
    assert names(Needer(), Provider("p1"), Provider("p2")) == ["p1", "p2", "Needer"]


def test_classes_by_name_and_with_their_subclasses() -> None:
    class Special(Reader):
        pass

    class Late(Named):
        after = ("Reader",)

    assert names(Late(), Special()) == ["Special", "Late"]


def test_a_class_that_is_not_there_is_no_matter() -> None:
    assert names(Saver(), Named("x")) == ["Saver", "x"]


def test_two_of_a_class_that_runs_before_its_own_kind() -> None:
    class Loop(Named):
        before = ("Loop",)

    with pytest.raises(CallbackOrderError, match=r"these callbacks wait for one another"):
        sort_callbacks([Loop("a"), Loop("b")])


def test_a_cycle_is_shown() -> None:
    class A(Named):
        after = ("B",)

    class B(Named):
        after = ("C",)

    class C(Named):
        after = ("A",)

    with pytest.raises(
        CallbackOrderError,
        match=r"(?s)wait for one another:\n  A runs after B\n  B runs after C\n  C runs after A\nRemove one of their",
    ):
        sort_callbacks([A(), B(), C(), Named("outside")])


def test_the_trainer_refuses_before_a_run() -> None:
    with pytest.raises(CallbackOrderError, match="Needer needs the metric 'm'"):
        trainer(callbacks=[Needer()])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_run_gives_the_same_result_in_any_order(order: tuple[int, ...]) -> None:
    class Provides(Callback):
        provides = ("m",)

        def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
            metrics["m"] = metrics["val"] * 10

    class Reads(Callback):
        needs = ("m",)

        def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
            metrics["read"] = metrics["m"] + 1

    class Saves(Callback):
        after = (Reads,)
        saved: dict[str, float]

        def on_validation_end(self, trainer: Any, task: Any, metrics: dict[str, float]) -> None:
            self.saved = dict(metrics)

    saves = Saves()
    callbacks = [Provides(), Reads(), saves]
    found = trainer(callbacks=[callbacks[index] for index in order])
    found.fit(Scalar(), ones(1), ones(1))
    assert saves.saved == {"val": 1, "m": 10, "read": 11}
    assert [type(callback).__name__ for callback in found.callbacks] == ["Provides", "Reads", "Saves"]


def test_state_keys_are_unique() -> None:
    class Keyed(Callback):
        state_key = "mine"  # type: ignore[assignment]

    a, b, c, d = Named(), Named(), Keyed(), Keyed()
    assert state_keys([a, b, c, d]) == {"Named": a, "Named#2": b, "mine": c, "mine#2": d}
