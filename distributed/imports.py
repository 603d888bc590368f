"""Optional packages: imported when they are needed, with one error that names the pip command."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from .errors import MissingDependencyError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: the dotted name to import.
        extra: the extra in pyproject.toml that installs it.
        purpose: what asked for it, for the error's text.
    Raises:
        MissingDependencyError: when it, or something that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs the package {module.partition('.')[0]!r}, which can't be imported ({error}). "
            f"Install it with: pip install 'loopwright[{extra}]'"
        ) from error


def is_installed(module: str) -> bool:
    """Whether a top-level module could be imported, without importing it. A mere folder of that name is none."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
