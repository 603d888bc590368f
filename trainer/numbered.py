"""Numbered checkpoints of a project: `project_dir/checkpoints/checkpoint_0`, `checkpoint_1`, ..."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from ..checkpoint.manifest import FILE_NAME
from ..distributed.atomic import remove_folder
from ..distributed.errors import ConfigError
from .project import ProjectConfiguration

_NAME = re.compile(r"checkpoint_(\d+)")


def numbered_folder(project: ProjectConfiguration) -> Path:
    """The folder of a project's numbered checkpoints. Local.

    Raises:
        ConfigError: the project has no folder.
    """
    if project.project_dir is None:
        raise ConfigError(
            "automatic_checkpoint_naming=True, and there is no project_dir. Give Accelerator(project_dir=...), or a "
            "ProjectConfiguration(project_dir=...)."
        )
    return Path(project.project_dir).expanduser() / "checkpoints"


def next_path(project: ProjectConfiguration) -> Path:
    """Where the next checkpoint goes. Local.

    Raises:
        ConfigError: the project has no folder, or a checkpoint of this number.
    """
    folder = numbered_folder(project)
    path = folder / f"checkpoint_{project.iteration}"
    if path.exists():
        free = max(numbered(folder), default=-1) + 1
        raise ConfigError(
            f"save_state: {str(path)!r} exists already. Call load_state() to go on behind it, or set "
            f"accelerator.save_iteration = {free}; or choose another project_dir."
        )
    return path


def numbered(folder: Path) -> dict[int, Path]:
    """The numbered checkpoints of a folder, by their numbers in order; a warning names what is none. Local."""
    if not folder.is_dir():
        return {}
    found, others = {}, []
    for entry in sorted(folder.iterdir()):
        match = _NAME.fullmatch(entry.name)
        if match is not None and is_checkpoint(entry):
            found[int(match[1])] = entry
        elif not entry.name.startswith("."):
            others.append(entry.name)
    if others:
        warnings.warn(
            f"in {str(folder)!r} these are no numbered checkpoints, and are left alone: {others}.", stacklevel=3
        )
    return dict(sorted(found.items()))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder was written by `save_state`, here or by Accelerate. Local."""
    return (folder / FILE_NAME).is_file() or (folder / "random_states_0.pkl").is_file()


def remove_oldest(project: ProjectConfiguration, newest: Path) -> None:
    """Remove the checkpoints with the lowest numbers that are beyond `total_limit`; never the newest. Local."""
    if project.total_limit is None:
        return
    older = [path for path in numbered(newest.parent).values() if path != newest]
    for path in older[: max(len(older) + 1 - project.total_limit, 0)]:
        remove_folder(path)


def number_of(path: Path) -> int | None:
    """The number of a checkpoint by its name, None for another name. Local."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])
