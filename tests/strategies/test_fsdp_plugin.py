"""Accelerate's options of FSDP: how each of their forms is understood, and what `Accelerator` makes of them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from loopwright import Accelerator, ConfigError, DistributedDataParallelKwargs, FSDPStrategy
from loopwright.distributed.environment import FSDP_VARIABLES
from loopwright.strategies.fsdp_plugin import FullyShardedDataParallelPlugin
from loopwright.strategies.wrapping import find_units

Run = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_USE_FSDP", "LOOPWRIGHT_USE_FSDP", *FSDP_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def options(num_processes: int = 4, num_nodes: int = 2, **given: Any) -> dict[str, Any]:
    """The arguments of `FSDPStrategy` that differ from its own defaults."""
    found = FullyShardedDataParallelPlugin(**given).options(num_processes, num_nodes)
    default = FullyShardedDataParallelPlugin().options(num_processes, num_nodes)
    return {name: value for name, value in found.items() if name not in default or value != default[name]}


def notes(**given: Any) -> list[str]:
    return FullyShardedDataParallelPlugin(**given).notes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Block(), Block())


def test_the_defaults_are_those_of_our_own_strategy() -> None:
    plugin = FullyShardedDataParallelPlugin()
    given, own = FSDPStrategy.from_plugin(plugin, 2, 1), FSDPStrategy()
    assert (plugin.fsdp_version, plugin.state_dict_type, plugin.notes) == (2, "SHARDED_STATE_DICT", [])
    assert (given.options, given.mesh) == (own.options, own.mesh)


class TestSharding:
    @pytest.mark.parametrize(
        ("word", "frees", "mesh"),
        [
            ("FULL_SHARD", True, None),
            ("shard_grad_op", False, None),
            ("NO_SHARD", False, (4, 1)),
            ("HYBRID_SHARD", True, (2, 2)),
            ("HYBRID_SHARD_ZERO2", False, (2, 2)),
            (1, True, None),
            ("2", False, None),
            (ShardingStrategy.SHARD_GRAD_OP, False, None),
            (ShardingStrategy._HYBRID_SHARD_ZERO2, False, (2, 2)),
        ],
    )
    @pytest.mark.parametrize("name", ["sharding_strategy", "reshard_after_forward"])
    def test_f63_words_of_version_1(self, name: str, word: Any, frees: bool, mesh: Any) -> None:
        """Over 4 processes on 2 machines: a part on each process of a machine, averaged over the machines."""
        plugin = FullyShardedDataParallelPlugin(**{name: word})
        assert (plugin.reshard_after_forward, plugin.mesh(4, 2)) == (frees, mesh)
        if name == "sharding_strategy" or not str(word).isdigit():
            assert f"reshard_after_forward={frees}" in plugin.notes[0]

    def test_one_machine_has_no_copies(self) -> None:
        assert FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD").mesh(4, 1) is None

    def test_claims(self) -> None:
        assert options(reshard_after_forward=False) == options(reshard_after_forward="false")
        assert options(reshard_after_forward=False) == {"reshard_after_forward": False}
        assert notes(reshard_after_forward=False) == []
        assert FullyShardedDataParallelPlugin("1", "FULL_SHARD", True).reshard_after_forward is True


class TestWrap:
    @pytest.mark.parametrize(
        ("given", "wrap"),
        [
            ({}, "auto"),
            ({"auto_wrap_policy": "NO_WRAP"}, "none"),
            ({"auto_wrap_policy": "transformer_based_wrap"}, "auto"),
            ({"transformer_cls_names_to_wrap": ["Block", "Other"]}, ["Block", "Other"]),
            ({"transformer_cls_names_to_wrap": "Block, Other"}, ["Block", "Other"]),
            ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": [Block]}, ["Block"]),
            ({"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": "Block"}, ["Block"]),
            ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, 100_000_000),
            ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0}, "none"),
            ({"min_num_params": 30}, 30),
            ({"auto_wrap_policy": size_based_auto_wrap_policy, "min_num_params": 7}, 7),
            ({"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=9)}, 9),
            ({"auto_wrap_policy": [Block, "Other"]}, [Block, "Other"]),
        ],
    )
    def test_policies(self, given: Mapping[str, Any], wrap: Any) -> None:
        assert FullyShardedDataParallelPlugin(**given).wrap == wrap

    @pytest.mark.parametrize(
        ("policy", "classes"),
        [
            (lambda module: isinstance(module, Block), ["Block", "Block"]),
            (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), ["Block", "Block"]),
            (ModuleWrapPolicy({nn.Linear}), ["Linear"] * 3),
            (always_wrap_policy, ["Linear", "Block", "Linear", "Block", "Linear"]),
        ],
    )
    def test_functions_also_those_of_torchs_first_fsdp(self, policy: Any, classes: list[str]) -> None:
        wrap = FullyShardedDataParallelPlugin(auto_wrap_policy=policy).wrap
        assert sorted(type(unit).__name__ for unit in find_units(model(), wrap)) == sorted(classes)

    def test_a_policy_that_is_set_later_counts(self) -> None:
        plugin = FullyShardedDataParallelPlugin()
        plugin.auto_wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        assert len(find_units(model(), plugin.wrap)) == 2
        plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = None, ["Blok"]
        with pytest.raises(ConfigError, match=r"has no module of class 'Blok'\. Did you mean 'Block'"):
            plugin.set_auto_wrap_policy(model())


class TestFormats:
    @pytest.mark.parametrize(
        ("policy", "formats"),
        [
            ("bf16", {"param_dtype": "bf16"}),
            (torch.float16, {"param_dtype": "fp16"}),
            ({"param_dtype": "bfloat16"}, {"param_dtype": "bf16"}),
            (
                {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "buffer_dtype": torch.float32},
                {"param_dtype": "bf16", "reduce_dtype": "bf16"},
            ),
            (
                MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
                {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"},
            ),
            (MixedPrecision(param_dtype=torch.float16), {"param_dtype": "fp16", "reduce_dtype": None}),
        ],
    )
    def test_policies(self, policy: Any, formats: Mapping[str, Any]) -> None:
        assert FullyShardedDataParallelPlugin(mixed_precision_policy=policy).formats == formats

    def test_reductions_are_in_fp32_unless_a_policy_says_otherwise(self) -> None:
        for policy, reduces in (("bf16", None), ({"param_dtype": "bf16", "reduce_dtype": "bf16"}, "bf16")):
            plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
            assert FSDPStrategy.from_plugin(plugin, 2, 1).options.reduce_dtype == reduces  # None: fp32

    def test_set_later(self) -> None:
        plugin = FullyShardedDataParallelPlugin()
        plugin.set_mixed_precision("bf16")
        plugin.set_mixed_precision("fp16")
        assert plugin.formats == {"param_dtype": "bf16"}
        plugin.set_mixed_precision("fp16", override=True)
        assert plugin.formats == {"param_dtype": "fp16"}


def test_the_other_fields() -> None:
    for offload in (True, "true", CPUOffload(True), CPUOffloadPolicy()):
        assert options(cpu_offload=offload) == {"cpu_offload": True}
    for offload in (False, "no", CPUOffload(False), OffloadPolicy(), None):
        assert options(cpu_offload=offload) == {}
    assert options(activation_checkpointing=True) == {"activation_checkpointing": True}
    found = options(activation_checkpointing=True, activation_checkpointing_offload=True)
    assert found == {"activation_checkpointing": True, "activation_offload": True}
    assert options(forward_prefetch=True) == {"prefetch": 1}
    head = nn.Linear(1, 1)
    for ignored in ("head.*", [head], head, ["a", head]):
        found = options(ignored_modules=ignored)["ignored_modules"]
        assert found == (ignored if isinstance(ignored, list) else [ignored])
    assert options(ignored_modules=iter([head]))["ignored_modules"] == [head]
    for word in ("full_state_dict", 1, StateDictType.FULL_STATE_DICT):
        assert FullyShardedDataParallelPlugin(state_dict_type=word).saves_whole
    plugin = FullyShardedDataParallelPlugin(state_dict_type=StateDictType.LOCAL_STATE_DICT)
    assert (plugin.saves_whole, plugin.state_dict_type) == (False, "SHARDED_STATE_DICT")
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.saves_whole


def test_what_has_no_effect_is_said_and_what_is_always_so_is_not() -> None:
    assert notes(
        use_orig_params=True, sync_module_states=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=False, limit_all_gathers=True,
    ) == []  # fmt: skip
    found = notes(
        use_orig_params=False, sync_module_states="false", backward_prefetch="2", limit_all_gathers=False,
        forward_prefetch=True, param_init_fn=nn.Module.eval, mixed_precision_policy={"buffer_dtype": "bf16"},
    )  # fmt: skip
    assert [note.partition("=")[0].partition(" ")[0] for note in found] == [
        "limit_all_gathers", "param_init_fn", "buffer_dtype", "use_orig_params", "sync_module_states",
        "backward_prefetch", "forward_prefetch",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fsdp_version": 3}, r"fsdp_plugin\.fsdp_version=3\. Expected 1 or 2"),
        ({"sharding_strategy": "FULL_SHRD"}, r"fsdp_plugin\.sharding_strategy='FULL_SHRD' is unknown\. Did you mean"),
        ({"sharding_strategy": 6}, r"sharding_strategy=6 is unknown"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, r"=FULL_SHARD says .*=True, and False"),
        ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": "FULL_SHARD"}, r"contradict each other"),
        ({"auto_wrap_policy": "SIZE_WRAP"}, r"auto_wrap_policy='SIZE_WRAP' is unknown\. .*SIZE_BASED_WRAP"),
        ({"auto_wrap_policy": 5}, r"auto_wrap_policy=5\. Expected a word"),
        (
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": -1},
            r"min_num_params=-1\. Expected an integer >= 0",
        ),
        ({"auto_wrap_policy": "NO_WRAP", "min_num_params": 5}, r"min_num_params=5 belongs to SIZE_BASED_WRAP"),
        ({"transformer_cls_names_to_wrap": "A", "min_num_params": 5}, r"Each is a choice of units: give one"),
        ({"mixed_precision_policy": "fp8"}, r"mixed_precision_policy='fp8' is unknown.* fp8 is not available"),
        ({"mixed_precision_policy": {"param_type": "bf16"}}, r"holds 'param_type', which is unknown\. Did you mean"),
        ({"mixed_precision_policy": 16}, r"mixed_precision_policy=16\. Expected 'bf16'"),
        ({"cpu_offload": 3}, r"cpu_offload=3\. Expected True, False"),
        ({"state_dict_type": "WHOLE"}, r"state_dict_type='WHOLE' is unknown"),
        ({"ignored_modules": [3]}, r"ignored_modules=\[3\]\. Expected modules"),
        ({"activation_checkpointing_offload": True}, r"offload=True needs activation_checkpointing=True"),
        ({"use_orig_params": "perhaps"}, r"use_orig_params='perhaps'\. Expected True or False"),
    ],
)
def test_bad_fields(given: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FullyShardedDataParallelPlugin(**given)


class TestVariables:
    def test_fields_that_are_open_are_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, text in {
            "FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Other", "FSDP_MIN_NUM_PARAMS": "100000000",
            "FSDP_OFFLOAD_PARAMS": "true", "FSDP_IGNORED_MODULES": "head", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
            "FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_FORWARD_PREFETCH": "true",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, text)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.options(2, 1) == {
            "wrap": ["Block", "Other"], "reshard_after_forward": False, "cpu_offload": True, "mesh": None,
            "activation_checkpointing": True, "activation_offload": False, "prefetch": 1, "ignored_modules": ["head"],
            "whole_states": True,
        }  # fmt: skip
        assert plugin.saves_whole
        given = FullyShardedDataParallelPlugin(cpu_offload=False, transformer_cls_names_to_wrap="Third")
        assert (given.cpu_offload, given.wrap) == (False, ["Third"])

    @pytest.mark.parametrize(("version", "frees"), [("1", False), ("2", True), (None, True)])
    def test_of_two_variables_that_accelerates_launcher_sets_one_counts(
        self, version: str | None, frees: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
        monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
        if version is not None:
            monkeypatch.setenv("FSDP_VERSION", version)
        assert FullyShardedDataParallelPlugin().reshard_after_forward is frees

    def test_an_error_names_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "maybe")
        with pytest.raises(ConfigError, match=r"FSDP_OFFLOAD_PARAMS='maybe'\. Expected True or False"):
            FullyShardedDataParallelPlugin()

    @pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
    def test_the_fields_are_accelerates_in_the_same_order(self) -> None:
        utils = importlib.import_module("accelerate.utils")
        names = [
            name for name, field in utils.FullyShardedDataParallelPlugin.__dataclass_fields__.items() if field.init
        ]
        ours = FullyShardedDataParallelPlugin.__dataclass_fields__
        assert [name for name, field in ours.items() if field.init] == names


class TestAccelerator:
    def test_the_plugin_or_the_variable_chooses_the_strategy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plugin = FullyShardedDataParallelPlugin(reshard_after_forward=False)
        first = Accelerator(fsdp_plugin=plugin)
        assert isinstance(first.strategy, FSDPStrategy)
        assert (first.strategy.options.reshard_after_forward, first.state.fsdp_plugin) == (False, plugin)
        assert first.distributed_type == "NO"  # one process: it only places the model
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
        for strategy in ("auto", "fsdp"):
            found = Accelerator(strategy=strategy).strategy
            assert isinstance(found, FSDPStrategy)
            assert found.options.cpu_offload
        with pytest.warns(UserWarning, match="ACCELERATE_USE_FSDP=true is not used: strategy='single' was given"):
            assert not isinstance(Accelerator(strategy="single").strategy, FSDPStrategy)

    def test_one_warning_lists_what_was_translated(self) -> None:
        plugin = FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP", use_orig_params=False)
        with pytest.warns(UserWarning, match="fsdp_plugin") as caught:
            Accelerator(fsdp_plugin=plugin)
        assert len(caught) == 1
        assert str(caught[0].message) == (
            "fsdp_plugin, options of FSDP's first version: sharding_strategy=SHARD_GRAD_OP is "
            "reshard_after_forward=False; use_orig_params=False has no effect: it is always True."
        )

    def test_contradictions(self) -> None:
        plugin = FullyShardedDataParallelPlugin()
        for strategy in ("ddp", {"name": "fsdp"}, FSDPStrategy()):
            with pytest.raises(ConfigError, match=r"strategy=.* and fsdp_plugin=.* were both given"):
                Accelerator(fsdp_plugin=plugin, strategy=strategy)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"fsdp_plugin='fsdp'\. Expected FullyShardedDataParallelPlugin"):
            Accelerator(fsdp_plugin="fsdp")  # type: ignore[arg-type]

    def test_settings_for_ddp(self) -> None:
        handler = DistributedDataParallelKwargs(find_unused_parameters=True, static_graph=True)
        with pytest.warns(UserWarning, match=r"DistributedDataParallelKwargs\(static_graph\) has no effect under FSDP"):
            found = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), kwargs_handlers=[handler]).strategy
        assert isinstance(found, FSDPStrategy)
        assert found.options.find_unused_parameters

    def test_transformers_learns_of_efficient_loading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            monkeypatch.setenv(name, "")
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True))
        assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


def _train(uses_plugin: bool) -> Any:
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD", ignored_modules="0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of version 1
        accelerator = Accelerator(fsdp_plugin=plugin) if uses_plugin else Accelerator(strategy="single")
    plugin.auto_wrap_policy = lambda module: isinstance(module, Block)  # before prepare, as PEFT's users do
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    share = 8 // accelerator.num_processes
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    x = x[accelerator.process_index * share :][:share]
    losses = []
    for _ in range(3):
        loss = net(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    units = [type(module).__name__ for module in net.modules() if type(module).__name__.startswith("FSDP")]
    return losses, units, str(accelerator.distributed_type), accelerator.is_fsdp2


def test_copies_train_as_one_process_does(two_processes: Run) -> None:
    wanted = _train(False)[0]
    for losses, units, kind, is_fsdp in two_processes(_train, True):
        torch.testing.assert_close(losses, wanted, atol=1e-6, rtol=0)
        assert (units, kind, is_fsdp) == (["FSDPSequential", "FSDPBlock", "FSDPBlock"], "FSDP", True)


def _prepared(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(**options)
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(net, optimizer)


def _save(path: str) -> Any:
    """Two checkpoints after one step: the second whole, as it is asked for after the first."""
    accelerator, net, optimizer = _prepared(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.backward(net(torch.ones(2, 4)).square().mean())
    optimizer.step()
    accelerator.save_state(f"{path}/parts")
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.save_state(f"{path}/whole")
    return accelerator.get_state_dict(net)


def test_checkpoints_are_in_parts_or_whole(two_processes: Run, tmp_path: Path) -> None:
    weights, nothing = two_processes(_save, str(tmp_path))
    assert nothing == {}
    names = [{file.name for file in (tmp_path / folder).iterdir()} for folder in ("parts", "whole")]
    assert {"model.parts.json", "optimizers.parts.json"} < names[0]
    assert {"model.safetensors", "optimizers.safetensors"} < names[1]
    assert not any("part" in name for name in names[1])
    states = []
    for folder in ("parts", "whole"):
        accelerator, net, optimizer = _prepared(strategy="single")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another number of processes
            accelerator.load_state(str(tmp_path / folder))
        torch.testing.assert_close(net.state_dict(), weights, atol=0, rtol=0)
        states.append(optimizer.state_dict()["state"])
    torch.testing.assert_close(states[0], states[1], atol=0, rtol=0)
    assert states[0][0]["exp_avg"].abs().sum() > 0
