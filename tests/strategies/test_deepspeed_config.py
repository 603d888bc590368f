"""DeepSpeed's configuration: read, completed from the run, and compared with it. Nothing here imports DeepSpeed."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.distributed.errors import ConfigError, MissingDependencyError
from loopwright.strategies.deepspeed import DeepSpeedStrategy
from loopwright.strategies.deepspeed_config import read_config
from loopwright.strategies.deepspeed_dummies import DummyOptim, DummyScheduler, facts_of
from loopwright.strategies.deepspeed_facts import Facts, complete, computes_in_half
from loopwright.strategies.deepspeed_nvme import check_nvme
from loopwright.strategies.deepspeed_package import import_deepspeed
from loopwright.strategies.deepspeed_plugin import DeepSpeedPlugin, HfDeepSpeedConfig
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.trainer import Trainer

AUTO_FILE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
        "offload_param": {"device": "none"},
    },
}  # fmt: skip


def facts(**options: Any) -> Facts:
    return Facts(**{"world_size": 2, "num_steps": 4, "precision": "no", **options})


def test_auto_values_come_from_the_run() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = DummyOptim([weight], lr=0.03, weight_decay=0.2, betas=(0.8, 0.9))
    DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=7)
    hyperparameters, schedule = facts_of(optimizer)
    run = facts(
        precision="bf16", micro_batch_size=8, hidden_size=64, clip_norm=0.7, optimizer=hyperparameters,
        schedule=schedule,
    )  # fmt: skip
    full = complete(read_config(AUTO_FILE), run)
    assert full["train_micro_batch_size_per_gpu"] == 8
    assert full["gradient_accumulation_steps"] == 4
    assert full["train_batch_size"] == 64
    assert full["gradient_clipping"] == 0.7
    assert full["bf16"] == {"enabled": True}
    assert "fp16" not in full
    assert full["optimizer"]["params"] == {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    assert full["scheduler"]["params"] == {
        "warmup_min_lr": 0, "warmup_max_lr": 0.03, "warmup_num_steps": 7, "total_num_steps": 100,
    }  # fmt: skip
    assert full["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }


def test_what_nothing_tells_is_left_to_deepspeed_or_refused() -> None:
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "optimizer": {"params": {"lr": "auto"}}}
    full = complete(read_config(config), facts(num_parameters=1234, optimizer={"lr": None}))
    assert full["zero_optimization"]["reduce_bucket_size"] == 1234
    assert full["optimizer"]["params"] == {}
    with pytest.raises(ConfigError, match=r"leaves flops_profiler\.profile_step 'auto'"):
        complete(read_config({"flops_profiler": {"profile_step": "auto"}}), facts())


def test_a_file_a_text_and_base64_are_the_same(tmp_path: Path) -> None:
    # In base64 it is longer than a file's name may be, and has a character that addresses may not have.
    config = {"zero_optimization": {"stage": 1}, "comment": "????>>>>" * 40}
    text = json.dumps(config)
    (tmp_path / "ds.json").write_text(text)
    forms: list[Any] = [config, text, str(tmp_path / "ds.json"), tmp_path / "ds.json"]
    forms += [encode(text.encode()).decode() for encode in (base64.b64encode, base64.urlsafe_b64encode)]
    assert [read_config(form) for form in forms] == [config] * 6
    assert read_config({"bfloat16": {"enabled": True}})["bf16"] == {"enabled": True}
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        read_config(tmp_path / "latin.json")


STRATEGY_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"zero_stage": 4}, "zero stage 4 is unknown"),
    ({"zero_stage": 2.0}, "zero stage 2.0 is unknown"),
    ({"zero_stag": 2}, "DeepSpeedStrategy.zero_stag=2. is unknown. Did you mean 'zero_stage'"),
    ({"stage": 1, "zero_stage": 3}, "DeepSpeedStrategy.stage=1. is unknown. Did you mean 'zero_stage'"),
    ({"offload_optimizer": "gpu"}, "offload_optimizer='gpu'. is unknown"),
    ({"offload_optimizer": 3}, "Expected 'cpu', 'nvme', or a mapping"),
    ({"zero_stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer='cpu' with ZeRO stage 0"),
    ({"zero_stage": 2, "offload_param": "cpu"}, "offload_param='cpu' with ZeRO stage 2.*zero_stage=3"),
    ({"zero_stage": 3, "offload_optimizer": "nvme"}, "'nvme' without nvme_path"),
    (
        {"zero_stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}},
        "'nvme' with ZeRO stage 2. NVMe needs zero_stage=3",
    ),
    ({"zero_stage": 2, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2 with ZeRO stage 2"),
    ({"zero_stage": 1, "zero3_init": True}, "zero3_init=True with ZeRO stage 1"),
    ({"config": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}}, "round_robin_gradients=True"),
    ({"clip_norm": 0}, r"clip_norm=0\). Expected a number above 0"),
    ({"moe_leaf_modules": "Experts"}, "Expected a list of names"),
    ({"moe_leaf_modules": [3]}, "Expected a list of names"),
    ({"zero_stage": 3, "zero_hpz_partition_size": 0}, "zero_hpz_partition_size=0. Expected an integer >= 1"),
    ({"config": "nowhere.json"}, "'nowhere.json' is no file"),
    ({"config": "{not json"}, "text is no JSON"),
    ({"config": {"zero_optimization": 3}}, "zero_optimization=3"),
    ({"config": {"zero_optimization": {"stage": 2}}, "zero_stage": 3}, "zero_stage=3.*config has stage=2"),
    ({"config": {"zero_optimization": {"offload_optimizer": "cpu"}}}, "offload_optimizer='cpu'.*mapping with 'device'"),
    ({"config": {"bf16": True}}, "bf16=True in DeepSpeed's config. Expected a mapping with 'enabled'"),
    ({"config": {"optimizer": "AdamW"}}, "optimizer='AdamW' in DeepSpeed's config. Expected a mapping with 'type'"),
    (
        {"config": {"optimizer": {"type": "SGD", "params": [1]}}},
        r"params=\[1\] in DeepSpeed's config. Expected a mapping",
    ),
    ({"config": {"train_batch_size": "x"}}, "train_batch_size='x'. Expected an integer >= 1"),
    ({"config": {"gradient_clipping": -1}}, "gradient_clipping=-1. Expected a number >= 0"),
    ({"config": {"gradient_clipping": 2.0}, "clip_norm": 1.0}, "clip_norm=1.0.*gradient_clipping=2.0"),
    ({"config": {"bf16": {"enabled": True}, "fp16": {"enabled": True}}}, "enables both bf16 and fp16"),
    ({"config": {"aio": 4}}, "aio=4 in DeepSpeed's config. Expected a mapping with 'block_size'"),
    ({"config": {"aio": {"blocksize": 4}}}, r"aio\.blocksize=4\. Did you mean 'block_size'"),
    ({"config": {"aio": {"queue_depth": 0}}}, r"aio\.queue_depth=0\. Expected an integer >= 1"),
    ({"config": {"aio": {"single_submit": "no"}}}, r"aio\.single_submit='no'"),
]


@pytest.mark.parametrize(("options", "text"), STRATEGY_ERRORS)
def test_options_that_cannot_be_used(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DeepSpeedStrategy(**options)


RUN_ERRORS: list[tuple[Mapping[str, Any], dict[str, Any], str]] = [
    ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps=2, and the run accumulates 4"),
    ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2}, {}, "train_batch_size=10.*make 16"),
    ({"bf16": {"enabled": True}}, {}, "bf16 enabled=True, and the run's precision is 'no'"),
    ({"bf16": {"enabled": False}}, {"precision": "bf16"}, "bf16 enabled=False.*'bf16'"),
    ({}, {"precision": "fp16", "device_type": "cuda"}, "fp16' with ZeRO stage 0"),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}},
        {}, "pin_memory=True, which needs an accelerator",
    ),
    (
        {"scheduler": {"params": {"total_num_steps": "auto"}}}, {"schedule": {"total_num_steps": None}},
        r"leaves scheduler\.params\.total_num_steps 'auto'",
    ),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, {}, "3 does not divide the 2 processes"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "run", "text"), RUN_ERRORS)
def test_contradictions_to_the_run_name_both(config: Mapping[str, Any], run: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        complete(read_config(config), facts(**run))


@pytest.mark.skipif(computes_in_half(), reason="this CPU computes in fp16")
def test_a_cpu_without_fp16() -> None:
    with pytest.raises(ConfigError, match=r"only on a CPU with instructions for it \(avx512_fp16\), which"):
        complete(read_config({"zero_optimization": {"stage": 2}}), facts(precision="fp16"))


def test_what_nvme_needs(tmp_path: Path) -> None:
    def offload(folder: Path) -> dict[str, Any]:
        offload = {"device": "nvme", "nvme_path": str(folder)}
        return DeepSpeedStrategy(zero_stage=3, offload_param=offload, config={"aio": {"block_size": 8}}).options.config

    with pytest.raises(ConfigError, match=r"offload_param has nvme_path='.*gone', which is no folder of this machine"):
        check_nvme(offload(tmp_path / "gone"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder of this machine"):
        check_nvme(offload(tmp_path / "file"))


def test_stage_0_in_bf16_computes_under_autocast() -> None:
    assert "bf16" not in complete(read_config({}), facts(precision="bf16"))


def test_plugin_without_a_file_is_accelerates_default() -> None:
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 2
    assert plugin.gradient_accumulation_steps == plugin.gradient_clipping == "auto"
    assert plugin.get_value("zero_optimization.offload_param.device") == "none"
    assert not plugin.is_zero3_init_enabled()
    assert plugin.options()["clip_norm"] == 1.0
    strategy = DeepSpeedStrategy(**plugin.options())
    assert complete(strategy.options.config, facts(clip_norm=1.0))["gradient_clipping"] == 1.0


def test_plugin_reads_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Experts, Router",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_USE_DEEPSPEED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == 3
    assert plugin.zero3_init_flag is False
    assert plugin.options()["moe_leaf_modules"] == ["Experts", "Router"]
    assert plugin.deepspeed_config["gradient_clipping"] == 0.5
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    accelerator = Accelerator(cpu=True)
    assert isinstance(accelerator.strategy, DeepSpeedStrategy)
    assert accelerator.strategy.zero_stage == 3


def test_plugin_with_a_file() -> None:
    config = {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto"}}, "bf16": {"enabled": True}}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero_stage=3, offload_param_device="cpu")
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert plugin.gradient_accumulation_steps == 1
    assert plugin.zero3_init_flag is True
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.state.deepspeed_plugin is plugin
    with pytest.raises(ConfigError, match=r"zero_stage=2, and its configuration has zero_optimization.stage=1"):
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}, zero_stage=2)


FIELDS = "zero_stage,gradient_clipping,offload_param_device,deepspeed_config_file,mixed_precision"


def test_what_the_launchers_file_says_beside_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", FIELDS)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    open_ones = {"zero_optimization": {"stage": "auto"}, "gradient_clipping": 0.5}
    assert DeepSpeedPlugin(open_ones).zero_stage == 3
    with pytest.raises(ConfigError, match=r"file has zero_stage=3, and .* has zero_optimization\.stage=2\. Give"):
        DeepSpeedPlugin({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"})
    with pytest.raises(ConfigError, match=r"file has gradient_clipping=0\.5, and .* has no gradient_clipping"):
        DeepSpeedPlugin({"zero_optimization": {"stage": 3}})
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "")  # said on the command line: the configuration counts
    assert DeepSpeedPlugin({"zero_optimization": {"stage": 2}}).zero_stage == 2


PLUGIN_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps='4'. Expected an integer >= 1"),
    ({"gradient_clipping": "x"}, "gradient_clipping='x'. Expected a number >= 0"),
    ({"transformer_moe_cls_names": ["Experts"]}, "Expected a text with commas"),
]


@pytest.mark.parametrize(("fields", "text"), PLUGIN_ERRORS)
def test_fields_that_cannot_be_used(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DeepSpeedPlugin(**fields)


def test_steps_of_the_file_count() -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}
    assert Accelerator(deepspeed_plugin=DeepSpeedPlugin(config), cpu=True).gradient_accumulation_steps == 4
    with pytest.warns(UserWarning, match="gradient_accumulation_steps=2, and DeepSpeed's configuration has 4"):
        found = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config), gradient_accumulation_steps=2, cpu=True)
    assert found.gradient_accumulation_steps == 4


def test_several_plugins() -> None:
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=1)}
    accelerator = Accelerator(deepspeed_plugins=plugins, cpu=True)
    assert accelerator.state.deepspeed_plugin is plugins["student"]
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.state.deepspeed_plugin is plugins["teacher"]
    assert isinstance(accelerator.strategy, DeepSpeedStrategy)
    assert accelerator.strategy.zero_stage == 1
    with pytest.raises(ConfigError, match="no DeepSpeed plugin 'parent'"):
        accelerator.state.get_deepspeed_plugin("parent")


ACCELERATOR_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"deepspeed_plugin": 3}, "deepspeed_plugin=3"),
    ({"deepspeed_plugin": DeepSpeedPlugin(), "deepspeed_plugins": {}}, "were both given"),
    ({"deepspeed_plugin": DeepSpeedPlugin(), "strategy": "ddp"}, "strategy='ddp' and deepspeed_plugin"),
]


@pytest.mark.parametrize(("options", "text"), ACCELERATOR_ERRORS)
def test_plugins_that_cannot_be_used(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Accelerator(cpu=True, **options)


def test_accelerates_ways_to_ask_a_configuration() -> None:
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "a": "auto"})
    assert config.is_zero3()
    assert not config.is_zero2()
    assert config.is_offload()
    assert config.is_auto("a")
    assert config.is_true("zero_optimization.stage")
    assert not config.is_false("zero_optimization.nothing")
    assert config.get_value("zero_optimization.offload_param.device") == "cpu"
    assert config.get_value("no.such.path", 5) == 5


def test_dummies_do_nothing_without_deepspeed() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = DummyOptim([{"params": [weight], "lr": 0.5}], lr=0.1)
    assert optimizer.explicit(0) == {"lr": 0.5}
    with pytest.raises(ConfigError, match="DummyOptim can't step"):
        optimizer.step()
    scheduler = DummyScheduler(optimizer)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    assert scheduler.state_dict() == {}


def test_a_missing_package_has_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'loopwright\[deepspeed\]'"):
        import_deepspeed(torch.device("cpu"))


def test_the_strategy_is_made_without_the_package() -> None:
    program = (
        "import sys; from loopwright import Trainer, DeepSpeedPlugin; DeepSpeedPlugin();"
        "Trainer(max_steps=1, strategy='deepspeed', devices=1, progress=False, trackers=False, project_dir='.');"
        "assert 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_trainer_takes_the_word() -> None:
    trainer = Trainer(max_steps=1, strategy={"name": "deepspeed", "zero_stage": 1}, trackers=False, project_dir=".")
    assert isinstance(trainer.strategy, DeepSpeedStrategy)
    assert trainer.strategy.zero_stage == 1
