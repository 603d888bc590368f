"""`Contents`: what one process puts into a checkpoint, and the files that come of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..distributed.errors import CheckpointError
from ..distributed.units import size_bytes
from .shards import SUFFIX, WeightFiles, plan_weights
from .tree import Packed, pack

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TAKEN = "manifest"


@dataclass(kw_only=True)
class Contents:
    """What one process puts into a checkpoint."""

    trees: Mapping[str, Any] = field(default_factory=dict)
    """State trees by name; no two processes have one of the same name. Names are letters, digits, `-` and `_`."""
    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """On the main process, the state dict of each model with plain names: the first as "model", further ones as
    "model_1" and so on."""
    max_shard_size: int | str = "10GB"
    """Of a file of weights; a larger model is spread over several."""
    files_beside: Path | None = None
    """A folder of the same file system. What is in it moves beside the checkpoint's files; readers leave it alone."""


class PackedContents:
    """Contents that are known to be storable, and what they take. Local; copies no tensor.

    Raises:
        CheckpointError: a value can't be stored; names its path and type. Or names clash.
    """

    def __init__(self, contents: Contents) -> None:
        _check_names(contents)
        self.files_beside = contents.files_beside
        self.trees: dict[str, Packed] = {name: pack(value, name) for name, value in contents.trees.items()}
        self.texts: dict[str, str] = {name: tree.text() for name, tree in self.trees.items()}
        self.weights: dict[str, WeightFiles] = {
            name: plan_weights(state, name, contents.max_shard_size) for name, state in contents.weights.items()
        }

    @property
    def size_bytes(self) -> int:
        """Roughly what the files take, rounded up."""
        tensors = size_bytes(tensor for group in self.tensor_groups() for tensor in group.values())
        texts = sum(map(len, self.texts.values()))
        return tensors + texts + 2**16 * (1 + len(self.trees) + len(self.weights))

    def tree_size(self, name: str) -> int:
        """What the tensors of a tree take, in bytes."""
        return size_bytes(self.trees[name].tensors.values())

    def tensor_groups(self) -> list[dict[str, Tensor]]:
        """All tensors that will be written, one mapping per tree or file of weights. They may be replaced in place."""
        groups = [tree.tensors for tree in self.trees.values()]
        return [*groups, *(shard for files in self.weights.values() for shard in files.shards.values())]

    def file_names(self) -> list[str]:
        """The names of the files that this process will write."""
        names = []
        for name, tree in self.trees.items():
            names += [f"{name}.json", f"{name}{SUFFIX}"] if tree.tensors else [f"{name}.json"]
        return names + [name for files in self.weights.values() for name in files.names()]


def _check_names(contents: Contents) -> None:
    for name in (*contents.trees, *contents.weights):
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == _TAKEN:
            raise CheckpointError(
                f"{name!r} can't be the name of a part of a checkpoint. Expected letters, digits, '-' and '_', not "
                f"{_TAKEN!r}."
            )
    both = contents.trees.keys() & contents.weights.keys()
    if both:
        raise CheckpointError(f"{', '.join(sorted(both))}: a state and weights of one name. Rename one of them.")
