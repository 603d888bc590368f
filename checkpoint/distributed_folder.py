"""Weights in a folder of `torch.distributed.checkpoint`, as Accelerate and others write them: parts in several files.

Its index, `.metadata`, is a pickle. It is read into plain records by an unpickler that makes nothing else, so that
nothing which it names is imported or called. The parts are files of `torch.save` inside larger files; torch's own
reader of weights opens them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from .boxes import check_boxes, overlap, read_shape
from .pickled import first_line
from .scalars import DTYPES
from .shards import listed
from .sources import WeightSource

INDEX_NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""Classes and functions that the index may name; a record stands for what they would give."""
_BUILTINS: dict[tuple[str, str], Any] = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class _Record:
    """What stands in an index for an object of a class: its values alone."""

    def __init__(self, *values: Any) -> None:
        self.values: Any = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.values = state


class _Place(NamedTuple):
    """A part of a tensor, and where it is stored."""

    file: str
    begin: int
    length: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class _Entry(NamedTuple):
    """A tensor, or where there is no shape, another value."""

    dtype: torch.dtype | None
    shape: torch.Size | None
    places: list[_Place]


class DistributedWeights(WeightSource):
    """Weights in a folder of `torch.distributed.checkpoint`. Local.

    Where all names are below one key, as `model`, they are taken without it.

    Args:
        folder: which has `.metadata`.
    Raises:
        CheckpointError: it is no such folder, its index names other classes than torch's own, or it has the state of
            an optimizer.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / INDEX_NAME
        index = _read_index(self.path)
        try:
            self._entries = dict(_entries(index))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{str(self.path)!r} can't be read: {type(error).__name__}: {error}.") from error
        self._check_files({each.name: each.stat().st_size for each in folder.iterdir()})

    @property
    def aliases(self) -> Mapping[str, str]:
        return {}

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        if entry.shape is None:
            return self._load(entry.places[0])
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_part(name, (0,) * tensor.dim(), tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape_of(self, name: str) -> torch.Size | None:
        return self._entries[name].shape

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self._entries[name].dtype

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            self.read_part(name, (0,) * target.dim(), target)

    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        with torch.no_grad():
            for place in self._entries[name].places:
                common = overlap(place.offset, place.shape, offset, target.shape)
                if common is not None:
                    target[common.second].copy_(self._load_part(name, place)[common.first])

    def _check_files(self, sizes: Mapping[str, int]) -> None:
        """Refuse an index that promises more than the files have.

        Args:
            sizes: of the files beside it, in bytes.
        """
        if missing := sorted({place.file for e in self._entries.values() for place in e.places} - sizes.keys()):
            raise CheckpointError(f"{str(self.path)!r} names files that are missing: {listed(missing)}.")
        for name, entry in self._entries.items():
            for place in entry.places:
                least = 0 if entry.dtype is None else prod(place.shape) * entry.dtype.itemsize
                end, size = place.begin + place.length, sizes[place.file]
                if place.begin < 0 or place.length < least or end > size:
                    raise CheckpointError(
                        f"{str(self.path)!r} says that {name!r} is in bytes {place.begin} to {end} of {place.file}, "
                        f"which has {size}; it takes {least}."
                    )

    def _load_part(self, name: str, place: _Place) -> Tensor:
        part, dtype = self._load(place), self._entries[name].dtype
        if not isinstance(part, Tensor) or (part.dtype, part.shape) != (dtype, place.shape):
            found = f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise CheckpointError(
                f"{str(self.path)!r} says that {place.file} has {name!r} of {dtype} {tuple(place.shape)} at "
                f"{tuple(place.offset)}, and it has {found} there."
            )
        return part

    def _load(self, place: _Place) -> Any:
        file = self.path.parent / place.file
        try:
            with file.open("rb") as opened:
                opened.seek(place.begin)
                data = opened.read(place.length)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{str(file)!r} can't be read as a part of torch.distributed.checkpoint: {type(error).__name__}: "
                f"{first_line(error)}."
            ) from error


class _IndexReader(pickle.Unpickler):
    """Makes records of what an index holds, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _BUILTINS:
            return _BUILTINS[module, name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        raise CheckpointError(
            f"an index of torch.distributed.checkpoint that names {module}.{name} is not read: to read it would run "
            "code of it. Expected torch's own classes of metadata alone."
        )


def _read_index(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _IndexReader(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{str(path)!r}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} can't be read: {error}.") from error
    except Exception as error:
        raise CheckpointError(f"{str(path)!r} is no index of torch.distributed.checkpoint: {error}.") from error


def _entries(index: Any) -> Iterator[tuple[str, _Entry]]:
    """The tensors and other values of an index, by their plain names."""
    stored: dict[str, dict[Any, Any]] = {}
    for key, info in index.storage_data.items():
        file = str(info.relative_path)
        if Path(file).name != file or vars(info).get("transform_descriptors"):
            raise ValueError(f"it names {file!r}, which is elsewhere or was transformed")
        stored.setdefault(key.fqn, {})[tuple(vars(key).get("offset") or ())] = info
    known = index.state_dict_metadata
    names = _plain_names(list(known), vars(index).get("planner_data"))
    for name, entry in known.items():
        if type(entry).__name__ == "TensorStorageMetadata":
            yield names[name], _tensor_entry(name, entry, stored.get(name, {}))
        else:
            yield names[name], _Entry(None, None, [_place(each) for each in stored[name].values()])


def _tensor_entry(name: str, entry: Any, stored: Mapping[Any, Any]) -> _Entry:
    dtype = _dtype(entry.properties)
    boxes = {(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks}
    try:
        shape = read_shape(entry.size, dtype)
        check_boxes(shape, boxes)
    except ValueError as error:
        raise ValueError(f"at {name!r}: {error}") from error
    if missing := sorted(offset for offset, sizes in boxes if 0 not in sizes and offset not in stored):
        raise ValueError(
            f"at {name!r}: it does not say where the parts at {listed([str(list(offset)) for offset in missing])} are"
        )
    return _Entry(dtype, shape, [_place(stored[at], at, sizes) for at, sizes in sorted(boxes) if 0 not in sizes])


def _place(info: Any, offset: tuple[int, ...] = (), shape: tuple[int, ...] = ()) -> _Place:
    return _Place(str(info.relative_path), int(info.offset), int(info.length), offset, shape)


def _dtype(properties: Any) -> torch.dtype:
    dtype = properties.values[0] if properties.values else properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is no number format")
    return dtype


def _plain_names(names: Sequence[str], paths: Any) -> dict[str, str]:
    """Each name without the key below which all are."""
    found = {name: tuple(map(str, (paths or {}).get(name, (name,)))) for name in names}
    tops = {path[0] for path in found.values()}
    if len(tops) != 1 or min(map(len, found.values())) < 2:
        return {name: name for name in names}
    if tops == {"optimizer"}:
        raise ValueError("it has the state of an optimizer, and no weights; give the folder beside it")
    plain = {name: ".".join(path[1:]) for name, path in found.items()}
    if len({*plain.values()}) != len(plain):
        raise ValueError(f"it has several weights of one name: {listed(sorted(plain.values()))}")
    return plain
