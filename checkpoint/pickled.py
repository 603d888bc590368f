"""Weights that others wrote with `torch.save`. torch's own reader of weights opens them, and runs no code of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.errors import CheckpointError
from .boxes import index_of
from .entries import tied_names
from .shards import check_promised, listed, shard_files
from .sources import WeightSource

ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
"""How the names of such files end."""
INDEX_ENDINGS = tuple(f"{ending}.index.json" for ending in ENDINGS)
_PLACES = ("state_dict", "model_state_dict", "model", "module")
"""Where a file that holds more than weights has them: Lightning's key first."""
_ZIP = b"PK\x03\x04"


class PickledWeights(WeightSource):
    """Weights in files of `torch.save`: a state dict, or a mapping that has one, as Lightning's. Local.

    Files of today's layout are not read as a whole, only what is asked for.

    Args:
        path: a file, or the index of several.
    Raises:
        CheckpointError: it is no such file, it is damaged, it names classes other than those of weights, or has none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest: dict[str, Any] = {}
        """What the file has beside the weights."""
        values: dict[str, Any] = {}
        for file, promised in shard_files(path).items():
            weights, rest = _split(file, read_pickle(file))
            check_promised(path, file, promised, weights)
            values |= weights
            self.rest |= rest
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        self._aliases = tied_names(tensors)
        self._values = values

    @property
    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def __getitem__(self, name: str) -> Any:
        if name in self._aliases:
            raise KeyError(name)
        value = self._values[name]
        return value.detach().clone() if isinstance(value, Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._values if name not in self._aliases)

    def __len__(self) -> int:
        return len(self._values) - len(self._aliases)

    def shape_of(self, name: str) -> torch.Size | None:
        value = self._values[name]
        return value.shape if isinstance(value, Tensor) else None

    def dtype_of(self, name: str) -> torch.dtype | None:
        value = self._values[name]
        return value.dtype if isinstance(value, Tensor) else None

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self._values[name])

    def read_part(self, name: str, offset: Sequence[int], target: Tensor) -> None:
        with torch.no_grad():
            target.copy_(self._values[name][index_of(offset, target.shape)])

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)


def read_pickle(file: Path) -> Any:
    """What a file of `torch.save` holds, on the CPU; the tensors may lie in the file. Local.

    torch makes tensors, plain values and what the program has allowed by `torch.serialization.add_safe_globals`, and
    nothing else.

    Raises:
        CheckpointError: it can't be read, or names other classes or functions: says which.
    """
    try:
        with file.open("rb") as opened:
            is_mapped = opened.read(len(_ZIP)) == _ZIP
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except OSError as error:
        raise CheckpointError(f"{str(file)!r} can't be read: {error}.") from error
    except Exception as error:
        refused = _refused_globals(file, str(error))
        if not refused:
            raise CheckpointError(
                f"{str(file)!r} can't be read as a file of torch.save: {type(error).__name__}: {first_line(error)}. "
                "It may be damaged, or another kind of file."
            ) from error
        raise CheckpointError(
            f"{str(file)!r} is a pickle that names {listed(refused)}: to read it would run their code, which is never "
            "done here. If you trust who wrote it, allow these by torch.serialization.add_safe_globals([...]), or "
            "write the weights anew: torch.save(torch.load(path, weights_only=False)['state_dict'], 'weights.bin')."
        ) from error


def _refused_globals(file: Path, message: str) -> list[str]:
    """The classes and functions that a file names and torch refuses. Nothing of it is run."""
    named = re.findall(r"GLOBAL ([\w.]+\w)", message)
    try:
        return sorted({*torch.serialization.get_unsafe_globals_in_checkpoint(file)} - {""}) or named
    except Exception:  # noqa: BLE001  (older layouts and damaged files: the message has the first one)
        return named


def first_line(error: Exception) -> str:
    """What is wrong, without torch's advice to load it in another way. Local."""
    reason = str(error)
    for advice in ("Do it only if you got the file from a trusted source.", "WeightsUnpickler error: "):
        reason = reason.partition(advice)[2] or reason
    return reason.strip().partition("\n")[0].rstrip(". ")[:300]


def _split(file: Path, content: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dict in what a file holds, and what is beside it."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{str(file)!r} holds a {type(content).__name__}. Expected a state dict: names and tensors."
        )
    place = next((key for key in _PLACES if _is_state_dict(content.get(key))), None)
    weights = content if place is None else content[place]
    if not _is_state_dict(weights):
        raise CheckpointError(
            f"{str(file)!r} has no state dict: neither itself nor under {', '.join(map(repr, _PLACES))}. It has: "
            f"{listed([str(key) for key in content]) or 'nothing'}."
        )
    spread = [n for n, v in weights.items() if isinstance(v, Tensor) and type(v) not in (Tensor, torch.nn.Parameter)]
    if spread:
        raise CheckpointError(
            f"{str(file)!r} has tensors of a class of their own, such as parts of larger ones: {listed(spread)}. Save "
            "the whole state dict with plain tensors."
        )
    rest = {} if place is None else {str(key): value for key, value in content.items() if key != place}
    return dict(weights), rest


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    return not value or any(isinstance(each, Tensor) for each in value.values())
