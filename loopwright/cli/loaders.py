"""What the `data` of a file may be, and which loader of it serves which stage.

A class or function named by `data` gives one of these:

- a mapping with some of the keys `train`, `val`, `test`, `predict`;
- an object with some of these as attributes or methods, or with `train_dataloader`, `val_dataloader`, ...;
- a tuple or list of two to four loaders, in that order;
- anything else that can be iterated: the one loader of the stage that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..distributed.errors import ConfigError
from ..trainer.loaders import STAGES


def loader_of(data: Any, stage: str, *, is_required: bool = True) -> Any:
    """The loader for a stage; None where the file has no `data`, so that the task's own is used.

    Args:
        data: what the class or function of `data` gave.
        stage: one of `STAGES`.
        is_required: whether a missing loader is an error; otherwise it is None.
    Raises:
        ConfigError: the stage has no loader, or `data` is nothing that is understood.
    """
    if data is None:
        return None
    loaders = _loaders_by_stage(data, stage)
    if loaders.get(stage) is None and is_required:
        given = [name for name in STAGES if loaders.get(name) is not None]
        raise ConfigError(f"data gives no loader for {stage!r}; it gives {', '.join(given) or 'none'}.")
    return loaders.get(stage)


def _loaders_by_stage(data: Any, stage: str) -> dict[str, Any]:
    if isinstance(data, Mapping):
        unknown = [key for key in data if key not in STAGES]
        if unknown:
            raise ConfigError(f"data gives a mapping with the keys {unknown}. Expected some of {', '.join(STAGES)}.")
        return dict(data)
    if isinstance(data, tuple | list):
        if not 1 < len(data) <= len(STAGES):
            raise ConfigError(f"data gives {len(data)} loaders in a row. Expected 2 to 4: {', '.join(STAGES)}.")
        return dict(zip(STAGES, data, strict=False))
    found = {name: _member(data, name) for name in STAGES}
    if any(loader is not None for loader in found.values()):
        return found
    if isinstance(data, Iterable):
        return {} if stage == "val" else {stage: data}
    raise ConfigError(
        f"data gives {type(data).__name__}, which has no loaders. Expected a mapping, a tuple, an iterable, or an "
        f"object with the attributes or methods {', '.join(STAGES)}."
    )


def _member(data: Any, stage: str) -> Any:
    """The attribute of that name, or what the method of that name returns."""
    for name in (stage, f"{stage}_dataloader"):
        member = getattr(data, name, None)
        if member is not None:
            return member() if callable(member) else member
    return None
