"""State trees: nested values as JSON and tensors, and back as equal values of equal types. Nothing is pickled.

What can be stored: mappings (`dict`, `OrderedDict`, `defaultdict`, `Counter`) with keys of any storable kind, lists,
tuples, sets, deques, texts, bytes, None, booleans, numbers of all sizes, ranges, members of enumerations, torch's
dtypes, devices and sizes, NumPy's arrays and scalars, and dense tensors. `docs/checkpoint-format.md` has the layout.
"""

from __future__ import annotations

import enum
import functools
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from . import arrays
from .memory import TensorCollector, TensorRestorer, why_not_storable
from .scalars import SMALL, SMALL_DECODERS, TAG, encode_enum, encode_text
from .stored import StoredTensor

_DEEPEST = 100
"""Levels of nesting; far below what readers of JSON in all languages take."""
_FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)}
_STORABLE = (
    "Expected mappings, lists, tuples, sets, texts, bytes, numbers, None, enumerations, dtypes, devices, NumPy arrays "
    "and tensors"
)


class Packed(NamedTuple):
    """A state tree, ready to be written."""

    json: Any
    """What the standard's JSON can hold: texts, booleans, None, 64-bit integers, finite numbers, lists, objects."""
    tensors: dict[str, Tensor]
    """The tensors by name: as they are, on any device; not all of them contiguous."""

    def text(self) -> str:
        """The JSON as text of ASCII characters. Local."""
        return json.dumps(self.json, allow_nan=False, separators=(",", ":"))


def pack(value: Any, where: str = "state", *, sharded: bool = False) -> Packed:
    """A value as JSON and tensors. Local; copies no tensor.

    Args:
        value: nested values; what is storable is listed above. A Parameter comes back as a tensor, and tensors come
            back without the record of how they were computed. Memory that tensors share is stored once.
        where: what errors and names of tensors call the value.
        sharded: there may be tensors of which each process has a part; they are among the tensors of the result.
    Raises:
        CheckpointError: something can't be stored; names its path, `state.optimizers[0].foo`, and its type.
    """
    packer = _Packer(sharded)
    packed = packer.pack(value, _Path(None, None), where)
    return Packed(packed, packer.tensors.finish())


def unpack(json: Any, tensors: Mapping[str, Tensor | StoredTensor]) -> Any:
    """The value that was packed: an equal one of equal types; tensors that shared memory share it again. Local.

    Args:
        json: of `Packed`. It is data from outside: it can't name any code to run or to import.
        tensors: of `Packed`; they become part of the value. Each that is needed is asked for once. Where one is
            on disk, the value has that, if it does not have to be looked at.
    Raises:
        CheckpointError: it was not made by `pack`, or it holds an enumeration that the program has not defined.
    """
    restorer = TensorRestorer(tensors)
    try:
        return _unpack(json, restorer)
    except CheckpointError:
        raise
    except Exception as error:
        said = error.args[0] if isinstance(error, LookupError) and error.args else error
        raise CheckpointError(f"the stored state can't be read: {type(error).__name__}: {said}.") from error


class _Path:
    """Where a container is in the tree. Its text is made when it is asked for, once for all that is in the container.

    Args:
        around: of the container that it is in; None for what is around the whole tree.
        step: its key or index there.
    """

    __slots__ = ("_around", "_step", "_text")

    def __init__(self, around: _Path | None, step: Any) -> None:
        self._around = around
        self._step = step
        self._text: str | None = None

    def __str__(self) -> str:
        if self._text is None:
            self._text = "" if self._around is None else self._around.text(self._step)
        return self._text

    def text(self, step: Any) -> str:
        """The path of what is at a key or an index; at the outermost, the name of the tree."""
        if not isinstance(step, str):
            return f"{self}[{_shown(step)}]"
        return step if self._around is None else f"{self}.{step}"


