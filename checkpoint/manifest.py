"""`Manifest`: what a checkpoint is, which files it has, and what each of them must be."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from ..distributed.errors import CheckpointError
from .hashing import FileEntry
from .parts import PARTS_SUFFIX
from .tree import pack, unpack

FORMAT_VERSION = 2
"""The newest that is read. A checkpoint has the lowest that has all that is in it: 2 where parts of tensors are."""
FILE_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the saver says of a checkpoint."""

    kind: Literal["state", "weights"] = "state"
    """Whether training can go on from it, or it has weights alone."""
    progress: Mapping[str, int | float] = field(default_factory=dict)
    """The counters: epoch, batch, step, samples, ..."""
    world_size: int = 1
    """How many processes saved it."""
    strategy: str = ""
    """The name of the strategy."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Of the run that saved it: id, name, task; and launch, where a launcher can start it again."""
    parent: Mapping[str, Any] | None = None
    """Of the checkpoint that this run was resumed from, see `lineage.as_parent`; None: it began anew."""
    changes: Sequence[str] = ()
    """The settings that were others before that resume, one line each."""
    scores: Sequence[Mapping[str, Any]] = ()
    """Metrics that it is judged by: `{"name": "val/loss", "mode": "min", "value": 0.1}`."""
    inexact: Sequence[str] = ()
    """Why a run that is resumed from it can't be bit-equal to one that went on, one line each."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings that matter for exactness."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Facts):
    """What a checkpoint says of itself."""

    format_version: int = 1
    """Of the layout of the folder; readers refuse newer ones."""
    sequence: int
    """Its place among those of its folder: larger than that of each which was there before it."""
    created: str
    """When, for people to read; nothing is decided by it."""
    versions: Mapping[str, str]
    """Of the software that wrote it."""
    files: Mapping[str, FileEntry]
    """All other files of the folder, by name."""


def make_manifest(facts: Facts, sequence: int, files: Mapping[str, FileEntry]) -> Manifest:
    """The manifest of a checkpoint that is written now. Local."""
    values = {each.name: getattr(facts, each.name) for each in fields(Facts)}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    versions = {"loopwright": _own_version(), "torch": str(torch.__version__)}
    return Manifest(
        **values,
        format_version=2 if any(name.endswith(PARTS_SUFFIX) for name in files) else 1,
        sequence=sequence,
        created=created,
        versions=versions,
        files=dict(sorted(files.items())),
    )


@functools.cache
def _own_version() -> str:
    return metadata.version("loopwright")  # reads a file


def manifest_text(manifest: Manifest) -> str:
    """The text of `manifest.json`. Local.

    Raises:
        CheckpointError: a fact can't be stored; names its path and type.
    """
    values = {each.name: getattr(manifest, each.name) for each in fields(Manifest)}
    values |= {name: list(values[name]) for name in ("changes", "scores", "inexact")}
    values |= {"files": {name: entry._asdict() for name, entry in manifest.files.items()}}
    packed = pack(_plain(values), "manifest")
    if packed.tensors:
        raise CheckpointError(f"{next(iter(packed.tensors))} is a tensor; the facts of a checkpoint are small values.")
    return json.dumps({**packed.json, "checksum": _checksum(packed.json)}, indent=2, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Local.

    Raises:
        CheckpointError: there is none, it is of a newer format version, or it was changed after it was written.
        OSError: it can't be read.
    """
    path = folder / FILE_NAME
    try:
        values = json.loads(path.read_bytes())
        version = values["format_version"]
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}.") from error
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{str(folder)!r} has the format version {version}, written by {values.get('versions')}. This one reads "
            f"up to {FORMAT_VERSION}; update Loopwright."
        )
    expected, found = values.pop("checksum", None), _checksum(values)
    if expected != found:
        raise CheckpointError(f"{str(path)!r} was changed after it was written: checksum {expected}, found {found}.")
    try:
        known = {each.name for each in fields(Manifest)}
        values = {name: value for name, value in unpack(values, {}).items() if name in known}
        values["files"] = {_file_name(name): FileEntry(**entry) for name, entry in values["files"].items()}
        arguments: dict[str, Any] = {name: tuple(v) if type(v) is list else v for name, v in values.items()}
        return Manifest(**arguments)
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{str(path)!r} is no manifest: {type(error).__name__}: {error}.") from error


def _file_name(name: str) -> str:
    """The name of a file that is in the folder itself, as all are."""
    if Path(name).name != name:
        raise TypeError(f"it names the file {name!r}, which is not in its folder")
    return name


def _checksum(values: Any) -> str:
    """The SHA-256 of the values as the shortest JSON, keys in order."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """With plain dictionaries for mappings of other kinds."""
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
