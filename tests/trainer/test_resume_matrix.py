"""A training that is stopped and resumed equals the one that was never stopped, whatever its settings."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .resuming import SCHEDULES, Setting, Stop, Story, differences

# Micro-batches are counted over both epochs, of 6 each.
STOPS: dict[str, Sequence[Stop]] = {
    "in an epoch": [Stop("stop", 4)],
    "at its edge": [Stop("stop", 6)],
    "dead behind a save": [Stop("save", 2)],
    "in validation": [Stop("validation", 2), Stop("validation", 6)],
    "three times": [Stop("stop", 1), Stop("save", 5), Stop("stop", 8)],
}
AXES: dict[str, Sequence[Any]] = {
    "shuffle": (True, False),
    "workers": (0, 2),
    "augments": (True, False),
    "accumulate": (1, 3),
    "remainder": ("flush", "carry"),
    "precision": ("no", "bf16", "fp16"),
    "dropout": (True, False),
    "schedule": tuple(SCHEDULES),
    "val_every": ("2 steps", "1 epoch"),
    "stops": tuple(STOPS),
}


def covering(axes: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few settings among which each two values of different axes meet: the best of some random ones, until all have."""
    names, choices = list(axes), random.Random(0)
    pairs = [
        {((a, x), (b, y)) for x in axes[a] for y in axes[b]} for a, b in itertools.combinations(names, 2)
    ]  # fmt: skip
    missing = set[Any]().union(*pairs)
    found: list[dict[str, Any]] = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        tries = [{name: choices.choice(axes[name]) for name in names} | {a: x, b: y} for _ in range(60)]
        best = max(tries, key=lambda each: len(missing.intersection(itertools.combinations(each.items(), 2))))
        missing.difference_update(itertools.combinations(best.items(), 2))
        found.append(best)
    return found


def compared(folder: Path, choice: dict[str, Any]) -> list[str]:
    setting = Setting(**{name: value for name, value in choice.items() if name != "stops"})
    expected = Story(setting, folder / "whole").leg()
    return differences(expected, Story(setting, folder / "legs").through(STOPS[choice["stops"]]))


def named(choice: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "_") for value in choice.values())


COVERING = covering(AXES)


def test_each_two_values_meet() -> None:
    assert len(COVERING) < 45
    met = {pair for choice in COVERING for pair in itertools.combinations(choice.items(), 2)}
    assert (("precision", "fp16"), ("schedule", "plateau")) in met
    assert (("workers", 2), ("stops", "in validation")) in met


@pytest.mark.parametrize("choice", COVERING, ids=named)
def test_resumed_equals_uninterrupted(choice: dict[str, Any], tmp_path: Path) -> None:
    assert compared(tmp_path, choice) == []


def _product(**fixed: Any) -> Iterable[dict[str, Any]]:
    axes = {name: (fixed[name],) if name in fixed else values for name, values in AXES.items()}
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", AXES["precision"])
@pytest.mark.parametrize("stops", STOPS)
def test_the_whole_product(precision: str, stops: str, tmp_path: Path) -> None:
    fixed = {"augments": True, "dropout": True, "remainder": "flush", "val_every": "2 steps"}
    choices = _product(**fixed, precision=precision, stops=stops)
    found = {named(each): compared(tmp_path / str(number), each) for number, each in enumerate(choices)}
    assert len(found) == 48
    assert {name: lines for name, lines in found.items() if lines} == {}


PAIRS = [
    {},
    {"accumulate": 3, "precision": "bf16", "schedule": "plateau"},
    {"workers": 2, "schedule": "one cycle", "val_every": "1 epoch"},
    {"accumulate": 3, "remainder": "carry", "precision": "fp16"},
]


def _both(folder: str, changes: dict[str, Any], stops: Sequence[tuple[str, int]]) -> list[str]:
    setting = Setting(**changes)
    expected = Story(setting, Path(folder) / "whole").leg()
    found = Story(setting, Path(folder) / "legs").through([Stop(*each) for each in stops])
    numbers = [number for batch in found.seen.values() for number in batch]
    assert len(numbers) == 24  # of 22 samples, two are seen twice to make the processes' passes alike
    return differences(expected, found)


@pytest.mark.parametrize("changes", PAIRS, ids=named)
def test_two_processes_go_on_each_with_its_own(two_processes: Any, changes: dict[str, Any]) -> None:
    stops = [("stop", 1), ("stop", 4)]
    assert two_processes(_both, "runs", changes, stops) == [[], []]


def test_settings_are_compared_whole(tmp_path: Path) -> None:
    """What the tests here can see: another order of samples, and a weight that is another."""
    setting = Setting()
    expected = Story(setting, tmp_path / "a").leg()
    other = Story(dataclasses.replace(setting, shuffle=False), tmp_path / "b").leg()
    paths = {line.partition(":")[0].partition(".")[0].partition("[")[0] for line in differences(expected, other)}
    assert {"weights", "optimizers", "metrics", "seen", "records"} <= paths
