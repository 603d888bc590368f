"""Tensors whose parts are in several files, one for each process that wrote some, and the index that says where.

`NAME.parts.json` has the shape and the number format of each tensor, and for each of its parts the file
(`NAME.part-00003.safetensors`), its name there, and where it begins in the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from .boxes import check_boxes, index_of, overlap, read_shape
from .scalars import DTYPES, dtype_name
from .sharded import Part, is_first_copy, is_sharded, parts_of
from .tensor_file import TensorFile, knows_dtype

PARTS_SUFFIX = ".parts.json"
SAVE_KEY = "loopwright.save"
"""In the metadata of a file of parts, a text that tells the save that wrote it from others; the index has it too."""
Described = dict[str, list[Any]]
"""By tensor its number format, its shape, and for each part its name in the file, its offset and its shape."""


def part_file(base: str, process: int) -> str:
    """The name of the file in which a process has its parts. Local."""
    return f"{base}.part-{process:05}.safetensors"


@dataclass(slots=True)
class OwnParts:
    """What one process writes of some tensors."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Its parts, by their names in its file."""
    described: Described = field(default_factory=dict)


def own_parts(tensors: Mapping[str, Tensor], *, is_main: bool) -> OwnParts:
    """What this process writes: of sharded tensors its part, unless another process has the same; the main process
    all others. Local; copies nothing.

    Raises:
        CheckpointError: a tensor can't be stored; names it.
    """
    own = OwnParts()
    for name, tensor in tensors.items():
        parts = _parts(name, tensor) if is_main or is_sharded(tensor) else []
        if parts or is_main:
            own.described[name] = [dtype_name(tensor.dtype), list(tensor.shape), []]
        for part in parts:
            free = _free(name, own.tensors, tensors)
            own.tensors[free] = part.values
            own.described[name][2].append([free, list(part.offset), list(part.values.shape)])
    return own


class Index:
    """The index of what several processes write. Local.

    Args:
        base: the tensors' common name.
        described: for each process what it writes; the first is the main process.
    Raises:
        CheckpointError: the parts don't make up the tensors.
    """

    def __init__(self, base: str, described: Mapping[int, Described]) -> None:
        self._base = base
        self._tensors: dict[str, Any] = {}
        self._boxes: set[tuple[Any, ...]] = set()
        self.twice: dict[int, list[str]] = {}
        """By process its parts that another one before it has as well, which need not be written."""
        for process, own in described.items():
            for name, (dtype, shape, parts) in own.items():
                self._add(process, name, dtype, shape, parts)
        for name, entry in self._tensors.items():
            self._check(name, entry)

    def text(self, metadata: Mapping[str, str], save: str) -> str:
        """The text of the file.

        Args:
            metadata: texts beside the tensors.
            save: the text that tells this save from others.
        """
        content = {"save": save, "metadata": dict(metadata), "tensors": self._tensors}
        return json.dumps(content, separators=(",", ":"), allow_nan=False)

    def _add(self, process: int, name: str, dtype: str, shape: list[int], parts: list[Any]) -> None:
        entry = self._tensors.setdefault(name, {"dtype": dtype, "shape": shape, "parts": []})
        if (entry["dtype"], entry["shape"]) != (dtype, shape):
            raise CheckpointError(
                f"{self._base}: {name!r} has the shape {entry['shape']} and the dtype {entry['dtype']} on one process, "
                f"{shape} and {dtype} on process {process}. Nothing was written."
            )
        for tensor, offset, size in parts:
            box = (name, *offset, *size)
            if box in self._boxes:
                self.twice.setdefault(process, []).append(tensor)
                continue
            self._boxes.add(box)
            file = part_file(self._base, process)
            entry["parts"].append({"file": file, "tensor": tensor, "offset": offset, "shape": size})

    def _check(self, name: str, entry: Mapping[str, Any]) -> None:
        try:
            check_boxes(entry["shape"], [(part["offset"], part["shape"]) for part in entry["parts"]])
        except ValueError as error:
            raise CheckpointError(
                f"{self._base}: of {name!r} the processes that save have not each element once: {error}. All processes "
                "that hold a part have to save one checkpoint together. Nothing was written."
            ) from error


class StoredPart(NamedTuple):
    """A box of a tensor, in a file."""

    file: str
    tensor: str
    """Its name in the file."""
    offset: tuple[int, ...]
    """Where it begins in the whole tensor."""
    shape: torch.Size


class PartedPlace(NamedTuple):
    """A tensor of which the parts are in files."""

    dtype: torch.dtype
    shape: torch.Size
    parts: tuple[StoredPart, ...]


