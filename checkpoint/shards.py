"""How weights are spread over files and found again: one safetensors file, or several with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from ..distributed.units import convert_file_size_to_int
from .entries import check_tensor, tied_names
from .hashing import NewFiles
from .parts import PARTS_SUFFIX, PartedTensors
from .scalars import TAG
from .sources import WeightSource
from .stored import StoredTensor, StoredTensors
from .tensor_file import TensorFile, write_tensors
from .tree import pack, unpack

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_EXTRA = "loopwright.extra"
_MOST_LISTED = 10


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold a model's weights, planned."""

    base: str
    """The files' common name."""
    shards: dict[str, dict[str, Any]]
    """For each file its tensors; they may be on disk."""
    metadata: dict[str, dict[str, str]]
    """For each file its metadata."""
    index: str | None
    """The text of the index, None for a single file."""

    @property
    def num_tensors(self) -> int:
        """Tensors in the files: of tied weights one."""
        return sum(map(len, self.shards.values()))

    def names(self) -> list[str]:
        """The names of all files, the one that is read first last."""
        return [*self.shards, *([f"{self.base}{INDEX_SUFFIX}"] if self.index is not None else [])]

    def write(self, files: NewFiles, places: Mapping[str, Path]) -> None:
        """Write all files, each to its place, where there is none yet. Local."""
        for name, tensors in self.shards.items():
            write_tensors(files.create(places[name]), tensors, self.metadata[name])
        if self.index is not None:
            name = f"{self.base}{INDEX_SUFFIX}"
            files.write_text(places[name], self.index)


def plan_weights(state: Mapping[str, Any], base: str, max_shard_size: int | str | None) -> WeightFiles:
    """How a state dict with plain names is stored: each piece of memory once, in files of limited size. Local.

    Raises:
        CheckpointError: a value can't be stored; names it and its type.
        ConfigError: the size is none.
    """
    limit = None if max_shard_size is None else convert_file_size_to_int(max_shard_size)
    known = entries_of(state)
    groups = _grouped(known.tensors, limit)
    count = len(groups)
    names = [f"{base}-{index:05}-of-{count:05}{SUFFIX}" for index in range(1, count + 1)]
    shards = dict(zip(names if count > 1 else [f"{base}{SUFFIX}"], groups, strict=True))
    metadata = {name: {"format": "pt"} for name in shards}
    for alias, name in known.aliases.items():
        next(metadata[file] for file, group in shards.items() if name in group)[alias] = name
    metadata[next(iter(shards))] |= known.extra
    return WeightFiles(base, shards, metadata, _index_of(shards) if count > 1 else None)


@dataclass(frozen=True)
class Entries:
    """What is stored of a state dict."""

    tensors: dict[str, Any]
    """Each piece of memory once; they may be on disk."""
    aliases: dict[str, str]
    """For each tied name that is left out, the stored one."""
    extra: dict[str, str]
    """As metadata, the state that is no tensor."""


