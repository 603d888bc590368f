"""`loopwright to-fsdp2`, and what `loopwright config` asks of FSDP and DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from loopwright.cli.launch_config import read_launch_file
from loopwright.cli.main import main

ON_CPU = pytest.mark.skipif(torch.accelerator.is_available(), reason="asks other questions where there are devices")
OLD = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": True, "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": True, "fsdp_min_num_params": 5,
    },
}  # fmt: skip


def write(keys: dict[str, Any], name: str = "old.yaml") -> None:
    Path(name).write_text(yaml.safe_dump(keys))


def read(name: str) -> Any:
    return yaml.safe_load(Path(name).read_text())


def test_version_1_becomes_version_2(capsys: pytest.CaptureFixture[str]) -> None:
    write(OLD)
    assert main(["to-fsdp2", "--config_file", "old.yaml", "--output-file=new.yaml"]) == 0
    assert read("old.yaml") == OLD
    found = read("new.yaml")
    assert found == {
        **OLD,
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False, "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": True,
            "fsdp_min_num_params": 5,
        },
    }  # fmt: skip
    said = capsys.readouterr().err
    for name in ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params"):
        assert f"fsdp_{name}" in said
    assert read_launch_file(Path("new.yaml")).sections["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("word", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"])
@pytest.mark.parametrize("name", ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"])
def test_the_outcome_is_accelerates(name: str, word: str) -> None:
    config = {key: value for key, value in OLD["fsdp_config"].items() if key != "fsdp_sharding_strategy"}  # type: ignore[attr-defined]
    write({**OLD, "fsdp_config": {**config, name: word}})
    convert = importlib.import_module("accelerate.commands.to_fsdp2").convert_config_to_fsdp2
    wanted = convert(read("old.yaml"))
    assert main(["to-fsdp2", "--config_file=old.yaml", "--overwrite"]) == 0
    assert read("old.yaml") == wanted


def test_numbers_and_names_without_the_prefix() -> None:
    write({"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": 1, "offload_params": True}})
    assert main(["to-fsdp2", "--config_file=old.yaml", "--overwrite"]) == 0
    wanted = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": True}
    assert read("old.yaml")["fsdp_config"] == wanted


@pytest.mark.parametrize(
    ("config", "says"),
    [({"fsdp_version": 2, "fsdp_use_orig_params": True}, "version 2 already"), ({}, "no fsdp_config")],
)
def test_what_is_not_of_version_1_stays(config: Any, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"distributed_type": "FSDP", "fsdp_config": config}
    write(keys)
    assert main(["to-fsdp2", "--config_file=old.yaml", "--output_file=new.yaml"]) == 0
    assert says in capsys.readouterr().err
    assert read("new.yaml") == keys


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--config_file is missing"),
        (["--config_file=old.yaml"], "--output_file is missing. Name one, or use --overwrite"),
        (["--config_file=old.yaml", "--output_file=old.yaml"], "old.yaml is there already"),
        (["--config_file=none.yaml", "--overwrite"], "the launch file none.yaml can't be read"),
        (["--config_file=old.yaml", "--overwrit"], "Did you mean '--overwrite'?"),
        (["--config_file"], "--config_file has no value"),
        (["old.yaml"], "to-fsdp2: got 1 paths. Expected to-fsdp2 with options alone."),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(OLD)
    assert main(["to-fsdp2", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert read("old.yaml") == OLD


@ON_CPU
class TestQuestions:
    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def ask(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> Any:
        """The keys that the answers give: for 1 machine and 4 processes, and nothing else asked for at the end."""
        lines = ["", "4", *answers, "", "", "", ""]
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["config", "--config_file=new.yaml"]) == 0
        assert sys.stdin.read() == ""
        read_launch_file(Path("new.yaml"))
        return read("new.yaml")

    def test_fsdp(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        keys = self.ask(monkeypatch, "fdsp", "fsdp", "", "Block", "no", "", "yes", "", "", "2", "2")
        assert "Answer: got 'fdsp'. Did you mean 'fsdp'?" in capsys.readouterr().out
        assert (keys["distributed_type"], keys["use_cpu"]) == ("FSDP", True)
        assert keys["fsdp_config"] == {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_reshard_after_forward": False,
            "fsdp_offload_params": False, "fsdp_activation_checkpointing": True,
            "fsdp_cpu_ram_efficient_loading": False, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }  # fmt: skip
        assert keys["parallelism_config"] == {
            "parallelism_config_tp_size": 2, "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_dp_shard_size": 1,
        }  # fmt: skip

    def test_fsdp_by_size_without_a_mesh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = self.ask(monkeypatch, "fsdp", "size", "1000", "", "", "", "", "", "", "")
        assert keys["fsdp_config"]["fsdp_min_num_params"] == 1000
        assert keys["fsdp_config"]["fsdp_reshard_after_forward"] is True
        assert "parallelism_config" not in keys

    def test_a_word_of_version_1_for_what_is_freed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = self.ask(monkeypatch, "fsdp", "none", "full_shard", "", "", "", "", "", "")
        assert keys["fsdp_config"]["fsdp_reshard_after_forward"] == "FULL_SHARD"

    def test_deepspeed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = self.ask(monkeypatch, "deepspeed", "", "3", "cpu", "nvme", "/fast", "1.5", "y", "")
        assert keys["distributed_type"] == "DEEPSPEED"
        assert keys["deepspeed_config"] == {
            "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "nvme",
            "offload_param_nvme_path": "/fast", "gradient_clipping": 1.5, "zero3_init_flag": True,
            "zero3_save_16bit_model": False,
        }  # fmt: skip

    def test_deepspeeds_own_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = self.ask(monkeypatch, "deepspeed", "zero.json")
        assert keys["deepspeed_config"] == {"deepspeed_config_file": "zero.json"}
