"""The configuration of a run: read from its sources, checked against the classes it names, and built."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from ..distributed.errors import ConfigError
from ..distributed.random import set_seed
from ..trainer.task import Task
from ..trainer.trainer import Trainer
from .classes import find_class, folders_used
from .near import nearest_anywhere
from .resolved import plain_values, to_yaml, without_wrappers
from .settings import Settings
from .signature import describe, parameters_of
from .sources import KEYS, Tree
from .text import is_null
from .typed import Problem, TypedReader


class RunConfig:
    """A checked configuration. Use it inside `python_path(settings.folders)`: it imports the classes that are named.

    Args:
        settings: what the sources say.
        prog: the program's name in the help.
    """

    def __init__(self, settings: Settings, prog: str = "loopwright fit FILE.yaml") -> None:
        self.settings = settings
        self._reader = TypedReader()
        self._tree = self._read_tree()
        self.parser = self._make_parser(prog)

    def parse(self) -> None:
        """Check the types of all values, and fill in the defaults.

        Raises:
            ConfigError: keys are unknown, required ones missing, classes not there (all of these at once), or a value
                doesn't fit its key.
        """
        self._raise_problems()
        try:
            parsed = self.parser.parse_object(self._tree)
        except ArgumentError as error:
            raise ConfigError(self._explained(str(error))) from error
        assert isinstance(parsed, Namespace)
        self._parsed = parsed

    @property
    def values(self) -> dict[str, Any]:
        """Every key with its value, defaults included, as plain values. After `parse`."""
        values = plain_values(self._parsed)
        values["trainer"] = {key: value for key, value in values["trainer"].items() if value is not None}
        used = folders_used(self._reader.class_paths, self.settings.folders)
        folders = [str(folder) for folder in dict.fromkeys([*self.settings.python_path, *used])]
        if folders:
            values["python_path"] = folders
        return {key: value for key, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """The file that runs the same again. After `parse`."""
        return to_yaml(self.values)

    def build(self) -> tuple[Task, Any, Trainer]:
        """The task, what the class or function of `data` gives (None without one), and the trainer. After `parse`.

        Random states are seeded by `trainer.seed` before anything is built, the task first.

        Raises:
            ConfigError: the task is no `Task`.
        """
        if self._parsed.trainer.seed is not None:
            set_seed(self._parsed.trainer.seed)
        objects = self._instantiate()
        task = self._call("task", objects)
        if not isinstance(task, Task):
            raise ConfigError(f"task is {type(task).__name__}, which is not a subclass of loopwright.Task.")
        data = self._call("data", objects) if "data" in self._tree else None
        return task, data, Trainer(**_arguments(objects.trainer))

    def _instantiate(self) -> Namespace:
        """The parsed values with an object in the place of each class that is an argument."""
        try:
            objects: Namespace = self.parser.instantiate(self._parsed, instantiators=[(_construct, object, True)])
            return objects
        except _Raised as raised:
            error = raised.error
        raise error  # the exception of the user's class, as if nothing stood between

    def _call(self, section: str, objects: Namespace) -> Any:
        target = find_class(self._tree[section]["class_path"])
        given = objects[section].get("init_args")
        return target(**({} if given is None else _arguments(given)))

    def _read_tree(self) -> Tree:
        """The tree with typed values; problems go to the reader."""
        tree, reader = self.settings.tree, self._reader
        read: Tree = {}
        for section in ("task", "data"):
            if section in tree and not is_null(tree[section]):
                read[section] = reader.read_class(tree[section], section)
        if "task" not in read:
            message = "required, and missing. Expected the class_path of a Task."
            reader.problems.append(Problem("task", message, is_missing=True))
        trainer = parameters_of(Trainer)
        read["trainer"] = reader.read_arguments(tree.get("trainer"), trainer, "trainer", is_none_a_value=False)
        known = [f"trainer.{name}" for name in trainer]
        for section in ("task", "data"):
            known += [f"{section}.init_args.{name}" for name in _parameter_names(read.get(section))]
        for key in tree:
            if key not in KEYS:
                reader.problems.append(Problem(key, f"unknown key. {nearest_anywhere(key, KEYS, known)}"))
        return read

    def _raise_problems(self) -> None:
        problems = self._reader.problems
        if not problems:
            return
        lines = [f"{problem.path} (in {self._origin_of(problem)}): {problem.message}" for problem in problems]
        if len(lines) == 1:
            raise ConfigError(lines[0])
        raise ConfigError("\n  ".join([f"{self.settings.file}: {len(lines)} problems.", *lines]))

    def _origin_of(self, problem: Problem) -> str:
        return str(self.settings.file) if problem.is_missing else self.settings.origin_of(problem.path)

    def _explained(self, message: str) -> str:
        """An error of jsonargparse in few words: the key, its source, what came and what is accepted."""
        found = re.search(r'[Kk]ey "([^"]+)"', message)
        if found is None:
            return f"{self.settings.file}: {message}"
        path = found[1]
        place = f"{path} (in {self.settings.origin_of(path)})"
        value: Any = self._tree
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        problems = re.findall(r"Problem with given class_path.*?:\s*(.+)", message)
        if problems:
            return f"{place}: {'; '.join(dict.fromkeys(problems))}"
        return f"{place}: got {without_wrappers(value)!r}. Expected {describe(self._hint_at(path))}."

    def _hint_at(self, path: str) -> Any:
        section, _, name = path.partition(".")
        target = Trainer if section == "trainer" else find_class(self._tree[section]["class_path"])
        parameter = parameters_of(target).get(name.removeprefix("init_args.").partition(".")[0])
        return Any if parameter is None else parameter.hint

    def _make_parser(self, prog: str) -> ArgumentParser:
        """The parser that knows every key of this task, this data and the trainer."""
        # Arguments without a type may name a class as well; without this, jsonargparse warns of it.
        set_parsing_settings(instantiate_subclass_spec_in_any=True)
        parser = ArgumentParser(prog=prog, usage=f"{prog} [--key value ...]", exit_on_error=False, default_env=False)
        for section in ("task", "data"):
            if self._tree.get(section) is not None:
                target = find_class(self._tree[section]["class_path"])
                _add_section(parser, section, target)
        add_trainer(parser)
        return parser


def add_trainer(parser: ArgumentParser) -> None:
    """Add the arguments of `Trainer` to a parser."""
    group = parser.add_argument_group("trainer: the arguments of loopwright.Trainer")
    group.add_class_arguments(Trainer, "trainer", as_group=False, instantiate=False, fail_untyped=False)


def _add_section(parser: ArgumentParser, section: str, target: Callable[..., Any]) -> None:
    group = parser.add_argument_group(f"{section}: the arguments of {target.__module__}.{target.__qualname__}")
    group.add_argument(f"--{section}.class_path", type=str, help="module.Name of a class or function")
    if isinstance(target, type):
        group.add_class_arguments(target, f"{section}.init_args", as_group=False, instantiate=False, fail_untyped=False)
    else:
        group.add_function_arguments(target, f"{section}.init_args", as_group=False, fail_untyped=False)


def _parameter_names(spec: Tree | None) -> list[str]:
    return [] if spec is None else list(parameters_of(find_class(spec["class_path"])))


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
