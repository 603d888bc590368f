"""The constructor, `prepare`, and what is not about stepping. F: facts of semantics about Accelerate."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from loopwright.checkpoint.weights import load_weights
from loopwright.data.combined import CombinedLoader
from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.data.loader import PreparedLoader
from loopwright.distributed.errors import CheckpointError, ConfigError
from loopwright.distributed.kinds import DistributedType
from loopwright.distributed.process import ProcessState
from loopwright.strategies.gradient_state import GradientAccumulationPlugin
from loopwright.strategies.handlers import AutocastKwargs, GradScalerKwargs
from loopwright.strategies.optimizer import GatedOptimizer
from loopwright.strategies.scheduler import GatedScheduler
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.project import ProjectConfiguration

from .weights import Weight, ones, parts

CONFLICTS: list[tuple[dict[str, Any], str]] = [
    (
        {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
        r"gradient_accumulation_steps=2 and gradient_accumulation_plugin=.* Give the plugin alone",
    ),
    ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0\. Expected an integer >= 1\."),
    ({"gradient_accumulation_steps": True}, r"gradient_accumulation_steps=True\. Expected an integer >= 1\."),
    ({"mixed_precision": "bogus"}, r"precision='bogus' is unknown\. Accepted: .*bf16.*fp16.*no"),
    ({"mixed_precision": "bf61"}, r"precision='bf61' is unknown\. Did you mean 'bf16'\?"),
    ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs(enabled=False)]}, r"You can only pass one AutocastKwargs"),
    ({"kwargs_handlers": [{"enabled": True}]}, r"is no handler object\. Accepted: .*GradScalerKwargs"),
    ({"kwargs_handlers": [GradScalerKwargs]}, r"is no handler object\. Did you mean 'GradScalerKwargs'\?"),
    ({"dynamo_backend": "inducter"}, r"backend='inducter'\) is unknown\. Did you mean 'inductor'\?"),
    ({"fsdp_plugin": object()}, r"fsdp_plugin=<object .*>\. Expected FullyShardedDataParallelPlugin"),
    ({"split_batches": True}, r"Use dataloader_config=DataLoaderConfiguration\(split_batches=\.\.\.\)"),
    ({"rng_types": ["generatr"]}, r"rng_types holds 'generatr', which is unknown\. Did you mean 'generator'\?"),
    ({"log_with": "wandbb"}, r"trackers='wandbb' is unknown\. Did you mean 'wandb'\?"),
    ({"strategy": "ddq"}, r"strategy='ddq' is unknown"),
    ({"rng_types": "torch"}, r"rng_types='torch'\. Expected a list of words"),
    ({"kwargs_handlers": AutocastKwargs()}, r"kwargs_handlers=AutocastKwargs\(.*Expected a list of handlers"),
    ({"gradient_accumulation_plugin": 5}, r"gradient_accumulation_plugin=5\. Expected GradientAccumulationPlugin\("),
    ({"project_config": "runs"}, r"project_config='runs'\. Expected ProjectConfiguration\("),
    ({"device_placement": "no"}, r"device_placement='no'\. Expected True or False\."),
    ({"step_scheduler_with_optimizer": 0}, r"step_scheduler_with_optimizer=0\. Expected True or False\."),
    ({"scale_scheduler_by_processes": 2}, r"scale_scheduler_by_processes=2\. Expected True or False\."),
    ({"cpu": "yes"}, r"cpu='yes'\. Expected True or False\."),
]


@pytest.mark.parametrize(("arguments", "message"), CONFLICTS, ids=[message[:40] for _, message in CONFLICTS])
def test_f40_arguments_that_can_not_be_used_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(**arguments)


def test_f40_an_argument_that_is_unknown_is_no_argument() -> None:
    with pytest.raises(
        TypeError, match=r"Accelerator\(mixed_precison='bf16'\) is unknown\. Did you mean 'mixed_precision'\?"
    ):
        Accelerator(mixed_precison="bf16")


def test_even_batches_may_be_set_for_the_loaders_to_come() -> None:
    accelerator = Accelerator()
    accelerator.even_batches = False
    assert not accelerator.even_batches
    assert not accelerator.dataloader_config.even_batches


def test_a_process_that_is_known_already_is_taken() -> None:
    process = ProcessState(cpu=True, connects=False)
    assert Accelerator(process=process).process is process


def test_what_asks_for_nothing_is_accepted() -> None:
    plugin = GradientAccumulationPlugin(3)
    accelerator = Accelerator(
        dynamo_backend="no", fsdp_plugin=None, deepspeed_plugin=None, gradient_accumulation_steps=1,
        gradient_accumulation_plugin=plugin, rng_types=["torch", "generator"], kwargs_handlers=[],
    )  # fmt: skip
    assert accelerator.gradient_accumulation_steps == 3


@pytest.mark.parametrize("prefix", ["ACCELERATE_", "LOOPWRIGHT_"])
def test_f26_the_environment_counts_where_no_argument_was_given(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setenv(f"{prefix}GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv(f"{prefix}MIXED_PRECISION", "bf16")
    accelerator = Accelerator()
    assert accelerator.gradient_accumulation_steps == 7
    assert accelerator.mixed_precision == "bf16"

    monkeypatch.setenv(f"{prefix}TORCH_DEVICE", "meta")
    assert Accelerator(mixed_precision="no").device == torch.device("meta")
    accelerator = Accelerator(gradient_accumulation_steps=1, mixed_precision="no", cpu=True)
    assert accelerator.gradient_accumulation_steps == 1
    assert accelerator.mixed_precision == "no"
    assert accelerator.device == torch.device("cpu")
    plugin = GradientAccumulationPlugin(num_steps=2)
    assert Accelerator(gradient_accumulation_plugin=plugin, cpu=True).gradient_accumulation_steps == 2


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GRADIENT_ACCUMULATION_STEPS", "many", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS='many' is not an integer"),
        ("GRADIENT_ACCUMULATION_STEPS", "0", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=0. Expected an integer >= 1"),
        ("MIXED_PRECISION", "fp61", "ACCELERATE_MIXED_PRECISION='fp61' is unknown. Did you mean 'fp16'?"),
        ("USE_CPU", "maybe", "ACCELERATE_USE_CPU='maybe' is neither true nor false"),
        ("TORCH_DEVICE", "gpu0", "ACCELERATE_TORCH_DEVICE='gpu0' is no device"),
    ],
)
def test_bad_variables_are_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        Accelerator()


# prepare


def test_prepare_keeps_the_order_and_passes_other_objects_through() -> None:
    accelerator = Accelerator()
    model, optimizer, loader = parts(2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    marker, names = object(), ["a"]
    prepared = accelerator.prepare(scheduler, marker, loader, None, optimizer, names, model)
    assert isinstance(prepared, tuple)
    kinds = [GatedScheduler, object, PreparedLoader, type(None), GatedOptimizer, list, Weight]
    assert [type(item) for item in prepared] == kinds
    assert (prepared[1], prepared[5], prepared[6]) == (marker, names, model)
    assert prepared[0].scheduler is scheduler
    assert prepared[4].optimizer is optimizer


def test_one_object_is_not_in_a_tuple() -> None:
    accelerator = Accelerator()
    model = Weight()
    assert accelerator.prepare(model) is model
    assert accelerator.prepare() == ()


def test_preparing_again_changes_nothing() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = parts(2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    once = accelerator.prepare(model, optimizer, loader, scheduler)
    forward = once[0].forward
    twice = accelerator.prepare(*once)
    assert all(a is b for a, b in zip(once, twice, strict=True))
    assert twice[0].forward is forward
    assert all(item._is_accelerate_prepared for item in once)
    kept = accelerator.preparation
    assert [len(k) for k in (kept.models, kept.optimizers, kept.loaders, kept.schedulers)] == [1, 1, 1, 1]


def test_another_accelerator_takes_prepared_objects_over() -> None:
    first, second = Accelerator(), Accelerator(gradient_accumulation_steps=2)
    model, loader = first.prepare(Weight(), ones(2))
    same, own = second.prepare(model, loader)
    assert same is model
    assert own is not loader
    for _ in own:
        assert (first.gradient_state.in_dataloader, second.gradient_state.in_dataloader) == (False, True)
    assert second.preparation.models == [model]


@pytest.mark.parametrize("placement", [[True], [True, True, False], True])
def test_f40_device_placement_has_one_entry_per_object(placement: Any) -> None:
    with pytest.raises(ConfigError, match=r"device_placement=.*\) for 2 objects\. Expected a list of as many\."):
        Accelerator().prepare(Weight(), ones(1), device_placement=placement)


def test_device_placement_says_what_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, since it is there on every machine."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    accelerator = Accelerator()
    moved, kept = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[None, False])
    assert [m.weight.device.type for m in (moved, kept)] == ["meta", "cpu"]
    moving, keeping = accelerator.prepare(ones(1), ones(1), device_placement=[True, False])
    assert [batch[0].device.type for loader in (moving, keeping) for batch in loader] == ["meta", "cpu"]
    evaluated = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
    assert evaluated.weight.device.type == "meta"
    stays = Accelerator(device_placement=False).prepare(nn.Linear(1, 1))
    assert stays.weight.device.type == "cpu"


def test_a_dispatched_model_stays_where_its_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model.hf_device_map = {"0": "cpu", "1": "cpu"}  # type: ignore[assignment]
    assert Accelerator().prepare(model)[0].weight.device.type == "cpu"


@pytest.mark.parametrize("placement", [True, False])
def test_optimizer_state_follows_the_parameters(placement: bool) -> None:
    """The meta device stands for an accelerator, which not every machine has."""
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    optimizer.state[parameter] = {"exp_avg": torch.zeros(2), "step": torch.tensor(1.0)}
    prepared = Accelerator(device_placement=placement).prepare(optimizer)
    devices = {key: value.device.type for key, value in prepared.state[parameter].items()}
    assert devices == {"exp_avg": "meta" if placement else "cpu", "step": "cpu"}


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("prepare_model", [1], r"prepare_model got a list\. Expected a torch\.nn\.Module\."),
        (
            "prepare_optimizer",
            nn.Linear(1, 1),
            r"prepare_optimizer got a Linear\. Expected a torch\.optim\.Optimizer\.",
        ),
        ("prepare_scheduler", "cosine", r"prepare_scheduler got a str\. Expected an object with step\(\)\."),
        ("prepare_data_loader", 3, r"prepare_data_loader got a int\. Expected an iterable of batches\."),
        ("skip_first_batches", 3, r"skip_first_batches got a int\. Expected an iterable of batches\."),
        ("no_sync", "model", r"no_sync got a str\. Expected models, as prepare gave them\."),
        ("trigger_sync_in_backward", 1, r"trigger_sync_in_backward got a int\. Expected models"),
        ("autocast", True, r"autocast got True\. Expected AutocastKwargs\("),
    ],
)
def test_each_method_names_what_it_got(method: str, wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(Accelerator(), method)(wrong)


def test_contexts_and_clipping_name_what_they_got() -> None:
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"accumulate got a SGD\. Expected models"):
        accelerator.accumulate(model, torch.optim.SGD(model.parameters())).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"profile got True\. Expected ProfileKwargs\("):
        accelerator.profile(True).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"clip_grad_norm_ got a Linear\. Expected parameters, such as"):
        accelerator.clip_grad_norm_(model, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"clip_grad_value_ got a float\. Expected parameters, such as"):
        accelerator.clip_grad_value_(1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pad_across_processes\(dim='0'\)\. Expected an integer\."):
        accelerator.pad_across_processes(torch.ones(1), dim="0")  # type: ignore[arg-type]


def test_clipping_without_gradients_does_nothing() -> None:
    accelerator = Accelerator()
    parameters = list(nn.Linear(1, 1).parameters())
    accelerator.clip_grad_value_(parameters, 1.0)
    assert accelerator.clip_grad_norm_(parameters, 1.0) == 0
    assert all(parameter.grad is None for parameter in parameters)


def test_any_iterable_of_batches_can_be_a_loader() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare_data_loader([1, 2, 3])
    assert [(batch, accelerator.gradient_state.end_of_dataloader) for batch in loader] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    combined = accelerator.prepare(CombinedLoader([[1, 2], [3]], mode="sequential"))
    assert (list(combined), len(combined)) == ([1, 2, 3], 3)


def test_f26b_a_scheduler_waits_for_the_optimizer_that_it_was_made_for() -> None:
    accelerator = Accelerator()
    model, other = Weight(), Weight()
    optimizer, second = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, other))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler, gated, _, gated_second = accelerator.prepare(schedule, optimizer, model, second)
    assert scheduler.optimizers == [gated]
    late = accelerator.prepare(torch.optim.lr_scheduler.StepLR(gated_second, 1))
    assert late.optimizers == [gated_second]
    stranger = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1)
    assert accelerator.prepare(stranger).optimizers == [gated, gated_second]
    assert Accelerator().prepare(schedule).optimizers == []


def test_shuffling_is_seedable_unless_it_is_not_wanted() -> None:
    shuffled = DataLoader(list(range(6)), shuffle=True)
    kept = shuffled.sampler
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(data_seed=42))
    assert (accelerator.use_seedable_sampler, accelerator.even_batches, accelerator.split_batches) == (
        True,
        True,
        False,
    )
    assert (accelerator.dispatch_batches, accelerator.non_blocking, accelerator.use_stateful_dataloader) == (
        None,
        False,
        False,
    )
    loader = accelerator.prepare(shuffled)
    assert [int(batch) for batch in loader] == [0, 3, 2, 4, 1, 5]  # F18
    assert [int(batch) for batch in loader] == [4, 0, 5, 1, 2, 3]
    loader.set_epoch(0)
    assert [int(batch) for batch in loader] == [0, 3, 2, 4, 1, 5]
    assert shuffled.sampler is kept, "the user's loader is not changed"
    plain = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False)).prepare(shuffled)
    assert type(plain.sampler) is RandomSampler


def test_compiled_models_are_prepared_and_unwrapped() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    prepared = accelerator.prepare(compiled)
    assert prepared is compiled
    assert prepared(torch.ones(1, 2)).dtype is torch.float32
    assert accelerator.unwrap_model(prepared) is compiled
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model


# Memory, state, processes


def test_free_memory_forgets_everything() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*parts(2))
    with accelerator.accumulate(model):
        pass
    gone = weakref.ref(model)
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    gc.collect()
    assert (model, optimizer, loader, gone()) == (None, None, None, None)
    assert accelerator.gradient_state.micro_steps == 0
    assert accelerator.preparation.models == []
    assert accelerator.clear() == []


def test_save_model_writes_what_loads_anywhere(tmp_path: Path) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_model(model, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    copied = nn.Linear(2, 2)
    load_weights(copied, tmp_path / "out")
    assert torch.equal(copied.weight, model.weight)
    assert accelerator.get_state_dict(model).keys() == {"weight", "bias"}
    assert accelerator.get_state_dict(model, unwrap=False).keys() == {"weight", "bias"}


def test_save_model_says_what_it_can_not_do(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"safe_serialization=False\): weights are not pickled"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)
    with pytest.raises(ConfigError, match=r"size='much'\. Expected a number of bytes"):
        accelerator.save_model(model, tmp_path, max_shard_size="much")
    assert list(tmp_path.iterdir()) == []


def test_save_writes_any_object_whole(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.save({"a": [1, 2]}, tmp_path / "new" / "object.pt")
    assert torch.load(tmp_path / "new" / "object.pt") == {"a": [1, 2]}
    buffer = io.BytesIO()
    accelerator.save([3], buffer)
    buffer.seek(0)
    assert torch.load(buffer) == [3]
    assert accelerator.should_save_model
    with pytest.raises(AttributeError, match="pickle"):
        accelerator.save(lambda: 1, tmp_path / "broken.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_save_writes_safetensors_where_asked_to(tmp_path: Path) -> None:
    accelerator = Accelerator()
    weight = torch.arange(4.0)
    state = OrderedDict(first=weight, tied=weight, turned=torch.ones(2, 3).t())
    accelerator.save(state, tmp_path / "weights.safetensors", safe_serialization=True)
    buffer = io.BytesIO()
    accelerator.save(state, buffer, safe_serialization=True)
    for loaded in (load_file(tmp_path / "weights.safetensors"), load(buffer.getvalue())):
        assert loaded.keys() == {"first", "turned"}
        assert torch.equal(loaded["turned"], state["turned"])
    with pytest.raises(ConfigError, match=r"save\(safe_serialization=True\) got a dict\. Expected a mapping of"):
        accelerator.save({"a": 1}, tmp_path / "no", safe_serialization=True)
    with pytest.raises(CheckpointError, match=r"the weight 'w' can't be stored: it has no values"):
        accelerator.save({"w": torch.empty(1, device="meta")}, tmp_path / "no", safe_serialization=True)
    assert not (tmp_path / "no").exists()


def test_verify_device_map_finds_parts_on_several_devices() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert not accelerator.verify_device_map(model)
    model[1].hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    assert not accelerator.verify_device_map(model)
    model[1].hf_device_map = {"a": "cpu", "b": "disk"}  # type: ignore[assignment]
    assert accelerator.verify_device_map(model)


def test_register_for_checkpointing_names_what_has_no_state() -> None:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"the objects at 1 \(list\), 2 \(int\) have no state_dict\(\)"):
        accelerator.register_for_checkpointing(nn.Linear(1, 1), [], 3)


def test_the_one_process_is_every_kind_of_process(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.process is accelerator.state.process
    assert accelerator.is_main_process and accelerator.is_local_main_process and accelerator.is_last_process
    assert not accelerator.use_distributed and not accelerator.multi_device
    assert accelerator.distributed_type == DistributedType.NO == "NO"
    accelerator.wait_for_everyone()
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.print("here")
    assert capsys.readouterr().out == "here\n"


def test_decorated_functions_run() -> None:
    accelerator = Accelerator()

    def double(value: int) -> int:
        return 2 * value

    decorators = (accelerator.on_main_process, accelerator.on_local_main_process, accelerator.on_last_process)
    assert [decorate(double)(4) for decorate in decorators] == [8, 8, 8]
    assert accelerator.on_process(double, process_index=3)(4) == 8
    assert accelerator.on_process(process_index=3)(double)(4) == 8
    assert accelerator.on_local_process(double, local_process_index=3)(4) == 8
    with pytest.raises(ConfigError, match=r"on_process needs process_index="):
        accelerator.on_process(double)


def test_data_of_one_process_stays_as_it_is() -> None:
    accelerator = Accelerator()
    tensor = torch.arange(3)
    nested = {"a": (tensor, [tensor])}
    assert accelerator.gather(tensor) is tensor
    assert accelerator.gather_for_metrics(nested) == nested
    assert accelerator.gather_for_metrics(["a", 1], use_gather_object=True) == ["a", 1]
    assert accelerator.reduce(tensor).tolist() == [0, 1, 2]
    assert accelerator.pad_across_processes(tensor, dim=0, pad_index=9, pad_first=True) is tensor
    with accelerator.split_between_processes(["a", "b"], apply_padding=True) as share:
        assert share == ["a", "b"]
    with pytest.raises(TypeError, match=r"gather got a str"):
        accelerator.gather("text")


@pytest.mark.parametrize("num_samples", [10, 8, 3])
def test_gather_for_metrics_keeps_every_sample_once(num_samples: int) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(range(num_samples)), batch_size=4))
    assert torch.cat([accelerator.gather_for_metrics(batch) for batch in loader]).tolist() == list(range(num_samples))
    skipped = accelerator.skip_first_batches(loader, 1) if num_samples > 4 else loader
    kept = [accelerator.gather_for_metrics(batch) for batch in skipped]
    assert torch.cat(kept).tolist() == list(range(4 if num_samples > 4 else 0, num_samples))


def test_f39_a_trigger_is_told_once() -> None:
    accelerator = Accelerator()
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


def test_join_uneven_inputs_says_that_it_has_no_effect() -> None:
    accelerator = Accelerator()
    with (
        pytest.warns(UserWarning, match="join_uneven_inputs has no effect in one process"),
        accelerator.join_uneven_inputs([Weight()], even_batches=False),
    ):
        pass


def test_a_copy_of_what_holds_an_accelerator_holds_the_same() -> None:
    holder = nn.Linear(1, 1)
    holder.accelerator = Accelerator()  # type: ignore[assignment]
    assert copy.deepcopy(holder).accelerator is holder.accelerator


def test_prepared_optimizers_can_be_pickled() -> None:
    _, optimizer = Accelerator(gradient_accumulation_steps=2).prepare(*parts(1)[:2])
    again = pickle.loads(pickle.dumps(optimizer))
    assert (again.param_groups[0]["lr"], again._is_accelerate_prepared, again.step_was_skipped) == (1.0, True, False)


def test_project_directories(tmp_path: Path) -> None:
    accelerator = Accelerator(project_dir=tmp_path)
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path)
    configuration = ProjectConfiguration(logging_dir="logs", total_limit=2)
    accelerator = Accelerator(project_dir="work", project_config=configuration)
    assert (accelerator.project_dir, accelerator.logging_dir) == ("work", "logs")
    assert accelerator.project_configuration.total_limit == 2
    with pytest.raises(ConfigError, match=r"ProjectConfiguration\.total_limit=0\. Expected an integer >= 1"):
        ProjectConfiguration(total_limit=0)
