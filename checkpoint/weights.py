"""A module's weights in one safetensors file, as the Hugging Face libraries lay it out.

The file holds each tensor once, under its plain name. Its metadata has `format: pt`; for each tied weight that was
left out the name under which it is stored; and, where the module has state that is no tensor (`get_extra_state`), that
as JSON under `loopwright.extra`. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed.atomic import whole_file
from ..distributed.errors import CheckpointError
from .entries import check_json, check_tensor, separate, tied_names
from .names import plain_names

FILE_NAME = "model.safetensors"
_EXTRA = "loopwright.extra"
_MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What didn't fit when weights were loaded; all empty when everything did."""

    missing: tuple[str, ...] = ()
    """In the module and not in the file; they keep their values."""
    unexpected: tuple[str, ...] = ()
    """In the file and not in the module; they are left out."""
    mismatched: tuple[str, ...] = ()
    """In both with different shapes, or with two values for tied weights; they keep their values."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        groups = {"missing": self.missing, "unexpected": self.unexpected, "mismatched": self.mismatched}
        return "; ".join(f"{word} ({len(names)}): {_listed(names)}" for word, names in groups.items() if names)


def save_weights(module: nn.Module, path: str | Path) -> Path:
    """Write a module's weights and buffers, whole or not at all. Local.

    Tied weights are stored once. Names are those of the plain module, whatever wrappers of `torch.compile` and of
    data parallelism are around it or inside. The module is not changed.

    Args:
        module: on any device.
        path: a file that ends with `.safetensors`, or a folder, for `model.safetensors` in it.
    Returns:
        The file.
    Raises:
        CheckpointError: a value can't be stored; names it and its type. Nothing is written then.
    """
    state = module.state_dict()
    names = plain_names(module, state)
    return write_weights({names[name]: value for name, value in state.items()}, path)


def write_weights(state: Mapping[str, Any], path: str | Path) -> Path:
    """As `save_weights`, from a state dict with plain names."""
    file = weights_file(path)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in state.items() if name not in tensors}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    for name, value in extra.items():
        check_json(name, value)
    aliases = tied_names(tensors)
    metadata = {"format": "pt", **aliases}
    if extra:
        metadata[_EXTRA] = json.dumps(extra)
    stored = separate({name: tensor for name, tensor in tensors.items() if name not in aliases})
    with whole_file(file) as temporary:
        save_file(stored, temporary, metadata=metadata)
    return file


def load_weights(module: nn.Module, path: str | Path, *, strict: bool = True) -> LoadReport:
    """Copy weights from a file into a module, in place: tied weights stay tied, views stay views. Local.

    Args:
        module: plain or wrapped, on any device; its number formats are kept.
        path: a safetensors file, or a folder with `model.safetensors`.
        strict: raise when something doesn't fit. Otherwise what fits is loaded, and the rest is in the report.
    Returns:
        What didn't fit.
    Raises:
        CheckpointError: there is no such file, it is no safetensors file, weights of the module are on the meta device,
            or, with `strict`, something doesn't fit. Shapes are compared before anything is loaded.
    """
    file = _existing(path)
    saved, aliases = read_weights(file)
    own = module.state_dict()
    plain = plain_names(module, own)
    _check_materialised(own, file)
    own_name = {plain_name: name for name, plain_name in plain.items()}
    ties = tied_names({plain[name]: value for name, value in own.items() if isinstance(value, Tensor)})
    _fill_ties(saved, ties, aliases, own_name)
    mismatched = _mismatched({plain[name]: value for name, value in own.items()}, saved, ties)
    if mismatched and strict:
        missing = sorted(own_name.keys() - saved.keys())
        _refuse(LoadReport(tuple(missing), tuple(sorted(saved.keys() - own_name.keys())), mismatched), module, file)
    fitting = {own_name.get(name, name): value for name, value in saved.items() if name not in mismatched}
    # torch's own loading runs the hooks by which modules read older layouts, so its answer counts.
    answer = module.load_state_dict(fitting, strict=False)
    missing = [plain.get(name, name) for name in answer.missing_keys]
    report = LoadReport(tuple(n for n in missing if n not in mismatched), tuple(answer.unexpected_keys), mismatched)
    if report and strict:
        _refuse(report, module, file)
    return report


def read_weights(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The entries of a weights file by their plain names, and for each tied name that was left out the stored one.

    Raises:
        CheckpointError: there is no such file, or it is no safetensors file.
    """
    file = _existing(path)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
            entries: dict[str, Any] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{str(file)!r} can't be read as safetensors ({error}). Expected a whole file written by save_weights "
            "or by another safetensors writer; pickled weights (.bin, .pt, .ckpt) are not opened."
        ) from error
    metadata.pop("format", None)
    entries |= json.loads(metadata.pop(_EXTRA, "{}"))
    return entries, {alias: name for alias, name in metadata.items() if name in entries and alias not in entries}


def _fill_ties(
    saved: dict[str, Any], ties: Mapping[str, str], aliases: Mapping[str, str], own: Mapping[str, str]
) -> None:
    """Give each name that the module has the value that its tied name has in the file, whichever of them was stored."""
    for alias, name in aliases.items():
        if alias in own:
            saved[alias] = saved[name]
    for alias, name in ties.items():
        if name not in saved and alias in saved:
            saved[name] = saved[alias]
    for alias, name in ties.items():
        if alias not in saved and name in saved:
            saved[alias] = saved[name]


def _mismatched(own: Mapping[str, Any], saved: Mapping[str, Any], ties: Mapping[str, str]) -> tuple[str, ...]:
    found = []
    for name, value in saved.items():
        mine = own.get(name)
        if not isinstance(mine, Tensor) or not isinstance(value, Tensor):
            continue
        differs_from_tie = name in ties and ties[name] in saved and not torch.equal(value, saved[ties[name]])
        if (not is_lazy(mine) and mine.shape != value.shape) or differs_from_tie:
            found.append(name)
    return tuple(found)


def _refuse(report: LoadReport, module: nn.Module, file: Path) -> None:
    raise CheckpointError(
        f"{str(file)!r} does not fit {type(module).__name__}: {report}. "
        "Build the module as it was when it was saved, or load with strict=False to take what fits."
    )


def _check_materialised(own: Mapping[str, Any], file: Path) -> None:
    on_meta = [name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta]
    if on_meta:
        raise CheckpointError(
            f"{str(file)!r} can't be loaded into weights without memory (device meta): {_listed(on_meta)}. "
            "Call module.to_empty(device=...) first."
        )


def weights_file(path: str | Path) -> Path:
    """The file that `save_weights` writes: the path, or `model.safetensors` in the folder that it names. Local."""
    given = Path(path)
    return given if given.suffix == ".safetensors" else given / FILE_NAME


def _existing(path: str | Path) -> Path:
    given = Path(path)
    file = given / FILE_NAME if given.is_dir() else given
    if not file.is_file():
        folder = file.parent
        beside = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        raise CheckpointError(f"{str(file)!r} does not exist. In its folder: {_listed(beside) or 'nothing'}.")
    return file


def _listed(names: tuple[str, ...] | list[str]) -> str:
    more = f", and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
