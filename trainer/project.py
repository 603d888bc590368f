"""`ProjectConfiguration`: where an `Accelerator` keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..distributed.errors import ConfigError


@dataclass(slots=True)
class ProjectConfiguration:
    """Where an `Accelerator` keeps its files; the names and their order are Accelerate's.

    `iteration` counts while a run goes on, so that this is not frozen as other settings are.
    """

    project_dir: str | os.PathLike[str] | None = None
    """The folder of the project's files."""
    logging_dir: str | os.PathLike[str] | None = None
    """The folder of the trackers' files; by default `project_dir`."""
    automatic_checkpoint_naming: bool = False
    """Number the checkpoints by `iteration`, below `project_dir/checkpoints`."""
    total_limit: int | None = None
    """How many numbered checkpoints are kept. None: all."""
    iteration: int = 0
    """The number of the next checkpoint."""
    save_on_each_node: bool = False
    """Save on each machine's main process, and not on one alone."""

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(
                f"ProjectConfiguration.total_limit={self.total_limit}. Expected an integer >= 1, or None to keep all."
            )
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set `project_dir`, and `logging_dir` where it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
