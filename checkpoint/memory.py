"""How the tensors of a state tree lie in memory: each piece of memory is stored once, and shared by those that were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .entries import why_not_dense
from .scalars import DTYPES, TAG, dtype_name
from .sharded import is_sharded
from .stored import StoredTensor

# Those that every version of safetensors in use knows; others are stored as bytes.
_TYPED = {
    DTYPES[name]
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
    )
}
_STORABLE = frozenset(DTYPES.values())
_ALIGNMENT = 16
"""The largest element of all number formats, in bytes."""


@dataclass(slots=True, eq=False)
class _Seen:
    """A tensor of the tree, the JSON object that stands for it, and the bytes of its memory that it spans."""

    number: int
    name: str
    tensor: Tensor
    node: dict[str, Any]
    begin: int
    end: int
    memory: object
    """What is the same for tensors that may overlap; None for one that has no memory which could be looked at."""

    @property
    def layout(self) -> tuple[Any, ...]:
        return self.begin, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


def why_not_storable(tensor: Tensor, *, sharded: bool = False) -> str | None:
    """Why a tensor can't be stored, None where it can; one of which each process has a part if `sharded`. Local."""
    if (reason := why_not_dense(tensor)) is not None:
        return reason
    if type(tensor) not in (Tensor, torch.nn.Parameter) and not (sharded and is_sharded(tensor)):
        return "it is a tensor of a class of its own; convert it to a plain one"
    if tensor.dtype not in _STORABLE:
        return f"it has the dtype {tensor.dtype}; dequantise it, or store its integers and scales"
    return None


class TensorCollector:
    """Takes the tensors of a tree one by one, and gives those to store. Local; nothing is copied."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._by_object: dict[int, _Seen] = {}
        self._names: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> dict[str, Any]:
        """The JSON object for a tensor; it is filled by `finish`.

        Args:
            name: where it stands in the tree. Of two equal names the second gets a number.
            tensor: one that `why_not_storable` has nothing against.
        """
        earlier = self._by_object.get(id(tensor))
        if earlier is not None:
            return {TAG: "again", "id": earlier.node.setdefault("id", earlier.number)}
        node = {TAG: "tensor"}
        seen = _Seen(len(self._seen), self._free(name), tensor, node, *_place_of(tensor))
        self._seen.append(seen)
        self._by_object[id(tensor)] = seen
        return seen.node

    def finish(self) -> dict[str, Tensor]:
        """The tensors to store by name. What one of them stands for is in the JSON objects."""
        stored: dict[str, Tensor] = {}
        for group in self._groups():
            stored[group[0].name] = _store_alone(group[0]) if len(group) == 1 else _store(group)
        return {seen.name: stored[seen.name] for seen in self._seen if seen.name in stored}

    def _free(self, name: str) -> str:
        if not name.isascii():
            name = name.encode("utf-8", "backslashreplace").decode()
        number, free = 1, name
        while free in self._names:
            number += 1
            free = f"{name}#{number}"
        self._names.add(free)
        return free

    def _groups(self) -> list[list[_Seen]]:
        """Those that lie in one piece of memory together, each in the tree's order."""
        by_memory: dict[object, list[_Seen]] = {}
        for seen in self._seen:
            by_memory.setdefault(seen if seen.memory is None else seen.memory, []).append(seen)
        groups: list[list[_Seen]] = []
        for tensors in by_memory.values():
            groups += [tensors] if len(tensors) == 1 else _apart(tensors)
        return groups


