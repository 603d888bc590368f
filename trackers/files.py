"""What the trackers that write local files share: strict JSON, whole lines, and a record of the run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..distributed.atomic import whole_file
from .tracker import RunInfo

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