class _Packer:
    def __init__(self, sharded: bool) -> None:
        self.tensors = TensorCollector()
        self._sharded = sharded
        self._around: set[int] = set()

    def pack(self, value: Any, path: _Path, step: Any) -> Any:
        kind = type(value)
        small = SMALL.get(kind)
        if small is not None:
            return small(value)
        if kind in _CONTAINERS:
            return self._pack_container(value, path, step)
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path, step)
        if isinstance(value, enum.Enum):
            return _checked(encode_enum, value, path.text(step))
        if kind is torch.Size:
            return {TAG: "Size", "items": list(value)}
        if arrays.is_array(value):
            place = path.text(step)
            return _checked(functools.partial(self._pack_array, name=place), value, place)
        if callable(getattr(value, "state_dict", None)):
            raise _refusal(value, path.text(step), "Store its state_dict() instead")
        raise _refusal(value, path.text(step), _STORABLE)

    def _pack_container(self, value: Any, path: _Path, step: Any) -> Any:
        if id(value) in self._around:
            raise _refusal(value, path.text(step), "It contains itself")
        if len(self._around) == _DEEPEST:
            raise _refusal(value, path.text(step), f"It is nested more than {_DEEPEST} levels deep")
        self._around.add(id(value))
        try:
            return _CONTAINERS[type(value)](self, value, _Path(path, step))
        finally:
            self._around.discard(id(value))

    def _pack_tensor(self, tensor: Tensor, path: _Path, step: Any) -> Any:
        reason = why_not_storable(tensor, sharded=self._sharded)
        if reason is not None:
            raise _refusal(tensor, path.text(step), reason.capitalize())
        return self.tensors.add(path.text(step), tensor)

    def _pack_array(self, value: Any, name: str) -> Any:
        node, data = arrays.encode(value)
        return node if data is None else {**node, "data": self.tensors.add(name, data)}

    def pack_items(self, value: Any, path: _Path) -> list[Any]:
        return [self.pack(item, path, index) for index, item in enumerate(value)]

    def pack_pairs(self, value: Mapping[Any, Any], path: _Path) -> list[Any]:
        return [[self.pack(key, path, key), self.pack(item, path, key)] for key, item in value.items()]

    def pack_dict(self, value: dict[Any, Any], path: _Path) -> Any:
        if TAG not in value and all(type(key) is str and encode_text(key) is key for key in value):
            return {key: self.pack(item, path, key) for key, item in value.items()}
        return {TAG: "dict", "items": self.pack_pairs(value, path)}

    def pack_defaultdict(self, value: defaultdict[Any, Any], path: _Path) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", None)
        if factory is not None and _FACTORIES.get(str(name)) is not factory:
            reason = f"Its default_factory has to be None or one of {', '.join(_FACTORIES)}"
            raise _refusal(value, str(path), reason)
        return {TAG: "defaultdict", "factory": name, "items": self.pack_pairs(value, path)}

    def pack_set(self, value: set[Any] | frozenset[Any], path: _Path) -> Any:
        # In an order that does not change from run to run, so that equal states have equal files.
        items = sorted(self.pack_items(value, path), key=json.dumps)
        return {TAG: type(value).__name__, "items": items}


_CONTAINERS: dict[type, Callable[[_Packer, Any, _Path], Any]] = {
    dict: _Packer.pack_dict,
    list: _Packer.pack_items,
    tuple: lambda packer, value, path: {TAG: "tuple", "items": packer.pack_items(value, path)},
    set: _Packer.pack_set,
    frozenset: _Packer.pack_set,
    deque: lambda packer, value, path: {
        TAG: "deque", "items": packer.pack_items(value, path), "maxlen": value.maxlen
    },
    OrderedDict: lambda packer, value, path: {TAG: "OrderedDict", "items": packer.pack_pairs(value, path)},
    Counter: lambda packer, value, path: {TAG: "Counter", "items": packer.pack_pairs(value, path)},
    defaultdict: _Packer.pack_defaultdict,
}  # fmt: skip


def _unpack(value: Any, tensors: TensorRestorer) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(TAG)
    if tag is None and TAG not in value:
        return {key: _unpack(item, tensors) for key, item in value.items()}
    if tag in ("tensor", "again"):
        return tensors.restore(value)
    if tag in SMALL_DECODERS:
        return SMALL_DECODERS[tag](value)
    if tag in ("ndarray", "numpy"):
        return arrays.decode(value, tensors.read(value["data"]) if tag == "ndarray" else None)
    if tag not in _BUILDERS:
        raise CheckpointError(
            f"the stored state has a value of the unknown kind {tag!r}. Update Loopwright to read it."
        )
    return _BUILDERS[tag](value, _unpack(value["items"], tensors))


_BUILDERS: dict[str, Callable[[dict[str, Any], list[Any]], Any]] = {
    "dict": lambda node, items: dict(items),
    "OrderedDict": lambda node, items: OrderedDict(items),
    "Counter": lambda node, items: Counter(dict(items)),
    "defaultdict": lambda node, items: defaultdict(
        None if node["factory"] is None else _FACTORIES[node["factory"]], items
    ),
    "tuple": lambda node, items: tuple(items),
    "set": lambda node, items: set(items),
    "frozenset": lambda node, items: frozenset(items),
    "deque": lambda node, items: deque(items, node["maxlen"]),
    "Size": lambda node, items: torch.Size(items),
}


def _shown(key: Any) -> str:
    try:
        return f"{key!r:.80}"
    except ValueError:  # an integer of thousands of digits
        return f"a {type(key).__name__}"


def _checked(encode: Callable[[Any], Any], value: Any, place: str) -> Any:
    try:
        return encode(value)
    except (LookupError, TypeError) as error:
        raise _refusal(value, place, str(error.args[0]).capitalize()) from error


def _refusal(value: Any, place: str, reason: str) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return CheckpointError(f"{place} is of type {name}, which can't be stored. {reason}. Nothing was written.")
