"""Names that are free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.distributed.paths import free_path


@pytest.mark.parametrize(
    ("taken", "options", "name"),
    [
        ([], {}, "a.b.txt"),
        (["a.b.txt"], {}, "a.b-2.txt"),
        (["a.b.txt", "a.b-2.txt", "a.b-4.txt"], {}, "a.b-3.txt"),
        (["a.b-2.txt"], {}, "a.b.txt"),
        (["a.b.txt"], {"mark": "-v"}, "a.b-v2.txt"),
        (["a.b.txt"], {"suffix": ""}, "a.b.txt-2"),
    ],
)
def test_the_first_that_is_free(tmp_path: Path, taken: list[str], options: dict[str, Any], name: str) -> None:
    for other in taken:
        (tmp_path / other).touch()
    assert free_path(tmp_path / "a.b.txt", **options) == tmp_path / name
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(taken)


def test_what_is_taken_may_be_said(tmp_path: Path) -> None:
    used = {tmp_path / "run", tmp_path / "run-2"}
    assert free_path(tmp_path / "run", is_taken=used.__contains__) == tmp_path / "run-3"
