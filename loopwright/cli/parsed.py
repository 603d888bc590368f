"""`ParsedConfig`: a configuration in which every value has its type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from ..distributed.errors import ConfigError
from ..distributed.random import check_seed, set_seed
from ..trainer.task import Task
from ..trainer.trainer import Trainer
from .classes import find_class, folders_used
from .resolved import plain_values, to_yaml, without_wrappers
from .sources import Sources


@dataclass(frozen=True, slots=True)
class ParsedConfig:
    """What `RunConfig.parse` gives: every key with its value, defaults included."""

    namespace: Namespace
    """The values as jsonargparse has them: classes are paths with arguments."""
    parser: ArgumentParser
    """The one that made it, and that builds objects from it."""
    sources: Sources
    """What it was read from."""
    class_paths: Sequence[str]
    """The classes that it names, in full."""

    @property
    def values(self) -> dict[str, Any]:
        """Every key with its value, as plain values."""
        values = plain_values(self.namespace)
        values["trainer"] = {key: value for key, value in values["trainer"].items() if value is not None}
        values["resume_from"] = self.sources.resume_from
        used = folders_used(self.class_paths, self.sources.folders)
        folders = [str(folder) for folder in dict.fromkeys([*self.sources.python_path, *used])]
        if folders:
            values["python_path"] = folders
        return {key: value for key, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """The file that runs the same again."""
        return to_yaml(self.values)

    def build(
        self, make_task: Callable[[Callable[[], Any]], Any] = lambda make: make(), **overrides: Any
    ) -> tuple[Task, Any, Trainer]:
        """The task, what the class or function of `data` gives (None without one), and the trainer.

        Random states are seeded by `trainer.seed` before anything is built, the task first.

        Args:
            make_task: is given the function that makes the task, and returns it.
            overrides: arguments of the trainer that this command sets itself.
        Raises:
            ConfigError: the seed can't be used, or the task is no `Task`.
        """
        if self.namespace.trainer.seed is not None:
            check_seed(self.namespace.trainer.seed, "trainer.seed")
            set_seed(self.namespace.trainer.seed)
        objects = self._instantiate()
        task = make_task(lambda: _call(objects.task))
        if not isinstance(task, Task):
            raise ConfigError(f"task is {type(task).__name__}, which is not a subclass of loopwright.Task.")
        data = _call(objects.data) if "data" in objects else None
        return task, data, Trainer(**{**_arguments(objects.trainer), **overrides})

    def _instantiate(self) -> Namespace:
        """The parsed values with an object in the place of each class that is an argument."""
        try:
            objects: Namespace = self.parser.instantiate(self.namespace, instantiators=[(_construct, object, True)])
            return objects
        except _Raised as raised:
            error = raised.error
        raise error  # the exception of the user's class, as if nothing stood between


def _call(spec: Namespace) -> Any:
    """What the class or function of a section makes of its arguments."""
    given = spec.get("init_args")
    return find_class(spec.class_path)(**({} if given is None else _arguments(given)))


def _arguments(namespace: Namespace) -> dict[str, Any]:
    return {name: without_wrappers(value) for name, value in vars(namespace).items()}


class _Raised(BaseException):
    """Carries an exception of a constructor past jsonargparse, which would otherwise go on with other types."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _construct(cls: type, *args: Any, **kwargs: Any) -> Any:
    try:
        return cls(*args, **{name: without_wrappers(value) for name, value in kwargs.items()})
    except Exception as error:
        raise _Raised(error) from error
