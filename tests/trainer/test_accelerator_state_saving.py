"""`save_state` and `load_state` of an `Accelerator` in one process. F: facts of semantics; B: cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from loopwright.checkpoint.reading import open_checkpoint
from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.distributed.errors import CheckpointError, ConfigError
from loopwright.strategies.gradient_state import GradientAccumulationPlugin
from loopwright.strategies.handlers import GradScalerKwargs
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.trainer import Trainer

from .tiny import Scalar, ones
from .trained import Drawing, build, train, weights


class Counter:
    """An object of the user's with a state."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(
    ("save_at", "skipped"), [((1, 2), 2), ((1, 6), 0), ((0, 1), 1)], ids=["middle", "edge", "first batch"]
)
@pytest.mark.parametrize("steps", [1, 4])
def test_f18b_a_resumed_run_is_equal_bit_for_bit(
    tmp_path: Path, save_at: tuple[int, int], skipped: int, steps: int
) -> None:
    """In the middle of an epoch and of a window, with shuffling and dropout; F18b has other samples there."""
    whole = build(gradient_accumulation_steps=steps)
    seen = train(whole, epochs=range(3), save_at=save_at, path=tmp_path / "state")
    resumed = build(seed=99, gradient_accumulation_steps=steps)
    resumed.accelerator.load_state(tmp_path / "state")
    first = save_at[0] if skipped else save_at[0] + 1
    assert train(resumed, epochs=range(first, 3), skipped=skipped) == seen[save_at[0] * 6 + save_at[1] :]
    assert weights(resumed) == weights(whole)
    assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
    assert resumed.accelerator.step == whole.accelerator.step


def test_it_is_so_a_second_time_in_the_rest_of_a_pass(tmp_path: Path) -> None:
    whole = build()
    seen = train(whole, epochs=range(3), save_at=(1, 2), path=tmp_path / "first")
    second = build(seed=98)
    second.accelerator.load_state(tmp_path / "first")
    train(second, epochs=range(1, 2), skipped=2, save_at=(1, 4), path=tmp_path / "second")
    third = build(seed=99)
    third.accelerator.load_state(tmp_path / "second")
    assert train(third, epochs=range(1, 3), skipped=4) == seen[10:]
    assert weights(third) == weights(whole)
    manifest = open_checkpoint(tmp_path / "second").manifest
    assert (manifest.progress["epoch"], manifest.progress["batch"], manifest.sequence) == (1, 4, 2)
    assert manifest.parent is not None and manifest.parent["checkpoint"] == "first"
    assert manifest.run["id"] == open_checkpoint(tmp_path / "first").manifest.run["id"]


@pytest.mark.parametrize("is_stateful", [False, True])
def test_what_samples_draw_goes_on_by_seed_batches(tmp_path: Path, is_stateful: bool) -> None:
    """A stateful loader goes on by itself, where the script skips nothing."""
    if is_stateful:
        pytest.importorskip("torchdata")
    options = {"dataloader_config": DataLoaderConfiguration(seed_batches=True, use_stateful_dataloader=is_stateful)}
    whole = build(Drawing(), **options)
    seen = train(whole, epochs=range(2), save_at=(0, 4), path=tmp_path / "state")
    resumed = build(Drawing(), seed=99, **options)
    resumed.accelerator.load_state(tmp_path / "state")
    assert train(resumed, epochs=range(2), skipped=0 if is_stateful else 4)[:2] == [
        (epoch, numbers, loss) for epoch, numbers, loss in seen[4:6]
    ]


