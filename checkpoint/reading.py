"""Reading a checkpoint: nothing of it is run, and no value shares memory with its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..distributed.errors import CheckpointError, suggest
from .hashing import find_damage
from .manifest import FILE_NAME, Manifest, read_manifest
from .parts import PARTS_SUFFIX, PartedTensors
from .shards import INDEX_SUFFIX, SUFFIX, StoredWeights, listed, names_in
from .stored import StoredTensor, StoredTensors, fill
from .tensor_file import TensorFile
from .tree import pack, unpack
from .weights import LoadReport, load_weights

Verify = Literal["full", "sizes"]


class Checkpoint:
    """A checkpoint on disk. Made by `open_checkpoint` and by the functions of `finding`; all its methods are local."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        """Its folder."""
        self.manifest = manifest
        """What it says of itself."""

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, sequence={self.manifest.sequence})"

    @property
    def tree_names(self) -> tuple[str, ...]:
        """The names of its state trees."""
        names = [name.removesuffix(".json") for name in self.manifest.files if name.endswith(".json")]
        return tuple(name for name in names if "." not in name)  # the others are indexes

    @property
    def weights_names(self) -> tuple[str, ...]:
        """The names of the models that it has weights of."""
        files = self.manifest.files
        whole = [name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)]
        whole = [name for name in whole if "." not in name]  # the others have parts
        indexes = (PARTS_SUFFIX, INDEX_SUFFIX)
        spread = [name.removesuffix(suffix) for suffix in indexes for name in files if name.endswith(suffix)]
        shards = {name for base in spread for name in whole if name.startswith(f"{base}-")}
        return tuple(sorted({*whole, *spread} - {*self.tree_names} - shards))

    @property
    def unlisted_files(self) -> tuple[str, ...]:
        """Files in its folder that are no part of it: nothing reads them."""
        known = {FILE_NAME, *self.manifest.files}
        return tuple(sorted(entry.name for entry in self.path.iterdir() if entry.name not in known))

    def tree(self, name: str, *, into: Any = None) -> Any:
        """A state tree: equal values of equal types; tensors on the CPU.

        Args:
            name: of the tree.
            into: a value of the same structure. Where it has a tensor of the same shape and number format, that one is
                filled in place, on its device, and is part of the result; of a sharded one this process's part.
        Raises:
            CheckpointError: it has no such tree, or the tree is damaged.
        """
        values, stored = self.packed_tree(name)
        existing = {} if into is None else pack(into, name, sharded=True).tensors
        return unpack(values, {} if stored is None else _read_tensors(stored, existing))

    def stored_tree(self, name: str) -> Any:
        """A state tree whose tensors are `StoredTensor`s, read when they are asked for, as far as nothing shares memory
        with them.

        Raises:
            CheckpointError: it has no such tree, or the tree is damaged.
        """
        values, stored = self.packed_tree(name)
        if stored is None:
            return unpack(values, {})
        tensors = {key: StoredTensor(stored, key, place.dtype, place.shape) for key, place in stored.places.items()}
        return unpack(values, tensors)

    def packed_tree(self, name: str) -> tuple[Any, StoredTensors | None]:
        """A state tree as it is stored: its JSON, and its tensors, None where it has none.

        Raises:
            CheckpointError: it has no such tree, or the tree is damaged.
        """
        if name not in self.tree_names:
            raise CheckpointError(f"{str(self.path)!r} has no state {name!r}. {suggest(name, self.tree_names)}")
        file = self.path / f"{name}.json"
        try:
            values = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
            if f"{name}{PARTS_SUFFIX}" in self.manifest.files:
                return values, PartedTensors(self.path / f"{name}{PARTS_SUFFIX}")
            has_tensors = f"{name}{SUFFIX}" in self.manifest.files
            return values, TensorFile(self.path / f"{name}{SUFFIX}") if has_tensors else None
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{str(file)!r} can't be read: {error}.") from error

    def weights(self, base: str = "model") -> StoredWeights:
        """A model's state dict with plain names, of which each value is read when it is asked for.

        Raises:
            CheckpointError: it has no such weights, or they are damaged.
        """
        self._check_weights(base)
        return StoredWeights(self.path / f"{base}{SUFFIX}")

    def load_weights_into(self, module: nn.Module, base: str = "model", strict: bool = True) -> LoadReport:
        """Copy a model's weights into a module, in place; see `weights.load_weights`.

        Raises:
            CheckpointError: it has no such weights, or, with `strict`, they don't fit.
        """
        self._check_weights(base)
        return load_weights(module, self.path, strict=strict, base=base)

    def find_damage(self, verify: Verify = "full") -> list[str]:
        """What is wrong with its files: for each its name, what was expected and what was found. Empty: it is whole.

        Args:
            verify: "full" reads all files; "sizes" compares sizes, and reads the headers of files of tensors.
        """
        damage = find_damage(self.path, self.manifest.files, reads=verify == "full")
        if not damage and verify == "sizes":
            for name in self.manifest.files:
                if name.endswith(SUFFIX):
                    damage += _header_damage(self.path / name)
        return damage

    def _check_weights(self, base: str) -> None:
        if base not in self.weights_names:
            raise CheckpointError(f"{str(self.path)!r} has no weights {base!r}. {suggest(base, self.weights_names)}")


def open_checkpoint(
    path: str | Path, *, verify: Verify = "full", find_damage: Callable[[Checkpoint], list[str]] | None = None
) -> Checkpoint:
    """A checkpoint that is whole. Local, unless `find_damage` is not.

    Args:
        path: its folder.
        verify: "full" compares all that its files hold with their checksums; "sizes" compares their sizes alone.
        find_damage: what says instead whether the files are whole.
    Raises:
        CheckpointError: there is no checkpoint, it was written by a newer version, or it is damaged: names the files,
            what was expected and what was found.
    """
    folder = Path(path)
    checkpoint = Checkpoint(folder, manifest_of(folder))
    damage = checkpoint.find_damage(verify) if find_damage is None else find_damage(checkpoint)
    if damage:
        raise damaged(folder, damage)
    return checkpoint


def damaged(folder: Path, damage: Sequence[str]) -> CheckpointError:
    """The error that says what is wrong with a checkpoint's files. Local."""
    return CheckpointError(f"the checkpoint {str(folder)!r} is damaged: {'; '.join(damage)}.")


