"""The configuration of a run: read from its sources, and checked against the classes that it names.

Scalars get their types by our own reader (`scalars.py`, `typed.py`), before jsonargparse sees them. By itself it takes
a file's `no`, `007` and `1e3` for a boolean and numbers where the field is a text, calls `1` no boolean, reads a file
otherwise than a flag, and stops at the first problem, where all are wanted at once, each with its source. What it does
is the help, the checks of all other types, and the building of objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from ..distributed.errors import ConfigError, suggest
from ..trainer.trainer import Trainer
from .classes import find_class
from .foreign import FOREIGN_KEYS
from .parsed import ParsedConfig
from .resolved import without_wrappers
from .scalars import is_null
from .signature import describe, parameters_of
from .sources import KEYS, Sources, Tree
from .typed import Problem, TypedReader


class RunConfig:
    """A configuration that was read. Use it inside `python_path(sources.folders)`: it imports the classes it names.

    Args:
        sources: what the file, the environment and the flags say.
        prog: the program's name in the help.
    """

    def __init__(self, sources: Sources, prog: str = "loopwright fit FILE.yaml") -> None:
        self.sources = sources
        self._reader = TypedReader()
        self._tree = self._read_tree()
        self.parser = self._make_parser(prog)

    def parse(self) -> ParsedConfig:
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
        return ParsedConfig(parsed, self.parser, self.sources, self._reader.class_paths)

    def _read_tree(self) -> Tree:
        """The tree with typed values; problems go to the reader."""
        tree, reader = self.sources.tree, self._reader
        read: Tree = {}
        for section in ("task", "data"):
            if section in tree and not is_null(tree[section]):
                read[section] = reader.read_class(tree[section], section)
        if "task" not in read:
            message = "required, and missing. Expected the class_path of a Task."
            reader.problems.append(Problem("task", message, is_missing=True))
        trainer = parameters_of(Trainer)
        read["trainer"] = reader.read_arguments(tree.get("trainer"), trainer, "trainer", is_none_a_value=False)
        places = {**FOREIGN_KEYS, **{name: f"trainer.{name}" for name in trainer}}
        for section in ("task", "data"):
            places |= {name: f"{section}.init_args.{name}" for name in _parameter_names(read.get(section))}
        places |= {key: key for key in KEYS}
        for key in tree:
            if key not in KEYS:
                reader.problems.append(Problem(key, f"unknown key. {suggest(key, KEYS, places=places)}"))
        return read

    def _raise_problems(self) -> None:
        problems = self._reader.problems
        if not problems:
            return
        lines = [f"{problem.path} (in {self._origin_of(problem)}): {problem.message}" for problem in problems]
        if len(lines) == 1:
            raise ConfigError(lines[0])
        raise ConfigError("\n  ".join([f"{self.sources.file}: {len(lines)} problems.", *lines]))

    def _origin_of(self, problem: Problem) -> str:
        return str(self.sources.file) if problem.is_missing else self.sources.origin_of(problem.path)

    def _explained(self, message: str) -> str:
        """An error of jsonargparse in few words: the key, its source, what came and what is accepted."""
        found = re.search(r'[Kk]ey "([^"]+)"', message)
        if found is None:
            return f"{self.sources.file}: {message}"
        path = found[1]
        place = f"{path} (in {self.sources.origin_of(path)})"
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
