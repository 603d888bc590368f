"""`loopwright config` and the launch file: questions answered on standard input, files of both forms."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from loopwright import ConfigError
from loopwright.cli.launch_config import accelerate_path, default_path, find_default, read_launch_file
from loopwright.cli.main import main

ON_CPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="asks other questions where there are devices")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


@ON_CPU
class TestQuestions:
    def test_answers_are_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer(monkeypatch, "", "4", "", "bf16", "2", "y", "")
        assert main(["config"]) == 0
        assert yaml.safe_load(default_path().read_text()) == {
            "compute_environment": "LOCAL_MACHINE",
            "debug": False,
            "distributed_type": "MULTI_CPU",
            "enable_cpu_affinity": True,
            "gradient_accumulation_steps": 2,
            "machine_rank": 0,
            "mixed_precision": "bf16",
            "num_machines": 1,
            "num_processes": 4,
            "use_cpu": True,
        }
        file = read_launch_file(default_path())
        assert file.distributed_type == "MULTI_CPU"
        assert file.options["num_processes"] == 4

    def test_wrong_answer_is_asked_again(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answer(monkeypatch, "0", "two", "2", "1", "", "10.0.0.1", "", "", "", "", "", "", "", "")
        assert main(["config", "--config_file=here.yaml"]) == 0
        said = capsys.readouterr().out
        assert "Answer: got '0'. Expected an integer >= 1." in said
        assert "Answer: got 'two'. Expected a whole number." in said
        assert "An answer is needed." in said  # there is no default for the address
        keys = yaml.safe_load(Path("here.yaml").read_text())
        assert (keys["num_machines"], keys["machine_rank"], keys["main_process_ip"]) == (2, 1, "10.0.0.1")

    def test_end_of_input_writes_nothing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answer(monkeypatch, "1")
        assert main(["config"]) == 2
        assert "`loopwright config --default` asks nothing" in capsys.readouterr().err
        assert not default_path().exists()


def test_default_keeps_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--default", "--mixed-precision", "bf16"]) == 0
    before = default_path().read_text()
    assert yaml.safe_load(before)["mixed_precision"] == "bf16"
    assert main(["config", "default"]) == 1
    assert "is there already, and stays as it is" in capsys.readouterr().out
    assert default_path().read_text() == before


def test_update_fills_in_keys_and_keeps_the_others() -> None:
    Path("old.yaml").write_text(
        "distributed_type: MULTI_CPU\nfp16: true\nnum_processes: 3\nfsdp_config: {min_num_params: 1}\n"
    )
    assert main(["config", "update", "--config_file", "old.yaml"]) == 0
    keys = yaml.safe_load(Path("old.yaml").read_text())
    assert (keys["mixed_precision"], keys["num_processes"], keys["fsdp_config"]) == ("fp16", 3, {"min_num_params": 1})
    assert keys["compute_environment"] == "LOCAL_MACHINE"
    assert "fp16" not in keys


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["defualt"], "defualt is not known. Did you mean 'default'?"), (["--config_file"], "--config_file has no value")],
)
def test_unknown_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *arguments]) == 2
    assert says in capsys.readouterr().err


class TestFile:
    def read(self, keys: Any, name: str = "launch.yaml") -> Any:
        Path(name).write_text(keys if isinstance(keys, str) else json.dumps(keys))
        return read_launch_file(Path(name))

    def test_json_and_yaml_of_accelerate(self) -> None:
        keys = {
            "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU",
            "downcast_bf16": "no", "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0,
            "main_training_function": "main", "mixed_precision": "fp16", "num_machines": 1, "num_processes": 2,
            "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False,
            "tpu_use_sudo": False, "use_cpu": False, "dynamo_backend": "NO",
        }  # fmt: skip
        for name in ("launch.json", "launch.yaml"):
            file = self.read(keys, name)
            assert file.distributed_type == "MULTI_GPU"
            assert file.options["num_processes"] == 2
            assert file.options["cpu"] is False
            assert file.unused == ()

    def test_words_that_yaml_reads_as_false(self) -> None:
        file = self.read("distributed_type: NO\nmixed_precision: no\n")
        assert file.distributed_type == "NO"
        assert file.options["mixed_precision"] == "no"

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("distributed_type: NO\nnum_proceses: 2", r"unknown key num_proceses\. Did you mean 'num_processes'\?"),
            ("num_processes: 2", r"lacks the key distributed_type\. Accepted: NO, MULTI_CPU"),
            ("distributed_type: MULTI_GPUS", r"Did you mean 'MULTI_GPU'\?"),
            ("distributed_type: NO\nnum_processes: many", r"num_processes: got 'many'\. Expected a whole number"),
            ("distributed_type: NO\ncompute_environment: AMAZON_SAGEMAKER", r"SageMaker is not available"),
            ("- a", r"is not a mapping"),
            ("a: [", r"can't be read"),
        ],
    )
    def test_bad_file(self, text: str, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            self.read(text)

    def test_accelerates_own_file_is_read_where_there_is_none_of_ours(self) -> None:
        assert find_default() is None
        for path in (accelerate_path(), default_path()):
            path.parent.mkdir(parents=True)
            path.write_text("distributed_type: NO\n")
            assert find_default() == path

    def test_env_shows_the_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        default_path().parent.mkdir(parents=True)
        default_path().write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
        assert main(["env"]) == 0
        assert "launch.yaml (distributed_type: MULTI_CPU, num_processes: 2)" in capsys.readouterr().out