class TensorRestorer:
    """Gives the tensors that JSON objects stand for. Local.

    Args:
        tensors: what was stored, by name; each is asked for once.
    """

    def __init__(self, tensors: Mapping[str, Tensor | StoredTensor]) -> None:
        self._tensors = tensors
        self._memory: dict[str, Tensor | StoredTensor] = {}
        self._by_identity: dict[int, Tensor | StoredTensor] = {}

    def restore(self, node: Mapping[str, Any]) -> Tensor | StoredTensor:
        """The tensor of a JSON object. Those that shared memory share it again.

        Raises:
            Exception: of many kinds, where the object does not fit what was stored.
        """
        if node[TAG] == "again":
            return self._by_identity[node["id"]]
        name = node["in"]
        is_first = name not in self._memory
        if is_first:
            self._memory[name] = self._tensors[name]
        memory = self._memory[name]
        tensor: Tensor | StoredTensor
        if "dtype" in node:
            if isinstance(memory, StoredTensor):  # a view needs the memory that it looks at
                memory = self._memory[name] = memory.read()
            flat = _flat(memory, DTYPES[node["dtype"]])
            tensor = flat.as_strided(node["shape"], node["stride"], flat.storage_offset() + node["offset"])
        else:
            tensor = memory if is_first else memory.detach()
        if "id" in node:
            self._by_identity[node["id"]] = tensor
        return tensor

    def read(self, node: Mapping[str, Any]) -> Tensor:
        """The tensor of a JSON object, in memory."""
        found = self.restore(node)
        return found.read() if isinstance(found, StoredTensor) else found


def _apart(tensors: list[_Seen]) -> list[list[_Seen]]:
    """Those that overlap together, each in the tree's order."""
    groups: list[list[_Seen]] = []
    end = -1
    for seen in sorted(tensors, key=lambda each: each.begin):
        if seen.begin > end:
            groups.append([])
        groups[-1].append(seen)
        end = max(end, seen.end)
    return [sorted(group, key=lambda each: each.number) for group in groups]


def _flat(memory: Tensor, dtype: torch.dtype) -> Tensor:
    flat = memory.reshape(-1)
    if flat.dtype == dtype:
        return flat
    # A view of another element size needs a whole number of elements.
    return flat[: len(flat) - len(flat) % dtype.itemsize].view(dtype)


def _place_of(tensor: Tensor) -> tuple[int, int, object]:
    """The first byte of its memory that a tensor has, the one behind its last, and which memory that is.

    None for the memory where there is none that could be looked at, or none that has its values.
    """
    if is_sharded(tensor) or not (size := int(tensor.nbytes)):
        return 0, 0, None
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.is_contiguous():
        last = sum((length - 1) * int(step) for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        size = (1 + last) * tensor.itemsize
    device = tensor.device
    has_none = tensor.is_conj() or tensor.is_neg() or device.type == "xla"  # where it can't be looked at
    address = 0 if has_none else tensor.data_ptr()
    return begin, begin + size, (device, address - begin) if address else None


def _store(group: list[_Seen]) -> Tensor:
    """What to store for tensors that lie together; fills their JSON objects."""
    for seen in group:
        seen.node["in"] = group[0].name
    tensor = group[0].tensor.detach()
    are_the_same = all(seen.layout == group[0].layout for seen in group)
    if are_the_same and tensor.dtype in _TYPED and tensor.is_contiguous():
        return tensor
    return _store_memory(group)


def _store_alone(seen: _Seen) -> Tensor:
    """What to store for a tensor that shares its memory with none; fills its JSON object."""
    seen.node["in"] = seen.name
    tensor = seen.tensor.detach()
    is_plain = tensor.dtype in _TYPED and tensor.is_contiguous()
    if is_plain or is_sharded(tensor):
        return tensor
    if seen.memory is not None and tensor.nbytes >= seen.end - seen.begin:
        return _store_memory([seen])
    # A view with gaps is stored without what lies between.
    if tensor.dtype in _TYPED:
        return tensor
    packed = tensor.resolve_conj().resolve_neg().contiguous()
    seen.node.update(_view(packed, 0))
    return packed.view(-1).view(torch.uint8)


def _store_memory(group: list[_Seen]) -> Tensor:
    """The memory that tensors span, in which each is a view."""
    tensor = group[0].tensor.detach()
    is_mixed = len({seen.tensor.dtype for seen in group}) > 1
    dtype = tensor.dtype if tensor.dtype in _TYPED and not is_mixed else torch.uint8
    begin, end = min(seen.begin for seen in group), max(seen.end for seen in group)
    begin -= begin % _ALIGNMENT if is_mixed else 0
    for seen in group:
        seen.node.update(_view(seen.tensor, seen.begin - begin))
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    size = (end - begin) // dtype.itemsize
    return flat.set_(tensor.untyped_storage(), begin // dtype.itemsize, (size,), (1,))


def _view(tensor: Tensor, begin: int) -> dict[str, Any]:
    return {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": begin // tensor.element_size(),
    }
