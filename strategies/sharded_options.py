"""Options of sharding as users write them, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..distributed.errors import ConfigError, suggest

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read_format(option: str, word: str | None) -> torch.dtype | None:
    """The number format of a word. Local.

    Raises:
        ConfigError: the word is unknown.
    """
    if word is None:
        return None
    if word not in _FORMATS:
        raise ConfigError(f"FSDPStrategy({option}={word!r}) is unknown. {suggest(word, _FORMATS)}")
    return _FORMATS[word]


def read_mesh(mesh: Sequence[int] | None) -> tuple[int, int] | None:
    """Two sizes, copies and parts. Local.

    Raises:
        ConfigError: it is something else.
    """
    if mesh is None:
        return None
    are_sizes = isinstance(mesh, (list, tuple)) and all(type(size) is int and size > 0 for size in mesh)
    if not are_sizes or len(mesh) != 2:
        raise ConfigError(f"FSDPStrategy(mesh={mesh!r}). Expected two sizes, (copies, parts), or None.")
    return mesh[0], mesh[1]
