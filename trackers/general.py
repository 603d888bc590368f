"""`GeneralTracker`: trackers that were written for Accelerate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from ..distributed.group import own_place
from .tracker import RunInfo, Status, Tracker

P = ParamSpec("P")
R = TypeVar("R")


class GeneralTracker(Tracker):
    """The base of a tracker of your own, as Accelerate has it; for a new one take `Tracker`.

    A subclass has a `name` and overrides what it needs of `start()`, `store_init_configuration(values)`,
    `log(values, step)` and `finish()`, in this order. It is passed as an object. Values are plain numbers, and the
    configuration is nested and without secrets. What it writes with may be its attribute `tracker`.
    """

    main_process_only = True
    """Whether methods under `on_main_process` run on the main process alone."""
    requires_logging_directory = False
    """Accelerate's; without effect here."""

    def __init__(self, _blank: bool = False) -> None:
        """Nothing to do; subclasses need not call it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accelerate's `start` and `finish` take no arguments. Let a subclass's be called with those of a `Tracker`."""
        super().__init_subclass__(**kwargs)
        for name, adapted in (("start", _adapted_start), ("finish", _adapted_finish)):
            if name in vars(cls):
                setattr(cls, name, adapted(vars(cls)[name]))

    def start(self, run: RunInfo | None = None, config: Mapping[str, Any] | None = None) -> None:
        """Open what the tracker writes with."""
        if config is not None:
            self.store_init_configuration(dict(config))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the run's configuration."""

    def log(  # type: ignore[override]  # the names are Accelerate's; a group passes both by position
        self, values: Mapping[str, float], step: int | None = None, **kwargs: Any
    ) -> None:
        """Write one record."""

    def finish(self, status: Status | None = None) -> None:
        """Close it."""


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a tracker's method: where the tracker is `main_process_only`, other processes skip it."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if getattr(args[0], "main_process_only", False) and own_place().process_index != 0:
            return None
        return function(*args, **kwargs)

    return guarded


def _adapted_start(own: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(own)
    def start(self: GeneralTracker, *run_and_config: Any) -> None:
        own(self)
        if run_and_config:  # none where a subclass calls super().start()
            self.store_init_configuration(dict(run_and_config[1]))

    return start


def _adapted_finish(own: Callable[[Any], None]) -> Callable[..., None]:
    @functools.wraps(own)
    def finish(self: GeneralTracker, *status: Any) -> None:
        own(self)

    return finish


class SilentTracker(GeneralTracker):
    """Writes nothing, whatever it is told: what other processes than the main one have in a tracker's place."""

    name = "silent"

    def log_images(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    def log_table(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    def log_figure(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    def log_artifact(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    def log_artifacts(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""
