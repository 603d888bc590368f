"""What a user gets from `pip install`: the wheel, built from a copy of the sources, holds the package alone."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from loopwright import __version__

ROOMS = ["trainer", "callbacks", "trackers", "inference", "strategies", "checkpoint", "data", "distributed", "recipes"]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def sources(repository: Path) -> list[str]:
    """The files that git knows or would know."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (repository / name).is_file()]


@pytest.fixture(scope="module")
def wheel(repository: Path, sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel. Built in a copy, since a `build` folder left from before would be packed as well."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("out")
    for name in sources:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((repository / name).read_bytes())
    command = [sys.executable, "-c", BUILD, str(out)]
    run = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return zipfile.ZipFile(out / run.stdout.splitlines()[-1])


def in_package(name: str) -> str:
    """Where a source file stands in the wheel."""
    return name if name.startswith("loopwright/") else f"loopwright/{name}"


def test_wheel_holds_every_source_of_every_room(wheel: zipfile.ZipFile, sources: list[str]) -> None:
    code = {in_package(name) for name in sources if name.split("/")[0] in (*ROOMS, "loopwright")}
    python = {name for name in code if name.endswith(".py")}
    assert {f"loopwright/{room}/__init__.py" for room in ROOMS} <= python
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert python == {name for name in packed if name.endswith(".py")}
    assert "loopwright/py.typed" in packed
    recipe_files = {name for name in code if name.startswith("loopwright/recipes/") and name.endswith((".yaml", ".md"))}
    assert packed == {*python, *recipe_files, "loopwright/py.typed"}
    assert any(name.endswith(".yaml") for name in recipe_files)


def test_wheel_names_its_version_command_and_extras(wheel: zipfile.ZipFile, repository: Path) -> None:
    info = f"loopwright-{__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "loopwright = loopwright.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    metadata = wheel.read(f"{info}/METADATA").decode().splitlines()
    assert f"Version: {__version__}" in metadata
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"Provides-Extra: {extra}" for extra in extras} <= set(metadata)
