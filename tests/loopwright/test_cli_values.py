"""Values get the type of their field, whichever source they come from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from loopwright import ConfigError, Trainer
from loopwright.cli.resolved import to_yaml
from loopwright.cli.scalars import Plain, UnreadableError, Verbatim, read_argument, read_scalar, read_untyped, read_yaml
from loopwright.cli.signature import parameters_of
from loopwright.distributed.environment import FALSE_WORDS, TRUE_WORDS, str_to_bool

Resolve = Callable[..., dict[str, Any]]
RUN = "task: {class_path: task.Line}\ntrainer: {max_epochs: 1}\n"

# What every boolean option takes. An empty value means the default.
SPELLINGS = dict.fromkeys(("false", "False", "FALSE", "0", "no", "NO", "off", "Off", "n", "F"), False)
SPELLINGS |= dict.fromkeys(("true", "True", "TRUE", "1", "yes", "YES", "on", "On", "y", "T"), True)
BOOLEANS = [f"trainer.{name}" for name, parameter in parameters_of(Trainer).items() if bool in parameter.kinds]
ONLY_BOOLEANS = [f"trainer.{name}" for name, parameter in parameters_of(Trainer).items() if parameter.kinds == (bool,)]
OPTIONS = [*BOOLEANS, "task.init_args.is_wide"]
SOURCES = ("file", "environment", "flag")


def give_all(project: Any, resolve: Resolve, source: str, given: dict[str, str]) -> dict[str, Any]:
    """The values that options have after one source gave them these texts."""
    flags, environment = [f"--{option}={text}" for option, text in given.items()], {}
    file = project.write(RUN)
    if source == "file":
        lines = {"task": ["class_path: task.Line"], "task.init_args": [], "trainer": ["max_epochs: 1"]}
        for option, text in given.items():
            section, _, name = option.rpartition(".")
            lines[section].append(f"{name}: {text}")
        lines["task"].append("init_args:" + "".join(f"\n    {line}" for line in lines.pop("task.init_args")))
        file = project.write("".join(f"{key}:\n  " + "\n  ".join(texts) + "\n" for key, texts in lines.items()))
    elif source == "environment":
        environment = {"LOOPWRIGHT_" + option.replace(".", "__").upper(): text for option, text in given.items()}
    values = resolve(file, *(flags if source == "flag" else []), environment=environment)
    return {option: functools.reduce(lambda tree, key: tree[key], option.split("."), values) for option in given}


def give(project: Any, resolve: Resolve, source: str, option: str, text: str) -> Any:
    """As `give_all`, for one option."""
    return give_all(project, resolve, source, {option: text})[option]


class TestB73:
    """`1e-3` in a file or on the command line is the number that it looks like, where the field is a number."""

    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("lr", "1e-3", 0.001),
            ("lr", "1e-5", 1e-5),
            ("lr", "-3.5e-2", -0.035),
            ("lr", "1", 1.0),
            ("lr", "1_000.5", 1000.5),
            ("lr", ".inf", float("inf")),
            ("steps", "1_000", 1000),
            ("steps", "007", 7),
            ("name", "1e3", "1e3"),
            ("name", "no", "no"),
            ("name", "1_000", "1_000"),
            ("name", "true", "true"),
            ("path", "007", "007"),
            ("path", "2026-01-02", "2026-01-02"),
            ("untyped", "1e3", "1e3"),
        ],
    )
    def test_the_field_decides(
        self, project: Any, resolve: Resolve, source: str, name: str, text: str, value: object
    ) -> None:
        read = give(project, resolve, source, f"task.init_args.{name}", text)
        assert (read, type(read)) == (value, type(value))

    def test_lists_and_mappings(self, project: Any, resolve: Resolve) -> None:
        flags = ["--task.init_args.tags=[007, 1e3, no]", "--trainer.limit_batches={train: 5e-1, val: 3}"]
        values = resolve(project.write(RUN), *flags)
        assert values["task"]["init_args"]["tags"] == ["007", "1e3", "no"]
        assert values["trainer"]["limit_batches"] == {"train": 0.5, "val": 3}

    def test_a_separate_argument_may_begin_with_one_dash(self, project: Any, resolve: Resolve) -> None:
        assert resolve(project.write(RUN), "--task.init_args.lr", "-1e-2")["task"]["init_args"]["lr"] == -0.01

    def test_text_that_looks_like_yaml(self, project: Any, resolve: Resolve) -> None:
        for text in ("[a]", "{b}", "[a-z]+", "a: b", "#c", "'", "{"):
            assert resolve(project.write(RUN), f"--task.init_args.name={text}")["task"]["init_args"]["name"] == text

    def test_precision_no_is_a_word(self, project: Any, resolve: Resolve) -> None:
        values = resolve(project.write("task: task.Line\ntrainer: {precision: no, max_epochs: 1}"))
        assert values["trainer"]["precision"] == "no"


class TestB74:
    """The text "False" is false: one reading of booleans for all options and all sources."""

    @pytest.mark.parametrize("source", SOURCES)
    def test_all_spellings(self, project: Any, resolve: Resolve, source: str) -> None:
        for text, value in SPELLINGS.items():
            assert give_all(project, resolve, source, dict.fromkeys(OPTIONS, text)) == dict.fromkeys(OPTIONS, value), (
                text
            )

    @pytest.mark.parametrize("source", SOURCES)
    def test_empty_is_the_default(self, project: Any, resolve: Resolve, source: str) -> None:
        defaults = give_all(project, resolve, "flag", dict.fromkeys(OPTIONS, "null"))
        assert defaults["trainer.progress"] is True
        assert give_all(project, resolve, source, dict.fromkeys(OPTIONS, "")) == defaults

    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize("option", [*ONLY_BOOLEANS, "task.init_args.is_wide"])
    def test_maybe_names_the_option(self, project: Any, resolve: Resolve, option: str, source: str) -> None:
        place = {"file": "run.yaml", "environment": "the environment", "flag": "the command line"}[source]
        message = rf"{option} \(in .*{place}\): 'maybe' is not a boolean"
        with pytest.raises(ConfigError, match=message):
            give(project, resolve, source, option, "maybe")

    def test_variables_of_the_package_and_fields_of_a_file_have_one_vocabulary(self) -> None:
        words = [*TRUE_WORDS, *FALSE_WORDS]
        for text in [*words, *map(str.upper, words), *map(str.title, words)]:
            assert read_scalar(Plain(text), (bool,)) is bool(str_to_bool(text)), text
        for text in ("ture", "2", "none", "-1"):
            with pytest.raises(UnreadableError, match="is not a boolean"):
                read_scalar(Plain(text), (bool,))
            with pytest.raises(ConfigError, match="is neither true nor false"):
                str_to_bool(text)

    @pytest.mark.parametrize("text", ["y", "n", "t", "F", "on", "No", "true"])
    def test_a_text_that_is_one_of_these_words_is_saved_as_a_text(self, text: str) -> None:
        (read,) = read_yaml(to_yaml({"key": text}), "f.yaml").values()
        assert read_scalar(read, (bool, str)) == text

    def test_there_are_boolean_options(self) -> None:
        assert {"trainer.progress", "trainer.deterministic"} <= set(ONLY_BOOLEANS)


class TestScalars:
    @pytest.mark.parametrize(
        ("text", "kinds", "value"),
        [
            ("3", (int, str), 3),
            ("3", (float,), 3.0),
            ("3 epochs", (int, str), "3 epochs"),
            ("0", (bool, int), 0),
            ("off", (bool, str), False),
            ("offline", (bool, str), "offline"),
            ("nan", (str, float), "nan"),
        ],
    )
    def test_unions(self, text: str, kinds: tuple[Any, ...], value: object) -> None:
        read = read_scalar(Plain(text), kinds)
        assert (read, type(read)) == (value, type(value)) if text != "nan" else read != read

    def test_quotes_keep_text(self) -> None:
        assert read_scalar("3", (int, str)) == "3"
        assert read_scalar("false", (bool,)) is False

    def test_a_boolean_alone_is_strict(self) -> None:
        with pytest.raises(UnreadableError, match="'2' is not a boolean"):
            read_scalar(Plain("2"), (bool, type(None)))

    @pytest.mark.parametrize(
        ("text", "value"),
        [("1e-3", 0.001), ("12", 12), ("true", True), ("FALSE", False), ("null", None), ("1.5", 1.5), ("-.5", -0.5)],
    )
    def test_without_a_type(self, text: str, value: object) -> None:
        read = read_untyped(Plain(text))
        assert (read, type(read)) == (value, type(value))

    @pytest.mark.parametrize("text", ["no", "off", "inf", "nan", "1.2.3", "0x1f", "1e", "-", "12:30:00"])
    def test_text_without_a_type_stays_text(self, text: str) -> None:
        read = read_untyped(Plain(text))
        assert isinstance(read, Verbatim)
        assert read.text == text


class TestText:
    def test_plain_and_quoted(self) -> None:
        tree = read_yaml("a: 1e3\nb: '1e3'\nc: [on, \"on\"]\n", "f.yaml")
        assert tree == {"a": "1e3", "b": "1e3", "c": ["on", "on"]}
        assert [isinstance(value, Plain) for value in (tree["a"], tree["b"], *tree["c"])] == [True, False, True, False]

    def test_anchors_and_merges_work(self) -> None:
        assert read_yaml("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}", "f.yaml")["d"] == {"b": "1", "c": "3"}

    def test_a_key_given_twice_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match=r"(?s)f\.yaml is not valid YAML: keys given twice: a"):
            read_yaml("a: 1\nb: 2\na: 3\n", "f.yaml")

    @pytest.mark.parametrize("tag", ["!!python/object/apply:os.getcwd []", "!!python/name:os.system", "!mine x"])
    def test_tags_run_no_code(self, tag: str) -> None:
        with pytest.raises(ConfigError, match="could not determine a constructor"):
            read_yaml(f"a: {tag}", "f.yaml")

    def test_quoted_arguments_are_text(self) -> None:
        assert not isinstance(read_argument("'12'"), Plain)
        assert read_argument("'12'") == "12"
