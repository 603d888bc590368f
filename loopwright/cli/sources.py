"""Where a run's configuration comes from: the file, the environment, the flags; each wins over the ones before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..distributed.environment import KEY_PREFIX
from ..distributed.errors import ConfigError, suggest
from .scalars import Plain, TextMapping, is_null, read_argument, read_yaml

KEYS = ("task", "data", "trainer", "resume_from", "python_path")
"""The keys of a file."""

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """What one place gives."""

    label: str
    """What to call the place in an error: a file's name, "the environment", "the command line"."""
    tree: Tree = field(default_factory=dict)
    """Nested mappings and lists of texts."""

    def gives(self, path: Sequence[str]) -> bool:
        """Whether a key comes from here."""
        node: Any = self.tree
        for key in path:
            if isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and (key in node or f"{key}+" in node):
                node = node[key if key in node else f"{key}+"]
            else:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Sources:
    """What the file, the environment and the flags say, before anything is imported."""

    file: Path
    ranked: tuple[Source, ...]
    """From the weakest to the strongest."""
    tree: Tree
    """All of them in one."""

    @classmethod
    def read(cls, file: Path, flags: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> Sources:
        """Read the three sources.

        Raises:
            ConfigError: the file can't be read, or a variable has an unknown key.
        """
        ranked = (read_file(file), read_environment(environment), read_flags(flags))
        tree: Tree = {}
        for source in ranked:
            tree = merge(tree, source.tree)
        return cls(file, ranked, tree)

    @property
    def folders(self) -> list[Path]:
        """Where class paths are looked up before the installed packages: the file's folder, then `python_path`."""
        return [self.file.resolve().parent, *self.python_path]

    @property
    def resume_from(self) -> str | None:
        """The checkpoint that `fit` goes on from: "latest", "best" or a path; None: it begins anew.

        Raises:
            ConfigError: the value is no text.
        """
        given = self.tree.get("resume_from")
        if given is None or is_null(given):
            return None
        if not isinstance(given, (str, Plain)) or not str(given):
            raise ConfigError(
                f"resume_from (in {self.origin_of('resume_from')}): got {given!r}. Expected 'latest', 'best', or the "
                "path of a checkpoint."
            )
        return str(given)

    @property
    def python_path(self) -> list[Path]:
        """The folders of the key `python_path`, which are relative to the file's.

        Raises:
            ConfigError: it holds something else than paths.
        """
        given = self.tree.get("python_path", [])
        folders = given if isinstance(given, list) else [] if is_null(given) else [given]
        for folder in folders:
            if not isinstance(folder, str):
                origin = self.origin_of("python_path")
                raise ConfigError(
                    f"python_path (in {origin}): got {folder!r}. Expected a folder, or a list of folders."
                )
        return [(self.file.resolve().parent / folder).resolve() for folder in folders]

    def origin_of(self, path: str) -> str:
        """The strongest source that gives a key, or else what it stands in; for errors."""
        keys = path.split(".")
        for length in range(len(keys), 0, -1):
            given = [source.label for source in self.ranked if source.gives(keys[:length])]
            if given:
                return given[-1]
        return str(self.file)


def read_file(file: Path) -> Source:
    """The settings in a YAML file.

    Raises:
        ConfigError: it can't be read, is not YAML, or is not a mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read ({error}). Expected the path of a YAML file.") from error
    tree = read_yaml(text, str(file))
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is not a mapping. Expected a YAML file with the keys {', '.join(KEYS)}.")
    return Source(str(file), tree)


def read_environment(environment: Mapping[str, str]) -> Source:
    """The settings in variables such as `LOOPWRIGHT_TRAINER__MAX_EPOCHS`: one `__` for each dot.

    Raises:
        ConfigError: a variable with `__` begins with a key that a file can't have.
    """
    tree: Tree = {}
    for name in sorted(environment):
        path = name.removeprefix(KEY_PREFIX).lower().split("__")
        if not name.startswith(KEY_PREFIX) or (len(path) == 1 and path[0] not in KEYS):
            continue
        if path[0] not in KEYS:
            known = [f"{KEY_PREFIX}{key.upper()}" for key in KEYS]
            raise ConfigError(f"the variable {name} is not known. {suggest(name.partition('__')[0], known)}")
        _put(tree, path, read_argument(environment[name]))
    return Source("the environment", tree)


def read_flags(flags: Sequence[tuple[str, str]]) -> Source:
    """The settings in flags, as pairs of a dotted key and its text. `key+` appends to the list of the other sources."""
    tree: Tree = {}
    for key, text in flags:
        _put(tree, key.split("."), read_argument(text))
    return Source("the command line", tree)


def _put(tree: Tree, path: Sequence[str], value: Any) -> None:
    """Place a value in a tree; what stood there is merged or replaced."""
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    tree.update(merge(tree, nested, is_final=False))


def merge(base: Tree, override: Tree, *, is_final: bool = True) -> Tree:
    """The settings of `base` where `override` says nothing else. Neither is changed.

    Mappings are merged key by key. Another `class_path` starts anew, since its arguments are others. A list is
    replaced, except for `key+`, which appends, and for a mapping of positions, which changes single elements.

    Args:
        is_final: whether `base` has all that `key+` can append to; otherwise it is kept as it is.
    """
    if "class_path" in base and override.get("class_path", base["class_path"]) != base["class_path"]:
        return dict(override)
    merged = dict(base)
    for key, value in override.items():
        if key.endswith("+"):
            target = key.removesuffix("+") if is_final else key
            merged[target] = _as_list(merged.get(target)) + _as_list(value)
        else:
            merged[key] = _merged_value(merged.get(key), value, is_final=is_final)
    return merged


def _merged_value(old: Any, new: Any, *, is_final: bool) -> Any:
    if isinstance(new, Plain) and isinstance(old, dict) and new == old.get("class_path"):
        return old  # the same class, named by its word alone
    if not isinstance(new, dict):
        return new
    if isinstance(old, list) and new and all(key.isdigit() and int(key) < len(old) for key in new):
        items = list(old)
        for position, item in new.items():
            items[int(position)] = _merged_value(items[int(position)], item, is_final=is_final)
        return items
    if isinstance(old, Plain) and not is_null(old) and set(new) == {"init_args"}:
        old = {"class_path": old}  # arguments for a class that was named by its word alone
    if not isinstance(old, dict) and isinstance(new, TextMapping):
        return new
    return merge(old if isinstance(old, dict) else {}, new, is_final=is_final)


def _as_list(value: Any) -> list[Any]:
    if value is None or is_null(value):
        return []
    return list(value) if isinstance(value, list) else [value]
