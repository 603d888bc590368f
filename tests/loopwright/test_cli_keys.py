"""Keys that are wrong, missing or null; classes that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loopwright import ConfigError, Trainer
from loopwright.cli.foreign import FOREIGN_KEYS
from loopwright.cli.signature import parameters_of

Resolve = Callable[..., dict[str, Any]]
TASK = "task: {class_path: task.Line}\n"


class TestB76:
    """An unknown key is never ignored, and null means the default."""

    def test_all_unknown_keys_at_once(self, project: Any, resolve: Resolve) -> None:
        text = """
        acumulate: 4
        task: {class_path: task.Line, init_args: {widht: 3}}
        trainer: {max_epochs: 1, presicion: bf16, from_a_newer_version: 1}
        """
        with pytest.raises(ConfigError) as caught:
            resolve(project.write(text), "--trainer.strtegy", "single")
        lines = str(caught.value).splitlines()
        file = str(project.folder / "run.yaml")
        assert lines[0] == f"{file}: 5 problems."
        assert [line.partition("Accepted")[0].strip() for line in lines[1:]] == [
            f"task.init_args.widht (in {file}): unknown key. Did you mean task.init_args.width?",
            f"trainer.presicion (in {file}): unknown key. Did you mean trainer.precision?",
            f"trainer.from_a_newer_version (in {file}): unknown key.",
            "trainer.strtegy (in the command line): unknown key. Did you mean trainer.strategy?",
            f"acumulate (in {file}): unknown key. Did you mean trainer.accumulate?",
        ]
        assert "Accepted: accumulate, " in lines[3]

    def test_unknown_keys_of_nested_classes(self, project: Any, resolve: Resolve) -> None:
        text = TASK + "trainer: {max_epochs: 1, callbacks: [{class_path: task.Count, init_args: {limt: 1}}]}"
        with pytest.raises(ConfigError) as caught:
            resolve(project.write(text))
        assert "trainer.callbacks.0.init_args.limt" in str(caught.value)
        assert "Did you mean trainer.callbacks.0.init_args.limit?" in str(caught.value)
        assert "trainer.callbacks.0.init_args.limit (in" in str(caught.value)
        assert "required, and missing" in str(caught.value)

    def test_a_key_beside_init_args(self, project: Any, resolve: Resolve) -> None:
        with pytest.raises(ConfigError, match=r"task\.init_arg \(in .*run\.yaml\): unknown key.*task\.init_args"):
            resolve(project.write("task: {class_path: task.Line, init_arg: {width: 3}}\ntrainer: {max_epochs: 1}"))

    def test_a_key_at_the_wrong_place_is_found(self, project: Any, resolve: Resolve) -> None:
        with pytest.raises(ConfigError, match=r"seed \(in .*run\.yaml\): unknown key\. Did you mean trainer\.seed\?"):
            resolve(project.write(TASK + "seed: 3\ntrainer: {max_epochs: 1}"))

    def test_an_argument_beside_the_class_path_is_found(self, project: Any, resolve: Resolve) -> None:
        message = r"task\.lr \(in the command line\): unknown key\. Did you mean task\.init_args\.lr\? Accepted: class"
        with pytest.raises(ConfigError, match=message):
            resolve(project.write(TASK + "trainer: {max_epochs: 1}"), "--task.lr", "0.1")

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("model", "task"),
            ("datamodule", "data"),
            ("seed_everything", "trainer.seed"),
            ("ckpt_path", "--weights of validate, test and predict"),
            ("logger", "trainer.trackers"),
            ("trainer.logger", "trainer.trackers"),
            ("trainer.max_epoch", "trainer.max_epochs"),
            ("trainer.accumulate_grad_batches", "trainer.accumulate"),
            ("trainer.gradient_clip_val", "trainer.clip_norm"),
            ("trainer.val_check_interval", "trainer.val_every"),
            ("trainer.num_sanity_val_steps", "trainer.sanity_val_batches"),
            ("trainer.limit_val_batches", "trainer.limit_batches"),
            ("trainer.enable_progress_bar", "trainer.progress"),
            ("trainer.log_every_n_steps", "trainer.log_every"),
            ("trainer.default_root_dir", "trainer.project_dir"),
            ("trainer.num_train_epochs", "trainer.max_epochs"),
        ],
    )
    def test_keys_of_other_frameworks(self, project: Any, resolve: Resolve, name: str, meant: str) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve(project.write(TASK + "trainer: {max_epochs: 1}"), f"--{name}=1")
        expected = f"{name} (in the command line): unknown key. Did you mean {meant}? Accepted: "
        assert str(caught.value).startswith(expected)

    def test_keys_of_other_frameworks_name_what_there_is(self) -> None:
        arguments = {f"trainer.{name}" for name in parameters_of(Trainer)}
        assert {key for key in FOREIGN_KEYS.values() if key.startswith("trainer.")} <= arguments
        assert not {f"trainer.{name}" for name in FOREIGN_KEYS} & arguments

    @pytest.mark.parametrize(
        "name", ["precision", "strategy", "trackers", "val_every", "seed", "callbacks", "progress"]
    )
    @pytest.mark.parametrize("null", ["null", "~", ""])
    def test_null_is_the_default(self, project: Any, resolve: Resolve, name: str, null: str) -> None:
        without = resolve(project.write(TASK + "trainer:\n  max_epochs: 1\n"))
        assert resolve(project.write(TASK + f"trainer:\n  max_epochs: 1\n  {name}: {null}\n")) == without
        assert resolve(project.write(TASK + "trainer: {max_epochs: 1}"), f"--trainer.{name}={null}") == without

    def test_null_is_a_value_where_the_users_type_says_so(self, project: Any, resolve: Resolve) -> None:
        text = "task: {class_path: task.Line, init_args: {dropout: null, width: null}}\ntrainer: {max_epochs: 1}"
        arguments = resolve(project.write(text))["task"]["init_args"]
        assert (arguments["dropout"], arguments["width"]) == (None, 4)

    def test_a_section_may_be_null(self, project: Any, resolve: Resolve) -> None:
        assert resolve(project.write(TASK + "data: null\ntrainer: null"))["trainer"]["num_nodes"] == 1


class TestMissing:
    def test_no_task(self, project: Any, resolve: Resolve) -> None:
        with pytest.raises(ConfigError, match=r"task \(in .*run\.yaml\): required, and missing"):
            resolve(project.write("trainer: {max_epochs: 1}"))

    def test_a_task_without_class_path(self, project: Any, resolve: Resolve) -> None:
        with pytest.raises(ConfigError, match=r"task \(in .*run\.yaml\): no class. Expected a mapping with class_path"):
            resolve(project.write("task: {init_args: {width: 3}}"))

    def test_arguments_that_are_no_mapping(self, project: Any, resolve: Resolve) -> None:
        with pytest.raises(ConfigError, match=r"task\.init_args .*: got \['1'\]\. Expected a mapping"):
            resolve(project.write("task: {class_path: task.Line, init_args: [1]}"))


class TestTypes:
    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--trainer.num_nodes=many", r"trainer\.num_nodes \(in the command line\): got 'many'\. Expected int"),
            ("--trainer.seed=1.5", r"trainer\.seed \(in the command line\): got '1\.5'\. Expected int or None"),
            (
                "--trainer.accumulate_across_epochs=keep",
                r"trainer\.accumulate_across_epochs .*got 'keep'\. Expected 'flush', 'carry' or 'drop'",
            ),
            ("--task.init_args.width=[1]", r"task\.init_args\.width \(in the command line\): got \[1\]\. Expected int"),
            ("--trainer.callbacks=task.Line", r"trainer\.callbacks .*task\.Line"),
        ],
    )
    def test_the_message_names_key_source_value_and_types(
        self, project: Any, resolve: Resolve, flag: str, message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(project.write(TASK + "trainer: {max_epochs: 1}"), flag)


class TestClasses:
    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("task.Lin", r"task has no class or function 'Lin'\. Did you mean 'Line'\?"),
            ("tusk.Line", r"there is no module 'tusk'"),
            ("task.deep.Line", r"there is no module 'task\.deep'"),
            ("Line", r"class_path 'Line' .*task\.Line for a file task\.py next to the YAML file"),
            ("EarlyStoping", r"Did you mean 'EarlyStopping'\?"),
            ("os.system", r"'os\.system' belongs to Python itself"),
            ("subprocess.run", r"'subprocess\.run' belongs to Python itself"),
            ("torch.pi", r"torch has no class or function 'pi'"),
        ],
    )
    def test_not_there(self, project: Any, resolve: Resolve, path: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            resolve(project.write(f"task: {path}\ntrainer: {{max_epochs: 1}}"))

    def test_a_module_that_fails_shows_its_own_error(self, project: Any, resolve: Resolve) -> None:
        (project.folder / "half.py").write_text("import nowhere_to_be_found\n")
        with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
            resolve(project.write("task: half.Task\ntrainer: {max_epochs: 1}"))

    def test_arguments_of_base_classes_are_known(self, project: Any, resolve: Resolve) -> None:
        text = "task: {class_path: task.Derived, init_args: {depth: 5}}\ntrainer: {max_epochs: 1}"
        assert resolve(project.write(text))["task"]["init_args"] == {"width": 4, "depth": 5}

    def test_public_names_need_no_package(self, project: Any, resolve: Resolve) -> None:
        text = TASK + "trainer: {callbacks: [LearningRateMonitor, {class_path: task.Count, init_args: {limit: 2}}]}"
        first, second = resolve(project.write(text))["trainer"]["callbacks"]
        assert first["class_path"] == "loopwright.LearningRateMonitor"
        assert second == {"class_path": "task.Count", "init_args": {"limit": 2, "word": "w"}}

    def test_files_in_two_folders_have_their_own_task(self, project: Any, resolve: Resolve) -> None:
        other = project.folder / "other"
        other.mkdir()
        (other / "task.py").write_text(
            "from loopwright import Task\nclass Line(Task):\n    def __init__(self, own: int = 1): ...\n"
        )
        (other / "run.yaml").write_text(TASK + "trainer: {max_epochs: 1}")
        assert "width" in resolve(project.write(TASK + "trainer: {max_epochs: 1}"))["task"]["init_args"]
        assert resolve(other / "run.yaml")["task"]["init_args"] == {"own": 1}
