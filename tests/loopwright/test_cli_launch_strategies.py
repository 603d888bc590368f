"""FSDP, DeepSpeed and meshes under `loopwright launch`: what reaches the script, against Accelerate's own launcher."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from loopwright.cli.launch import settings_of
from loopwright.cli.launch_merge import merged_options
from loopwright.cli.launch_options import read_launch
from loopwright.cli.main import main
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.fsdp_plugin import FullyShardedDataParallelPlugin

NEEDS_ACCELERATE = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")
FSDP_1 = """
distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block,Other
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_forward_prefetch: true
  fsdp_offload_params: true
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
  fsdp_activation_checkpointing: true
  fsdp_version: 1
"""
FSDP_2 = """
distributed_type: FSDP
num_processes: 4
fsdp_config:
  version: 2
  reshard_after_forward: false
  auto_wrap_policy: SIZE_BASED_WRAP
  min_num_params: 2000
  state_dict_type: FULL_STATE_DICT
  ignored_modules: head|tail
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
"""
OLD = """
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_sharding_strategy: 1
"""
ZERO_3 = """
distributed_type: DEEPSPEED
num_processes: 2
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 4
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: NVME
  offload_param_nvme_path: /fast
  zero3_init_flag: true
  zero3_save_16bit_model: false
  deepspeed_moe_layer_cls_names: Experts
"""
ZERO_FILE = """
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config:
  deepspeed_config_file: zero.json
  zero3_init_flag: false
"""
# What Accelerate's launcher says of itself where nobody says anything: here nothing is said, and the plugin's defaults
# hold.
DEFAULTS = {
    "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    "PARALLELISM_CONFIG_CP_BACKEND": "torch", "PARALLELISM_CONFIG_SP_BACKEND": "deepspeed",
    "PARALLELISM_CONFIG_SP_SIZE": "1",
}  # fmt: skip
PREFIXES = ("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_CL")
PREFIXES += ("ACCELERATE_CONFIG_DS_",)


@pytest.fixture(autouse=True)
def no_launch_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)


def ours(*arguments: str) -> dict[str, str]:
    """What the processes of a launch learn."""
    return dict(settings_of(merged_options(read_launch([*arguments, "script.py"]).options)).environment)


def theirs(*arguments: str) -> dict[str, str]:
    """The same of Accelerate's launcher."""
    launch = importlib.import_module("accelerate.commands.launch")
    utils = importlib.import_module("accelerate.utils.launch")
    args, defaults, from_file = launch._validate_launch_command(
        launch.launch_command_parser().parse_args(["--main_process_port=0", *arguments, "script.py"])
    )
    if not args.use_deepspeed:
        return dict(utils.prepare_multi_gpu_env(args))
    fields = list(defaults.deepspeed_config) if defaults else []
    args.deepspeed_fields_from_accelerate_config = ",".join([*fields, *(["mixed_precision"] if from_file else [])])
    return dict(utils.prepare_deepspeed_cmd_env(args)[1])


def chosen(environment: dict[str, str]) -> dict[str, str]:
    found = {name: text for name, text in environment.items() if name.startswith(PREFIXES)}
    for name in found.keys() & {"ACCELERATE_CONFIG_DS_FIELDS"}:
        found[name] = ",".join(sorted(found[name].split(",")))
    return found


@NEEDS_ACCELERATE
@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (FSDP_1, []),
        (FSDP_2, []),
        (OLD, []),
        (FSDP_1, ["--use_fsdp", "--fsdp_sharding_strategy=FULL_SHARD", "--fsdp-offload-params", "false"]),
        (None, ["--use_fsdp", "--num_processes=2", "--fsdp_version=2", "--fsdp_reshard_after_forward", "false"]),
        (ZERO_3, []),
        (ZERO_FILE, []),
        (None, ["--use_deepspeed", "--num_processes=2", "--zero_stage=1", "--gradient_clipping=1.0"]),
    ],
    ids=["fsdp1", "fsdp2", "f65", "flags over file", "fsdp flags", "zero3", "zero file", "zero flags"],
)
def test_the_processes_learn_what_accelerates_launcher_tells_them(
    text: str | None, flags: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = [] if text is None else ["--config_file=launch.yaml"]
    Path("launch.yaml").write_text(text or "")
    told = theirs(*file, *flags)
    own = ours(*file, *flags)
    for name in ("MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS"):  # which have a name of our own as well
        assert own.get(f"LOOPWRIGHT_{name}", "no") == told.get(f"ACCELERATE_{name}", "no")
    found, wanted = chosen(own), chosen(told)
    ours_alone = {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "FSDP_BACKWARD_PREFETCH"}  # lost by Accelerate
    assert {name: text for name, text in found.items() if name not in ours_alone} == {
        name: text for name, text in wanted.items() if name in found and name not in ours_alone
    }
    unsaid = {name: text for name, text in wanted.items() if name not in found}
    assert unsaid == {name: text for name, text in DEFAULTS.items() if name in unsaid}
    if "ACCELERATE_USE_FSDP" not in found:
        return
    plugins = []
    for environment in (found, wanted):
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(PREFIXES)]:
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            plugins.append(FullyShardedDataParallelPlugin())
    assert plugins[0].options(4, 2) == plugins[1].options(4, 2)


