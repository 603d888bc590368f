"""`WeightSource`: a model's weights on disk, whoever wrote them; and the same under other names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from .names import COMPILED
from .stored import StoredTensor

_PARALLEL = "module."


class WeightSource(Mapping[str, Any], ABC):
    """A model's state dict on disk, each value in memory of its own when it is asked for. Local."""

    path: Path
    """The file, or the index of several."""

    @property
    @abstractmethod
    def aliases(self) -> Mapping[str, str]:
        """For each tied name that is left out of the mapping, the one that is in it."""

    @abstractmethod
    def shape_of(self, name: str) -> torch.Size | None:
        """The shape of a tensor, None for state that is none."""

    @abstractmethod
    def dtype_of(self, name: str) -> torch.dtype | None:
        """The number format of a tensor, None for state that is none."""

    @abstractmethod
    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same shapes in place."""

    @abstractmethod
    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        """Fill a tensor with the box of its shape that begins at `offset`."""

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        found: Tensor = self[name]
        return found

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have equal values."""
        return self.shape_of(name) == self.shape_of(other) and torch.equal(self[name], self[other])

    def state_dict(self) -> dict[str, Any]:
        """All values, for use at once, while the files are there: tied names too, as one object."""
        state = dict(self)
        return state | {alias: state[name] for alias, name in self.aliases.items()}

    def stored_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, with tensors that are read when they are asked for."""
        state = {name: self._stored(name) for name in self}
        return state | {alias: state[name] for alias, name in self.aliases.items()}

    def _stored(self, name: str) -> Any:
        dtype, shape = self.dtype_of(name), self.shape_of(name)
        return self[name] if dtype is None or shape is None else StoredTensor(self, name, dtype, shape)


class Renamed(WeightSource):
    """Weights under other names, or a part of them. Local.

    Args:
        source: the weights.
        rename: from a name in the source to the new one, None for what is left out.
    Raises:
        CheckpointError: two would get one name.
    """

    def __init__(self, source: WeightSource, rename: Callable[[str], str | None]) -> None:
        self.path = source.path
        self._source = source
        self._names: dict[str, str] = {}
        self._aliases: dict[str, str] = {}
        for name in source:
            self._add(rename(name), name)
        new_names = {stored: new for new, stored in self._names.items()}
        for alias, stored in source.aliases.items():
            new_alias = rename(alias)
            if new_alias is None:
                continue
            if stored in new_names:
                self._aliases[new_alias] = new_names[stored]
            else:  # the name under which it is stored is left out, and this one is not
                self._add(new_alias, stored)
                new_names[stored] = new_alias

    def _add(self, new: str | None, stored: str) -> None:
        if new is None:
            return
        if new in self._names:
            raise CheckpointError(
                f"{str(self.path)!r}: the weights {self._names[new]!r} and {stored!r} would both be called {new!r}."
            )
        self._names[new] = stored

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def __getitem__(self, name: str) -> Any:
        return self._source[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape_of(self, name: str) -> torch.Size | None:
        return self._source.shape_of(self._names[name])

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self._source.dtype_of(self._names[name])

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        self._source.read_into({self._names[name]: target for name, target in targets.items()})

    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        self._source.read_part(self._names[name], offset, target)

    def state_dict(self) -> dict[str, Any]:
        whole = self._source.state_dict()
        state = {name: whole[stored] for name, stored in self._names.items()}
        return state | {alias: state[name] for alias, name in self._aliases.items()}


def below(source: WeightSource, prefix: str) -> WeightSource:
    """The weights whose names begin with a prefix, without it. Local.

    Raises:
        CheckpointError: there are none.
    """
    if not prefix:
        return source
    found = Renamed(source, lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None)
    if not found:
        begins = sorted({f"{name.partition('.')[0]}." for name in source if "." in name})
        raise CheckpointError(
            f"{str(source.path)!r} has no weights whose names begin with {prefix!r}. They begin with: "
            f"{', '.join(begins[:10]) or 'no common part'}."
        )
    return found


def fitting(source: WeightSource, own: Mapping[str, Any]) -> WeightSource:
    """The weights by the names of a model, where they have those of wrappers around it. Local.

    Args:
        source: the weights.
        own: the model's plain names. A name that it has is left as it is.
    """

    def rename(name: str) -> str:
        plain = _without_wrappers(name)
        return plain if name not in own and plain in own and plain not in source else name

    return Renamed(source, rename) if any(rename(name) != name for name in source) else source


def plainly_named(source: WeightSource) -> WeightSource:
    """The weights without the names of wrappers, as far as that can be told without the model. Local.

    `_orig_mod`, which only `torch.compile` puts there, is taken out anywhere; `module` where all names begin with it.
    """
    is_parallel = bool(source) and all(_uncompiled(name).startswith(_PARALLEL) for name in source)
    rename = _without_wrappers if is_parallel else _uncompiled
    return Renamed(source, rename) if any(rename(name) != name for name in source) else source


def _without_wrappers(name: str) -> str:
    plain = _uncompiled(name)
    while plain.startswith(_PARALLEL):
        plain = plain.removeprefix(_PARALLEL)
    return plain


def _uncompiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)
