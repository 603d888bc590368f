"""The public names: one sorted list, all of them there, shown by `dir`, and known to type checkers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import loopwright

# Public names that stand for another one, whose name their object has.
ALIASES = {"PartialState": "ProcessState"}


def names_for_type_checkers() -> dict[str, str]:
    """Name to module, as the `if TYPE_CHECKING` block of the package says."""
    tree = ast.parse(Path(loopwright.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(node.level == 1 for node in imports)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_the_list_is_sorted_and_names_nothing_twice() -> None:
    assert loopwright.__all__ == sorted(set(loopwright.__all__))


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    assert names_for_type_checkers() == loopwright._MODULE_OF_NAME
    assert sorted(loopwright._MODULE_OF_NAME) == loopwright.__all__


@pytest.mark.parametrize("name", loopwright.__all__)
def test_name_resolves_to_what_its_module_defines(name: str) -> None:
    found = getattr(loopwright, name)
    assert found.__name__ == ALIASES.get(name, name)
    assert found.__module__ == f"loopwright.{loopwright._MODULE_OF_NAME[name]}"


@pytest.mark.parametrize("name", loopwright.__all__)
def test_name_has_a_docstring_of_its_own(name: str) -> None:
    assert getattr(loopwright, name).__doc__


def test_dir_shows_every_name() -> None:
    assert set(loopwright.__all__) <= set(dir(loopwright))
    assert "__version__" in dir(loopwright)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Trainr", r"module 'loopwright' has no attribute 'Trainr'\. Did you mean 'Trainer'\?"),
        ("ModelCheckpoints", r"Did you mean 'ModelCheckpoint'\?"),
        ("zzz", r"has no attribute 'zzz'\. dir\(loopwright\) lists the public names\."),
    ],
)
def test_unknown_name_is_an_error_with_the_nearest_one(name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        getattr(loopwright, name)


def test_unknown_name_can_not_be_imported() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Trainr' from 'loopwright'"):
        from loopwright import Trainr  # noqa: F401
