"""A module's weights in safetensors files, as the Hugging Face libraries lay them out.

One file, or several of a limited size with an index (`NAME-00001-of-00002.safetensors`, `NAME.safetensors.index.json`).
Each tensor is stored once, under its plain name. A file's metadata has `format: pt`; for each tied weight that was
left out the name under which it is stored; and, where the module has state that is no tensor (`get_extra_state`), that
as JSON under `loopwright.extra`, in the layout of `tree`. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed.atomic import whole_file
from ..distributed.errors import CheckpointError
from .entries import tied_names
from .filling import fill_in_place
from .hashing import NewFiles
from .names import plain_names
from .others import open_weights
from .shards import SUFFIX, listed, plan_weights, remove_stale, retire_index
from .sources import WeightSource, below, fitting

__all__ = [
    "LoadReport",
    "compare_weights",
    "load_weights",
    "save_weights",
    "weights_file",
    "write_weights",
]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What didn't fit when weights were loaded; all empty when everything did."""

    missing: tuple[str, ...] = ()
    """In the module and not in the file; they keep their values."""
    unexpected: tuple[str, ...] = ()
    """In the file and not in the module; they are left out."""
    mismatched: tuple[str, ...] = ()
    """In both with different shapes, or with two values for tied weights; they keep their values."""
    differences: Mapping[str, str] = field(default_factory=dict)
    """For each of the mismatched, how the saved one and the module's differ."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        if not self:
            return "everything fits"
        mismatched = [f"{name} ({self.differences.get(name, 'it differs')})" for name in self.mismatched]
        groups = {"missing": self.missing, "unexpected": self.unexpected, "mismatched": mismatched}
        return "; ".join(f"{word} ({len(names)}): {listed(names)}" for word, names in groups.items() if names)


def save_weights(module: nn.Module, path: str | Path, *, max_shard_size: int | str | None = None) -> Path:
    """Write a module's weights and buffers, whole or not at all. Local.

    Tied weights are stored once. Names are those of the plain module, whatever wrappers of `torch.compile` and of
    data parallelism are around it or inside. The module is not changed.

    Args:
        module: on any device.
        path: a file that ends with `.safetensors`, or a folder, for `model.safetensors` in it.
        max_shard_size: bytes, or text such as "5GB": larger weights are spread over files of at most that size, and an
            index; a single weight that is larger gets a file of its own. None: one file.
    Returns:
        The file, or the index. Files of an earlier save under that name which this one does not have are removed.
    Raises:
        CheckpointError: a value can't be stored; names it and its type. Nothing is written then.
        ConfigError: the size is none.
    """
    state = module.state_dict()
    names = plain_names(module, state)
    return write_weights({names[name]: value for name, value in state.items()}, path, max_shard_size=max_shard_size)


def write_weights(
    state: Mapping[str, Any],
    path: str | Path,
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """As `save_weights`, from a state dict with plain names, and with further texts in the files' metadata."""
    file = weights_file(path)
    base = file.name.removesuffix(SUFFIX)
    planned = plan_weights(state, base, max_shard_size)
    for own in planned.metadata.values():
        own |= {name: text for name, text in (metadata or {}).items() if name not in own}
    with ExitStack() as stack:
        # The contexts end from the last to the first: the index, which is read first, appears last.
        places = {name: stack.enter_context(whole_file(file.parent / name)) for name in reversed(planned.names())}
        with NewFiles() as files:
            planned.write(files, places)
        retire_index(file.parent, planned)
    remove_stale(file.parent, planned)
    return file.parent / planned.names()[-1]


def load_weights(
    module: nn.Module, path: str | Path, *, strict: bool = True, base: str = "model", prefix: str = ""
) -> LoadReport:
    """Copy weights from files into a module, in place: tied weights stay tied, views stay views. Local.

    Where modules load in torch's own way, the values go from the file straight into the weights. Modules that read
    their state by code of their own get tensors to read from, which take memory until they are loaded.

    Args:
        module: plain or wrapped, on any device; its number formats are kept.
        path: a safetensors file, an index of several, or a folder with `model.safetensors` or its index. Also what
            other libraries wrote: Hugging Face's and Accelerate's folders with `pytorch_model.bin` or its index,
            Lightning's `.ckpt`, a state dict in a `.bin`, `.pt` or `.pth`; these are read without running code that
            they name. Names of wrappers (`module.`, `_orig_mod.`) are matched with those of the module.
        strict: raise when something doesn't fit. Otherwise what fits is loaded, and the rest is in the report.
        base: in a folder, which model: `model`, `model_1`, ...
        prefix: take the weights alone whose names begin with this, and take it off: `"model."` for a `LightningModule`
            that holds the module as `self.model`.
    Returns:
        What didn't fit.
    Raises:
        CheckpointError: there is no such file, it is damaged, it is a pickle that names other classes, weights of the
            module are on the meta device, or, with `strict`, something doesn't fit. Shapes are compared before anything
            is loaded.
    """
    match = _Match(module, below(open_weights(path, base), prefix))
    _check_materialised(match.own, match.saved.path)
    if match.mismatched and strict:
        _refuse(match.report(), module, match.saved)
    values = fill_in_place(module, match.own, match.fitting(), match.saved, match.names_of_ties())
    # torch's own loading runs the hooks by which modules read older layouts, so its answer counts.
    answer = module.load_state_dict(values, strict=False)
    missing = [match.plain.get(name, name) for name in answer.missing_keys]
    missing = [name for name in missing if name not in match.mismatched]
    report = LoadReport(tuple(missing), tuple(answer.unexpected_keys), tuple(match.mismatched), match.mismatched)
    if report and strict:
        _refuse(report, module, match.saved)
    return report


