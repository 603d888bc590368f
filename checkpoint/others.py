"""A model's weights in whatever file or folder they are: Loopwright's, and those of other libraries.

- a folder, of Loopwright, of Hugging Face or of Accelerate: `model.safetensors` or its index, `model.parts.json`, else
  `pytorch_model.bin` or its index;
- `.safetensors`, `.safetensors.index.json`, `.parts.json`;
- a folder of `torch.distributed.checkpoint`, or one of Accelerate's with such a folder in it, see `distributed_folder`;
- `.bin`, `.pt`, `.pth`, `.ckpt` (Lightning's), `.bin.index.json`: files of `torch.save`, see `pickled`.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..distributed.errors import CheckpointError
from .distributed_folder import INDEX_NAME, DistributedWeights
from .parts import PARTS_SUFFIX
from .pickled import ENDINGS, INDEX_ENDINGS, PickledWeights
from .shards import INDEX_SUFFIX, SUFFIX, StoredWeights, existing, names_in
from .sources import WeightSource

_WEIGHTS = re.compile(r"(?:pytorch_)?(model(?:_\d+)?)(?:(?:\.safetensors|\.bin)(?:\.index\.json)?|\.parts\.json)")


def open_weights(path: str | Path, base: str = "model") -> WeightSource:
    """A model's weights, whoever wrote them, with the names that they have there. Local.

    Args:
        path: a file, an index of several, or a folder; see above.
        base: in a folder, which model: `model`, `model_1`, ...
    Raises:
        CheckpointError: there are none, they are damaged, or they can't be read without running code that they name.
    """
    given = Path(path)
    try:
        return _open_in(given, base) if given.is_dir() else _open(given)
    except OSError as error:
        raise CheckpointError(f"{str(given)!r} can't be read: {error}.") from error


def model_names(folder: Path) -> list[str]:
    """The names of the models of which a folder has weights: `model`, `model_1`, ... Local."""
    found = {match[1] for entry in folder.iterdir() if (match := _WEIGHTS.fullmatch(entry.name))}
    for index in folder.glob(f"pytorch_model_fsdp_*/{INDEX_NAME}"):
        number = index.parent.name.rpartition("_")[2]
        found.add("model" if number == "0" else f"model_{number}")
    if (folder / INDEX_NAME).is_file():
        found.add("model")
    return sorted(found, key=lambda name: (len(name), name))


def _open(file: Path) -> WeightSource:
    if file.name.endswith(INDEX_ENDINGS):
        return PickledWeights(file)
    if file.suffix not in ENDINGS:
        return StoredWeights(file)
    return PickledWeights(existing(file, file.with_name(f"{file.name}.index.json")))


def _open_in(folder: Path, base: str) -> WeightSource:
    pickled = f"pytorch_{base}.bin"
    candidates = (f"{base}{SUFFIX}", f"{base}{INDEX_SUFFIX}", f"{base}{PARTS_SUFFIX}", pickled, f"{pickled}.index.json")
    found = next((folder / name for name in candidates if (folder / name).is_file()), None)
    if found is not None:
        return _open(found)
    # Accelerate's names of folders, one for each model.
    below = folder / f"pytorch_model_fsdp_{base.removeprefix('model').removeprefix('_') or '0'}"
    distributed = next((each for each in (folder, below) if (each / INDEX_NAME).is_file()), None)
    if distributed is not None:
        return DistributedWeights(distributed)
    raise CheckpointError(f"{str(folder)!r} has no weights: {_why_none(folder, candidates)}")


def _why_none(folder: Path, candidates: tuple[str, ...]) -> str:
    if (folder / "zero_to_fp32.py").exists():
        return (
            "it is a folder of DeepSpeed, whose states are pickles of its own classes. If you trust it, run the script "
            "in it: python zero_to_fp32.py . weights"
        )
    return f"none of {', '.join(candidates)} is there. In it: {names_in(folder)}."
