"""What the trackers that write local files share: strict JSON, whole lines, and a record of the run."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ..distributed.atomic import whole_file
from .tracker import RunInfo

logger = logging.getLogger(__name__)

_BLOCK = 4096


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """JSON text that every parser accepts: NaN and the infinities become "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_with_named_floats(value), indent=indent, allow_nan=False)


def _with_named_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _with_named_floats(item) for key, item in value.items()}
    return [_with_named_floats(item) for item in value] if isinstance(value, list) else value


def cut_partial_line(path: Path) -> None:
    """Make a file end with a whole line, as after a process that was killed while it wrote the last one."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def flush_to_disk(file: IO[Any]) -> None:
    """Put what was written where neither a kill nor the loss of power takes it."""
    file.flush()
    os.fsync(file.fileno())


def say_removed(tracker: str, num_rows: int, step: int, place: object) -> None:
    """The one line that says what a resume from `step` has removed; none where there was nothing."""
    if num_rows:
        logger.info(
            "tracker %r goes on behind step %d: %d later rows of an earlier leg were removed from %s.",
            tracker,
            step,
            num_rows,
            place,
        )


class Behind:
    """Tells of a resumed run's earlier records, when it is asked for each in their order, which ones come again.

    Args:
        run: with the step that it resumes from.
    """

    def __init__(self, run: RunInfo) -> None:
        assert run.resumed_step is not None
        self._step = run.resumed_step
        self._num_last: float
        self._last_step, self._num_last = run.last_record or (run.resumed_step, math.inf)

    def __call__(self, step: int) -> bool:
        if step == self._last_step:
            self._num_last -= 1
            return self._num_last < 0
        return step > min(self._step, self._last_step)


class RunRecord:
    """The JSON file next to a metrics file: the run's name, project, status and configuration.

    The status is "running" until `close`; so it stays when the process is killed. Trackers that share a folder and the
    stem of their files share this file, and write the same into it.
    """

    def __init__(self, metrics_path: Path, run: RunInfo, config: Mapping[str, Any]) -> None:
        self.path = metrics_path.with_suffix(".run.json")
        self._content = {"name": run.name, "project": run.project, "status": "running", "config": dict(config)}
        self._write()

    def close(self, status: str) -> None:
        """Write the outcome."""
        self._content["status"] = status
        self._write()

    def _write(self) -> None:
        with whole_file(self.path) as temporary:
            temporary.write_text(strict_json(self._content, indent=2) + "\n", encoding="utf-8")