def test_both_spellings_of_the_file_are_understood() -> None:
    """F65: Accelerate loses the second one."""
    for key in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "backward_prefetch"):
        Path("launch.yaml").write_text(OLD.replace("fsdp_backward_prefetch_policy", key))
        assert ours("--config_file=launch.yaml")["FSDP_BACKWARD_PREFETCH"] == "BACKWARD_PRE"


class TestPrecedence:
    def test_flag_over_variable_over_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("launch.yaml").write_text(FSDP_1)
        assert ours("--config_file=launch.yaml")["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"
        monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
        assert "FSDP_STATE_DICT_TYPE" not in ours("--config_file=launch.yaml")  # the processes inherit it
        flags = ["--config_file=launch.yaml", "--fsdp_state_dict_type=2"]
        assert ours(*flags)["FSDP_STATE_DICT_TYPE"] == "2"

    def test_a_variable_switches_fsdp_on_and_a_flag_takes_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        assert ours("--num_processes=2", "--fsdp_min_num_params=3")["FSDP_MIN_NUM_PARAMS"] == "3"
        found = ours("--num_processes=2", "--use_deepspeed")
        assert (found["ACCELERATE_USE_DEEPSPEED"], found["ACCELERATE_USE_FSDP"]) == ("true", "false")

    def test_the_cpu_flag_keeps_the_strategy_of_the_file(self) -> None:
        Path("launch.yaml").write_text(FSDP_1)
        settings = settings_of(merged_options({"config_file": "launch.yaml", "cpu": True, "num_processes": 3}))
        assert (settings.num_processes, settings.environment["ACCELERATE_USE_FSDP"]) == (3, "true")

    def test_another_strategy_leaves_out_the_section_of_the_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("launch.yaml").write_text(FSDP_1)
        found = chosen(ours("--config_file=launch.yaml", "--use_deepspeed", "--zero_stage=1"))
        assert {name for name in found if name.startswith("FSDP") or "FSDP" in name} == set()
        assert "fsdp_config is not used: it belongs to --use_fsdp" in capsys.readouterr().err

    def test_a_section_counts_where_a_flag_switches_it_on(self) -> None:
        Path("launch.yaml").write_text(FSDP_1.replace("distributed_type: FSDP", "distributed_type: MULTI_CPU"))
        assert chosen(ours("--config_file=launch.yaml")) == {}
        assert ours("--config_file=launch.yaml", "--use_fsdp")["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block,Other"


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            "fsdp_config: {fsdp_ofload_params: true}",
            r"fsdp_config\.fsdp_ofload_params is not known\. Did you mean 'fsdp_of",
        ),
        ("fsdp_config: [a]", r"fsdp_config is not a mapping"),
        (
            "fsdp_config: {fsdp_min_num_params: some}",
            r"fsdp_config\.fsdp_min_num_params: got 'some'\. Expected a whole",
        ),
        ("deepspeed_config: {zero_stag: 2}", r"Did you mean 'zero_stage'\?"),
        (
            "fsdp_config: {cpu_ram_efficient_loading: true, sync_module_states: false}",
            r"fsdp_cpu_ram_efficient_loading needs fsdp_sync_module_states",
        ),
    ],
)
def test_bad_sections(section: str, says: str) -> None:
    Path("launch.yaml").write_text(f"distributed_type: FSDP\nnum_processes: 2\n{section}\n")
    with pytest.raises(ConfigError, match=says):
        ours("--config_file=launch.yaml")


SCRIPT = """
import json

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopwright import Accelerator  # was: from accelerate import Accelerator
from loopwright.utils import DistributedType, set_seed  # was: from accelerate.utils import ...


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, "weights")
    if accelerator.is_main_process:
        is_fsdp = accelerator.distributed_type == DistributedType.FSDP
        units = sorted({type(m).__name__ for m in unwrapped.modules()})
        total = sum(value.sum().item() for value in state.values())
        with open("told.json", "w") as file:
            json.dump({"losses": losses, "fsdp": is_fsdp, "units": units, "sum": total}, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""


def trained(*flags: str) -> Any:
    """What the script tells after a launch."""
    Path("script.py").write_text(SCRIPT)
    assert main(["launch", "--cpu", *flags, "script.py"]) == 0
    told = json.loads(Path("told.json").read_text())
    Path("told.json").unlink()
    return told


@pytest.mark.slow
def test_the_self_check_trains_with_the_strategy_of_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    Path("launch.yaml").write_text(f"{FSDP_1}\nuse_cpu: true\n".replace("Block,Other", "Linear"))
    assert main(["test", "--config_file=launch.yaml"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line[:3] for line in lines] == ["ok:", "ok:", "ok:", "All"]


@pytest.mark.slow
def test_a_script_that_was_written_for_accelerate_trains_as_in_one_process() -> None:
    alone = trained("--num_processes=1", "--use_fsdp")
    Path("launch.yaml").write_text(FSDP_1.replace("bf16", "no").replace("Block,Other", "Block"))
    two = trained("--config_file=launch.yaml")
    assert (alone["fsdp"], two["fsdp"]) == (False, True)
    assert two["units"] == ["FSDPBlock", "FSDPSequential", "Linear"]
    assert two["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert two["sum"] == pytest.approx(alone["sum"], abs=1e-4)
    assert sorted(path.name for path in Path("weights").iterdir()) == ["model.safetensors"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_script_trains_with_deepspeed() -> None:
    alone = trained("--num_processes=1")
    two = trained("--num_processes=2", "--use_deepspeed", "--zero_stage=2")
    assert two["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert two["sum"] == pytest.approx(alone["sum"], abs=1e-4)
