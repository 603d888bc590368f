"""Names that a backend does not take: how they are stored there, and how they are read back."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

# An escaped character is its code point in hexadecimal: "@" is "-x40-". No digits at all stand for the empty name.
_ESCAPED = re.compile(r"-x([0-9a-f]*)-")
_DOT_SEGMENT = re.compile(r"(?<![^/])\.{1,2}(?![^/])|^\.\.")
_DIGEST_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class NameRule:
    """Which names a backend takes. `apply` gives each name one that it takes.

    The stored name is a function of the name alone, the same in every run; two names never share one; a name that the
    backend takes is stored as it is, unless it looks like a stored one ("a-x40-b").
    """

    accepted: str = r"(?s:.)"
    """A regular expression of one character: those that the backend takes."""
    reserved: frozenset[str] = frozenset()
    """Whole names that the backend uses for itself."""
    is_path: bool = False
    """Whether names must be normal paths: no empty, "." or ".." part, no slash at an end."""
    max_length: int | None = None
    """The most characters of a name; a longer one ends in a digest of the whole. None where there is no limit."""

    def apply(self, name: str) -> str:
        """The name under which `name` is stored."""
        return _stored_name(self, name)

    def _shorten(self, escaped: str, name: str) -> str:
        if self.max_length is None or len(escaped) <= self.max_length:
            return escaped
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
        return f"{escaped[: self.max_length - _DIGEST_LENGTH - 1]}-{digest}"

    def _escape(self, name: str) -> str:
        if not name:
            return "-x-" if self.is_path or name in self.reserved else name
        refused = self._refused(name)
        stored = ""
        # From the end, because whether a "-" would be read as the start of an escape depends on what follows it.
        for index in range(len(name) - 1, -1, -1):
            character = name[index]
            if index in refused or _ESCAPED.match(character + stored):
                character = f"-x{ord(character):x}-"
            stored = character + stored
        return stored

    def _refused(self, name: str) -> set[int]:
        """The indices of the characters that can't stay."""
        accepted = re.compile(self.accepted)
        refused = {index for index, character in enumerate(name) if not accepted.fullmatch(character)}
        if name in self.reserved:
            refused.add(0)
        if self.is_path:
            refused |= {match.start() for match in _DOT_SEGMENT.finditer(name)}
            refused |= {i for i, c in enumerate(name) if c == "/" and (i in (0, len(name) - 1) or name[i - 1] == "/")}
        return refused


@functools.lru_cache(maxsize=4096)
def _stored_name(rule: NameRule, name: str) -> str:
    return rule._shorten(rule._escape(name), name)


def original_name(stored: str) -> str:
    """The name that `NameRule.apply` was given, from what it returned; a name that was shortened stays short."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)) if match[1] else "", stored)
