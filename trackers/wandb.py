"""`WandbTracker`: Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..distributed.imports import require
from .names import NameRule
from .tracker import RunInfo, Status, Tracker, opened

STEP = "step"
"""The metric that is the x axis of all others."""
NAMES = NameRule(reserved=frozenset({STEP, "_step", "_runtime", "_timestamp", "_wandb", ""}))
"""Metric names are kept, but for those that wandb and this tracker use themselves, and the empty one that it drops."""

# What wandb itself gives a run that ended by an exception, and by Ctrl-C.
_EXIT_CODES = {"success": 0, "failed": 1, "interrupted": 255}


class WandbTracker(Tracker):
    """Writes records with `step` as the x axis of every chart, so that none is dropped for its order.

    A run that is already active in this process when training starts (of a sweep, or of your own `wandb.init`) is
    written to and left open. Otherwise one is opened and finished with the outcome, and is `wandb.run` meanwhile. Its
    id is kept in `RunInfo.run_ids`, and with it a resumed run goes on.

    Args:
        mode: "online", "offline" or "disabled"; None leaves it to wandb's own settings, as all of these do.
        project: the project, in place of the run's.
        entity: the user or team.
        group: what this run belongs to.
        tags: words to find it by.
        name: the tracker's name, where a run has two of them.
        options: further arguments of `wandb.init`, which come before all others. With `reinit` an active run is not
            written to, and `wandb.init` decides.
    """

    package: ClassVar[str | None] = "wandb"
    extra: ClassVar[str | None] = "wandb"

    def __init__(
        self,
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        name: str = "wandb",
        **options: Any,
    ) -> None:
        self.name = name
        self.project = project
        given = {"mode": mode, "entity": entity, "group": group, "tags": None if tags is None else list(tags)}
        self.options: dict[str, Any] = {key: value for key, value in given.items() if value is not None} | options
        """What `wandb.init` is given beside the run's own name, folder, id and configuration."""
        self.run: Any = None
        """The `wandb.Run` while a run is open, to log pictures and tables with; else None."""
        self._is_ours = False

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open the run, or join the active one.

        Raises:
            MissingDependencyError: wandb is not installed.
        """
        wandb = require("wandb", extra="wandb", purpose="WandbTracker")
        self._is_ours = wandb.run is None or "reinit" in self.options
        self.run = self._open(wandb, run, config) if self._is_ours else wandb.run
        run.run_ids[self.name] = self.run.id
        try:
            if not self._is_ours:
                self.run.config.update(dict(config), allow_val_change=True)
            self.run.define_metric(STEP, hidden=True)
            self.run.define_metric("*", step_metric=STEP, step_sync=True)
        except BaseException:
            self.finish("failed")
            raise

    def _open(self, wandb: Any, run: RunInfo, config: Mapping[str, Any]) -> Any:
        directory = Path(self.options.get("dir", run.directory))
        # wandb writes to a temporary folder, with a warning alone, where this one is missing.
        directory.mkdir(parents=True, exist_ok=True)
        own = {"project": self.project or run.project, "name": run.name, "dir": str(directory), "config": dict(config)}
        if self.name in run.run_ids:
            own |= {"id": run.run_ids[self.name], "resume": "allow"}
        return wandb.init(**(own | self.options))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one record.

        Raises:
            TrackerError: no run is open.
        """
        run = opened(self.run, self)
        # wandb's own step argument would drop a record whose step it has seen; its counter of records drops none.
        run.log({**{NAMES.apply(name): value for name, value in metrics.items()}, STEP: step})

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write pictures.

        Args:
            values: several by name: arrays of shape (height, width, channels), or what else `wandb.Image` takes.
            step: the step that they belong to.
            options: of `wandb.Image`.
        Raises:
            TrackerError: no run is open.
        """
        run = opened(self.run, self)
        image = require("wandb", extra="wandb", purpose="WandbTracker").Image
        record = {NAMES.apply(name): [image(item, **options) for item in images] for name, images in values.items()}
        run.log(record if step is None else {**record, STEP: step})

    @property
    def tracker(self) -> Any:
        """The `wandb.Run` while a run is open, by Accelerate's name."""
        return self.run

    def finish(self, status: Status) -> None:
        """Finish the run with exit code 0, 1 or 255; a run that was active before `start` stays open."""
        run, self.run = self.run, None
        if run is not None and self._is_ours:
            run.finish(exit_code=_EXIT_CODES[status])
