"""Which checkpoints a folder has: in the order in which they were saved, the newest, the best."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from ..distributed.errors import CheckpointError, suggest
from .manifest import FILE_NAME, Facts, read_manifest
from .reading import Checkpoint
from .shards import listed


def find_checkpoints(folder: str | Path) -> list[Checkpoint]:
    """The checkpoints directly in a folder, in the order in which they were saved. Local.

    Their files are not looked at. A folder in it whose manifest can't be read is left out, with a warning that says
    why; folders without a manifest, and those that are being written, are none.
    """
    found = []
    for each in _entries(Path(folder)):
        if isinstance(each, Checkpoint):
            found.append(each)
        else:
            warnings.warn(f"a checkpoint is passed over: {each}", stacklevel=2)
    return sorted(found, key=lambda each: (each.manifest.sequence, each.manifest.progress.get("step", 0), each.path))


def newest(
    folder: str | Path,
    *,
    kind: Literal["state", "weights"] | None = "state",
    accepts: Callable[[Checkpoint], bool] | None = None,
    find_damage: Callable[[Checkpoint], list[str]] = Checkpoint.find_damage,
) -> Checkpoint | None:
    """The checkpoint of a folder that was saved last, of those that are whole; None where there is none. Local.

    Each damaged one that is passed over is named by a warning, with what is wrong.

    Args:
        folder: where the checkpoints are; it need not exist.
        kind: "state" passes those over that training can't go on from; None takes all.
        accepts: which others are looked at, by what their manifests say; None: all.
        find_damage: what says of each whether its files are whole.
    """
    candidates = [
        each
        for each in find_checkpoints(folder)
        if kind in (None, each.manifest.kind) and (accepts is None or accepts(each))
    ]
    return _first_whole(reversed(candidates), find_damage)


def best(
    folder: str | Path,
    name: str | None = None,
    *,
    find_damage: Callable[[Checkpoint], list[str]] = Checkpoint.find_damage,
) -> Checkpoint | None:
    """The checkpoint of a folder with the best score, of those that are whole; None where none has a score. Local.

    A score that is NaN is never the best. Of equal scores, the one that was saved first is.

    Args:
        folder: where the checkpoints are; it need not exist.
        name: of the metric; by default the first that the newest checkpoint with scores is judged by.
        find_damage: as of `newest`.
    Raises:
        CheckpointError: there are scores, and none of that name.
    """
    found = find_checkpoints(folder)
    scores = [score for each in reversed(found) for score in each.manifest.scores]
    if not scores:
        return None
    named = [score for score in scores if name in (None, score["name"])]
    if not named:
        known = sorted({str(score["name"]) for score in scores})
        raise CheckpointError(f"no checkpoint in {str(folder)!r} has the score {name!r}. {suggest(str(name), known)}")
    name, mode = named[0]["name"], named[0]["mode"]
    sign = -1.0 if mode == "max" else 1.0
    values = [(sign * value, each) for each in found if (value := _value(each, str(name))) is not None]
    return _first_whole((each for _, each in sorted(values, key=lambda pair: pair[0])), find_damage)


def is_only_a_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint and has no other files in it. Local.

    Raises:
        CheckpointError: it is one, and has; names them. Or its manifest can't be read.
    """
    if not (folder / FILE_NAME).is_file():
        return False
    others = Checkpoint(folder, read_manifest(folder)).unlisted_files
    if others:
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} can't be replaced: these files in it are no part of it: {listed(others)}. "
            "Remove it, or choose another folder."
        )
    return True


def next_sequence(folder: Path, facts: Facts) -> int:
    """The number of a checkpoint that is saved into a folder now: above all that are there, and its parent's. Local."""
    taken = [each.manifest.sequence for each in _entries(folder) if isinstance(each, Checkpoint)]
    parent: Any = (facts.parent or {}).get("sequence", 0)
    return max([*taken, int(parent or 0)], default=0) + 1


def _entries(folder: Path) -> Iterator[Checkpoint | Exception]:
    """Each checkpoint of a folder, or why its manifest can't be read."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name.startswith(".") or not (entry / FILE_NAME).is_file():
            continue
        try:
            yield Checkpoint(entry, read_manifest(entry))
        except FileNotFoundError:
            continue  # it was removed meanwhile
        except (CheckpointError, OSError) as error:
            yield error


def _first_whole(candidates: Iterable[Checkpoint], find_damage: Callable[[Checkpoint], list[str]]) -> Checkpoint | None:
    for each in candidates:
        damage = find_damage(each)
        if not damage:
            return each
        warnings.warn(
            f"the checkpoint {str(each.path)!r} is damaged, and passed over: {'; '.join(damage)}.", stacklevel=3
        )
    return None


def _value(checkpoint: Checkpoint, name: str) -> float | None:
    values = [float(score["value"]) for score in checkpoint.manifest.scores if score["name"] == name]
    return values[0] if values and not math.isnan(values[0]) else None
