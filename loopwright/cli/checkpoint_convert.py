"""`loopwright checkpoint convert`: weights of any kind, written anew."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping

from ..checkpoint.converting import SAFETENSORS, ConvertedModel, convert_weights
from ..checkpoint.shards import listed
from ..checkpoint.space import readable


def run_convert(path: str, folder: str, *, options: Mapping[str, str], as_json: bool = False) -> None:
    """Write the weights of `path` into a new folder, and say what was written.

    Args:
        path: a checkpoint, or another library's weights.
        folder: where nothing is yet.
        options: `to`, `max_shard_size` and `prefix`, those that were given.
        as_json: print one object for each model.
    Raises:
        CheckpointError: see `convert_weights`.
        ConfigError: see `convert_weights`.
    """
    models = convert_weights(
        path,
        folder,
        kind=options.get("to", SAFETENSORS),
        max_shard_size=options.get("max_shard_size"),
        prefix=options.get("prefix", ""),
    )
    if as_json:
        print(json.dumps([dataclasses.asdict(model) for model in models], indent=2))
    else:
        print("\n".join(line for model in models for line in _lines(model, folder)))


def _lines(model: ConvertedModel, folder: str) -> Iterator[str]:
    count = len(model.files)
    files = f"{folder}/{model.files[-1]}" + (f" and {count - 1} files" if count > 1 else "")
    yield f"{files}: {model.num_tensors} tensors, {readable(model.size_bytes)}"
    if model.renamed:
        yield f"  without the names of wrappers: {listed([f'{old} is {new}' for new, old in model.renamed.items()])}"
    if model.left_out:
        yield f"  left out ({len(model.left_out)}): {listed(model.left_out)}"
