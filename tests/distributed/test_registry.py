"""`Registry`: words that choose classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.registry import Registry


class Shape:
    def __init__(self, size: int = 1) -> None:
        self.size = size


def shapes() -> Registry[Shape]:
    return Registry(
        Shape,
        option="shape",
        built_in={"lazy": "their_shape:Lazy"},
        package="their_package",
        group="loopwright.tests.shapes",
        reserved=("any",),
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with one class, and a declaration of it under another word."""
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "their_shape.py").write_text(f"from {__name__} import Shape\nclass Lazy(Shape): ...\n")
    metadata = tmp_path / "their_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    words = "declared = their_package.their_shape:Lazy\nlazy = their_package.nowhere:Nothing\n"
    (metadata / "entry_points.txt").write_text(f"[loopwright.tests.shapes]\n{words}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("their_package", "their_package.their_shape"):
        sys.modules.pop(name, None)


def define(size: int) -> type[Shape]:
    """The same class as a cell that is run again brings it: a new object of the same name."""

    class Square(Shape):
        def __init__(self) -> None:
            super().__init__(size)

    return Square


@pytest.mark.usefixtures("installed")
def test_a_word_is_built_in_or_registered_or_declared_and_loads_when_it_is_used() -> None:
    registry = shapes()
    square = registry.register("square")(define(3))
    assert registry.words() == ["lazy", "square", "declared"]
    assert "their_package" not in sys.modules
    assert registry.find("square") is square
    made = [registry.create(word, {}) for word in ("lazy", "square", "declared")]
    assert [(type(shape).__name__, shape.size) for shape in made] == [("Lazy", 1), ("Square", 3), ("Lazy", 1)]


def test_options_reach_what_is_made() -> None:
    registry = shapes()
    registry.register("plain")(Shape)
    registry.register("double")(lambda size: Shape(2 * size))
    assert [registry.create(word, {"size": 4}).size for word in ("plain", "double")] == [4, 8]


def test_the_same_class_again_takes_the_place_of_the_older_one() -> None:
    registry = shapes()
    registry.register("square")(define(3))
    registry.register("square")(define(5))
    assert registry.create("square", {}).size == 5


@pytest.mark.parametrize("word", ["lazy", "any", "square"])
def test_a_word_has_one_meaning(word: str) -> None:
    registry = shapes()
    registry.register("square")(define(3))
    with pytest.raises(ConfigError, match=rf"register_shape\('{word}'\): this word is taken\. Choose another"):
        registry.register(word)(Shape)
    assert list(registry.registered) == ["square"]


@pytest.mark.parametrize(
    ("word", "options", "message"),
    [
        ("plian", {}, r"shape='plian' is unknown\. Did you mean 'plain'\? Accepted: any, lazy, none, plain\.$"),
        ("any", {}, r"shape='any' is unknown\."),
        (["plain"], {}, r"shape=\['plain'\] is unknown\."),
        ("m.Plain", {}, r"Accepted: .*\. For a class, pass an object; .* write \{class_path: m\.Plain\}\.$"),
        ("plain", {"color": 1}, r"shape='plain' does not take these options \(color=1\): .* argument 'color'"),
        ("none", {}, r"shape='none' does not take these options \(none\): .* missing 1 required"),
        ("none", {"size": 1}, r"shape='none' gave 1\. Expected an instance of a subclass of Shape\."),
    ],
)
def test_what_can_not_be_made_says_why(word: object, options: dict[str, Any], message: str) -> None:
    registry = shapes()
    registry.register("plain")(Shape)
    registry.register("none")(lambda size: size)
    with pytest.raises(ConfigError, match=message):
        registry.create(word, options)
