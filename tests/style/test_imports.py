"""Who may import whom, read from the source: imports for type hints and inside functions count as well."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import loopwright

BELOW_TRAINER = {"callbacks", "trackers", "inference", "strategies", "checkpoint", "data", "distributed"}

# The rooms from the top down, each with the rooms that it may import besides itself. README shows the same table.
ALLOWED = {
    "loopwright": {"recipes", "trainer", *BELOW_TRAINER},
    "recipes": set[str](),  # but the public names, which every user has
    "trainer": BELOW_TRAINER,
    "callbacks": {"trackers", "inference", "strategies", "checkpoint", "data", "distributed"},
    "trackers": {"distributed"},
    "inference": {"checkpoint", "distributed"},
    "strategies": {"checkpoint", "data", "distributed"},
    "checkpoint": {"distributed"},
    "data": {"distributed"},
    "distributed": set[str](),
}
ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("tests", "benchmarks")


@dataclass(frozen=True)
class Import:
    """One name imported by one file: `from module import name`, or `import module`."""

    file: Path
    line: int
    module: str
    name: str | None
    is_relative: bool
    is_eager: bool
    """Runs when the file is imported: not inside a function, not for type checkers alone."""

    def __str__(self) -> str:
        what = f"import {self.module}" if self.name is None else f"from {self.module} import {self.name}"
        return f"{self.file.relative_to(ROOT)}:{self.line}: {what}"


def module_name(file: Path) -> str:
    """The import name of a file of a room: `trainer/task.py` is `loopwright.trainer.task`."""
    parts = [part for part in file.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] in ("loopwright", *OUTSIDE) else ["loopwright", *parts])


def absolute(file: Path, level: int, module: str | None) -> str:
    """The module that `from <dots><module> import ...` in this file means."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package.pop()
    base = package[: len(package) - level + 1]
    return ".".join([*base, *(module.split(".") if module else [])])


