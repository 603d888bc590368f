"""`Registry`: classes that a word in a configuration chooses."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from .errors import ConfigError, suggest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Words and what each of them makes: built in, registered, or declared by an installed package.

    A word has one meaning: what is built in or registered comes before what a package declares.

    Args:
        kind: the base class of all that is made.
        option: the argument that takes the words, for errors: `"strategy"`.
        built_in: for each word the module, relative to `package`, and the class: `{"csv": "csv:CSVTracker"}`. It is
            imported when the word is used.
        package: the package of those modules.
        group: the entry point group in which packages declare theirs: `word = "package.module:Class"`.
        reserved: accepted words with a meaning of their own, which can't be registered and which `find` doesn't know.
    """

    def __init__(
        self,
        kind: type[Any],
        *,
        option: str,
        built_in: Mapping[str, str],
        package: str,
        group: str,
        reserved: tuple[str, ...] = (),
    ) -> None:
        self._kind = kind
        self._option = option
        self._built_in = dict(built_in)
        self._package = package
        self._group = group
        self._reserved = reserved
        self.registered: dict[str, Callable[..., T]] = {}
        """What `register` was given, by word."""

    def register(self, word: str) -> Callable[[F], F]:
        """Decorate a class, or a function that returns such an object, so that the word makes it.

        Raises:
            ConfigError: the word is taken.
        """

        def decorate(factory: F) -> F:
            known = self.registered.get(word, factory)
            # A cell or a module that is run again brings the same class as a new object.
            is_same = (known.__module__, known.__qualname__) == (factory.__module__, factory.__qualname__)
            if word in self._built_in or word in self._reserved or not is_same:
                name = f"register_{self._kind.__name__.lower()}"
                raise ConfigError(f"{name}({word!r}): this word is taken. Choose another.")
            self.registered[word] = factory
            return factory

        return decorate

    def words(self) -> list[str]:
        """Every word that makes something. No package is imported for it."""
        return list(dict.fromkeys([*self._built_in, *self.registered, *self._declared()]))

    def find(self, word: object) -> Callable[..., T]:
        """What a word makes its object with.

        Raises:
            ConfigError: nobody knows the word; lists those that are known.
        """
        if isinstance(word, str):
            if word in self.registered:
                return self.registered[word]
            if word in self._built_in:
                module, _, name = self._built_in[word].partition(":")
                built_in: Callable[..., T] = getattr(importlib.import_module(f".{module}", self._package), name)
                return built_in
            if (declared := self._declared().get(word)) is not None:
                loaded: Callable[..., T] = declared.load()
                return loaded
        raise ConfigError(f"{self._option}={word!r} is unknown. {self._hint(word)}")

    def create(self, word: object, options: Mapping[str, Any]) -> T:
        """The object of a word.

        Raises:
            ConfigError: nobody knows the word, it does not take an option, or it makes something else.
        """
        return self.build(self.find(word), word, options)

    def build(self, factory: Callable[..., T], word: object, options: Mapping[str, Any]) -> T:
        """The object of a class or function that was found already; `word` names it in errors, as in `create`."""
        try:
            made = factory(**options)
        except TypeError as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "none"
            text = f"{self._option}={word!r} does not take these options ({given}): {error}. {_near(factory, options)}"
            raise ConfigError(text.rstrip()) from error
        if not isinstance(made, self._kind):
            kind = self._kind.__name__
            raise ConfigError(f"{self._option}={word!r} gave {made!r}. Expected an instance of a subclass of {kind}.")
        return made

    def _declared(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}

    def _hint(self, word: object) -> str:
        accepted = suggest(word, [*self.words(), *self._reserved])
        if not isinstance(word, str) or "." not in word:
            return accepted
        return f"{accepted} For a class, pass an object; in a file or a flag write {{class_path: {word}}}."


def _near(factory: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """What a factory accepts instead of the first option that it has no parameter for; empty where it has all."""
    try:
        accepted = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a factory of C shows no signature
        return ""
    if any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        return ""
    unknown = [name for name in options if name not in accepted]
    return suggest(unknown[0], accepted) if unknown else ""