class PartedTensors:
    """Tensors whose parts are in several files, to read: of each file what is needed. Files are open during calls
    alone. Local.

    Args:
        path: the index.
    Raises:
        CheckpointError: it is no index, its parts don't make up the tensors, or a file is missing or too small.
        OSError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[str, PartedPlace] = {}
        self._files: dict[str, TensorFile] = {}
        taken: set[tuple[str, str]] = set()
        at = ""
        try:
            content = json.loads(path.read_bytes())
            self._save = content["save"]
            self.metadata = {str(key): str(value) for key, value in content["metadata"].items()}
            for name, entry in content["tensors"].items():
                at = f", at {name!r}"
                self.places[name] = _place(entry, taken)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{str(path)!r} is no index of parts{at}: {text}.") from error
        self._check_sizes()

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        place = self.places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        self.read_into({name: tensor})
        return tensor

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill whole tensors of the same shapes, on any devices and of any number formats, in place.

        Raises:
            CheckpointError: a file is not what the index says.
        """
        by_file: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            for part in self.places[name].parts:
                view = target.detach()[index_of(part.offset, part.shape)]
                by_file.setdefault(part.file, {})[self._check(name, part)] = view
        for file, views in by_file.items():
            self._files[file].read_into(views)

    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        """Fill a whole tensor with the box of its shape that begins at `offset`.

        Raises:
            CheckpointError: a file is not what the index says.
        """
        for part in self.places[name].parts:
            common = overlap(part.offset, part.shape, offset, target.shape)
            if common is not None:
                tensor = self._check(name, part)
                begins = [each.start for each in common.first]
                self._files[part.file].read_part(tensor, begins, target.detach()[common.second])

    def _check(self, name: str, part: StoredPart) -> str:
        """Opens the part's file; gives its name there."""
        if part.file not in self._files:
            self._files[part.file] = self._open(part.file)
        found, dtype = self._files[part.file].places.get(part.tensor), self.places[name].dtype
        if found is None or (found.dtype, found.shape) != (dtype, part.shape):
            text = "no such tensor is there" if found is None else f"it has {_described(found.dtype, found.shape)}"
            raise CheckpointError(
                f"{str(self.path)!r} says that {part.file} has {part.tensor!r} of {_described(dtype, part.shape)}, and "
                f"{text}."
            )
        return part.tensor

    def _check_sizes(self) -> None:
        """On all processes alike, and before memory is taken for what a damaged index promises."""
        promised: dict[str, int] = {}
        for place in self.places.values():
            for part in place.parts:
                promised[part.file] = promised.get(part.file, 0) + part.shape.numel() * place.dtype.itemsize
        for name, least in promised.items():
            path = self.path.parent / name
            if not path.is_file():
                raise CheckpointError(f"{str(self.path)!r} names {name}, which is missing. Copy it beside it.")
            if (found := path.stat().st_size) < least:
                raise CheckpointError(
                    f"{str(self.path)!r} says that {name} has parts of {least} bytes together, and it has {found}."
                )

    def _open(self, name: str) -> TensorFile:
        try:
            file = TensorFile(self.path.parent / name)
        except OSError as error:
            raise CheckpointError(f"{str(self.path)!r} names {name}, which can't be read: {error}.") from error
        if (found := file.metadata.get(SAVE_KEY)) != self._save:
            raise CheckpointError(
                f"{str(self.path)!r} is of the save {self._save!r}, and {name} beside it is of {found!r}. Copy the "
                "index and all parts of one checkpoint."
            )
        return file


def _parts(name: str, tensor: Tensor) -> list[Part]:
    if not knows_dtype(tensor.dtype):
        raise CheckpointError(
            f"{name!r} can't be stored in parts: it has the dtype {tensor.dtype}, which safetensors does not know. "
            "Nothing was written."
        )
    try:
        parts = parts_of(tensor)
    except TypeError as error:
        raise CheckpointError(f"{name!r} can't be stored: {error}. Nothing was written.") from error
    is_needed = not is_sharded(tensor) or is_first_copy(tensor)
    return [part for part in parts if part.values.numel()] if is_needed else []


def _free(name: str, taken: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """The name of a part in the file: that of its tensor, for a second one with a number."""
    number, free = 1, name
    while free in taken or (free != name and free in others):
        number += 1
        free = f"{name}#{number}"
    return free


def _place(entry: Mapping[str, Any], taken: set[tuple[str, str]]) -> PartedPlace:
    """What an index says of a tensor.

    Args:
        entry: of the index.
        taken: the tensors of files that are parts of those before, to which its own are added.
    """
    dtype = DTYPES[entry["dtype"]]
    shape = read_shape(entry["shape"], dtype)
    parts = [_stored_part(part, dtype) for part in entry["parts"]]
    check_boxes(shape, [(part.offset, part.shape) for part in parts])
    for part in parts:
        if (part.file, part.tensor) in taken:
            raise ValueError(f"{part.tensor!r} of {part.file} is a part already")
        taken.add((part.file, part.tensor))
    return PartedPlace(dtype, shape, tuple(part for part in parts if part.shape.numel()))


def _stored_part(entry: Mapping[str, Any], dtype: torch.dtype) -> StoredPart:
    file = str(entry["file"])
    if Path(file).name != file:
        raise ValueError(f"it names the file {file!r}, which is not beside it")
    return StoredPart(file, str(entry["tensor"]), torch.Size(entry["offset"]), read_shape(entry["shape"], dtype))


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"
