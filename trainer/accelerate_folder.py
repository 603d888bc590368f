"""Folders that Hugging Face Accelerate's `save_state` wrote: its weights and states, as far as they can be read safely.

Its pickles are read with `weights_only=True`: torch then makes tensors, arrays and plain values, and nothing else. What
holds more is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..checkpoint.pickled import read_pickle
from ..distributed.errors import CheckpointError
from .accelerator_trees import SavedState
from .numbered import number_of


def is_accelerate_folder(folder: Path) -> bool:
    """Whether it looks like what Accelerate's `save_state` leaves. Local."""
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    return (folder / "random_states_0.pkl").is_file() and any((folder / name).is_file() for name in names)


def read_accelerate_folder(folder: Path, process_index: int, num_processes: int) -> SavedState:
    """The states beside the weights. Local.

    Raises:
        CheckpointError: a file can't be read, or holds what only running its code would make.
    """
    customs = _numbered(folder, "custom_checkpoint_{}.pkl", begin=0)
    randoms = _numbered(folder, "random_states_{}.pkl", begin=0)
    number = number_of(folder)
    first = _read(randoms[0])
    own = _read(randoms[process_index]) if num_processes == len(randoms) else None
    return SavedState(
        common={
            "schedulers": [{"kind": None, "state": _read(each), "calls": 0} for each in _indexed(folder, "scheduler")],
            "precision": _read(folder / "scaler.pt") if (folder / "scaler.pt").is_file() else {},
            "custom": [{"kind": None, "state": _read(each)} for each in customs],
            "micro_steps": int(first.get("step", 0)),
            "window_size": None,
            "iteration": number,
        },
        optimizers=[{"kind": None, "groups": None, "state": _read(each)} for each in _indexed(folder, "optimizer")],
        own=None if own is None else {**_NOTHING, "random": _random_tree(own)},
        first=_NOTHING,
        world_size=len(randoms),
        inexact=[
            "Accelerate's checkpoints hold no position in the data: call loader.set_epoch(epoch) with the epoch that "
            "goes on, and skip_first_batches"
        ],
    )


def _read(file: Path) -> Any:
    """What a file holds, in memory of its own: tensors, NumPy's arrays of numbers, and plain values."""
    with torch.serialization.safe_globals(_numpy_parts()):
        return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, read_pickle(file))


_NOTHING: dict[str, Any] = {"random": None, "loaders": None, "gradients": None, "strategy": []}
"""The tree of a process of which nothing is known."""


def _numpy_parts() -> list[Any]:
    """What torch must be allowed to make for an array of plain numbers."""
    import _codecs

    import numpy

    core = numpy.zeros(0).__reduce__()[0]  # numpy's function that rebuilds arrays, wherever this version has it
    kinds = [type(numpy.dtype(word)) for word in ("uint32", "int64", "float64", "float32")]
    return [core, numpy.ndarray, numpy.dtype, _codecs.encode, *kinds]


def _indexed(folder: Path, base: str) -> list[Path]:
    """`optimizer.bin`, `optimizer_1.bin`, ..."""
    first = folder / f"{base}.bin"
    return [first, *_numbered(folder, base + "_{}.bin", begin=1)] if first.is_file() else []


def _numbered(folder: Path, pattern: str, *, begin: int) -> list[Path]:
    """The files of a pattern, by their numbers, without a gap."""
    name = re.compile(re.escape(pattern).replace(re.escape("{}"), r"(\d+)"))
    numbers = sorted(int(match[1]) for entry in folder.iterdir() if (match := name.fullmatch(entry.name)))
    if numbers != list(range(begin, begin + len(numbers))):
        raise CheckpointError(
            f"{str(folder)!r} has the files {pattern.format('N')} for N in {numbers}: some are missing. Copy them."
        )
    return [folder / pattern.format(number) for number in numbers]


def _random_tree(states: Mapping[str, Any]) -> dict[str, Any]:
    """Accelerate's random states as `random_tree` has them."""
    version, numbers, gauss = states["random_state"]
    algorithm, keys, position, has_gauss, cached = states["numpy_random_seed"]
    tree: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "torch": states["torch_manual_seed"],
        "numpy": {
            "algorithm": algorithm,
            "keys": torch.tensor(keys.tolist(), dtype=torch.int64),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
    }
    for kind in ("cuda", "xpu", "mlu", "sdaa", "musa", "hpu"):
        devices = states.get(f"torch_{kind}_manual_seed")
        if devices:
            tree[kind] = devices[torch.accelerator.current_device_index() if len(devices) > 1 else 0]
    return tree
