"""`Tracker`: where a run's configuration and metrics are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from ..distributed.errors import MissingDependencyError, TrackerError
from ..distributed.imports import is_installed

T = TypeVar("T")
Status: TypeAlias = Literal["success", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker is told of the run it records."""

    name: str
    """The run's name, unique in its project."""
    project: str
    """What several runs have in common: the project's or experiment's name."""
    directory: Path
    """Where the run's files go. It may not exist yet."""
    run_ids: dict[str, str] = field(default_factory=dict)
    """The ids under which trackers know this run, by tracker name: filled by `start`, kept over a resume."""
    resumed_step: int | None = None
    """Where one `start` resumes the run: `start` removes what an earlier leg wrote at larger steps, or begins a copy
    without it, so that every metric has one value per step. -1 removes everything; None nothing."""
    last_record: tuple[int, int] | None = None
    """The step of the last record that the resumed checkpoint knows of, and how many records that step had. A tracker
    that counts its records removes all behind it, also those of the very step at which the earlier leg ended."""


class Tracker(ABC):
    """Base of all experiment trackers, your own included.

    Only the main process calls these. What a tracker raises is reported once and never ends the run, see
    `TrackerGroup`. Values reach `log` as plain Python numbers: tensors, NumPy scalars and None have been dealt with
    before. The constructor takes settings and does nothing else: packages are imported and files opened in `start`.
    """

    name: str
    """The word that names this tracker, for messages and `RunInfo.run_ids`; no two of one run share it."""
    package: ClassVar[str | None] = None
    """The package, by its import name, without which this tracker can't work; None where it needs nothing more."""
    extra: ClassVar[str | None] = None
    """The extra of `loopwright` that installs `package`; None for a package that is installed by its own name."""

    @classmethod
    def check(cls) -> None:
        """Say before the run begins whether this tracker can work here. Nothing is imported.

        Raises:
            MissingDependencyError: `package` is not installed.
        """
        if cls.package is None or is_installed(cls.package):
            return
        wanted = f"'loopwright[{cls.extra}]'" if cls.extra else cls.package
        raise MissingDependencyError(
            f"{cls.__name__} needs the package {cls.package!r}, which is not installed. Install it with: "
            f"pip install {wanted}"
        )

    @abstractmethod
    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open the run and store its configuration, a nested mapping of plain values without secrets.

        An id in `run.run_ids` under this tracker's name is that of the same run's earlier leg, which is continued. With
        `run.resumed_step` it is continued behind that step: see there. The configuration may differ from the earlier
        leg's.
        """

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one record. `step` counts applied optimizer steps and never decreases; values may be NaN or infinite.

        Further arguments of a subclass, which are optional, are what `Accelerator.log(log_kwargs=...)` may give.

        Raises:
            TrackerError: no run is open.
        """

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write pictures, by name, where the tracker has a place for them.

        Raises:
            TrackerError: it has none; names those that have it.
        """
        raise _lacks(self, "log_images")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Write a table, from its columns and rows or from a data frame, where the tracker has a place for one.

        Raises:
            TrackerError: it has none; names those that have it.
        """
        raise _lacks(self, "log_table")

    def flush(self) -> None:
        """Put all that was logged on the disk, or send it: called before each checkpoint, which counts on it.

        Where no run is open it does nothing.
        """

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` wants back before the `start` of a later leg; plain values, and none by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave in an earlier leg."""

    @abstractmethod
    def finish(self, status: Status) -> None:
        """Flush and close the run with its outcome. Called once, also after an exception; then `start` may follow.

        Where no run is open it does nothing.
        """


WORDS_WITH: Mapping[str, tuple[str, ...]] = {
    "log_images": ("mlflow", "tensorboard", "wandb"),
    "log_table": ("mlflow", "wandb"),
}
"""By method, the words of the trackers here that have it."""


def _lacks(tracker: Tracker, method: str) -> TrackerError:
    words = ", ".join(WORDS_WITH[method])
    return TrackerError(
        f"{type(tracker).__name__} has no {method}. The trackers that have it: {words}. Name one of them in log_with, "
        f"or override {method} in a class of your own."
    )


def opened(resource: T | None, tracker: Tracker) -> T:
    """What `tracker.start` opened.

    Raises:
        TrackerError: nothing is open, because `log` came before `start` or after `finish`.
    """
    if resource is None:
        raise TrackerError(
            f"{type(tracker).__name__}.log was called while no run is open. Call start(run, config) first."
        )
    return resource
