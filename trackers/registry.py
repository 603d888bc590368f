"""The words that name trackers, and the group that `Trainer(trackers=...)` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from ..distributed.errors import ConfigError, MissingDependencyError
from ..distributed.registry import Registry
from .group import TrackerGroup
from .tracker import Tracker

Factory: TypeAlias = Callable[..., Tracker]
TrackerSpec: TypeAlias = str | Tracker | Mapping[str, Any]
F = TypeVar("F", bound=Factory)

ENTRY_POINT_GROUP = "loopwright.trackers"
"""Packages that bring a tracker declare it in this group: `word = "package.module:Class"`."""
DEFAULT = "tensorboard"
"""What `trackers=True` means."""
EVERY = "all"
"""The word for every tracker that is installed."""

_trackers: Registry[Tracker] = Registry(
    Tracker,
    option="trackers",
    built_in={
        "tensorboard": "tensorboard:TensorBoardTracker",
        "jsonl": "jsonl:JSONLTracker",
        "csv": "csv:CSVTracker",
        "wandb": "wandb:WandbTracker",
        "mlflow": "mlflow:MLflowTracker",
    },
    package=__package__,
    group=ENTRY_POINT_GROUP,
    reserved=(EVERY,),
)


def register_tracker(word: str) -> Callable[[F], F]:
    """Decorate a tracker class, or a function that returns a tracker, to make it selectable by a word.

    Raises:
        ConfigError: the word names another one.
    """
    return _trackers.register(word)


def tracker_words() -> list[str]:
    """Every word that names a tracker: built in, registered, or declared by an installed package."""
    return _trackers.words()


def create_trackers(
    spec: bool | TrackerSpec | type[Tracker] | Iterable[TrackerSpec | type[Tracker]] | None, *, enabled: bool = True
) -> TrackerGroup:
    """The group of trackers that a specification names. Nothing is opened, and no tracker's package imported.

    Args:
        spec: None or False for none; True for the default; a word ("tensorboard", "jsonl", "csv", "wandb", "mlflow",
            one of your own, or "all" for every one whose package is installed); a mapping of a word and options,
            `{"name": "wandb", "entity": "team"}`; a `Tracker`; or a list of these.
        enabled: whether this process writes; see `TrackerGroup`.
    Raises:
        ConfigError: a word or an option is unknown, or two trackers have one name.
        MissingDependencyError: a tracker was named whose package is not installed.
    """
    trackers = [tracker for item in _items(spec) for tracker in _create(item)]
    return TrackerGroup(trackers, enabled=enabled)


def _items(spec: Any) -> list[Any]:
    if spec is None or spec is False:
        return []
    if spec is True:
        return [DEFAULT]
    is_one = isinstance(spec, str | Tracker | Mapping | type) or not isinstance(spec, Iterable)
    return [spec] if is_one else list(spec)


def _create(item: Any) -> list[Tracker]:
    if isinstance(item, str):
        return _create_installed() if item == EVERY else [_checked(_trackers.create(item, {}))]
    if isinstance(item, Mapping):
        options = dict(item)
        word = options.pop("name", None)
        return [_checked(_trackers.create(word, options))]
    if isinstance(item, type) and issubclass(item, Tracker):
        return [_checked(_trackers.build(item, item.__name__, {}))]
    if isinstance(item, Tracker):
        return [_checked(item)]
    raise ConfigError(
        f"trackers={item!r} is of type {type(item).__name__}. Expected a word "
        f"({', '.join([*tracker_words(), EVERY])}), "
        'a Tracker, {"name": word, option: value}, or a list of these; False for none.'
    )


def _create_installed() -> list[Tracker]:
    created = []
    for word in tracker_words():
        try:
            created.append(_checked(_trackers.create(word, {})))
        except MissingDependencyError:
            continue  # "all" asks for those that are installed.
    return created


def _checked(tracker: Tracker) -> Tracker:
    tracker.check()
    return tracker