def is_for_types(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(node: ast.AST, is_eager: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below, with whether it runs when the file is imported."""
    for child in ast.iter_child_nodes(node):
        eager = is_eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and is_for_types(node.test) and child in node.body:
            eager = False
        yield child, eager
        yield from statements(child, eager)


def imports_of(file: Path, source: str) -> list[Import]:
    """All that a file imports, also by `import_module` with a literal name."""
    found = []
    for node, eager in statements(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            found += [Import(file, line, alias.name, None, False, eager) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = absolute(file, node.level, node.module) if node.level else node.module or ""
            found += [Import(file, line, module, alias.name, node.level > 0, eager) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += by_call(file, line, node)
    return found


def by_call(file: Path, line: int, call: ast.Call) -> list[Import]:
    name = call.args[0] if call.args else None
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return []
    dots = len(name.value) - len(name.value.lstrip("."))
    module = absolute(file, dots, name.value[dots:]) if dots else name.value
    return [Import(file, line, module, None, dots > 0, False)]


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports_in(folder: str) -> list[Import]:
    return [found for file in files_of(folder) for found in imports_of(file, file.read_text())]


def room_of(item: Import) -> str | None:
    """The room that is imported; `loopwright` for the package's own face, None for other packages."""
    parts = item.module.split(".")
    if parts[0] != "loopwright":
        return None
    if len(parts) == 1 and item.name in ALLOWED:  # from .. import trainer
        return item.name
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "loopwright"


def wrong_way(room: str, item: Import) -> bool:
    target = room_of(item)
    if target is None or target == room:
        return False
    is_public_name = target == "loopwright" and item.module == "loopwright" and item.name in loopwright.__all__
    return target not in ALLOWED[room] and not (room == "recipes" and is_public_name)


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_down(room: str) -> None:
    wrong = [str(item) for item in imports_in(room) if wrong_way(room, item)]
    assert not wrong, f"{room} may import {sorted(ALLOWED[room]) or 'no other room'}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", [room for room in ALLOWED if room != "recipes"])
def test_imports_inside_the_package_are_relative(room: str) -> None:
    wrong = [str(item) for item in imports_in(room) if room_of(item) is not None and not item.is_relative]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", [*ALLOWED, *OUTSIDE])
def test_rooms_are_imported_by_their_full_name(folder: str) -> None:
    """`import trainer` would work from the repository's folder, and nowhere else."""
    rooms = ALLOWED.keys() - {"loopwright"}
    wrong = [item for item in imports_in(folder) if not item.is_relative and item.module.split(".")[0] in rooms]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_import_cycle_when_the_package_loads() -> None:
    files = {module_name(file): file for room in ALLOWED for file in files_of(room)}
    graph = {name: set[str]() for name in files}
    for name, file in files.items():
        for item in imports_of(file, file.read_text()):
            submodule = f"{item.module}.{item.name}"
            target = submodule if submodule in files else item.module
            if item.is_eager and target in files and target != name:
                graph[name].add(target)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def test_every_folder_with_code_is_a_room_or_known() -> None:
    folders = {file.parent.name for file in ROOT.glob("*/*.py") if not file.parent.name.startswith(".")}
    assert folders - {"build"} <= {*ALLOWED, *OUTSIDE}


def test_readme_shows_the_same_table() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = {room: set(re.findall(r"`(\w+)`", allowed)) for room, allowed in rows if room in ALLOWED}
    all_below = {room: ALLOWED[room] for room in ("loopwright", "trainer", "callbacks")}
    assert all(allowed.strip() == "all below" for room, allowed in rows if room in all_below)
    assert list(shown) == list(ALLOWED)
    assert {**shown, **all_below} == ALLOWED


SAMPLE = """
from typing import TYPE_CHECKING
from .. import trainer
from ..data.loader import A
from . import sibling
if TYPE_CHECKING:
    from ..trainer.trainer import Trainer
else:
    import json
def f():
    import loopwright.trackers.jsonl
    importlib.import_module("..callbacks.bus", __package__)
"""


def test_the_reader_sees_every_kind_of_import() -> None:
    found = imports_of(ROOT / "strategies" / "sample.py", SAMPLE)
    assert [(item.module, item.name, item.is_relative, item.is_eager) for item in found] == [
        ("typing", "TYPE_CHECKING", False, True),
        ("loopwright", "trainer", True, True),
        ("loopwright.data.loader", "A", True, True),
        ("loopwright.strategies", "sibling", True, True),
        ("loopwright.trainer.trainer", "Trainer", True, False),
        ("json", None, False, True),
        ("loopwright.trackers.jsonl", None, False, False),
        ("loopwright.callbacks.bus", None, True, False),
    ]
    assert [room_of(item) for item in found] == [
        None, "trainer", "data", "strategies", "trainer", None, "trackers", "callbacks",
    ]  # fmt: skip
    assert [wrong_way("strategies", item) for item in found] == [False, True, False, False, True, False, True, True]


@pytest.mark.parametrize(
    ("source", "is_wrong"),
    [
        ("from loopwright import Task", False),
        ("from loopwright import Trainr", True),
        ("from loopwright import trainer", True),
        ("import loopwright", True),
        ("from loopwright.trainer.task import Task", True),
        ("from .task import Digits", False),
        ("from ..gan.task import Gan", False),
        ("from ...trainer.task import Task", True),
        ("import torch", False),
    ],
)
def test_recipes_see_the_public_names_alone(source: str, is_wrong: bool) -> None:
    (item,) = imports_of(ROOT / "recipes" / "digits" / "data.py", source)
    assert wrong_way("recipes", item) == is_wrong


@pytest.mark.parametrize("source", ["from .. import __version__", "import loopwright", "from loopwright import Task"])
def test_no_room_imports_the_packages_own_face(source: str) -> None:
    (item,) = imports_of(ROOT / "trainer" / "sample.py", source)
    assert wrong_way("trainer", item)
