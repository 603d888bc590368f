"""Nested data: tuples, named tuples, lists, mappings and dataclasses of tensors, walked and rebuilt. All is local."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

P = ParamSpec("P")

_HALVES = (torch.float16, torch.bfloat16)


def is_torch_tensor(value: Any) -> bool:
    """Whether this is a tensor."""
    return isinstance(value, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether this is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """A sequence of the same type as `obj`, named tuples included, from these items."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def honor_mapping(obj: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type as `obj`, with its attributes, of these items. The keys are those of `obj`."""
    if type(obj) is dict:
        return items
    if isinstance(obj, MutableMapping):
        try:
            return _copy_with(obj, items)
        except TypeError:  # one that can't be changed, though its base class can
            pass
    return type(obj)(items)  # type: ignore[call-arg]


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    operation: str | None = None,
    **kwargs: Any,
) -> Any:
    """Apply a function to the leaves of nested data that pass a test.

    Args:
        func: called as `func(leaf, *args, **kwargs)`.
        data: leaves in tuples, named tuples, lists and mappings.
        args: passed on.
        test_type: which leaves; by default tensors.
        error_on_other_type: raise at a leaf that does not pass; else it stays as it is.
        operation: what the error calls it; by default the function's name.
        kwargs: passed on.
    Returns:
        The same nesting, of the same types. The input is not changed.
    Raises:
        TypeError: a leaf does not pass the test.
    """

    def change(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            accepted = "tensors" if test_type is is_torch_tensor else f"what {_name(test_type)} accepts"
            raise TypeError(
                f"{operation or _name(func)} got a {type(leaf).__name__} ({leaf!r:.80}). Expected {accepted}, or "
                "tuples, lists and mappings of it."
            )
        return leaf

    return _walk(data, change)


def send_to_device(data: Any, device: torch.device | str, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move every tensor of nested data.

    Args:
        data: tensors, or tuples, named tuples, lists, mappings and dataclasses of them, or objects with their own `to`
            (such as packed sequences). Anything else passes unchanged; the caller's containers are not changed.
        device: where to.
        non_blocking: let the copy go on in the background where the memory is pinned.
        skip_keys: keys of mappings whose values stay where they are.
    Returns:
        The same nesting, of the same types.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if isinstance(leaf, (str, bytes, int, float, type(None))):
            return leaf
        if _is_dataclass(leaf):
            fields = [field.name for field in dataclasses.fields(leaf) if field.init]
            return dataclasses.replace(leaf, **{name: moved(getattr(leaf, name)) for name in fields})
        if callable(own := getattr(leaf, "to", None)) and not isinstance(leaf, torch.nn.Module):
            return own(device)
        return leaf

    # A packed sequence is a named tuple, but one of its tensors has to stay on the CPU.
    moved = functools.partial(_walk, change=move, skip_keys=skipped, leaf_type=PackedSequence)
    return moved(data)


def map_leaves(
    data: Any, change: Callable[[str, Any], Any], name: str = "", is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Nested data rebuilt, dataclasses included, with each leaf changed.

    Args:
        data: leaves in tuples, named tuples, lists, mappings and dataclasses.
        change: called with how the leaf is reached, `name['x'][0]`, and the leaf.
        name: what stands before.
        is_leaf: whether one of these is a leaf as a whole. None: none is.
    Returns:
        The same nesting, of the same types. The input is not changed.
    """
    if is_leaf is not None and is_leaf(data):
        return change(name, data)

    def inside(value: Any, place: str) -> Any:
        return map_leaves(value, change, name + place, is_leaf)

    if isinstance(data, (tuple, list)):
        return honor_type(data, [inside(item, f"[{index}]") for index, item in enumerate(data)])
    if isinstance(data, Mapping):
        return honor_mapping(data, {key: inside(value, f"[{key!r}]") for key, value in data.items()})
    if _is_dataclass(data):
        fields = [field.name for field in dataclasses.fields(data) if field.init]
        return dataclasses.replace(data, **{field: inside(getattr(data, field), f".{field}") for field in fields})
    return change(name, data)


def flatten(data: Any) -> tuple[list[tuple[str, Any]], Callable[[Sequence[Any]], Any]]:
    """The leaves of nested data with how each is reached, and a function that puts others in their places.

    The leaves come in the order of their positions, whatever the order of the keys, so that those of several processes
    belong together.
    """
    found: list[tuple[str, Any]] = []
    map_leaves(data, lambda name, leaf: found.append((name, leaf)))
    order = sorted(range(len(found)), key=lambda index: found[index][0])

    def rebuild(leaves: Sequence[Any]) -> Any:
        by_place = dict(zip(order, leaves, strict=True))
        places = iter(range(len(order)))
        return map_leaves(data, lambda name, leaf: by_place[next(places)])

    return [found[index] for index in order], rebuild


def named_leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of nested data, with how it is reached: `name['x'][0]`.

    Leaves are looked for in mappings, sequences and dataclasses. A sequence of texts alone is one leaf.
    """
    if isinstance(data, Tensor):  # first, since most are
        yield name, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from named_leaves(value, f"{name}[{key!r}]")
    elif isinstance(data, Sequence) and not _is_text(data):
        for index, value in enumerate(data):
            yield from named_leaves(value, f"{name}[{index}]")
    elif _is_dataclass(data):
        for field in dataclasses.fields(data):
            yield from named_leaves(getattr(data, field.name), f"{name}.{field.name}")
    else:
        yield name, data


def named_tensors(data: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Those of `named_leaves` that are tensors."""
    return ((path, leaf) for path, leaf in named_leaves(data, name) if isinstance(leaf, Tensor))


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join nested data of one structure, tensor by tensor.

    Args:
        data: at least one item; all have the nesting of the first.
        dim: the dimension in which the tensors are joined.
    Returns:
        The nesting of the first item.
    Raises:
        TypeError: a leaf is no tensor.
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([item[i] for item in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return honor_mapping(first, {key: concatenate([item[key] for item in data], dim) for key in first})
    if _is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        joined = {name: concatenate([getattr(item, name) for item in data], dim) for name in names}
        return dataclasses.replace(first, **joined)
    if not isinstance(first, Tensor):
        raise TypeError(
            f"concatenate got a {type(first).__name__}. Expected tensors, nested in the same way in each item."
        )
    return torch.cat(list(data), dim=dim)


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """The same nesting with each tensor sliced in its first dimension.

    Raises:
        TypeError: a leaf is no tensor.
    """

    def cut(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf[tensor_slice]
        raise TypeError(refusal("slice_tensors", name, leaf))

    return map_leaves(data, cut)


def refusal(operation: str, name: str, leaf: Any) -> str:
    """The message for a leaf that an operation on tensors can't take: what it is, where, and what is accepted."""
    place = f" at {name}" if name else ""
    kind = type(leaf).__name__
    if isinstance(leaf, Tensor):
        kind = "quantized tensor" if leaf.is_quantized else "nested tensor" if leaf.is_nested else "sparse tensor"
    return (
        f"{operation} got a {kind} ({leaf!r:.80}){place}. Expected tensors, or tuples, lists, mappings and dataclasses "
        "of tensors."
    )


def listify(data: Any) -> Any:
    """The same nesting with each tensor as Python numbers, or nested lists of them."""

    def as_list(tensor: Tensor) -> Any:
        # bf16 has no counterpart in Python's or NumPy's conversions.
        plain = tensor.detach().cpu()
        return (plain.float() if plain.dtype is torch.bfloat16 else plain).tolist()

    return recursively_apply(as_list, data)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested data, None where there is none."""
    return next((tensor.device for _, tensor in named_tensors(data)), None)


def convert_to_fp32(tensor: Any) -> Any:
    """The same nesting with each fp16 and bf16 tensor as fp32; every other leaf is the same object."""

    def is_half(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in _HALVES

    return recursively_apply(Tensor.float, tensor, test_type=is_half)


def convert_outputs_to_fp32(model_forward: Callable[P, Any]) -> Callable[P, Any]:
    """Decorate a function so that the fp16 and bf16 tensors of what it returns become fp32."""

    @functools.wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def _walk(
    data: Any,
    change: Callable[[Any], Any],
    skip_keys: Collection[Any] = (),
    leaf_type: type[Any] | tuple[type[Any], ...] = (),
) -> Any:
    """Nested data rebuilt with each leaf changed, but for the values of some keys; `leaf_type` is not looked into."""

    def walk(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and not isinstance(value, leaf_type):
            return honor_type(value, [walk(item) for item in value])
        if isinstance(value, Mapping):
            return honor_mapping(value, {key: v if key in skip_keys else walk(v) for key, v in value.items()})
        return change(value)

    return walk(data)


def _copy_with(mapping: MutableMapping[Any, Any], items: dict[Any, Any]) -> MutableMapping[Any, Any]:
    clone = copy.copy(mapping)
    attributes = getattr(clone, "__dict__", {})
    # A class that keeps its items in an attribute would share it with its copy.
    attributes.update({name: copy.copy(part) for name, part in attributes.items() if isinstance(part, MutableMapping)})
    for key, value in items.items():
        clone[key] = value
    return clone


def _is_text(data: Sequence[Any]) -> bool:
    """Whether this is a text, or a sequence of texts alone."""
    return isinstance(data, (str, bytes)) or (len(data) > 0 and all(isinstance(item, (str, bytes)) for item in data))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
