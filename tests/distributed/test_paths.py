"""Names that are free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loopwright.distributed.paths import free_path, prove_writable


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


def test_a_folder_that_can_be_written_to_is_left_as_it_was(tmp_path: Path) -> None:
    prove_writable(tmp_path)
    prove_writable(tmp_path / "not" / "made")
    prove_writable(Path("relative"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/sub", "link", "link/sub", "x" * 300])
def test_what_can_not_be_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(OSError, match=r"Not a directory|No such file|too long"):
        prove_writable(tmp_path / name)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "link"]