def _read_tensors(stored: StoredTensors, existing: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All stored tensors: each in an existing one of its name, shape and format, or in memory of its own."""
    tensors = {}
    for name, place in stored.places.items():
        target = existing.get(name)
        fits = target is not None and (target.shape, target.dtype) == (place.shape, place.dtype)
        tensors[name] = target if target is not None and fits else torch.empty(place.shape, dtype=place.dtype)
    fill(stored, tensors)
    return tensors


def manifest_of(folder: Path) -> Manifest:
    """The manifest of a folder. Local.

    Raises:
        CheckpointError: it is no checkpoint, and what there is instead; or it can't be read.
    """
    try:
        return read_manifest(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{str(folder)!r} is no checkpoint: {_what_is_there(folder)}") from error
    except OSError as error:
        raise CheckpointError(f"{str(folder)!r} can't be read: {error}.") from error


def _what_is_there(folder: Path) -> str:
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "not there"
        remedy = " Weights alone, also those of other libraries, are loaded by load_weights." if folder.exists() else ""
        return f"it is {kind}. Beside it: {names_in(folder.parent)}.{remedy}"
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    manifests = [path for depth in ("*", "*/*") for path in sorted(folder.glob(f"{depth}/{FILE_NAME}"))]
    inside = [path.parent.relative_to(folder).as_posix() for path in manifests]
    if shown := [name for name in inside if "/." not in f"/{name}"]:
        return f"it holds some: {listed(shown)}. Name one of them."
    return f"it has no {FILE_NAME}. In it: {listed(names) or 'nothing'}."


def _header_damage(file: Path) -> list[str]:
    try:
        TensorFile(file)
    except CheckpointError as error:
        return [f"{file.name}: {error}"]
    return []


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")
