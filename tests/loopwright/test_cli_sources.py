"""File, environment and flags: who wins, and that a saved configuration runs the same again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from loopwright import ConfigError
from loopwright.cli.commands import save_config
from loopwright.cli.main import main
from loopwright.cli.scalars import read_yaml
from loopwright.cli.sources import merge, read_environment, read_flags
from loopwright.distributed.environment import variable_names

Resolve = Callable[..., dict[str, Any]]
RUN = """
task:
  class_path: task.Line
  init_args: {width: 5}
data:
  class_path: task.loaders
trainer: {max_epochs: 2, clip_norm: 3.0, num_nodes: 1, progress: false, seed: 7}
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    """The records of the JSON lines tracker below a folder."""
    (file,) = folder.rglob("*.jsonl")
    return [record for line in file.read_text().splitlines() if "train/loss" in (record := json.loads(line))]


class TestPain39:
    """Precedence is file < environment < flag, and the saved configuration repeats the run."""

    def test_precedence(self, project: Any, resolve: Resolve) -> None:
        file = project.write(RUN)
        environment = {
            "LOOPWRIGHT_TRAINER__CLIP_NORM": "2",
            "LOOPWRIGHT_TRAINER__SEED": "8",
            "LOOPWRIGHT_TASK__INIT_ARGS__WIDTH": "6",
            "LOOPWRIGHT_TASK__INIT_ARGS__STEPS": "6",
        }
        values = resolve(file, "--trainer.seed=9", "--task.init_args.width", "7", environment=environment)
        assert values["trainer"]["max_epochs"] == 2  # the file alone
        assert values["trainer"]["clip_norm"] == 2.0  # the environment over the file
        assert values["trainer"]["seed"] == 9  # the flag over both
        assert (values["task"]["init_args"]["width"], values["task"]["init_args"]["steps"]) == (7, 6)
        assert values["task"]["init_args"]["lr"] == 0.05  # the default

    @pytest.mark.parametrize("flags", [[], ["--trainer.callbacks=[{class_path: task.Count, init_args: {limit: 3}}]"]])
    def test_a_printed_configuration_resolves_to_itself(
        self, project: Any, resolve: Resolve, capsys: pytest.CaptureFixture[str], flags: list[str], tmp_path: Path
    ) -> None:
        flags = [*flags, "--task.init_args.name", "1e3", "--task.init_args.path='null'", "--task.init_args.dropout="]
        flags += [
            "--trainer.strategy={name: single}",
            "--trainer.limit_batches={train: 5e-1}",
            "--trainer.max_time",
            "1 h",
        ]
        assert main(["fit", str(project.write(RUN)), *flags, "--print_config"]) == 0
        printed = capsys.readouterr().out
        elsewhere = tmp_path / "elsewhere.yaml"
        elsewhere.write_text(printed)
        again = resolve(elsewhere)
        assert again == yaml.safe_load(printed) == resolve(project.write(RUN), *flags)
        assert again["task"]["init_args"]["dropout"] is None
        assert again["python_path"] == [str(project.folder)]

    def test_the_saved_configuration_repeats_the_run(
        self, project: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        flags = [
            "--trainer.name=first",
            "--trainer.trackers=jsonl",
            "--trainer.log_every=1",
            "--data.init_args.shuffle=on",
        ]
        with monkeypatch.context() as patch:
            patch.setenv("LOOPWRIGHT_TASK__INIT_ARGS__LR", "2e-2")
            assert main(["fit", str(project.write(RUN)), *flags]) == 0
        saved = tmp_path / "runs" / "first" / "config.yaml"
        assert main(["fit", str(saved), "--trainer.name=second"]) == 0
        first, second = rows(tmp_path / "runs" / "first"), rows(tmp_path / "runs" / "second")
        assert len(first) == 2 * 4  # two epochs of four batches of two
        assert [row["train/loss"] for row in first] == [row["train/loss"] for row in second]
        again = (tmp_path / "runs" / "second" / "config.yaml").read_text()
        assert saved.read_text() == again.replace("name: second", "name: first")

    def test_the_configuration_of_another_run_is_kept(self, tmp_path: Path) -> None:
        assert save_config("a: 1\n", tmp_path / "run").name == "config.yaml"
        assert save_config("a: 2\n", tmp_path / "run").name == "config-2.yaml"
        assert save_config("a: 2\n", tmp_path / "run").name == "config-2.yaml"
        assert save_config("a: 1\n", tmp_path / "run").name == "config.yaml"
        assert (tmp_path / "run" / "config.yaml").read_text() == "a: 1\n"
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config-2.yaml", "config.yaml"]

    def test_two_runs_of_one_name_keep_both(self, project: Any, tmp_path: Path) -> None:
        command = ["fit", str(project.write(RUN)), "--trainer.name=one", "--trainer.trackers=false"]
        assert main([*command, "--trainer.max_epochs=1"]) == 0
        assert main([*command, "--trainer.max_epochs=3"]) == 0
        saved = [
            yaml.safe_load((tmp_path / "runs/one" / name).read_text()) for name in ("config.yaml", "config-2.yaml")
        ]
        assert [config["trainer"]["max_epochs"] for config in saved] == [1, 3]

    def test_fast_dev_run_writes_nothing(self, project: Any, tmp_path: Path) -> None:
        assert main(["fit", str(project.write(RUN)), "--trainer.fast_dev_run=true"]) == 0
        assert not (tmp_path / "runs").exists()

    def test_a_class_of_the_working_folder_is_found_again(
        self, project: Any, resolve: Resolve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "here.py").write_text("from loopwright import Task\nclass Mine(Task): ...\n")
        values = resolve(project.write("task: here.Mine"))
        assert values["python_path"] == [str(tmp_path)]
        again = project.write(yaml.safe_dump(values), "again.yaml")
        monkeypatch.chdir("/")
        assert resolve(again) == values


class TestEnvironment:
    def test_no_variable_of_the_package_looks_like_a_key(self) -> None:
        assert read_environment(dict.fromkeys(variable_names(), "1")).tree == {}

    def test_names(self) -> None:
        source = read_environment(
            {"LOOPWRIGHT_TRAINER__SEED": "3", "LOOPWRIGHT_DEBUG": "1", "HOME": "/", "LOOPWRIGHT_TASK": "T"}
        )
        assert source.tree == {"trainer": {"seed": "3"}, "task": "T"}

    def test_an_unknown_section_is_an_error(self) -> None:
        with pytest.raises(
            ConfigError, match=r"LOOPWRIGHT_TRANER__SEED is not known\. Did you mean 'LOOPWRIGHT_TRAINER'"
        ):
            read_environment({"LOOPWRIGHT_TRANER__SEED": "3"})

    def test_an_unknown_key_names_the_environment(self, project: Any, resolve: Resolve) -> None:
        with pytest.raises(
            ConfigError, match=r"trainer\.sed \(in the environment\): unknown key\. Did you mean trainer\.seed"
        ):
            resolve(project.write(RUN), environment={"LOOPWRIGHT_TRAINER__SED": "3"})

    def test_a_section_as_one_variable(self, project: Any, resolve: Resolve) -> None:
        values = resolve(project.write(RUN), environment={"LOOPWRIGHT_TRAINER": "{seed: 3, max_steps: 2}"})
        assert (values["trainer"]["seed"], values["trainer"]["max_steps"], values["trainer"]["max_epochs"]) == (3, 2, 2)


class TestMerge:
    @pytest.mark.parametrize(
        ("base", "flags", "merged"),
        [
            ("a: {b: 1, c: 2}", [("a.b", "3")], {"a": {"b": "3", "c": "2"}}),
            ("a: [1, 2]", [("a", "[3]")], {"a": ["3"]}),
            ("a: [1, 2]", [("a+", "3"), ("a+", "[4]")], {"a": ["1", "2", "3", "4"]}),
            ("a: x", [("a+", "y")], {"a": ["x", "y"]}),
            ("{}", [("a+", "y")], {"a": ["y"]}),
            ("a: null", [("a+", "y")], {"a": ["y"]}),
            ("a: [{b: 1, c: 2}, x]", [("a.0.b", "3")], {"a": [{"b": "3", "c": "2"}, "x"]}),
            ("a: {class_path: m.A, init_args: {x: 1}}", [("a.init_args.y", "2")],
             {"a": {"class_path": "m.A", "init_args": {"x": "1", "y": "2"}}}),
            ("a: {class_path: m.A, init_args: {x: 1}}", [("a.class_path", "m.B"), ("a.init_args.y", "2")],
             {"a": {"class_path": "m.B", "init_args": {"y": "2"}}}),
            ("a: {class_path: m.A, init_args: {x: 1}}", [("a", "m.B")], {"a": "m.B"}),
            ("a: {class_path: m.A, init_args: {x: 1}}", [("a", "m.A")],
             {"a": {"class_path": "m.A", "init_args": {"x": "1"}}}),
            ("a: m.A", [("a.init_args.x", "1")], {"a": {"class_path": "m.A", "init_args": {"x": "1"}}}),
        ],
    )  # fmt: skip
    def test_flags_over_a_file(self, base: str, flags: list[tuple[str, str]], merged: dict[str, Any]) -> None:
        tree = read_yaml(base, "f.yaml")
        before = json.dumps(tree)
        assert merge(tree, read_flags(flags).tree) == merged
        assert json.dumps(tree) == before
