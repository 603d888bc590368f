"""The classes that a file names: where they are looked up, and what is said when they are not there."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import __all__ as PUBLIC_NAMES
from ..distributed.errors import ConfigError, suggest


@contextmanager
def python_path(folders: Sequence[Path]) -> Iterator[None]:
    """A context in which modules are found in these folders as well.

    The file's own folder comes first, as it does for a script; the working directory comes last. Modules that were
    imported from these folders are forgotten afterwards: `task` next to another file is another module.
    """
    before_path, before_modules = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(folder) for folder in folders]
    sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before_path
        for name in set(sys.modules) - before_modules:
            if name.partition(".")[0] not in before_modules and _folder_of(sys.modules[name], folders) is not None:
                del sys.modules[name]


def is_public_name(path: str) -> bool:
    """Whether a class path is one of Loopwright's public names alone."""
    return path in PUBLIC_NAMES


def full_class_path(path: str) -> str:
    """A public name of Loopwright with its package in front; any other path as it is."""
    return f"loopwright.{path}" if is_public_name(path) else path


def find_class(path: str) -> Callable[..., Any]:
    """The class or function at a dotted path.

    Raises:
        ConfigError: there is none, or it belongs to Python itself; the names that exist are listed.
    """
    path = full_class_path(path)
    module, _, name = path.rpartition(".")
    if not module:
        hint = suggest(path, PUBLIC_NAMES, is_listed=False)
        message = (
            f"class_path {path!r} is no public name of loopwright. A class of your own is named with its module, such "
            f"as task.{path} for a file task.py next to the YAML file. {hint}"
        )
        raise ConfigError(message.rstrip())
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"class_path {path!r} belongs to Python itself. Name a class or function made for this.")
    owner = _find_owner(module)
    found = getattr(owner, name, None)
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        public = [key for key, value in vars(owner).items() if inspect.isclass(value) or inspect.isfunction(value)]
        raise ConfigError(f"class_path {path!r}: {module} has no class or function {name!r}. {suggest(name, public)}")
    return found


def folders_used(class_paths: Sequence[str], folders: Sequence[Path]) -> list[Path]:
    """Those of the folders, or the working directory, that the modules of these class paths were imported from."""
    used: list[Path] = []
    for top in {path.partition(".")[0]: None for path in class_paths}:
        module = None if top == "loopwright" else sys.modules.get(top)
        folder = None if module is None else _folder_of(module, [*folders, Path.cwd()])
        if folder is not None and folder not in used:
            used.append(folder)
    return used


def _find_owner(path: str) -> Any:
    """The module at a path, or the class inside a module."""
    try:
        module: Any = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something that it imports itself
        parent, _, name = path.rpartition(".")
        owner = _find_owner(parent) if parent else None
        if owner is None or not hasattr(owner, name):
            raise ConfigError(
                f"class_path: there is no module {path!r} in the file's folder, in the working directory or among "
                "the installed packages. Check the spelling and the place of the YAML file."
            ) from error
        return getattr(owner, name)
    return module


def _folder_of(module: ModuleType, folders: Sequence[Path]) -> Path | None:
    """The folder in which a module, or the package that it belongs to, lies as a direct child."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    origin = getattr(top, "__file__", None)
    places = [Path(origin)] if origin else [Path(place) for place in getattr(top, "__path__", ())]
    parents = {place.parent.parent if place.name == "__init__.py" else place.parent for place in places}
    return next((folder for folder in folders if folder in parents), None)
