"""The nearest right key for one that is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], path: str) -> str:
    """A sentence that names the key that was probably meant, with its full path, and all that are accepted."""
    names = list(known)
    accepted = f"Accepted here: {', '.join(names)}." if names else "Nothing is accepted here."
    near = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {'.'.join(filter(None, (path, near[0])))}? {accepted}" if near else accepted


def nearest_anywhere(name: str, keys: Iterable[str], paths: Iterable[str]) -> str:
    """As `nearest`, for a key at the top of a file: also one that stands in a wrong place is found."""
    leaves = {path.rpartition(".")[2]: path for path in paths}
    near = difflib.get_close_matches(name, [*keys, *leaves], n=1)
    accepted = f"Accepted here: {', '.join(keys)}."
    return f"Did you mean {leaves.get(near[0], near[0])}? {accepted}" if near else accepted
