"""`WandbTracker`: Weights & Biases."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..distributed.errors import TrackerError
from ..distributed.imports import require
from .files import flush_to_disk, say_removed
from .names import NameRule
from .tracker import RunInfo, Status, Tracker, opened
from .wandb_files import next_row, offline_files, remove_later_rows

logger = logging.getLogger(__name__)

STEP = "step"
"""The metric that is the x axis of all others."""
NAMES = NameRule(reserved=frozenset({STEP, "_step", "_runtime", "_timestamp", "_wandb", ""}))
"""Metric names are kept, but for those that wandb and this tracker use themselves, and the empty one that it drops."""

_FLUSH_SETTING = "x_transaction_log_flush_interval"
_FLUSH_SECONDS = 0.05
_FLUSH_TIMEOUT_SECONDS = 10
# Arguments of `wandb.init` that say which run goes on.
_CONTINUING = ("id", "resume", "resume_from", "fork_from")
_ROWS_STAY = (
    "tracker %r: the run goes on, but %s: what an earlier leg wrote behind step %d stays there beside the new rows."
)
# What wandb itself gives a run that ended by an exception, and by Ctrl-C.
_EXIT_CODES = {"success": 0, "failed": 1, "interrupted": 255}


class WandbTracker(Tracker):
    """Writes records with `step` as the x axis of every chart, so that none is dropped for its order.

    A run that is already active in this process when training starts (of a sweep, or of your own `wandb.init`) is
    written to and left open. Otherwise one is opened and finished with the outcome, and is `wandb.run` meanwhile.

    A resumed run goes on by its id in `RunInfo.run_ids`, with its configuration brought up to date. What an earlier leg
    wrote after the checkpoint that is resumed from is removed: from the files of offline runs that were not synced, and
    on the server by rewinding the run there, where it offers that; where it doesn't, a warning says that these rows
    stay.

    Args:
        mode: "online", "offline" or "disabled"; None leaves it to wandb's own settings, as all of these do.
        project: the project, in place of the run's.
        entity: the user or team.
        group: what this run belongs to.
        tags: words to find it by.
        name: the tracker's name, where a run has two of them.
        options: further arguments of `wandb.init`, which come before all others. With `reinit` an active run is not
            written to, and `wandb.init` decides. With `settings` of your own, `x_transaction_log_flush_interval` is
            wandb's, 15 seconds, within which a kill takes records along.
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
        self._next_row: int | None = None
        self._saved_row: int | None = None
        self._writes_soon = False
        self._num_flushed = 0
        self._flushed_size = 0

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open the run, or join the active one.

        Raises:
            MissingDependencyError: wandb is not installed.
        """
        wandb = require("wandb", extra="wandb", purpose="WandbTracker")
        self._is_ours = wandb.run is None or "reinit" in self.options
        self._writes_soon = False
        saved_row, self._saved_row = self._saved_row, None
        self.run = self._open(wandb, run, config, saved_row) if self._is_ours else wandb.run
        if run.resumed_step is not None and not self._is_ours and self.run.resumed:
            logger.warning(_ROWS_STAY, self.name, "it is not ours to rewind", run.resumed_step)
        run.run_ids[self.name] = self.run.id
        self._num_flushed, self._flushed_size = self.run.starting_step, 0
        try:
            if not self._is_ours:
                self.run.config.update(dict(config), allow_val_change=True)
            self.run.define_metric(STEP, hidden=True)
            self.run.define_metric("*", step_metric=STEP, step_sync=True)
        except BaseException:
            self.finish("failed")
            raise

    def _open(self, wandb: Any, run: RunInfo, config: Mapping[str, Any], saved_row: int | None) -> Any:
        directory = Path(self.options.get("dir", run.directory))
        # wandb writes to a temporary folder, with a warning alone, where this one is missing.
        directory.mkdir(parents=True, exist_ok=True)
        own: dict[str, Any] = {
            "project": self.project or run.project,
            "name": run.name,
            "dir": str(directory),
            "config": dict(config),
        }
        # Older versions have no such setting.
        self._writes_soon = "settings" not in self.options and _FLUSH_SETTING in wandb.Settings.model_fields
        if self._writes_soon:
            own["settings"] = {_FLUSH_SETTING: _FLUSH_SECONDS}
        run_id, self._next_row = run.run_ids.get(self.name), None
        if run_id is None or not self.options.keys().isdisjoint(_CONTINUING):
            return wandb.init(**(own | self.options))
        files = offline_files(directory, run_id)
        if run.resumed_step is not None:
            self._remove_offline(files, run.resumed_step, saved_row)
        started = wandb.init(**(own | {"id": run_id, "resume": "allow", "allow_val_change": True} | self.options))
        if started.offline:
            self._next_row = max(map(next_row, files), default=saved_row)
        elif run.resumed_step is not None and started.starting_step > (saved_row or 0):
            return self._rewind(wandb, started, own, saved_row, run.resumed_step)
        return started

    def _remove_offline(self, files: Sequence[Path], last_step: int, num_known: int | None) -> None:
        for path in files:
            num_later = remove_later_rows(path, last_step, STEP, num_known)
            say_removed(self.name, num_later, last_step, path)
            if num_later and path.with_suffix(".wandb.synced").exists():
                logger.warning(_ROWS_STAY, self.name, f"{path} was synced before", last_step)

    def _rewind(self, wandb: Any, started: Any, own: dict[str, Any], row: int | None, last_step: int) -> Any:
        """The run, after its server has forgotten its rows from this one on."""
        if row is None:
            logger.warning(_ROWS_STAY, self.name, "nothing says how many rows it had then", last_step)
            return started
        started.finish()
        try:
            rewound = wandb.init(**(own | {"resume_from": f"{started.id}?_step={row - 1}"} | self.options))
        except wandb.Error as error:
            logger.warning(_ROWS_STAY, self.name, f"its server can't rewind it ({error})", last_step)
            return wandb.init(**(own | {"id": started.id, "resume": "allow"} | self.options))
        say_removed(self.name, started.starting_step - row, last_step, "the run on its server")
        return rewound

    def log(self, metrics: Mapping[str, Any], step: int | None = None, *, commit: bool | None = None) -> None:
        """Write one record.

        Args:
            metrics: by name; called directly, also `wandb.Image`, `wandb.Table` and whatever else wandb takes.
            step: the step that they belong to; None: that of the last record.
            commit: False: wait for the next record, and write one row of both.
        Raises:
            TrackerError: no run is open.
        """
        run = opened(self.run, self)
        # wandb's own step argument would drop a record whose step it has seen; its counter of records drops none.
        record = {NAMES.apply(name): value for name, value in metrics.items()}
        record = record if step is None else {**record, STEP: step}
        row, self._next_row = self._next_row, None
        if row is None:
            run.log(record, commit=commit)
        else:
            run.log(record, step=row, commit=commit is not False)  # offline, wandb would count from 0 in each leg

    def flush(self) -> None:
        """Wait until the service of wandb has written every row to its file; it sends them when it can.

        Without waiting where the run is not ours, or has `settings` of yours.

        Raises:
            TrackerError: it has not after 10 seconds.
        """
        run = self.run
        if run is None or run.disabled or not self._writes_soon:
            return
        row, path, begun = run.step, Path(run.settings.sync_file), time.monotonic()
        while self._num_flushed < row:
            time.sleep(_FLUSH_SECONDS / 5)
            self._num_flushed = max(next_row(path, self._flushed_size), self._num_flushed)
            if time.monotonic() - begun > _FLUSH_TIMEOUT_SECONDS:
                raise TrackerError(
                    f"wandb's service has written {self._num_flushed} of {row} rows to {path} after "
                    f"{_FLUSH_TIMEOUT_SECONDS} seconds. Look for its reason in {run.settings.log_internal}."
                )
        self._flushed_size = path.stat().st_size
        with path.open("rb+") as file:
            flush_to_disk(file)

    def state_dict(self) -> dict[str, Any]:
        """The number of the next row: the first that a later leg will have to take back."""
        run = self.run
        if run is None or run.disabled:
            return {}
        return {"row": int(run.step if self._next_row is None else self._next_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that number back."""
        self._saved_row = state.get("row")

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, *, commit: bool | None = None, **options: Any
    ) -> None:
        """Write pictures.

        Args:
            values: several by name: arrays of shape (height, width, channels), or what else `wandb.Image` takes.
            step: the step that they belong to.
            commit: as for `log`.
            options: of `wandb.Image`, such as `caption`.
        Raises:
            TrackerError: no run is open.
        """
        opened(self.run, self)
        image = require("wandb", extra="wandb", purpose="WandbTracker").Image
        record = {name: [image(item, **options) for item in images] for name, images in values.items()}
        self.log(record, step, commit=commit)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        commit: bool | None = None,
        **options: Any,
    ) -> None:
        """Write a table.

        Args:
            table_name: its name among the metrics.
            columns: the names of its columns.
            data: its rows; the cells may be texts, numbers, and whatever else wandb takes.
            dataframe: a pandas data frame in place of both.
            step: the step that it belongs to.
            commit: as for `log`.
            options: of `wandb.Table`.
        Raises:
            TrackerError: no run is open.
        """
        opened(self.run, self)
        table = require("wandb", extra="wandb", purpose="WandbTracker").Table
        record = {table_name: table(columns=columns, data=data, dataframe=dataframe, **options)}
        self.log(record, step, commit=commit)

    @property
    def tracker(self) -> Any:
        """The `wandb.Run` while a run is open, by Accelerate's name."""
        return self.run

    def finish(self, status: Status) -> None:
        """Finish the run with exit code 0, 1 or 255; a run that was active before `start` stays open."""
        run, self.run = self.run, None
        if run is not None and self._is_ours:
            run.finish(exit_code=_EXIT_CODES[status])
