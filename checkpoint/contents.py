"""`Contents`: what one process puts into a checkpoint, and the files that come of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..distributed.errors import CheckpointError
from ..distributed.units import size_bytes
from .parts import PARTS_SUFFIX, SAVE_KEY, Described, Index, OwnParts, own_parts, part_file
from .sharded import holds_sharded, is_sharded
from .shards import SUFFIX, WeightFiles, entries_of, plan_weights
from .tree import Packed, pack

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TAKEN = "manifest"


@dataclass(kw_only=True)
class Contents:
    """What one process puts into a checkpoint."""

    trees: Mapping[str, Any] = field(default_factory=dict)
    """State trees by name; no two processes have one of the same name. Names are letters, digits, `-` and `_`."""
    shared_trees: Mapping[str, Any] = field(default_factory=dict)
    """State trees that all processes give alike. The main process's are stored; of sharded tensors in them every
    process stores its part."""
    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The state dict of each model with plain names: the first as "model", further ones as "model_1" and so on. The
    main process's are stored; of sharded tensors in them every process stores its part."""
    max_shard_size: int | str = "10GB"
    """Of a file of weights that no process has a part of alone; a larger model is spread over several."""
    files_beside: Path | None = None
    """A folder of the same file system. What is in it moves beside the checkpoint's files; readers leave it alone."""


class PackedContents:
    """Contents that are known to be storable, and what they take. Local; copies no tensor.

    Args:
        contents: what this process puts in.
        process: its number.
        is_main: whether it is the main one of those that save the checkpoint.
    Raises:
        CheckpointError: a value can't be stored; names its path and type. Or names clash.
    """

    def __init__(self, contents: Contents, process: int = 0, *, is_main: bool = True) -> None:
        _check_names(contents)
        self.files_beside = contents.files_beside
        self.process = process
        self.trees: dict[str, Packed] = {name: pack(value, name) for name, value in contents.trees.items()}
        self.parts: dict[str, OwnParts] = {}
        """What this process writes of trees and weights of which each has a part."""
        self._save = ""
        """What tells the files of parts from those of other saves."""
        self._metadata: dict[str, dict[str, str]] = {}
        """For each of these what stands beside the tensors; on the main process."""
        self.weights: dict[str, WeightFiles] = {}
        for name, value in contents.shared_trees.items():
            self._add_shared_tree(name, value, is_main)
        for name, state in contents.weights.items():
            self._add_weights(name, state, contents.max_shard_size, is_main)
        self.texts: dict[str, str] = {f"{name}.json": tree.text() for name, tree in self.trees.items()}
        """The files of text, by name: of trees, and the indexes of parts."""

    @property
    def size_bytes(self) -> int:
        """Roughly what the files take, rounded up."""
        tensors = size_bytes(tensor for group in self.tensor_groups() for tensor in group.values())
        texts = sum(map(len, self.texts.values()))
        return tensors + texts + 2**16 * (1 + len(self.trees) + len(self.weights) + len(self.parts))

    @property
    def described(self) -> dict[str, Described]:
        """What this process writes of what it has a part of, for `add_indexes`."""
        return {name: own.described for name, own in self.parts.items()}

    def add_indexes(
        self, described: Mapping[int, Mapping[str, Described]], save: str
    ) -> dict[str, dict[str, list[str]]]:
        """Make the indexes of parts. On the main process.

        Args:
            described: for each process what it writes; the first is the main process.
            save: a text that tells this save from others.
        Returns:
            For each process, as text, by the trees and weights the parts that it need not write, see `use_indexes`.
        Raises:
            CheckpointError: the parts don't make up the tensors.
        """
        for process, told in described.items():
            if unknown := sorted(told.keys() - self._metadata.keys()):
                raise CheckpointError(
                    f"process {process} has parts of {', '.join(unknown)}, and the main process has none. Nothing was "
                    "written."
                )
        twice: dict[str, dict[str, list[str]]] = {}
        for name, metadata in self._metadata.items():
            index = Index(name, {process: told[name] for process, told in described.items() if name in told})
            self.texts[f"{name}{PARTS_SUFFIX}"] = index.text(metadata, save)
            for process, parts in index.twice.items():
                twice.setdefault(str(process), {})[name] = parts
        return twice

    def use_indexes(self, save: str, twice: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        """Write for the main process's indexes: mark this process's files, and leave out what others write.

        Args:
            save: as `add_indexes` was given it.
            twice: what `add_indexes` has found.
        """
        self._save = save
        for name, parts in twice.get(str(self.process), {}).items():
            for part in parts:
                del self.parts[name].tensors[part]

    def tensor_files(self) -> Iterator[tuple[str, dict[str, Tensor], dict[str, str]]]:
        """Each file of tensors of trees and of parts, what is in it, and its metadata: the longest first."""
        yield from sorted(self._tensor_files(), key=lambda file: size_bytes(file[1].values()), reverse=True)

    def tensor_groups(self) -> list[dict[str, Tensor]]:
        """All tensors that will be written, one mapping per file. They may be replaced in place."""
        groups = [tree.tensors for tree in self.trees.values()] + [own.tensors for own in self.parts.values()]
        return [*groups, *(shard for files in self.weights.values() for shard in files.shards.values())]

    def file_names(self) -> list[str]:
        """The names of the files that this process will write."""
        names = [*self.texts, *(name for name, _, _ in self._tensor_files())]
        return names + [name for files in self.weights.values() for name in files.names()]

    def _tensor_files(self) -> list[tuple[str, dict[str, Tensor], dict[str, str]]]:
        plain, marked = {"format": "pt"}, {"format": "pt", SAVE_KEY: self._save}
        files = [(f"{name}{SUFFIX}", tree.tensors, plain) for name, tree in self.trees.items()]
        files += [(part_file(name, self.process), own.tensors, marked) for name, own in self.parts.items()]
        return [file for file in files if file[1]]

    def _add_shared_tree(self, name: str, value: Any, is_main: bool) -> None:
        is_sharded = holds_sharded(value)
        if not is_main and not is_sharded:
            return
        tree = pack(value, name, sharded=True)
        if is_sharded:
            self.parts[name] = own_parts(tree.tensors, is_main=is_main)
        if is_main:
            self.trees[name] = Packed(tree.json, {}) if is_sharded else tree
        if is_main and is_sharded:
            self._metadata[name] = {}

    def _add_weights(self, name: str, state: Mapping[str, Any], max_shard_size: int | str, is_main: bool) -> None:
        if not holds_sharded(state):
            if is_main:
                self.weights[name] = plan_weights(state, name, max_shard_size)
            return
        entries = entries_of(state if is_main else {key: value for key, value in state.items() if is_sharded(value)})
        self.parts[name] = own_parts(entries.tensors, is_main=is_main)
        if is_main:
            self._metadata[name] = entries.aliases | entries.extra


def _check_names(contents: Contents) -> None:
    trees = [*contents.trees, *contents.shared_trees]
    for name in (*trees, *contents.weights):
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == _TAKEN:
            raise CheckpointError(
                f"{name!r} can't be the name of a part of a checkpoint. Expected letters, digits, '-' and '_', not "
                f"{_TAKEN!r}."
            )
    both = {name for name in trees if trees.count(name) > 1} | ({*trees} & contents.weights.keys())
    if both:
        raise CheckpointError(f"{', '.join(sorted(both))}: a state and weights of one name. Rename one of them.")