def test_a_stateful_loader_goes_on_behind_the_rest_of_a_pass(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    options = {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}
    whole = build(**options)
    seen = train(whole, epochs=range(2), skipped=2, save_at=(0, 4), path=tmp_path / "state")
    resumed = build(seed=99, **options)
    resumed.accelerator.load_state(tmp_path / "state")
    assert train(resumed, epochs=range(2)) == seen[2:]
    assert weights(resumed) == weights(whole)


def test_a_loader_that_is_nested_in_another_has_its_own_place(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    outer, inner = accelerator.prepare(DataLoader(range(4)), DataLoader(range(3)))  # type: ignore[arg-type]
    list(inner)
    next(iter(outer))
    for _ in outer:
        for number in inner:
            if number == 1:
                accelerator.save_state(tmp_path / "state")
                break
        break
    places = [
        (place["epoch"], place["batch"])
        for place in open_checkpoint(tmp_path / "state").tree("process-00000")["loaders"]
    ]
    assert places == [(0, 1), (1, 2)]


def test_a_sampler_with_a_generator_of_its_own_begins_its_pass_again(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False))
        generator = torch.Generator().manual_seed(seed)
        return accelerator, accelerator.prepare(
            DataLoader(list(range(8)), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
        )

    accelerator, loader = made(1)
    list(loader)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number == 1:
            accelerator.save_state(tmp_path / "state")
    later = [batch.tolist() for batch in loader]
    second, rest = made(2)
    second.load_state(tmp_path / "state")
    assert [batch.tolist() for batch in second.skip_first_batches(rest, 2)] == seen[2:]
    assert [batch.tolist() for batch in rest] == later


def test_fp16_goes_on_with_its_scale(tmp_path: Path) -> None:
    scaling = GradScalerKwargs(init_scale=64.0, growth_interval=4)
    options: dict[str, Any] = {"mixed_precision": "fp16", "kwargs_handlers": [scaling]}
    whole = build(**options)
    seen = train(whole, epochs=range(3), save_at=(0, 6), path=tmp_path / "state")
    assert whole.accelerator.scaler is not None and whole.accelerator.scaler.get_scale() == 1024
    resumed = build(seed=99, **options)
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.accelerator.scaler is not None
    assert resumed.accelerator.scaler.state_dict()["_growth_tracker"] == 2
    assert train(resumed, epochs=range(1, 3)) == seen[6:]
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()


def test_a_checkpoint_is_one_of_loopwrights(tmp_path: Path) -> None:
    trained = build()
    second = trained.accelerator.prepare(nn.Linear(2, 2))
    trained.accelerator.register_for_checkpointing(Counter(5))
    assert trained.accelerator.save_state(str(tmp_path / "state")) == str(tmp_path / "state")
    checkpoint = open_checkpoint(tmp_path / "state")
    assert checkpoint.manifest.kind == "state"
    assert checkpoint.weights_names == ("model", "model_1")
    assert checkpoint.tree_names == ("accelerator", "optimizers", "process-00000")
    assert torch.equal(load_file(tmp_path / "state" / "model_1.safetensors")["weight"], second.weight)
    assert checkpoint.tree("accelerator")["custom"] == [{"kind": "Counter", "state": {"count": 5}}]
    with pytest.raises(CheckpointError, match=r"holds the state of an Accelerator, so that no run of a Trainer can"):
        Trainer(max_epochs=1, trackers=False, progress=False, project_dir=tmp_path).fit(
            Scalar(), ones(4), resume_from=tmp_path / "state"
        )
    trainer = Trainer(max_epochs=1, trackers=False, progress=False, project_dir=tmp_path)
    trainer.fit(Scalar(), ones(4))
    trainer.save_state(tmp_path / "of a trainer")
    with pytest.raises(CheckpointError, match=r"no state of an Accelerator\. A Trainer saved it: go on by trainer"):
        trained.accelerator.load_state(tmp_path / "of a trainer")


def test_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    """B38."""
    accelerator = Accelerator(cpu=True)
    compiled = accelerator.prepare(torch.compile(nn.Linear(2, 2), backend="eager"))
    accelerator.save_state(tmp_path / "state")
    assert load_file(tmp_path / "state" / "model.safetensors").keys() == {"weight", "bias"}
    plain = Accelerator(cpu=True)
    model = plain.prepare(nn.Linear(2, 2))
    plain.load_state(tmp_path / "state")
    assert torch.equal(model.weight, compiled.weight)


def test_gradients_of_an_earlier_window_do_not_stay(tmp_path: Path) -> None:
    trained = build()
    trained.accelerator.save_state(tmp_path / "state")
    for parameter in trained.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained.accelerator.load_state(tmp_path / "state")
    assert all(parameter.grad is None for parameter in trained.model.parameters())


def test_a_window_that_a_loaders_end_cuts_keeps_its_divisor(tmp_path: Path) -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, exact_last_window=True)
    whole = build(gradient_accumulation_plugin=plugin)
    seen = train(whole, epochs=range(1), save_at=(0, 5), path=tmp_path / "state")
    resumed = build(gradient_accumulation_plugin=plugin, seed=99)
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.accelerator.gradient_state.window_size == 2
    assert train(resumed, epochs=range(1), skipped=5) == seen[5:]
    assert weights(resumed) == weights(whole)


def test_a_group_that_was_added_is_added_again(tmp_path: Path) -> None:
    def made() -> tuple[Accelerator, nn.Module, Any]:
        accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9))

    accelerator, model, optimizer = made()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
    accelerator.save_state(tmp_path / "state")
    second, _, other = made()
    second.load_state(tmp_path / "state")
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.5]


