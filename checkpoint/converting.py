"""Weights of any kind, written anew into a folder: whole or not at all, over nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.atomic import PartialFolder, whole_file
from ..distributed.errors import CheckpointError, ConfigError, suggest
from .hashing import NewFiles
from .manifest import FILE_NAME
from .others import model_names, open_weights
from .reading import open_checkpoint
from .shards import WeightFiles, plan_weights
from .sources import WeightSource, below, plainly_named

SAFETENSORS, TORCH = "safetensors", "torch"
KINDS = (SAFETENSORS, TORCH)
"""What weights can be written as: the files of Hugging Face's libraries, of today and of earlier."""


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A model whose weights were written."""

    name: str
    """`model`, `model_1`, ..."""
    files: tuple[str, ...]
    """The files, the one that is read first last."""
    num_tensors: int
    """Tensors in the files: of tied weights one, except in a pickle, which has all names."""
    size_bytes: int
    """What the files take."""
    renamed: Mapping[str, str]
    """The weights that have a new name: the old by the new."""
    left_out: tuple[str, ...]
    """The weights that are outside of what was asked for."""


def convert_weights(
    path: str | Path,
    folder: str | Path,
    *,
    kind: str = SAFETENSORS,
    max_shard_size: int | str | None = None,
    prefix: str = "",
) -> list[ConvertedModel]:
    """Write the weights of a checkpoint, or of what another library wrote, into a new folder. Local.

    Args:
        path: a checkpoint, all of whose files are verified first; or what `open_weights` takes.
        folder: where nothing is yet.
        kind: "safetensors" for `model.safetensors`; "torch" for a pickled `pytorch_model.bin`, for tools that need it.
        max_shard_size: bytes, or text such as "5GB": of each file of safetensors. None: one file.
        prefix: take the weights alone whose names begin with this, and take it off.
    Returns:
        One entry for each model of the source.
    Raises:
        CheckpointError: the source has no weights, or they are damaged or can't be read safely or stored; something is
            at the folder, or it can't be written to. Nothing is left there then.
        ConfigError: the kind or the size is none.
    """
    if kind not in KINDS:
        raise ConfigError(f"to={kind!r} is unknown. {suggest(kind, KINDS)}")
    if kind == TORCH and max_shard_size is not None:
        raise ConfigError(f"max_shard_size={max_shard_size!r}: a file of torch.save is not split. Leave it out.")
    sources = _sources(Path(path))
    try:
        target = PartialFolder(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        models = [_convert(name, source, target.path, kind, max_shard_size, prefix) for name, source in sources.items()]
        target.commit()
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        target.discard()
    return models


def _sources(path: Path) -> dict[str, WeightSource]:
    """The weights of each model, by its name."""
    if (path / FILE_NAME).is_file():
        checkpoint = open_checkpoint(path)
        if not checkpoint.weights_names:
            raise CheckpointError(f"the checkpoint {str(path)!r} has no weights.")
        return {name: checkpoint.weights(name) for name in checkpoint.weights_names}
    names = (model_names(path) if path.is_dir() else []) or ["model"]
    return {name: open_weights(path, name) for name in names}


def _convert(
    name: str, source: WeightSource, folder: Path, kind: str, max_shard_size: int | str | None, prefix: str
) -> ConvertedModel:
    part = below(source, prefix)
    plain = plainly_named(part)
    if kind == TORCH:
        state = plain.state_dict()
        files, count = _write_torch(name, state, folder), sum(isinstance(each, Tensor) for each in state.values())
    else:
        planned = plan_weights(plain.stored_state_dict(), name, max_shard_size)
        files, count = _write(planned, folder), planned.num_tensors
    left_out = tuple(each for each in source if prefix and not each.startswith(prefix))
    renamed = {new: old for new, old in zip(plain, part, strict=True) if new != old}
    return ConvertedModel(
        name,
        files,
        count,
        sum((folder / file).stat().st_size for file in files),
        renamed,
        left_out,
    )


def _write(planned: WeightFiles, folder: Path) -> tuple[str, ...]:
    with NewFiles() as files:
        planned.write(files, {each: folder / each for each in planned.names()})
    return tuple(planned.names())


def _write_torch(name: str, state: dict[str, Any], folder: Path) -> tuple[str, ...]:
    file = f"pytorch_{name}.bin"
    with whole_file(folder / file) as path:
        torch.save(state, path)
    return (file,)


def _unwritable(folder: str | Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{str(folder)!r} can't be written: {error}. Choose another path. Nothing was left there.")