def compare_weights(module: nn.Module, path: str | Path, *, base: str = "model") -> LoadReport:
    """What would not fit if weights were loaded, by names and shapes; nothing is changed. Local.

    Modules that read older layouts by hooks of their own may take more than this says.

    Args:
        module: as `load_weights` takes it.
        path: as `load_weights` takes it.
        base: as `load_weights` takes it.
    Raises:
        CheckpointError: there is no such file, or it can't be read.
    """
    return _Match(module, open_weights(path, base)).report()


def weights_file(path: str | Path) -> Path:
    """The file that `save_weights` writes: the path, or `model.safetensors` in the folder that it names. Local."""
    given = Path(path)
    return given if given.suffix == SUFFIX else given / f"model{SUFFIX}"


class _Match:
    """Which entry of the files belongs to which of a module."""

    def __init__(self, module: nn.Module, saved: WeightSource) -> None:
        self.own: dict[str, Any] = module.state_dict(keep_vars=True)
        self.plain = plain_names(module, self.own)
        self._own_name = {plain: name for name, plain in self.plain.items()}
        self._mine = {self.plain[name]: value for name, value in self.own.items()}
        self._ties = tied_names({name: value for name, value in self._mine.items() if isinstance(value, Tensor)})
        self.saved = fitting(saved, self._mine)
        """By the module's plain names, where they are those of wrappers in the files."""
        self._sources = self._find_sources()
        differences = {name: self._difference(name, source) for name, source in self._sources.items()}
        self.mismatched = {name: difference for name, difference in differences.items() if difference is not None}
        """By plain names, how shapes differ, or that tied weights have two values in the files."""

    def report(self) -> LoadReport:
        """What does not fit, by names and shapes."""
        missing = tuple(name for name in self._mine if name not in self._sources)
        unexpected = tuple(name for name in self._sources if name not in self._mine)
        return LoadReport(missing, unexpected, tuple(self.mismatched), self.mismatched)

    def fitting(self) -> dict[str, str]:
        """For each name of the module's own, and for each that it lacks, the name in the files."""
        sources = self._sources.items()
        return {self._own_name.get(name, name): source for name, source in sources if name not in self.mismatched}

    def names_of_ties(self) -> set[str]:
        """The module's own names of weights that have another name before."""
        return {self._own_name[name] for name in self._ties}

    def _find_sources(self) -> dict[str, str]:
        """For each name the one to read it from: its own, or that of a tied weight, whichever of them was stored."""
        sources = {name: name for name in self.saved}
        sources |= {alias: name for alias, name in self.saved.aliases.items() if alias in self._mine}
        for alias, name in self._ties.items():
            if name not in sources and alias in sources:
                sources[name] = sources[alias]
        for alias, name in self._ties.items():
            if alias not in sources and name in sources:
                sources[alias] = sources[name]
        return sources

    def _difference(self, name: str, source: str) -> str | None:
        mine, shape = self._mine.get(name), self.saved.shape_of(source)
        if not isinstance(mine, Tensor) or shape is None:
            return None
        if not is_lazy(mine) and mine.shape != shape:
            return f"saved as {tuple(shape)}, here {tuple(mine.shape)}"
        tied = self._sources.get(self._ties.get(name, name), source)
        if tied != source and not self.saved.are_equal(source, tied):
            return f"tied to {self._ties[name]} here, saved with another value"
        return None


def _refuse(report: LoadReport, module: nn.Module, saved: WeightSource) -> None:
    prefix = _prefix_of(report, {*report.unexpected, *saved.aliases})
    remedy = "Build the module as it was when it was saved, or load with strict=False to take what fits."
    if prefix is not None:
        remedy = f"The names of these weights begin with {prefix!r} in the file: give prefix={prefix!r}."
    raise CheckpointError(f"{str(saved.path)!r} does not fit {type(module).__name__}: {report}. {remedy}")


def _prefix_of(report: LoadReport, unexpected: set[str]) -> str | None:
    """What stands before all missing names among the unexpected ones, if there is such a thing."""
    for name in sorted(unexpected) if report.missing else ():
        prefix = name.removesuffix(report.missing[0])
        if prefix.endswith(".") and prefix != name and all(f"{prefix}{each}" in unexpected for each in report.missing):
            return prefix
    return None


def _check_materialised(own: Mapping[str, Any], file: Path) -> None:
    on_meta = [name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta]
    if on_meta:
        raise CheckpointError(
            f"{str(file)!r} can't be loaded into weights without memory (device meta): {listed(on_meta)}. "
            "Call module.to_empty(device=...) first."
        )