# What may be in the folder


def test_a_checkpoint_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """An empty folder is none; what is no part of a checkpoint is never removed."""
    trained = build()
    (tmp_path / "state").mkdir()
    for _ in range(2):
        train(trained, epochs=range(1), save_at=(0, 6), path=tmp_path / "state")
        loaded = build(seed=99)
        loaded.accelerator.load_state(tmp_path / "state")
        assert weights(loaded) == weights(trained)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert open_checkpoint(tmp_path / "state").manifest.sequence == 2
    (tmp_path / "state" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"can't be replaced: these files in it are no part of it: notes\.txt"):
        trained.accelerator.save_state(tmp_path / "state")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"other' exists already, and nothing that exists is overwritten"):
        trained.accelerator.save_state(tmp_path / "other")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "state"]


def test_a_failed_save_leaves_the_one_before(tmp_path: Path) -> None:
    trained = build()
    counter = Counter(1)
    trained.accelerator.register_for_checkpointing(counter)
    trained.accelerator.save_state(tmp_path / "state")
    counter.count = object()
    with pytest.raises(CheckpointError, match=r"accelerator\.custom\[0\]\.state\.count.*object"):
        trained.accelerator.save_state(tmp_path / "state")
    counter.count = 2
    trained.accelerator.load_state(tmp_path / "state")
    assert counter.count == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


# Hooks


def test_hooks_see_models_weights_and_a_folder(tmp_path: Path) -> None:
    """Clearing the lists leaves the default files out, and the models as they are."""
    trained = build()

    def save(models: list[nn.Module], states: list[dict[str, Any]], folder: str) -> None:
        assert models == [trained.model] and states[0].keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert Path(folder).name == "state" and list(Path(folder).iterdir()) == []
        (Path(folder) / "own" / "deep").mkdir(parents=True)
        torch.save(states.pop(), Path(folder) / "own" / "deep" / "weights.bin")
        models.clear()  # a list of its own

    def load(models: list[nn.Module], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "own" / "deep" / "weights.bin"))

    handle = trained.accelerator.register_save_state_pre_hook(save)
    trained.accelerator.save_state(tmp_path / "state")
    checkpoint = open_checkpoint(tmp_path / "state")
    assert (checkpoint.weights_names, checkpoint.unlisted_files) == ((), ("own",))
    handle.remove()
    trained.accelerator.save_state(tmp_path / "plain")
    assert open_checkpoint(tmp_path / "plain").weights_names == ("model",)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plain", "state"]

    loaded = build(seed=99)
    with pytest.raises(CheckpointError, match=r"has no weights 'model'"):
        loaded.accelerator.load_state(tmp_path / "state")
    loaded.accelerator.register_load_state_pre_hook(load)
    loaded.accelerator.load_state(tmp_path / "state")
    assert weights(loaded) == weights(trained)


