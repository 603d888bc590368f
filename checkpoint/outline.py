"""What a state tree holds, line by line, without reading its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..distributed.errors import CheckpointError
from .reading import Checkpoint
from .scalars import TAG
from .stored import Kept

_LONGEST = 60
_HIDDEN = {TAG, "base64", "id"}


def outline(checkpoint: Checkpoint, name: str) -> list[tuple[str, str]]:
    """Each value of a state tree by its path: `optimizers[0].state[1].exp_avg`, `tensor float32 (8, 4)`. Local.

    It can be shown whatever the tree holds, also classes of enumerations that this program does not have.

    Args:
        checkpoint: whose tree it is.
        name: of the tree.
    Raises:
        CheckpointError: there is no such tree, or it can't be read.
    """
    tree, stored = checkpoint.packed_tree(name)
    try:
        return list(_lines(tree, name, {} if stored is None else stored.places))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        file = checkpoint.path / f"{name}.json"
        raise CheckpointError(f"{str(file)!r} can't be read: {type(error).__name__}: {error}.") from error


def _lines(node: Any, path: str, places: Mapping[str, Kept]) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        yield from _children([(f"{path}[{index}]", item) for index, item in enumerate(node)], path, "list", places)
    elif not isinstance(node, dict):
        yield path, _short(node)
    elif TAG not in node:
        yield from _children([(f"{path}.{key}", item) for key, item in node.items()], path, "dict", places)
    elif "items" in node:
        yield from _children(_items_of(node, path), path, str(node[TAG]), places)
    else:
        yield path, _tagged(node, places)


def _children(
    items: list[tuple[str, Any]], path: str, kind: str, places: Mapping[str, Kept]
) -> Iterator[tuple[str, str]]:
    if not items:
        yield path, f"empty {kind}"
    for child, item in items:
        yield from _lines(item, child, places)


def _items_of(node: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """The values of a container that JSON has no word for; mappings have pairs."""
    if node[TAG] in ("dict", "OrderedDict", "defaultdict", "Counter"):
        return [(f"{path}.{key}" if isinstance(key, str) else f"{path}[{_key(key)}]", i) for key, i in node["items"]]
    return [(f"{path}[{index}]", item) for index, item in enumerate(node["items"])]


def _key(key: Any) -> str:
    return _tagged(key, {}) if isinstance(key, dict) else _short(key)


def _tagged(node: dict[str, Any], places: Mapping[str, Kept]) -> str:
    if node[TAG] == "tensor":
        place = places[node["in"]]
        dtype = node.get("dtype", str(place.dtype).removeprefix("torch."))
        return f"tensor {dtype} {tuple(node.get('shape', place.shape))}"
    if node[TAG] == "again":
        return "the same tensor as one above"
    parts = (f"{key} {_short(value)}" for key, value in node.items() if key not in _HIDDEN and key != "data")
    return " ".join([str(node[TAG]), *parts])


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
