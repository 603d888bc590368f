"""The words that name trackers, and the group that `Trainer(trackers=...)` asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, TypeVar

from ..distributed.errors import ConfigError, MissingDependencyError, suggest
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

_BUILT_IN = {
    "tensorboard": "tensorboard:TensorBoardTracker",
    "jsonl": "jsonl:JSONLTracker",
    "csv": "csv:CSVTracker",
    "wandb": "wandb:WandbTracker",
    "mlflow": "mlflow:MLflowTracker",
}
_registered: dict[str, Factory] = {}


def register_tracker(word: str) -> Callable[[F], F]:
    """Decorate a tracker class, or a function that returns a tracker, to make it selectable by a word.

    Raises:
        ConfigError: the word names another one.
    """

    def register(factory: F) -> F:
        known = _registered.get(word, factory)
        # A module that is run again, in a notebook or by a reload, brings the same class as a new object.
        is_same = (known.__module__, known.__qualname__) == (factory.__module__, factory.__qualname__)
        if word in _BUILT_IN or word == EVERY or not is_same:
            raise ConfigError(f"register_tracker({word!r}): this word is taken. Choose another.")
        _registered[word] = factory
        return factory

    return register


def tracker_words() -> list[str]:
    """Every word that names a tracker: built in, registered, or declared by an installed package."""
    return [*_BUILT_IN, *_registered, *(word for word in _entry_points() if word not in {*_BUILT_IN, *_registered})]


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
        return _create_installed() if item == EVERY else [_build(_factory(item), item, {})]
    if isinstance(item, Mapping):
        options = dict(item)
        word = options.pop("name", None)
        return [_build(_factory(word), word, options)]
    if isinstance(item, type) and issubclass(item, Tracker):
        return [_build(item, item.__name__, {})]
    if isinstance(item, Tracker):
        item.check()
        return [item]
    raise ConfigError(
        f"trackers={item!r} is of type {type(item).__name__}. Expected a word "
        f"({', '.join([*tracker_words(), EVERY])}), "
        'a Tracker, {"name": word, option: value}, or a list of these; False for none.'
    )


def _create_installed() -> list[Tracker]:
    created = []
    for word in tracker_words():
        try:
            created.append(_build(_factory(word), word, {}))
        except MissingDependencyError:
            continue  # "all" asks for those that are installed.
    return created


def _build(factory: Factory, word: str, options: dict[str, Any]) -> Tracker:
    try:
        tracker = factory(**options)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        raise ConfigError(f"trackers: {word!r} can't be made with {given}: {error}.") from error
    if not isinstance(tracker, Tracker):
        raise ConfigError(f"trackers: {word!r} gave {tracker!r}. Expected an instance of a subclass of Tracker.")
    tracker.check()
    return tracker


def _factory(word: object) -> Factory:
    if word in _BUILT_IN:
        module, _, name = _BUILT_IN[str(word)].partition(":")
        factory: Factory = getattr(importlib.import_module(f".{module}", __package__), name)
        return factory
    if word in _registered:
        return _registered[str(word)]
    found = _entry_points().get(str(word))
    if found is None:
        raise ConfigError(f"trackers={word!r} is unknown. {suggest(word, [*tracker_words(), EVERY])}")
    loaded: Factory = found.load()
    return loaded


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