def test_a_hook_that_fails_leaves_nothing(tmp_path: Path) -> None:
    trained = build()

    def fail(*_: Any) -> None:
        raise ValueError("not now")

    trained.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(ValueError, match="not now"):
        trained.accelerator.save_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


# What does not fit: all is compared before anything is changed


def _snapshot(trained: Any) -> Any:
    optimizer = trained.optimizer.state_dict()
    return weights(trained), str(optimizer), trained.scheduler.state_dict(), torch.get_rng_state().tolist()


def test_f45_registered_objects_are_compared_first(tmp_path: Path) -> None:
    trained = build()
    trained.accelerator.register_for_checkpointing(Counter())
    trained.accelerator.save_state(tmp_path / "state")
    other, linear = build(seed=99), nn.Linear(1, 1)
    before = _snapshot(other)
    with pytest.raises(RuntimeError, match=r"states of 1 objects \['Counter'\], and 0 are registered here \[\]"):
        other.accelerator.load_state(tmp_path / "state")
    other.accelerator.register_for_checkpointing(linear)
    with pytest.raises(CheckpointError, match=r"has the registered objects \['Counter'\], and here are \['Linear'\]"):
        other.accelerator.load_state(tmp_path / "state")
    assert _snapshot(other) == before


def test_other_models_and_optimizers_are_refused(tmp_path: Path) -> None:
    build().accelerator.save_state(tmp_path / "state")
    wide = build(seed=99, width=5)
    before = _snapshot(wide)
    with pytest.raises(CheckpointError, match=r"do not fit Sequential: mismatched \(3\): 0\.weight \(saved as"):
        wide.accelerator.load_state(tmp_path / "state")
    assert _snapshot(wide) == before

    other = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    prepared, _ = other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = prepared[0].weight.tolist()
    with pytest.raises(CheckpointError, match=r"has the optimizers \['AdamW'\], and here are \['SGD'\]"):
        other.load_state(tmp_path / "state")
    assert prepared[0].weight.tolist() == weight

    more = build(seed=99)
    more.accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"has no weights 'model_1'"):
        more.accelerator.load_state(tmp_path / "state")


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    def made(*order: int) -> tuple[Accelerator, Any]:
        accelerator, model = Accelerator(cpu=True), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parameters = [parameter for index in order for parameter in model[index].parameters()]
        return accelerator, accelerator.prepare(model, torch.optim.AdamW(parameters))

    made(0, 1)[0].save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"AdamW: group 0 holds other parameters: in another order"):
        made(1, 0)[0].load_state(tmp_path / "state")


def test_a_loader_of_another_kind_is_refused(tmp_path: Path) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    first = Accelerator(cpu=True)
    first.prepare(nn.Linear(1, 1), DataLoader(range(4)))  # type: ignore[arg-type]
    first.save_state(tmp_path / "state")
    second = Accelerator(cpu=True)
    model, _ = second.prepare(nn.Linear(1, 1), DataLoader(Stream()))
    weight = model.weight.item()
    with pytest.raises(
        CheckpointError, match=r"reads samples by their indices, and this one reads an iterable dataset"
    ):
        second.load_state(tmp_path / "state")
    assert model.weight.item() == weight


def test_an_evaluation_takes_the_model_alone(tmp_path: Path) -> None:
    trained = build()
    train(trained, epochs=range(1), save_at=(0, 6), path=tmp_path / "state")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)))
    with pytest.warns(
        UserWarning, match=r"states of 1 schedulers, and 0 are .*; .* of 1 optimizers, and 0 .* of 1 loaders"
    ):
        accelerator.load_state(tmp_path / "state")
    assert {name: value.tolist() for name, value in model.state_dict().items()} == weights(trained)


