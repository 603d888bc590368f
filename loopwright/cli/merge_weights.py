"""`loopwright merge-weights`: one set of weights from a checkpoint of which each process wrote a part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.converting import SAFETENSORS, TORCH
from ..checkpoint.distributed_folder import INDEX_NAME
from ..checkpoint.finding import is_only_a_checkpoint
from ..checkpoint.shards import listed
from ..distributed.atomic import remove_folder
from ..distributed.errors import CheckpointError
from .checkpoint import Form, read_rest
from .checkpoint_convert import run_convert

USAGE = """\
usage: loopwright merge-weights CHECKPOINT OUT [--max_shard_size 5GB] [--prefix model.] [--json]

Write the weights of CHECKPOINT into a new folder OUT, as one set in the layout of Hugging Face: model.safetensors. One
weight at a time is in memory, and no other process is needed.
CHECKPOINT: a checkpoint, or a folder of torch.distributed.checkpoint, as Accelerate's pytorch_model_fsdp_0.

  --max_shard_size SIZE    several files of at most this size, such as 5GB, and an index
  --prefix TEXT            only the weights whose names begin with this, without it
  --unsafe_serialization   write pytorch_model.bin, a pickle, for tools that need it; it is made in memory
  --remove_checkpoint_dir  remove CHECKPOINT when the weights are written
  --json                   print JSON
"""
_FORM = Form(
    "CHECKPOINT OUT",
    range(2, 3),
    ("max_shard_size", "prefix"),
    ("json", "unsafe_serialization", "remove_checkpoint_dir"),
)
_PARTS = ".distcp"


def run_merge_weights(arguments: Sequence[str]) -> int:
    """Run the command; returns 0.

    Raises:
        ConfigError: the arguments can't be used.
        CheckpointError: what they name has no weights, is damaged, or can't be written or removed.
    """
    if {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0
    asked = read_rest("merge-weights", _FORM, arguments)
    path, folder = asked.paths
    removes = "remove_checkpoint_dir" in asked.switches
    if removes:
        _check_removable(Path(path), Path(folder))
    kind = TORCH if "unsafe_serialization" in asked.switches else SAFETENSORS
    run_convert(path, folder, options={**asked.options, "to": kind}, as_json="json" in asked.switches)
    if removes:
        try:
            remove_folder(path)
        except OSError as error:
            raise CheckpointError(f"the weights are in {folder!r}, and {path!r} can't be removed: {error}.") from error
    return 0


def _check_removable(path: Path, folder: Path) -> None:
    """Refuse to remove what has other files in it, or would have.

    Raises:
        CheckpointError: it has; names them.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{str(path)!r} is a link to {str(path.resolve())!r}. Name the folder that is to be removed."
        )
    if folder.resolve().is_relative_to(path.resolve()):
        raise CheckpointError(f"{str(folder)!r} would be removed with {str(path)!r}. Choose a folder outside of it.")
    if is_only_a_checkpoint(path):
        return
    others = [path.name] if not path.is_dir() else sorted(each.name for each in path.iterdir() if not _is_part(each))
    if others:
        raise CheckpointError(
            f"{str(path)!r} is not removed: these are no part of a checkpoint: {listed(others)}. Leave out "
            "--remove_checkpoint_dir, and remove it by hand."
        )


def _is_part(file: Path) -> bool:
    return file.is_file() and (file.name == INDEX_NAME or file.suffix == _PARTS)
