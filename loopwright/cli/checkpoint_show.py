"""`loopwright checkpoint show`: what a checkpoint holds, in text or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.lineage import Ancestor, ancestors
from ..checkpoint.manifest import FILE_NAME
from ..checkpoint.others import model_names, open_weights
from ..checkpoint.outline import outline
from ..checkpoint.pickled import PickledWeights
from ..checkpoint.reading import Checkpoint, open_checkpoint
from ..checkpoint.shards import listed
from ..checkpoint.sources import WeightSource
from ..checkpoint.space import readable
from ..distributed.errors import ConfigError

_LABEL_WIDTH = 13
_SHOWN = (str, int, float, bool, type(None))


def show(path: str, *, tree: str | None = None, as_json: bool = False) -> None:
    """Print what is at a path.

    Args:
        path: a checkpoint, or another library's weights.
        tree: the name of one of its states, to list its values.
        as_json: print JSON.
    Raises:
        CheckpointError: there is none, or files of it are missing or have other sizes.
        ConfigError: a state was asked for of what has none.
    """
    folder = Path(path)
    if _is_others(folder):
        if tree is not None:
            raise ConfigError(f"--tree={tree}: {path!r} is no checkpoint of Loopwright, and has no states.")
        _show_weights(folder, as_json=as_json)
        return
    checkpoint = open_checkpoint(folder, verify="sizes")
    if tree is not None:
        _show_tree(checkpoint, tree, as_json=as_json)
    elif as_json:
        print(json.dumps(_as_json(checkpoint), indent=2))
    else:
        print("\n".join(_describe(checkpoint)))


def _is_others(path: Path) -> bool:
    """Whether there are weights, and no checkpoint of ours."""
    if path.is_dir():
        return not (path / FILE_NAME).is_file() and bool(model_names(path))
    return path.is_file()


def _describe(checkpoint: Checkpoint) -> Iterator[str]:
    manifest = checkpoint.manifest
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    run = manifest.run
    yield _line("checkpoint", checkpoint.path)
    yield _line("kind", f"{manifest.kind}, number {manifest.sequence} of its folder, format {manifest.format_version}")
    yield _line("saved", f"{manifest.created} by {versions}")
    yield _line("run", ", ".join(f"{name} {value}" for name, value in run.items()) or "unknown")
    yield _line("progress", ", ".join(f"{name} {_number(value)}" for name, value in manifest.progress.items()))
    yield _line("processes", f"{manifest.world_size}, {manifest.strategy or 'strategy unknown'}")
    yield from _block("scores", [_score(each) for each in manifest.scores])
    yield from _block("inexact", manifest.inexact)
    yield from _block("models", [f"{name}: {text}" for name, text in _models(checkpoint).items()])
    yield _line("states", ", ".join(checkpoint.tree_names) or "none")
    width = max((len(name) for name in manifest.files), default=0)
    files = [f"{name:<{width}}  {readable(entry.size_bytes):>9}" for name, entry in manifest.files.items()]
    yield from _block("files", files)
    yield from _block("not of it", checkpoint.unlisted_files)
    yield from _block("lineage", [line for each in ancestors(checkpoint) for line in _ancestor(each)])


def _score(score: Mapping[str, Any]) -> str:
    return f"{score['name']} {_number(score['value'])} ({score['mode']} is best)"


def _ancestor(ancestor: Ancestor) -> Iterator[str]:
    said = ancestor.said
    run = said.get("run") or {}
    place = f"at {ancestor.path}" if ancestor.path is not None else "no longer there"
    known = {"run": run.get("name"), "number": said.get("sequence")}
    known |= {name: said.get(name) for name in ("step", "epoch", "batch")}
    facts = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    yield f"resumed from {said.get('checkpoint')} ({facts}), {place}"
    for change in ancestor.changes:
        yield f"  {change}"


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    line = ancestors(checkpoint)
    return {
        "path": str(checkpoint.path),
        "manifest": json.loads((checkpoint.path / FILE_NAME).read_bytes()),
        "models": _models(checkpoint),
        "states": list(checkpoint.tree_names),
        "unlisted_files": list(checkpoint.unlisted_files),
        "lineage": [{**each.said, "path": None if each.path is None else str(each.path)} for each in line],
    }


def _show_tree(checkpoint: Checkpoint, tree: str, *, as_json: bool) -> None:
    lines = outline(checkpoint, tree)
    if as_json:
        print(json.dumps([{"path": path, "value": value} for path, value in lines], indent=2))
        return
    width = min(max((len(path) for path, _ in lines), default=0), 60)
    for path, value in lines:
        print(f"{path:<{width}}  {value}")


def _models(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: _summary(checkpoint.weights(name)) for name in checkpoint.weights_names}


def _show_weights(path: Path, *, as_json: bool) -> None:
    names = (model_names(path) if path.is_dir() else []) or ["model"]
    sources = {name: open_weights(path, name) for name in names}
    rest = {name: source.rest for name, source in sources.items() if isinstance(source, PickledWeights) and source.rest}
    models = {name: _summary(source) for name, source in sources.items()}
    if as_json:
        told = {name: dict(_told(entries)) for name, entries in rest.items()}
        print(json.dumps({"path": str(path), "models": models, "beside": told}, indent=2))
        return
    print(_line("weights", path))
    print("\n".join(_block("models", [f"{name}: {text}" for name, text in models.items()])))
    for entries in rest.values():
        print("\n".join(_block("beside", [f"{name}: {value}" for name, value in _told(entries)])))


def _told(entries: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is beside the weights: small values as they are, of the others what they are."""
    for name, value in entries.items():
        if isinstance(value, _SHOWN):
            yield name, _short(str(value))
        elif isinstance(value, Mapping) and "hyper_parameters" in name:
            for key, each in value.items():
                yield f"{name}.{key}", _short(str(each) if isinstance(each, _SHOWN) else repr(each))
        else:
            size = f" of {len(value)}" if hasattr(value, "__len__") else ""
            yield name, f"a {type(value).__name__}{size}"


def _summary(source: WeightSource) -> str:
    shapes = [shape for name in source if (shape := source.shape_of(name)) is not None]
    dtypes = Counter(
        str(source.dtype_of(name)).removeprefix("torch.") for name in source if source.shape_of(name) is not None
    )
    elements = sum(shape.numel() for shape in shapes)
    kinds = ", ".join(f"{count} {name}" if len(dtypes) > 1 else name for name, count in dtypes.most_common())
    tied = f", {len(source.aliases)} tied: {listed(list(source.aliases))}" if source.aliases else ""
    return f"{len(shapes)} tensors, {elements:,} elements, {kinds or 'nothing'}{tied}"


def _line(label: str, value: object) -> str:
    return f"{label:<{_LABEL_WIDTH}}{value}"


def _block(label: str, lines: Any) -> Iterator[str]:
    """A line for each, the label before the first; nothing where there are none."""
    for index, line in enumerate(lines):
        yield _line(label if index == 0 else "", line)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
