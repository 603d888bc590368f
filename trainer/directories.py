"""Where the files of runs go: one folder for each, below the folder of the project."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..distributed.paths import free_path

CHECKPOINTS = "checkpoints"


class RunDirectories:
    """Gives each run its folder, and finds those of earlier ones.

    Args:
        project_dir: the folder of all runs.
        name: the run's name and folder; None: made of the task's name, the time and a random part.
    """

    def __init__(self, project_dir: Path, name: str | None) -> None:
        self._project_dir = project_dir
        self._name = name
        self._used: list[Path] = []

    def new(self, kind: str) -> Path:
        """A folder that no run of this Trainer has; without a name one that nobody has. Nothing is made.

        Args:
            kind: what runs, for the name.
        """
        # The last part keeps runs apart that begin in the same second, on machines that share the folder.
        base = self._name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        folder = free_path(
            self._project_dir / base,
            is_taken=lambda path: path in self._used or (self._name is None and path.exists()),
            suffix="",
        )
        self._used.append(folder)
        return folder

    def of(self, run: str) -> Path:
        """The folder of a run that goes on from a checkpoint of an earlier one: the same, if it is the same run."""
        folder = self._project_dir / (run if self.continues(run) else self._name or run)
        self._used.append(folder)
        return folder

    def continues(self, run: str) -> bool:
        """Whether what goes on from a checkpoint of this run is the same run, and no branch of it."""
        return self._name is None or run == self._name or self._project_dir / run in self._used

    def earlier(self, kind: str) -> list[Path]:
        """The folders of earlier runs of this name; without one, those of this kind of task. The newest first."""
        if self._name is not None:
            return [*reversed(self._used), self._project_dir / self._name]
        if not self._project_dir.is_dir():
            return []
        pattern = re.compile(re.escape(kind) + r"-\d{8}-\d{6}-[0-9a-f]{6}")
        found = [each for each in self._project_dir.iterdir() if pattern.fullmatch(each.name) and each.is_dir()]
        return sorted(found, key=lambda each: each.name, reverse=True)


def checkpoint_folders(own: Iterable[Path | None], runs: Sequence[Path]) -> list[Path]:
    """Where checkpoints are looked for: folders that callbacks keep, then those in the folders of runs."""
    return [*dict.fromkeys(folder for folder in own if folder is not None), *(run / CHECKPOINTS for run in runs)]
