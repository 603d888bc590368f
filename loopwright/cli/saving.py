"""The resolved configuration in the run's folder."""

from __future__ import annotations

import itertools
from pathlib import Path

from ..checkpoint.atomic import whole_file


def save_config(text: str, directory: Path) -> Path:
    """Write `config.yaml`, whole or not at all, and return its path.

    A file of another run is never overwritten: where one with other content stands, this one is `config-2.yaml`, and
    so on; where one with the same content stands, nothing is written.
    """
    for number in itertools.count(1):
        file = directory / ("config.yaml" if number == 1 else f"config-{number}.yaml")
        if not file.exists():
            with whole_file(file) as temporary:
                temporary.write_text(text, encoding="utf-8")
            return file
        if file.read_text(encoding="utf-8") == text:
            return file
    raise AssertionError("count never ends")
