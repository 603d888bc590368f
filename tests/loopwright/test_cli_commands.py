"""The commands, run in this process with real training; a few in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loopwright import ConfigError
from loopwright.cli.main import COMMANDS, HELP, main
from loopwright.cli.request import read_request

RUN = """
task:
  class_path: task.Line
data:
  class_path: task.loaders
trainer:
  max_epochs: 2
  progress: false
  trackers: false
  seed: 7
"""
# Weights with which the task computes y = 2x exactly: one hidden unit, then times two.
EXACT = {
    "net.0.weight": torch.tensor([[1.0], [0.0], [0.0], [0.0]]),
    "net.0.bias": torch.zeros(4),
    "net.1.weight": torch.tensor([[2.0, 0.0, 0.0, 0.0]]),
    "net.1.bias": torch.zeros(1),
}


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that exits with 2 prints; nothing may be on stdout."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


class TestFit:
    def test_trains_and_saves_its_configuration(
        self, project: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checkpoint = "--trainer.callbacks={class_path: ModelCheckpoint, init_args: {monitor: val/error}}"
        assert main(["fit", str(project.write(RUN)), "--trainer.name=a", "--trainer.max_epochs=30", checkpoint]) == 0
        assert (tmp_path / "runs/a/config.yaml").is_file()
        assert capsys.readouterr().out.splitlines()[-1] == f"The files of this run are in {Path('runs/a')}"
        weights = max((tmp_path / "runs/a/checkpoints").iterdir())
        assert main(["test", str(project.write(RUN)), "--weights", str(weights)]) == 0
        name, _, value = capsys.readouterr().out.strip().partition(": ")
        assert name == "test/error"
        assert float(value) < 0.2  # an untrained line is off by about 1

    def test_the_seed_comes_before_the_task(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        file = str(project.write(RUN))
        found = []
        for seed in (1, 1, 2):
            assert main(["plan", file, "--task=task.Talkative", f"--trainer.seed={seed}"]) == 0
            found.append(capsys.readouterr().out.splitlines()[0])
        assert found[0].startswith("weights sum to ")
        assert found[0] == found[1] != found[2]

    def test_trackers_get_the_whole_file(self, project: Any, tmp_path: Path) -> None:
        flags = [
            "--trainer.trackers=jsonl",
            "--trainer.name=a",
            "--task.init_args.width=3",
            "--data.init_args.batch_size=4",
        ]
        assert main(["fit", str(project.write(RUN)), *flags]) == 0
        text = "".join(path.read_text() for path in sorted((tmp_path / "runs/a").rglob("*.json*")))
        for part in ('"width": 3', '"batch_size": 4', '"class_path": "task.loaders"', '"max_epochs": 2'):
            assert part in text

    def test_a_list_of_callbacks_is_built(self, project: Any) -> None:
        assert main(["fit", str(project.write(RUN)), "--trainer.callbacks+=LearningRateMonitor",
                     "--trainer.callbacks+={class_path: task.Count, init_args: {limit: 3}}"]) == 0  # fmt: skip

    def test_the_recipes_resolve(self, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
        files = sorted((repository / "recipes").glob("*/*.yaml"))
        assert files
        for file in files:
            assert main(["fit", str(file), "--print_config"]) == 0
            assert "python_path" not in capsys.readouterr().out

    def test_a_dataclass_is_an_argument(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--task=task.Windowed", "--task.init_args.window.size=4", "--task.init_args.window.is_open", "on"]
        assert main(["plan", str(project.write(RUN)), *flags, "--task.init_args.window.word=1e3"]) == 0
        assert "Window(size=4, word='1e3', is_open=True) False" in capsys.readouterr().out
        message = (
            "task.init_args.window.sise (in the command line): unknown key. Did you mean task.init_args.window.size?"
        )
        assert message in error_of(capsys, "plan", str(project.write(RUN)), *flags, "--task.init_args.window.sise=4")
        assert "'maybe' is not a boolean" in error_of(
            capsys, "plan", str(project.write(RUN)), *flags, "--task.init_args.loose=maybe"
        )

    def test_why_it_ended_is_shown_with_the_place_of_its_files(
        self, project: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        early = (
            "--trainer.callbacks={class_path: EarlyStopping, init_args: {monitor: val/error, stopping_threshold: 9}}"
        )
        assert main(["fit", str(project.write(RUN)), "--trainer.name=a", early]) == 0
        reason, place = capsys.readouterr().out.splitlines()[-2:]
        assert reason.startswith("The run ended: EarlyStopping: ")
        assert place == f"The files of this run are in {Path('runs/a')}"

    def test_a_task_without_arguments(self, project: Any) -> None:
        assert main(["fit", str(project.write(RUN)), "--task=task.Talkative"]) == 0

    def test_plan_trains_nothing(self, project: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", str(project.write(RUN))]) == 0
        assert "8 steps" in capsys.readouterr().out  # two epochs of four batches
        assert not (tmp_path / "runs").exists()


class TestWeights:
    @pytest.fixture
    def weights(self, tmp_path: Path) -> str:
        file = tmp_path / "exact.safetensors"
        save_file(EXACT, file)
        return str(file)

    @pytest.mark.parametrize(("command", "metric"), [("validate", "val/error"), ("test", "test/error")])
    def test_metrics_are_printed(
        self, project: Any, weights: str, command: str, metric: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command, str(project.write(RUN)), "--weights", weights]) == 0
        assert capsys.readouterr().out == f"{metric}: 0\n"

    def test_predictions_go_to_a_file(
        self, project: Any, weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["predict", str(project.write(RUN)), "--weights", weights, "--output", "out/p.jsonl"]) == 0
        lines = (tmp_path / "out/p.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [[i / 4] for i in range(8)]  # y = 2x for x = i / 8
        assert capsys.readouterr().out.startswith("8 predictions.")

    def test_predictions_are_counted(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["predict", str(project.write(RUN))]) == 0
        assert capsys.readouterr().out.startswith("8 predictions. Write them to a file with --output")

    def test_predicting_opens_no_tracker_and_leaves_no_run(self, project: Any, tmp_path: Path) -> None:
        file = str(project.write(RUN))
        assert main(["predict", file, "--trainer.trackers=[jsonl, tensorboard]", "--output", "out/p.jsonl"]) == 0
        assert (tmp_path / "out/p.jsonl").is_file()
        assert not (tmp_path / "runs").exists()

    def test_weights_that_do_not_fit(self, project: Any, weights: str, capsys: pytest.CaptureFixture[str]) -> None:
        file = str(project.write(RUN))
        assert "does not fit Line" in error_of(capsys, "test", file, "--weights", weights, "--task.init_args.width=2")
        assert "--weights: " in error_of(capsys, "test", file, "--weights=nowhere.safetensors")

    def test_weights_belong_to_evaluation(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert "weights (in the command line): unknown key" in error_of(
            capsys, "fit", str(project.write(RUN)), "--weights=x"
        )


class TestExitCodes:
    def test_usage_is_2(self, project: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = str(project.write(RUN))
        assert "no such command. Did you mean 'fit'?" in error_of(capsys, "fitt")
        assert "no file is given" in error_of(capsys, "fit", "--trainer.seed=1")
        assert "got two files" in error_of(capsys, "fit", file, file)
        assert "nowhere.yaml can't be read" in error_of(capsys, "fit", "nowhere.yaml")
        assert "--trainer.seed has no value" in error_of(capsys, "fit", file, "--trainer.seed")
        assert "is not valid YAML" in error_of(capsys, "fit", str(project.write("a: [", "bad.yaml")))
        assert "is not a mapping" in error_of(capsys, "fit", str(project.write("- a", "list.yaml")))
        assert "takes no arguments" in error_of(capsys, "env", "x")
        assert "not a subclass of loopwright.Task" in error_of(
            capsys, "fit", file, "--task=task.Count", "--task.init_args.limit=1"
        )

    def test_what_the_trainer_refuses_is_2(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert "singel" in error_of(capsys, "fit", str(project.write(RUN)), "--trainer.strategy=singel")
        for seed in (99_999_999_999_999, -1):
            message = error_of(capsys, "fit", str(project.write(RUN)), f"--trainer.seed={seed}")
            assert (
                message == f"loopwright fit: trainer.seed={seed}. Expected an integer from 0 to 2**32 - 1, or None.\n"
            )
        message = error_of(capsys, "fit", str(project.write(RUN)), "--trainer.limit_batches=.nan")
        assert "limit_batches['train']=nan. Expected a number of batches" in message
        callback = "{class_path: ModelCheckpoint, init_args: {mode: max}}"
        message = error_of(capsys, "fit", str(project.write(RUN)), f"--trainer.callbacks={callback}")
        assert "ModelCheckpoint(mode='max') has no metric to compare" in message

    @pytest.mark.parametrize(
        ("flag", "message"),
        [
            ("--task=task.Broken", "broken by its author"),
            ("--trainer.callbacks={class_path: task.Count, init_args: {limit: -1}}", "limit is negative"),
        ],
    )
    def test_exceptions_of_the_users_code_pass_through(self, project: Any, flag: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            main(["fit", str(project.write(RUN)), flag])
        assert type(caught.value) is ValueError
        assert str(caught.traceback[-1].path).endswith("task.py")

    def test_a_class_in_the_place_of_a_word_says_how_to_name_it(
        self, project: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, path = str(project.write(RUN)), "loopwright.SingleDeviceStrategy"
        message = error_of(capsys, "fit", file, f"--trainer.strategy={path}")
        assert message.rstrip().endswith(f"in a file or a flag write {{class_path: {path}}}.")
        for strategy in (f"{{class_path: {path}}}", "SingleDeviceStrategy"):
            assert main(["fit", file, f"--trainer.strategy={strategy}"]) == 0

    def test_interrupting_is_130(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fit", str(project.write(RUN)), "--task=task.Interrupted", "--trainer.name=a"]) == 130
        lines = capsys.readouterr().err.splitlines()
        assert lines == [
            "Interrupted.",
            "No checkpoint was saved. The callback ModelCheckpoint saves them.",
            f"The files of this run are in {Path('runs/a')}",
        ]

    def test_interrupting_says_where_the_newest_checkpoint_is(
        self, project: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flags = ["--trainer.name=a", "--trainer.callbacks=ModelCheckpoint"]
        assert main(["fit", str(project.write(RUN)), "--task=task.InterruptedLater", *flags]) == 130
        newest = max((tmp_path / "runs/a/checkpoints").iterdir())
        lines = capsys.readouterr().err.splitlines()
        files = f"The files of this run are in {Path('runs/a')}"
        assert lines == ["Interrupted.", f"The newest checkpoint is {newest}", files]
        assert main(["fit", str(project.write(RUN)), "--task=task.Interrupted", *flags]) == 130
        assert capsys.readouterr().err.splitlines()[1] == "No checkpoint was saved."


class TestHelp:
    def test_the_short_help_names_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments in (["--help"], ["-h"], ["help"]):
            assert main(arguments) == 0
            assert capsys.readouterr().out == HELP
        assert all(f"\n  {command} " in HELP for command in COMMANDS)
        assert main([]) == 2

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        import loopwright

        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"loopwright {loopwright.__version__}\n"

    def test_help_of_a_file_lists_its_own_arguments(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fit", str(project.write(RUN)), "--help"]) == 0
        text = capsys.readouterr().out
        assert "--task.init_args.width WIDTH\n                        hidden width. (type: int, default: 4)" in text
        assert "--data.init_args.batch_size" in text
        assert "--trainer.accumulate_across_epochs {flush,carry,drop}" in text

    def test_help_without_a_file_lists_the_trainers(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fit", "--help"]) == 0
        text = capsys.readouterr().out
        assert "--trainer.max_epochs" in text
        assert "--task" not in text

    def test_help_of_a_class(self, project: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fit", str(project.write(RUN)), "--trainer.callbacks.help", "EarlyStopping"]) == 0
        assert "--trainer.callbacks.monitor" in capsys.readouterr().out
        file = str(project.write(RUN))
        wrong = error_of(capsys, "fit", file, "--trainer.seed.help=EarlyStopping")
        assert "--trainer.seed.help: EarlyStopping can't stand at this key. --help lists the keys" in wrong
        assert "Did you mean 'EarlyStopping'?" in error_of(capsys, "fit", file, "--trainer.callbacks.help=EarlyStoping")

    def test_env_shows_versions_and_the_variables_that_are_read_but_no_value_of_a_key(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOOPWRIGHT_TRAINER__NAME", "a-secret-name")
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")  # nobody reads it
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert main(["env"]) == 0
        text = capsys.readouterr().out
        assert f"torch:                {torch.__version__}" in text
        variables = "ACCELERATE_MIXED_PRECISION=bf16, LOOPWRIGHT_TRAINER__NAME, WORLD_SIZE=1"
        assert text.splitlines()[-1] == f"variables set:        {variables}"
        assert "a-secret-name" not in text


class TestRequest:
    def test_any_order(self) -> None:
        request = read_request(
            "test", ["--weights=w", "--trainer.seed", "-1", "f.yaml", "--print-config", "--a-b.c=x=y"]
        )
        assert request.file == Path("f.yaml")
        assert request.options == {"weights": "w"}
        assert request.switches == {"print_config"}
        assert request.flags == [("trainer.seed", "-1"), ("a_b.c", "x=y")]

    def test_a_flag_is_no_value(self) -> None:
        with pytest.raises(ConfigError, match=r"--trainer\.progress has no value"):
            read_request("fit", ["f.yaml", "--trainer.progress", "--trainer.seed=1"])


class TestB112:
    """An option reaches the run under every strategy, and nothing of one run is left for the next."""

    @pytest.mark.parametrize("strategy", ["auto", "single", "{name: single}"])
    def test_accumulate(self, project: Any, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
        steps = []
        for accumulate in (4, 2, 1):  # 8 samples in batches of 2: four batches an epoch, for two epochs
            flags = (f"--trainer.accumulate={accumulate}", f"--trainer.strategy={strategy}")
            assert main(["plan", str(project.write(RUN)), *flags]) == 0
            steps.append(capsys.readouterr().out.split(",")[0].split()[-2:])
            counter = "--trainer.callbacks=task.Steps"
            assert main(["fit", str(project.write(RUN)), *flags, counter]) == 0
            steps.append(capsys.readouterr().out.splitlines()[0].split())
        assert steps == [[number, "steps"] for number in ("2", "2", "4", "4", "8", "8")]


class TestProcess:
    """What only a new process shows."""

    @staticmethod
    def run(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "loopwright", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    def test_help_and_version_import_nothing_heavy(self) -> None:
        code = (
            "import sys; from loopwright.cli.main import main\n"
            "codes = [main([word]) for word in ('--help', '--version', 'fitt')]\n"
            "heavy = {'torch', 'jsonargparse', 'yaml', 'numpy'} & set(sys.modules)\n"
            "sys.exit(0 if codes == [0, 0, 2] and not heavy else f'{codes} {heavy}')"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stderr.splitlines()[1:]) == (0, [])

    def test_the_users_traceback_and_exit_code_1(self, project: Any) -> None:
        run = self.run("fit", str(project.write(RUN)), "--task=task.Broken")
        assert run.returncode == 1
        assert "Traceback" in run.stderr
        assert run.stderr.rstrip().endswith("ValueError: broken by its author")
        assert "During handling" not in run.stderr

    def test_a_usage_error_exits_with_2(self) -> None:
        run = self.run("fit", "nowhere.yaml")
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr.startswith("loopwright fit: nowhere.yaml can't be read")
