"""All that the sources say, in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..distributed.errors import ConfigError
from .sources import Source, Tree, merge, read_environment, read_file, read_flags
from .text import is_null


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file, the environment and the flags say, before anything is imported."""

    file: Path
    sources: tuple[Source, ...]
    """From the weakest to the strongest."""
    tree: Tree
    """All of them in one."""

    @classmethod
    def read(cls, file: Path, flags: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> Settings:
        """Read the three sources.

        Raises:
            ConfigError: the file can't be read, or a variable has an unknown key.
        """
        sources = (read_file(file), read_environment(environment), read_flags(flags))
        tree: Tree = {}
        for source in sources:
            tree = merge(tree, source.tree)
        return cls(file, sources, tree)

    @property
    def folders(self) -> list[Path]:
        """Where class paths are looked up before the installed packages: the file's folder, then `python_path`."""
        return [self.file.resolve().parent, *self.python_path]

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
            given = [source.label for source in self.sources if source.gives(keys[:length])]
            if given:
                return given[-1]
        return str(self.file)
