"""Where a checkpoint comes from: those that runs went on from before it, and what was changed each time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .finding import find_checkpoints
from .manifest import Manifest
from .reading import Checkpoint

_MOST_KEPT = 200
"""Resumes that a manifest remembers; a run that is requeued every few minutes has many."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A checkpoint that a run was resumed from, and what was changed then."""

    said: Mapping[str, Any]
    """What is remembered of it: `checkpoint` (its name), `run`, `sequence`, and how far it was: `step`, or without a
    Trainer that counts steps `epoch` and `batch`."""
    changes: tuple[str, ...]
    """The settings that were others before that resume."""
    path: Path | None
    """Where it is, None where it is no longer there."""


def as_parent(name: str, manifest: Manifest) -> dict[str, Any]:
    """What the checkpoints of a run that goes on from one say of it, as `Facts.parent`. Local.

    Under `earlier` it has the same of the checkpoints before it, so that the line is known when they are gone.

    Args:
        name: of its folder.
        manifest: its own.
    """
    before: Mapping[str, Any] = manifest.parent or {}
    resumes = [{**before, "changes": list(manifest.changes)}] if before else []
    earlier = [each for resume in resumes for each in (resume, *resume.pop("earlier", ()))]
    progress = manifest.progress
    names = ("step",) if "step" in progress else ("epoch", "batch")
    return {
        "checkpoint": name,
        "run": dict(manifest.run),
        "sequence": manifest.sequence,
        **{name: progress[name] for name in names if name in progress},
        "earlier": earlier[:_MOST_KEPT],
    }


def ancestors(checkpoint: Checkpoint) -> list[Ancestor]:
    """The checkpoints that a checkpoint descends from, its parent first. Local.

    Each is looked for in the folder of this one, and in that of the run that it belongs to, beside this one's run.
    """
    manifest = checkpoint.manifest
    if manifest.parent is None:
        return []
    parent = {key: value for key, value in manifest.parent.items() if key != "earlier"}
    resumes: Sequence[Mapping[str, Any]] = [
        {**parent, "changes": manifest.changes},
        *manifest.parent.get("earlier", ()),
    ]
    folder = checkpoint.path.absolute().parent
    known: dict[Path, list[Checkpoint]] = {}
    line = []
    for resume in resumes:
        # Runs keep their checkpoints in folders of one name below their own: RUN/checkpoints/NAME.
        of_run = folder.parent.parent / str(resume["run"].get("name")) / folder.name
        for each in (folder, of_run):
            known.setdefault(each, _checkpoints(each))
        found = next((each for each in (*known[folder], *known[of_run]) if _is_meant(each, resume)), None)
        line.append(Ancestor(resume, tuple(resume.get("changes", ())), None if found is None else found.path))
    return line


def _checkpoints(folder: Path) -> list[Checkpoint]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged ones: they are not what was asked about
        return find_checkpoints(folder)


def _is_meant(checkpoint: Checkpoint, resume: Mapping[str, Any]) -> bool:
    manifest = checkpoint.manifest
    return (manifest.run.get("id"), manifest.sequence) == (resume["run"].get("id"), resume["sequence"])