def entries_of(state: Mapping[str, Any]) -> Entries:
    """What is stored of a state dict with plain names. Local.

    Raises:
        CheckpointError: a value can't be stored; names it and its type.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, (Tensor, StoredTensor))}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    aliases = tied_names(tensors)
    stored = {name: tensor.detach() for name, tensor in tensors.items() if name not in aliases}
    extra = {}
    for name, value in state.items():
        if name not in tensors:
            packed = pack(value, name)
            extra[name] = packed.json
            stored |= _checked_free(packed.tensors, stored)
    return Entries(stored, aliases, {_EXTRA: json.dumps(extra, allow_nan=False)} if extra else {})


def remove_stale(folder: Path, planned: WeightFiles) -> None:
    """Remove the files of an earlier save under the same name that this one does not have. Local."""
    for path in _set_of(folder, planned.base):
        if path.name not in planned.names():
            path.unlink(missing_ok=True)


def retire_index(folder: Path, planned: WeightFiles) -> None:
    """Remove an index whose files are about to be replaced, so that no reader mixes old files and new ones. Local."""
    if any((folder / name).exists() for name in planned.shards):
        (folder / f"{planned.base}{INDEX_SUFFIX}").unlink(missing_ok=True)


class StoredWeights(WeightSource):
    """A model's weights in safetensors files, each read when it is asked for, in memory of its own. Local.

    Args:
        path: a safetensors file, an index of several, or one of parts; where the file is missing, the index beside it.
    Raises:
        CheckpointError: there is no such file, or it is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        base = path.name.removesuffix(SUFFIX)
        self.path = existing(path, *(path.with_name(f"{base}{suffix}") for suffix in (INDEX_SUFFIX, PARTS_SUFFIX)))
        """The file, or the index."""
        self._files: dict[str, StoredTensors] = {}
        for stored in _opened(self.path):
            self._files |= dict.fromkeys(stored.places, stored)
        extra_file = next((each for each in self._files.values() if _EXTRA in each.metadata), None)
        self._extra: dict[str, Any] = {} if extra_file is None else self._read_extra(extra_file)
        inner = set(_names_inside(self._extra))
        self._names = [*(name for name in self._files if name not in inner), *self._extra]

    def __getitem__(self, name: str) -> Any:
        if name in self._extra:
            return unpack(self._extra[name], _Lazy(self._files))
        return self._files[name].read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """For each tied name that was left out, the stored one."""
        found: dict[str, str] = {}
        for file in {id(each): each for each in self._files.values()}.values():
            found |= {
                alias: name
                for alias, name in file.metadata.items()
                if name in self._files and alias not in self._files and alias not in self._extra
            }
        return found

    def shape_of(self, name: str) -> torch.Size | None:
        """The shape of a tensor, None for state that is none."""
        return None if name in self._extra else self._files[name].places[name].shape

    def dtype_of(self, name: str) -> torch.dtype | None:
        """The number format of a tensor, None for state that is none."""
        return None if name in self._extra else self._files[name].places[name].dtype

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same shapes in place."""
        by_file: dict[Path, dict[str, Tensor]] = {}
        for name, target in targets.items():
            by_file.setdefault(self._files[name].path, {})[name] = target
        for group in by_file.values():
            self._files[next(iter(group))].read_into(group)

    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        """Fill a tensor with the box of its shape that begins at `offset`."""
        self._files[name].read_part(name, offset, target)

    def _read_extra(self, file: StoredTensors) -> dict[str, Any]:
        try:
            return dict(json.loads(file.metadata[_EXTRA]))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{str(file.path)!r} has damaged metadata: {error}.") from error


class _Lazy(Mapping[str, Tensor]):
    def __init__(self, files: Mapping[str, StoredTensors]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def listed(names: Sequence[str]) -> str:
    """The first ten names, and how many there are more. Local."""
    more = f", and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def names_in(folder: Path) -> str:
    """What is in a folder, for messages; `nothing` where there is none. Local."""
    return listed(sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []) or "nothing"


def _opened(path: Path) -> Iterator[StoredTensors]:
    """The files of tensors behind a file or an index."""
    if path.name.endswith(PARTS_SUFFIX):
        yield PartedTensors(path)
        return
    for file, promised in shard_files(path).items():
        stored = TensorFile(file)
        check_promised(path, file, promised, stored.places)
        yield stored


def _grouped(tensors: Mapping[str, Any], limit: int | None) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if limit is not None and groups[-1] and size + tensor.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def _index_of(shards: Mapping[str, Mapping[str, Any]]) -> str:
    total = sum(tensor.nbytes for group in shards.values() for tensor in group.values())
    places = {name: file for file, group in shards.items() for name in group}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


def _checked_free(tensors: Mapping[str, Tensor], taken: Mapping[str, Any]) -> Mapping[str, Tensor]:
    for name in tensors.keys() & taken.keys():
        raise CheckpointError(f"two weights are called {name!r}, one of them inside of extra state. Rename it.")
    return tensors


def _set_of(folder: Path, base: str) -> list[Path]:
    pattern = re.compile(rf"{re.escape(base)}(-\d{{5,}}-of-\d{{5,}})?\.safetensors|{re.escape(base + INDEX_SUFFIX)}")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


def existing(file: Path, *indexes: Path) -> Path:
    """The file, or where there is none the first index of several in its place. Local.

    Raises:
        CheckpointError: there is none of them; says what is beside them.
    """
    found = next((path for path in (file, *indexes) if path.is_file()), None)
    if found is None:
        raise CheckpointError(f"{str(file)!r} does not exist. In its folder: {names_in(file.parent)}.")
    return found


def shard_files(path: Path) -> dict[Path, list[str]]:
    """The files that an index names, and for each what it says that the file has; any other file is itself. Local.

    Raises:
        CheckpointError: it is no index, or names files that are missing or elsewhere.
    """
    if not path.name.endswith(".json"):
        return {path: []}
    promised: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(path.read_bytes())["weight_map"].items():
            promised.setdefault(file, []).append(name)
        wrong = [file for file in promised if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} is no index of weights: {type(error).__name__}: {error}.") from error
    if wrong:
        raise CheckpointError(f"{str(path)!r} names files that are not beside it: {listed(wrong)}.")
    missing = [file for file in promised if not (path.parent / file).is_file()]
    if missing:
        raise CheckpointError(f"{str(path)!r} names files that are missing: {listed(missing)}. Copy them beside it.")
    return {path.parent / file: names for file, names in promised.items()}


def check_promised(index: Path, file: Path, promised: Sequence[str], found: Container[str]) -> None:
    """Refuse a file that lacks what the index says of it. Local.

    Raises:
        CheckpointError: names what is missing.
    """
    if missing := [name for name in promised if name not in found]:
        raise CheckpointError(f"{str(index)!r} says that {file.name} has {listed(missing)}, which it has not.")


def _names_inside(node: Any) -> Iterator[str]:
    """The names of the tensors that a packed value refers to."""
    if isinstance(node, dict):
        if node.get(TAG) == "tensor":
            yield str(node["in"])
        for item in node.values():
            yield from _names_inside(item)
    elif isinstance(node, list):
        for item in node:
            yield from _names_inside(item)
