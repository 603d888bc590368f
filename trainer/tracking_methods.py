"""`TrackingMethods`: what an `Accelerator` does with experiment trackers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..distributed.errors import ConfigError, TrackerError, suggest
from ..trackers.general import SilentTracker
from ..trackers.kinds import LoggerType
from ..trackers.registry import create_trackers, tracker_words
from ..trackers.tracker import RunInfo, Tracker
from .project import ProjectConfiguration

LogWith: TypeAlias = "str | Tracker | type[Tracker] | Iterable[str | Tracker | type[Tracker]] | None"

_DEFAULT_FOLDER = "runs"


class TrackingMethods:
    """The experiment trackers of an `Accelerator`.

    Args:
        log_with: words, trackers, or a list of these; None for none.
        project: where trackers' files go.
        is_main_process: whether this process writes.
    Raises:
        ConfigError: a word is unknown.
        MissingDependencyError: a tracker was named whose package is not installed.
    """

    def __init__(self, log_with: LogWith, project: ProjectConfiguration, is_main_process: bool) -> None:
        self.project_configuration = project
        """Where files go."""
        chosen = [log_with] if isinstance(log_with, (str, Tracker, type)) else list(log_with or [])
        self.log_with = [str(item) if isinstance(item, str) else item for item in chosen]  # also a LoggerType's member
        """What was asked for."""
        self._group = create_trackers(self.log_with, enabled=is_main_process)
        self._next_step = 0
        self._resumed: Mapping[str, Any] | None = None

    @property
    def project_dir(self) -> Any:
        """The folder of the project's files, None where there is none."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """The folder of the trackers' files, None where there is none; they go to `runs` then."""
        return self.project_configuration.logging_dir

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers that `init_trackers` has opened; none on other processes than the main one."""
        return list(self._group.trackers) if self._group.is_open and self._group.enabled else []

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open a run in every tracker. Files go to a folder of this name below `logging_dir`.

        Args:
            project_name: the project's name, and the run's.
            config: what the run was configured with.
            init_kwargs: further options by the tracker's word: `{"wandb": {"entity": "team"}}`; `"name"` names the run.
                Those of trackers that are not in use are left out.
        Raises:
            ConfigError: no tracker has this word, or it does not take an option.
            TrackerError: a run is open already.
        """
        self._check_words("init_trackers", "init_kwargs", init_kwargs or {})
        options = {word: dict(given) for word, given in (init_kwargs or {}).items()}
        names = [name for given in options.values() if (name := given.pop("name", None))]
        if any(options.values()):
            configured = [self._with_options(tracker, options.get(tracker.name)) for tracker in self._group.trackers]
            self._group = create_trackers(configured, enabled=self._group.enabled)
        folder = Path(self.logging_dir or _DEFAULT_FOLDER) / project_name
        resumed, self._resumed = self._resumed, None
        info = RunInfo(names[0] if names else project_name, project_name, folder)
        if resumed is not None:
            self._group.load_state_dict(resumed["group"])
            info = dataclasses.replace(info, resumed_step=resumed["group"]["last_step"])
        self._group.start(info, config or {})
        self._next_step = 0 if resumed is None else resumed["next_step"]

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Write one record to every tracker; without trackers, do nothing.

        Args:
            values: numbers by name; tensors of one element count as such.
            step: the optimizer step that it belongs to. Without one, one more than that of the last record.
            log_kwargs: further arguments of single trackers' `log`, by the tracker's word: `{"wandb": {"commit":
                False}}`. Those of trackers that are not in use are left out.
        Raises:
            TrackerError: `init_trackers` was not called.
            ConfigError: no tracker has this word, or it does not take an option.
        """
        self._check_words("log", "log_kwargs", log_kwargs or {})
        if not self.log_with:
            return
        if not self._group.is_open:
            raise TrackerError(
                "accelerator.log was called while no run is open. Call init_trackers(project_name) first."
            )
        step = self._next_step if step is None else step
        self._group.log(values, step, log_kwargs)
        self._next_step = step + 1

    def tracking_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the trackers: their runs' ids, and the number of the next record. Local."""
        self._group.flush()
        return {"group": self._group.state_dict(), "next_step": self._next_step}

    def restore_tracking(self, state: Mapping[str, Any]) -> None:
        """Let `init_trackers` go on with the runs that `tracking_state` told of; where it was called already, the
        records go on with their numbers in the new runs. Local.
        """
        if self._group.is_open:
            self._next_step = state["next_step"]
        else:
            self._resumed = state

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The open tracker of that name; one that writes nothing without trackers, and where another process writes.

        Args:
            name: its word.
            unwrap: return what the tracker itself writes with, its attribute `tracker`.
        Raises:
            TrackerError: no such tracker is open, or it has nothing to unwrap.
        """
        if not self._group.enabled or not self.log_with:
            return SilentTracker()
        found = next((tracker for tracker in self.trackers if tracker.name == name), None)
        if found is None:
            known = [tracker.name for tracker in self.trackers]
            raise TrackerError(
                f"get_tracker({name!r}): no such tracker is open. {suggest(name, known)} Name it in log_with, and call "
                "init_trackers first."
            )
        if not unwrap:
            return found
        if not hasattr(found, "tracker"):
            raise TrackerError(f"get_tracker({name!r}, unwrap=True): {type(found).__name__} has nothing to unwrap.")
        return found.tracker

    def end_training(self) -> None:
        """Close the run in every tracker."""
        self._group.finish("success")

    def _check_words(self, method: str, argument: str, options: Mapping[str, Any]) -> None:
        if not options:
            return
        if not isinstance(options, Mapping) or not all(isinstance(given, Mapping) for given in options.values()):
            raise ConfigError(
                f"{method}({argument}={options!r:.80}). Expected options by the tracker's word, such as "
                f"{argument}={{'wandb': {{...}}}}."
            )
        words = {word.value for word in LoggerType if word is not LoggerType.ALL}
        known = {*tracker_words(), *words, *(tracker.name for tracker in self._group.trackers)}
        for word in options:
            if word not in known:
                raise ConfigError(f"{method}({argument}={{{word!r}: ...}}) names no tracker. {suggest(word, known)}")

    def _with_options(self, tracker: Tracker, options: dict[str, Any] | None) -> Tracker | dict[str, Any]:
        """The tracker, or what makes one with these options in its place."""
        if not options:
            return tracker
        if any(tracker is given for given in self.log_with):
            raise ConfigError(
                f"init_trackers(init_kwargs={{{tracker.name!r}: ...}}): this tracker was given as an object, which has "
                "its options already. Give them to its constructor."
            )
        return {"name": tracker.name, **options}