def test_strict_can_be_left_out(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state")
    other = Accelerator(cpu=True)
    loaded = other.prepare(nn.Linear(2, 2, bias=False))
    with pytest.raises(CheckpointError, match=r"do not fit Linear: unexpected \(1\): bias"):
        other.load_state(tmp_path / "state")
    with pytest.warns(UserWarning, match=r"of Linear these are not loaded: unexpected \(1\): bias"):
        other.load_state(tmp_path / "state", strict=False)
    assert torch.equal(loaded.weight, model.weight)


def test_other_settings_are_told(tmp_path: Path) -> None:
    build(gradient_accumulation_steps=2).accelerator.save_state(tmp_path / "state")
    with pytest.warns(UserWarning, match=r"can't be equal .*: gradient_accumulation_steps was 2 and is 1"):
        (other := build()).accelerator.load_state(tmp_path / "state")
    other.accelerator.save_state(tmp_path / "next")
    assert open_checkpoint(tmp_path / "next").manifest.changes == ("gradient_accumulation_steps was 2 and is 1",)


def test_damage_is_named(tmp_path: Path) -> None:
    trained = build()
    trained.accelerator.save_state(tmp_path / "state")
    file = tmp_path / "state" / "optimizers.json"
    file.write_text(file.read_text().replace("0.1", "0.2"))
    with pytest.raises(CheckpointError, match=r"is damaged: optimizers\.json"):
        trained.accelerator.load_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"nothing' is no checkpoint: it is not there"):
        trained.accelerator.load_state(tmp_path / "nothing")


def test_options_that_can_not_be_meant_are_refused(tmp_path: Path) -> None:
    trained = build()
    save, load = trained.accelerator.save_state, trained.accelerator.load_state
    with pytest.raises(ConfigError, match=r"save_state\(safe_serialization=False\): nothing is pickled"):
        save(tmp_path / "state", safe_serialization=False)
    with pytest.raises(ConfigError, match=r"save_state\(exclude_frozen=\.\.\.\) is unknown"):
        save(tmp_path / "state", exclude_frozen=True)
    with pytest.raises(ConfigError, match=r"save_state\(\) without a folder\. Give one, or number"):
        save()
    with pytest.raises(ConfigError, match=r"load_state\(\) without a folder"):
        load()
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"map_location='cuda'\)\. Expected 'cpu', 'on_device', or None"):
        load(tmp_path / "state", map_location="cuda")
    with pytest.raises(ConfigError, match=r"load_kwargs=\{'weights_only': False\}\) can't be used: no pickle is run"):
        load(tmp_path / "state", load_kwargs={"weights_only": False})
    with pytest.raises(ConfigError, match=r"load_state\(stict=\.\.\.\) is unknown\. Did you mean 'strict'"):
        load(tmp_path / "state", stict=True)
    load(tmp_path / "state", {"weights_only": True}, map_location="on_device")


# Trackers


def test_trackers_go_on_with_their_run(tmp_path: Path) -> None:
    def made() -> Accelerator:
        return Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)

    first = made()
    first.init_trackers("project")
    first.log({"loss": 1.0})
    first.log({"loss": 2.0})
    first.save_state(tmp_path / "state")
    first.log({"loss": 3.0})
    first.end_training()
    second = made()
    second.load_state(tmp_path / "state")
    second.init_trackers("project")
    second.log({"loss": 4.0})
    second.end_training()
    files = list((tmp_path / "project").rglob("*.jsonl"))
    assert len(files) == 1
    assert '"loss": 4.0' in files[0].read_text() and '"loss": 3.0' not in files[0].read_text()
    third = made()
    third.init_trackers("another")
    third.load_state(tmp_path / "state")
    third.log({"loss": 5.0})
    third.end_training()
    assert '"step": 2' in next((tmp_path / "another").rglob("*.jsonl")).read_text()
