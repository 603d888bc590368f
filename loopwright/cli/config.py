"""The configuration of a run: read from its sources, checked against the classes it names, and built."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from ..distributed.errors import ConfigError
from ..distributed.random import set_seed
from ..trainer.task import Task
from ..trainer.trainer import Trainer
from .classes import find_class, folders_used
from .near import nearest_anywhere
from .resolved import plain_values, to_yaml, without_wrappers
from .signature import describe_kinds, kinds_of, parameters_of
from .sources import KEYS, Source, Tree, merge, read_environment, read_file, read_flags
from .text import is_null
from .typed import Problem, TypedReader

SECTIONS = ("task", "data", "trainer")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file, the environment and the flags say, before anything is imported."""

    file: Path
    sources: tuple[Source, ...]
    """From the weakest to the strongest."""
    tree: Tree
    """All of them in one."""

    @classmethod
    def read(cls, file: Path, flags: Sequence[tuple[str, str]], environment: Mapping[str, str]) -> Settings:
        """Read the three sources.

        Raises:
            ConfigError: the file can't be read, or a variable has an unknown key.
        """
        sources = (read_file(file), read_environment(environment), read_flags(flags))
        tree: Tree = {}
        for source in sources:
            tree = merge(tree, source.tree)
        return cls(file, sources, tree)

    @property
    def folders(self) -> list[Path]:
        """Where class paths are looked up before the installed packages: the file's folder, then `python_path`."""
        home = self.file.resolve().parent
        more = self.tree.get("python_path")
        given = [] if more is None or is_null(more) else more if isinstance(more, list) else [more]
        return [home, *(home / folder for folder in given)]

    def origin_of(self, path: str) -> str:
        """The strongest source that gives a key, or else what it stands in; for errors."""
        keys = path.split(".")
        for length in range(len(keys), 0, -1):
            given = [source.label for source in self.sources if source.gives(keys[:length])]
            if given:
                return given[-1]
        return str(self.file)


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
        folders = folders_used(self._reader.class_paths, self.settings.folders)
        if folders:
            values["python_path"] = [str(folder) for folder in folders]
        return {key: value for key, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """The file that runs the same again. After `parse`."""
        return to_yaml(self.values)

    @property
    def resume_from(self) -> str | None:
        """The checkpoint to go on from. After `parse`."""
        value: str | None = self._parsed.resume_from
        return value

    def build(self) -> tuple[Task, Any, Trainer]:
        """The task, what the class or function of `data` gives (None without one), and the trainer. After `parse`.

        Random states are seeded by `trainer.seed` before anything is built, the task first.

        Raises:
            ConfigError: the task is no `Task`.
        """
        if self._parsed.trainer.seed is not None:
            set_seed(self._parsed.trainer.seed)
        try:
            objects = self.parser.instantiate(self._parsed, instantiators=[(_construct, object, True)])
        except _Raised as raised:
            raise raised.error  # noqa: B904 - the exception of the user's class, as if nothing stood between
        task = self._call("task", objects)
        if not isinstance(task, Task):
            raise ConfigError(f"task is {type(task).__name__}, which is not a subclass of loopwright.Task.")
        data = self._call("data", objects) if "data" in self._tree else None
        return task, data, Trainer(**_arguments(objects.trainer))

    def _call(self, section: str, objects: Namespace) -> Any:
        target = find_class(self._tree[section]["class_path"])
        given = objects[section].get("init_args")
        return target(**({} if given is None else _arguments(given)))

    def _read_tree(self) -> Tree:
        """The tree with typed values; problems go to the reader."""
        tree, reader = self.settings.tree, self._reader
        read: Tree = {}
        if is_null(tree.get("task", None)) or "task" not in tree:
            reader.problems.append(
                Problem("task", "required, and missing. Expected the class_path of a Task.", is_missing=True)
            )
        else:
            read["task"] = reader.read_class(tree["task"], "task")
        if "data" in tree and not is_null(tree["data"]):
            read["data"] = reader.read_class(tree["data"], "data")
        trainer = parameters_of(Trainer)
        read["trainer"] = reader.read_arguments(tree.get("trainer"), trainer, "trainer", is_none_a_value=False)
        if "resume_from" in tree:
            read["resume_from"] = reader.read_value(tree["resume_from"], kinds_of(str | None), "resume_from")
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
        return f"{place}: got {without_wrappers(value)!r}. Expected {describe_kinds(self._kinds_at(path))}."

    def _kinds_at(self, path: str) -> tuple[Any, ...]:
        section, _, name = path.partition(".")
        target = Trainer if section == "trainer" else find_class(self._tree[section]["class_path"])
        parameter = parameters_of(target).get(name.removeprefix("init_args.").partition(".")[0])
        return (Any,) if parameter is None else parameter.kinds

    def _make_parser(self, prog: str) -> ArgumentParser:
        """The parser that knows every key of this task, this data and the trainer."""
        set_parsing_settings(instantiate_subclass_spec_in_any=True)
        parser = ArgumentParser(prog=prog, usage=f"{prog} [--key value ...]", exit_on_error=False, default_env=False)
        for section in ("task", "data"):
            if self._tree.get(section) is not None:
                target = find_class(self._tree[section]["class_path"])
                _add_section(parser, section, target)
        add_trainer(parser)
        parser.add_argument("--resume_from", type=str | None, default=None, help="a checkpoint, or latest")
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
