"""Nested data: tuples, named tuples, lists and mappings of tensors, walked and rebuilt. Everything here is local."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

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


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply a function to the leaves of nested data that pass a test.

    Args:
        func: called as `func(leaf, *args, **kwargs)`.
        data: leaves in tuples, named tuples, lists and mappings.
        args: passed on.
        test_type: which leaves; by default tensors.
        error_on_other_type: raise at a leaf that does not pass; else it stays as it is.
        kwargs: passed on.
    Returns:
        The same nesting, of the same types. The input is not changed.
    Raises:
        TypeError: a leaf does not pass the test.
    """

    def apply(value: Any) -> Any:
        return recursively_apply(
            func, value, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
        )

    if isinstance(data, (tuple, list)):
        return honor_type(data, (apply(value) for value in data))
    if isinstance(data, Mapping):
        return type(data)({key: apply(value) for key, value in data.items()})  # type: ignore[call-arg]
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        raise TypeError(
            f"{_name(func)} got a {type(data).__name__} ({data!r:.80}). Expected what {_name(test_type)} accepts, or "
            "tuples, lists and mappings of it."
        )
    return data


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
        joined = {key: concatenate([item[key] for item in data], dim) for key in first}
        return type(first)(joined)  # type: ignore[call-arg]
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

    def cut(tensor: Tensor) -> Tensor:
        return tensor[tensor_slice]

    return recursively_apply(cut, data, error_on_other_type=True)


def listify(data: Any) -> Any:
    """The same nesting with each tensor as Python numbers, or nested lists of them."""

    def as_list(tensor: Tensor) -> Any:
        # bf16 has no counterpart in Python's or NumPy's conversions.
        plain = tensor.detach().cpu()
        return (plain.float() if plain.dtype is torch.bfloat16 else plain).tolist()

    return recursively_apply(as_list, data)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested data, None where there is none."""
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, (tuple, list)):
        return next((device for value in data if (device := find_device(value)) is not None), None)
    return data.device if isinstance(data, Tensor) else None


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


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
