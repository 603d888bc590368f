from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwright.distributed.errors import ConfigError, MissingDependencyError
from loopwright.trackers import registry
from loopwright.trackers.csv import CSVTracker
from loopwright.trackers.jsonl import JSONLTracker
from loopwright.trackers.memory import MemoryTracker
from loopwright.trackers.registry import create_trackers, register_tracker, tracker_words
from loopwright.trackers.tensorboard import TensorBoardTracker
from loopwright.trackers.tracker import RunInfo, Tracker
from loopwright.trackers.wandb import WandbTracker

BUILT_IN = ["tensorboard", "jsonl", "csv", "wandb", "mlflow"]


@pytest.fixture
def own_words() -> Iterator[None]:
    """Words that a test registers are gone after it."""
    known = registry._trackers.registered
    before = dict(known)
    yield
    known.clear()
    known.update(before)


def names(spec: Any) -> list[str]:
    return [tracker.name for tracker in create_trackers(spec).trackers]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, []),
        (False, []),
        ([], []),
        (True, ["tensorboard"]),
        ("csv", ["csv"]),
        (BUILT_IN, BUILT_IN),
        ("all", BUILT_IN),
        (["jsonl", MemoryTracker()], ["jsonl", "memory"]),
        (MemoryTracker(name="mine"), ["mine"]),
        (MemoryTracker, ["memory"]),
        ({"name": "csv"}, ["csv"]),
        ((word for word in ("csv", "jsonl")), ["csv", "jsonl"]),
    ],
)
def test_specification_gives_these_trackers(spec: Any, expected: list[str]) -> None:
    assert names(spec) == expected


def test_words_make_their_classes_and_options_reach_them() -> None:
    group = create_trackers(["tensorboard", {"name": "jsonl", "path": "a.jsonl"}, {"name": "wandb", "entity": "team"}])
    assert [type(tracker) for tracker in group.trackers] == [TensorBoardTracker, JSONLTracker, WandbTracker]
    _, jsonl, wandb = group.trackers
    assert isinstance(jsonl, JSONLTracker) and jsonl.path == Path("a.jsonl")
    assert isinstance(wandb, WandbTracker) and wandb.options == {"entity": "team"}


@pytest.mark.parametrize("enabled", [True, False])
def test_enabled_reaches_the_group(enabled: bool) -> None:
    assert create_trackers("csv", enabled=enabled).enabled is enabled


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "tensorbord",
            r"trackers='tensorbord' is unknown\. Did you mean 'tensorboard'\? Accepted: all, csv, jsonl, mlf",
        ),
        (["csv", "al"], r"trackers='al' is unknown\. Did you mean 'all'\?"),
        ({"name": "wandbb"}, r"trackers='wandbb' is unknown\. Did you mean 'wandb'\?"),
        ({"entity": "team"}, r"trackers=None is unknown\. Accepted: all, csv"),
        (
            {"name": "csv", "pth": "x"},
            r"'csv' does not take these options \(pth='x'\): .* argument 'pth'",
        ),
        (
            3,
            r"trackers=3 is of type int\. Expected a word \(tensorboard, jsonl, csv, wandb, mlflow, all\), a Tracker",
        ),
        (["csv", None], r"trackers=None is of type NoneType\. Expected a word"),
        (["csv", "csv"], r"two of them are named 'csv'\. Leave one out, or give it a name of its own: CSVTracker"),
        ([CSVTracker("a.csv"), CSVTracker("b.csv")], r"CSVTracker\(\.\.\., name='csv-2'\)"),
    ],
)
def test_wrong_specification_is_an_error_that_says_what_to_do(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_trackers(spec)


@pytest.mark.parametrize("spec", ["wandb", ["csv", {"name": "wandb"}], WandbTracker, WandbTracker(mode="offline")])
def test_named_and_not_installed_is_an_error_before_the_run(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python's own way to say that there is no such module
    with pytest.raises(MissingDependencyError, match=r"WandbTracker needs the package 'wandb'.*'loopwright\[wandb\]'"):
        create_trackers(spec)


def test_all_means_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert names("all") == ["tensorboard", "jsonl", "csv", "mlflow"]


def test_a_package_without_an_extra_is_installed_by_its_name() -> None:
    class Mine(MemoryTracker):
        package = "no_such_package"

    with pytest.raises(MissingDependencyError, match=r"Mine needs .*Install it with: pip install no_such_package"):
        create_trackers([Mine()])


@pytest.mark.usefixtures("own_words")
def test_registered_word_names_a_tracker() -> None:
    @register_tracker("mine")
    class Mine(MemoryTracker):
        def __init__(self, colour: str = "red") -> None:
            super().__init__(name="mine")
            self.colour = colour

    (tracker,) = create_trackers({"name": "mine", "colour": "blue"}).trackers
    assert isinstance(tracker, Mine) and tracker.colour == "blue"
    assert tracker_words() == [*BUILT_IN, "mine"]
    with pytest.raises(ConfigError, match=r"trackers='mime' is unknown\. Did you mean 'mine'\?"):
        create_trackers("mime")
    assert register_tracker("mine")(Mine) is Mine


@pytest.mark.usefixtures("own_words")
@pytest.mark.parametrize("word", ["csv", "all", "taken"])
def test_a_taken_word_can_not_be_registered(word: str) -> None:
    register_tracker("taken")(MemoryTracker)
    with pytest.raises(ConfigError, match=rf"register_tracker\('{word}'\): this word is taken\. Choose another"):
        register_tracker(word)(CSVTracker)


@pytest.mark.usefixtures("own_words")
def test_a_factory_that_makes_no_tracker_is_an_error() -> None:
    def make() -> Any:
        return object()

    register_tracker("nothing")(make)
    with pytest.raises(
        ConfigError, match=r"'nothing' gave <object .*>\. Expected an instance of a subclass of Tracker"
    ):
        create_trackers("nothing")


def test_installed_package_declares_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_tracker.py").write_text(
        "from loopwright.trackers.memory import MemoryTracker\n"
        "class Theirs(MemoryTracker):\n"
        "    def __init__(self):\n"
        "        super().__init__(name='theirs')\n"
    )
    metadata = tmp_path / "their_tracker-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-tracker\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[loopwright.trackers]\ntheirs = their_tracker:Theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tracker_words() == [*BUILT_IN, "theirs"]
    assert "their_tracker" not in sys.modules
    assert names(["theirs", "csv"]) == ["theirs", "csv"]
    monkeypatch.delitem(sys.modules, "their_tracker")


PROBE = """
import json, sys
from loopwright.trackers.registry import create_trackers
create_trackers(["tensorboard", "jsonl", "csv", "wandb", "mlflow"])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_making_trackers_imports_none_of_their_packages_and_writes_nothing(working_folder: Path) -> None:
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    assert not {"tensorboard", "wandb", "mlflow", "sqlalchemy"} & set(json.loads(run.stdout))
    assert list(working_folder.iterdir()) == []


def test_a_tracker_of_ones_own_needs_three_methods(tmp_path: Path) -> None:
    lines: list[str] = []

    class Printer(Tracker):
        name = "printer"

        def start(self, run: RunInfo, config: Any) -> None:
            lines.append(f"{run.name} {config}")

        def log(self, metrics: Any, step: int) -> None:
            lines.append(f"{step} {metrics}")

        def finish(self, status: str) -> None:
            lines.append(status)

    group = create_trackers(Printer())
    group.start(RunInfo("one", "digits", tmp_path), {"lr": 0.5})
    group.log({"loss": 1.0}, 2)
    group.finish("success")
    assert lines == ["one {'lr': 0.5}", "2 {'loss': 1.0}", "success"]
