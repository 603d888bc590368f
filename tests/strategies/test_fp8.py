"""FP8 by torchao, which is imported here once: emulated, under each strategy that it goes around."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from loopwright.callbacks.callback import Callback, SkipBatch
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.ema import EMA
from loopwright.callbacks.roll_back import RollBack
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.fp8 import FP8Strategy
from loopwright.strategies.fp8_recipes import TORCHAO_RECIPES, AORecipeKwargs
from loopwright.strategies.strategy import Strategy
from loopwright.trainer.accelerator import Accelerator
from loopwright.trainer.trainer import Trainer

from .fp8_nets import Block, Classes, batches, fit, losses, make

INNER = ("blocks.0.inner", "blocks.0.outer", "blocks.1.inner", "blocks.1.outer")


def fp8(**options: Any) -> dict[str, Any]:
    return {"name": "fp8", "emulate": True, **options}


def converted(model: nn.Module) -> list[str]:
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return [name for name, kind in kinds.items() if kind in ("Float8Linear", "BlockScaledLinear")]


def prepared(model: nn.Module, **options: Any) -> nn.Module:
    recipe = AORecipeKwargs(emulate=True, **options)
    found: nn.Module = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe]).prepare_model(model)
    return found


@functools.cache
def plain() -> list[float]:
    return losses(make(), precision="bf16")


class TestTraining:
    @pytest.mark.parametrize("recipe", TORCHAO_RECIPES)
    def test_each_recipe_trains_as_bf16_does_and_not_just_alike(self, recipe: str) -> None:
        task = make()
        found = losses(task, precision=fp8(recipe=recipe))
        assert found == pytest.approx(plain(), rel=0.05, abs=0.02)
        assert found[1:] != plain()[1:]
        assert task.kinds == {"BlockScaledLinear" if "mxfp8" in recipe else "Float8Linear"}
        assert task.formats == {torch.bfloat16}

    def test_the_first_layer_and_the_last_stay_and_all_are_the_tasks_own_after_the_run(self) -> None:
        task = make()
        layers = dict(task.named_modules())
        fit(task, precision=fp8())
        assert [name for name, module in task.named_modules() if type(module) is nn.Linear] == ["first", *INNER, "last"]
        assert dict(task.named_modules()) == layers
        assert task.kinds == {"Float8Linear"}

    def test_the_strategy_alone_leaves_the_rest_in_fp32(self) -> None:
        task = make()
        fit(task, strategy={"name": "fp8", "emulate": True})
        assert (task.kinds, task.formats) == ({"Float8Linear"}, {torch.float32})

    def test_by_hand(self) -> None:
        """Numbers of FP8 E4M3 have 3 bits behind the first: a product of numbers that all have them is exact."""
        layer = nn.Linear(16, 16, bias=False)
        inputs = torch.full((16, 16), 1.5)
        with torch.no_grad():
            layer.weight.copy_(torch.full((16, 16), 1.0 + 2**-3))
        model = prepared(nn.Sequential(layer), first_and_last=True)
        assert model(inputs).unique().tolist() == [16 * 1.5 * 1.125]
        with torch.no_grad():
            layer.weight[:, 0] = 1.0 + 2**-5  # is rounded to 1, as 1.125 is the largest: a scale that is no power of 2
        assert model(inputs)[0, 0].item() != pytest.approx(1.5 * (15 * 1.125 + 1 + 2**-5), rel=1e-4)

    def test_gradients_are_those_of_the_plain_layer_up_to_the_rounding(self) -> None:
        torch.manual_seed(0)
        block, x = Block(), torch.randn(7, 32)
        twin = copy.deepcopy(block)
        F.mse_loss(prepared(block, first_and_last=True)(x), torch.ones(7, 32)).backward()
        F.mse_loss(twin(x), torch.ones(7, 32)).backward()
        for name, parameter in twin.named_parameters():
            gradient = block.get_parameter(name).grad
            assert gradient is not None and parameter.grad is not None
            assert (gradient - parameter.grad).norm() < 0.1 * parameter.grad.norm()


class LeaveOut(Callback):
    """Never sees these batches."""

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (4, 5):
            raise SkipBatch


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_run_that_rolls_back_is_the_one_that_never_saw_the_samples(recipe: str) -> None:
    data = batches(12)
    data[5][0][0, 0] = math.nan
    task, expected = make(), make()
    with pytest.warns(UserWarning, match=r"Back to step 4; batches 4 to 5 of epoch 0 are left out"):
        fit(task, data, max_epochs=1, precision=fp8(recipe=recipe), callbacks=[RollBack(every=1, snapshot_every=2)])
    fit(expected, data, max_epochs=1, precision=fp8(recipe=recipe), callbacks=[LeaveOut()])
    for name, value in task.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=0)


class TestStates:
    @pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
    def test_a_state_dict_holds_plain_weights(self, recipe: str) -> None:
        model = make()
        before = model.state_dict()
        after = prepared(model, recipe=recipe).state_dict()
        assert list(after) == list(before)
        for name, value in after.items():
            assert type(value) is Tensor
            assert value.data_ptr() == before[name].data_ptr()

    @pytest.mark.parametrize(("first", "then"), [("bf16", fp8()), (fp8(), "bf16"), (fp8(), fp8(recipe="rowwise"))])
    @pytest.mark.filterwarnings("ignore:.*precision.*")
    def test_a_checkpoint_goes_on_with_and_without(self, first: Any, then: Any) -> None:
        saving = ModelCheckpoint(every="1 epoch")
        fit(make(), precision=first, max_epochs=2, name="run", callbacks=[saving])
        task = make(seed=9)
        saving = ModelCheckpoint(every="1 epoch")
        found = fit(task, precision=then, max_epochs=3, name="run", resume_from="latest", callbacks=[saving])
        assert found.state.step == 12

    def test_a_run_goes_on_bit_for_bit(self) -> None:
        whole = make()
        fit(whole, precision=fp8())
        fit(
            make(),
            precision=fp8(),
            max_steps=6,
            max_epochs=None,
            name="run",
            callbacks=[ModelCheckpoint(every="6 steps")],
        )
        again = make(seed=9)
        saving = ModelCheckpoint(every="6 steps")
        fit(again, precision=fp8(), name="run", resume_from="latest", callbacks=[saving])
        for name, value in whole.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), name

    def test_saved_weights_are_plain(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(emulate=True)])
        model = accelerator.prepare(make())
        accelerator.save_model(model, tmp_path)
        plain = make()
        plain.load_state_dict(load_file(tmp_path / "model.safetensors"))


class TestChoosing:
    def test_a_filter_decides_for_the_first_and_the_last_too(self) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        assert converted(prepared(model, module_filter_func=lambda module, name: name != "1")) == ["0", "2"]

    def test_patterns_leave_layers_out(self) -> None:
        assert converted(prepared(make(), skip=["blocks.0.*"])) == list(INNER[2:])
        with pytest.raises(
            ConfigError, match=r"skip='blocks' matches no linear layer of Classes\. .* it has first, bl"
        ):
            prepared(make(), skip=["blocks"])

    def test_sizes_that_do_not_fit_are_named_once(self) -> None:
        recipe = AORecipeKwargs(emulate=True, first_and_last=True)
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
        model = make()
        with pytest.warns(
            UserWarning, match=r"stay in high precision.* multiples of 16: first \(8 x 32\), last \(32 x 4"
        ):
            accelerator.prepare(model)
        assert converted(model) == list(INNER)

    def test_mxfp8_needs_blocks_of_32(self) -> None:
        model = nn.Sequential(
            nn.Linear(32, 32), nn.Linear(32, 48), nn.Linear(48, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        )
        with pytest.warns(UserWarning, match=r"no multiples of 32: 1 \(32 x 48\), 2 \(48 x 64\)"):
            prepared(model, recipe="mxfp8")
        assert converted(model) == ["3"]

    def test_nothing_left(self) -> None:
        message = (
            r"no layer of Sequential is left to convert\. It has 2 linear layers: 2 are the first and the last, 0 more"
        )
        with pytest.raises(ConfigError, match=message):
            prepared(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        with pytest.raises(ConfigError, match=r"and 1 have sizes that are no multiples of 16: 0 \(4 x 4\)"):
            prepared(nn.Sequential(nn.Linear(4, 4)), first_and_last=True)

    def test_layers_of_another_class_stay(self) -> None:
        class Own(nn.Linear):
            pass

        model = nn.Sequential(Own(16, 16), nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
        assert converted(prepared(model, first_and_last=True)) == ["1"]
        assert type(model[0]) is Own
        assert type(model[2].out_proj).__name__ == "NonDynamicallyQuantizableLinear"

    def test_own_settings_of_torchao(self) -> None:
        from torchao.float8 import Float8LinearConfig

        model = prepared(make(), config=Float8LinearConfig.from_recipe_name("rowwise"))
        assert "axs" in repr(model.get_submodule(INNER[0]))

    def test_hooks_and_the_compiled_forward_of_a_layer_stay(self) -> None:
        model, seen = make(), []
        model.get_submodule(INNER[0]).register_forward_hook(lambda *_: seen.append(1))
        prepared(model)(torch.ones(2, 8))
        assert seen


class TestEmulation:
    def test_it_is_chosen_by_itself_with_one_warning(self) -> None:
        accelerator = Accelerator(mixed_precision="fp8")
        with pytest.warns(
            UserWarning, match=r"a device of type 'cpu' can't compute in FP8 with recipe 'tensorwise': it"
        ):
            accelerator.prepare(make())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = accelerator.prepare(make())
        assert model.get_submodule(INNER[0]).config.emulate

    def test_it_can_be_declined(self) -> None:
        recipe = AORecipeKwargs(emulate=False)
        model = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe]).prepare(make())
        assert not model.get_submodule(INNER[0]).config.emulate
        model(torch.ones(2, 8)).sum().backward()  # torch has such products on the CPU as well, slow ones


class TestAccelerator:
    def test_the_precision_is_fp8_and_unwrapping_gives_the_layers_back(self) -> None:
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(emulate=True)])
        model = accelerator.prepare(make())
        assert (accelerator.mixed_precision, accelerator.state.mixed_precision) == ("fp8", "fp8")
        assert model(torch.ones(2, 8)).dtype is torch.float32
        assert converted(accelerator.unwrap_model(model)) == list(INNER)
        assert converted(accelerator.unwrap_model(model, keep_fp32_wrapper=False)) == []

    def test_the_environment_asks_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
        accelerator = Accelerator()
        with pytest.warns(UserWarning, match="can't compute in FP8"):
            assert converted(accelerator.prepare(make())) == list(INNER)

    def test_a_loop(self) -> None:
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(emulate=True)])
        task = make()
        model, optimizer, loader = accelerator.prepare(task, task.configure_optimizers(), batches())
        values = []
        for x, y in [*loader] * 3:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        assert values[-1] < 0.8 * values[0]


def own_values(strategy: str, precision: Any, accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    from . import fp8_nets

    features, targets = (torch.cat(each) for each in zip(*batches(), strict=True))
    data = DataLoader(TensorDataset(features, targets), batch_size=5)
    records = fp8_nets.Records()
    task = make()
    trainer = fit(task, data, strategy=strategy, precision=precision, accumulate=accumulate, callbacks=[records])
    state = trainer.strategy.whole_model_state(trainer._newest("test").model)
    return records.losses, {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("ddp", fp8()),
        ("fsdp", fp8(enable_fsdp_float8_all_gather=True)),
        pytest.param("ddp", fp8(recipe="mxfp8"), marks=pytest.mark.slow),
        pytest.param("fsdp", fp8(recipe="rowwise"), marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(two_processes: Callable[..., list[Any]], strategy: str, precision: Any) -> None:
    (values, state), _ = two_processes(own_values, strategy, precision, 2, timeout=110)
    single = own_values("single", {key: v for key, v in precision.items() if "gather" not in key}, 4)
    assert values == pytest.approx(single[0], rel=0.05)
    assert state.keys() == single[1].keys()
    for name, value in single[1].items():
        assert type(state[name]) is Tensor
        assert (state[name].float() - value).norm() < 0.1 * value.norm() + 0.1, name


def resumed_in_fp8(folder: str) -> list[bool]:
    precision = fp8(enable_fsdp_float8_all_gather=True)
    features, targets = (torch.cat(each) for each in zip(*batches(), strict=True))
    data = DataLoader(TensorDataset(features, targets), batch_size=5)
    options: dict[str, Any] = {"strategy": "fsdp", "precision": precision, "project_dir": folder}

    def state(trainer: Trainer) -> dict[str, Tensor]:
        found = trainer.strategy.whole_model_state(trainer._newest("test").model)
        return {name: value.clone() for name, value in found.items()}

    whole = state(fit(make(), data, **options))
    saving = ModelCheckpoint(every="5 steps")
    fit(make(), data, **(options | {"max_steps": 5, "max_epochs": None, "name": "run", "callbacks": [saving]}))
    saving = ModelCheckpoint(every="5 steps")
    again = state(fit(make(seed=4), data, **options, name="run", resume_from="latest", callbacks=[saving]))
    single = make(seed=5)
    if not again:
        return []
    single.load_state_dict(again)
    return [torch.equal(value, again[name]) for name, value in whole.items()]


def test_weights_gathered_in_fp8_go_on_bit_for_bit(two_processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    found, _ = two_processes(resumed_in_fp8, str(tmp_path), timeout=110)
    assert found and all(found)


class SomeLosses(Classes):
    """Process 1 has no loss in its second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_left_out = self.trainer.process.process_index == 1 and batch_idx == 1
        return None if is_left_out else super().training_step(batch, batch_idx)


def averaged_in_fp8() -> list[float]:
    features, targets = (torch.cat(each) for each in zip(*batches(), strict=True))
    data = DataLoader(TensorDataset(features, targets), batch_size=5)
    precision = fp8(enable_fsdp_float8_all_gather=True)
    callbacks = [EMA(decay=0.5), ModelCheckpoint(every="1 epoch")]
    torch.manual_seed(1)
    trainer = fit(SomeLosses(), data, val=data, strategy="fsdp", precision=precision, callbacks=callbacks)
    return [trainer.metrics["loss"], trainer.metrics["val/loss"]]


def test_batches_without_a_loss_and_averages_where_weights_are_gathered_in_fp8(
    two_processes: Callable[..., list[Any]],
) -> None:
    found, _ = two_processes(averaged_in_fp8, timeout=110)
    assert max(found) < 0.9  # both are 1.49 in the beginning


class TestStrategies:
    def test_words(self) -> None:
        from loopwright.strategies.ddp import DDPStrategy
        from loopwright.strategies.fsdp import FSDPStrategy
        from loopwright.strategies.registry import create_strategy
        from loopwright.strategies.single import SingleDeviceStrategy

        found = create_strategy({"name": "fsdp+fp8", "prefetch": 1, "fp8": {"recipe": "rowwise"}})
        assert isinstance(found, FP8Strategy) and isinstance(found.inner, FSDPStrategy)
        assert (found.inner.options.prefetch, found.recipe) == (1, AORecipeKwargs(recipe="rowwise"))
        assert isinstance(create_strategy("ddp+fp8").inner, DDPStrategy)  # type: ignore[attr-defined]
        assert isinstance(create_strategy("fp8").inner, SingleDeviceStrategy)  # type: ignore[attr-defined]
        assert isinstance(create_strategy("fp8", 2).inner, DDPStrategy)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("strategy", "message"),
        [
            ("deepspeed+fp8", "fp8 can't be used with DeepSpeedStrategy"),
            ("pipeline+fp8", "fp8 can't be used with PipelineStrategy"),
            ("fp8+ddp", r"strategy='fp8\+ddp' is unknown\. A strategy is joined with 'fp8' alone, as in 'fsdp\+fp8'"),
            ("ddp+fsdp+fp8", "is unknown"),
            ("dpd+fp8", "strategy='dpd' is unknown.*Did you mean 'ddp'"),
            (
                {"name": "ddp+fp8", "fp8": {"recipe": "rowwize"}},
                r"recipe='rowwize'\) is unknown\. Did you mean 'rowwise'",
            ),
            (
                {"name": "fp8", "backend": "cuda"},
                r"strategy='fp8': backend='cuda' is unknown\. Accepted: ao, msamp, te",
            ),
            (
                {"name": "fp8", "recip": "x", "backend": "ao"},
                r"backend 'ao' does not take 'recip'\. Did you mean 'recipe'",
            ),
        ],
    )
    def test_what_can_not_be(self, strategy: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Trainer(max_steps=1, strategy=strategy, progress=False, trackers=False)

    def test_with_the_precision_it_is_refused_there_too(self) -> None:
        with pytest.raises(ConfigError, match="fp8 can't be used with DeepSpeedStrategy"):
            Trainer(max_steps=1, strategy="deepspeed", precision="fp8", progress=False, trackers=False)
        with pytest.raises(
            ConfigError, match=r"strategy='fp8' with precision='fp16': numbers of FP8 are scaled by themse"
        ):
            Trainer(max_steps=1, strategy="fp8", precision="fp16", progress=False, trackers=False)

    def test_recipes_in_two_places(self) -> None:
        recipe = AORecipeKwargs(emulate=True)
        with pytest.raises(ConfigError, match=r"given in precision='fp8' and kwargs_handlers\. Give one"):
            Accelerator(mixed_precision=fp8(), kwargs_handlers=[recipe])
        with pytest.raises(
            ConfigError, match=r"holds AORecipeKwargs, and the precision is 'bf16'\. Use mixed_precision="
        ):
            Accelerator(mixed_precision="bf16", kwargs_handlers=[recipe])
        with pytest.raises(ConfigError, match=r"FP8Strategy was made before\. Give it there: FP8Strategy\(rec"):
            Accelerator(strategy=FP8Strategy(), mixed_precision="fp8", kwargs_handlers=[recipe])

    def test_it_passes_everything_on(self) -> None:
        """Each method and property of a strategy is written out in `DelegatingStrategy`."""
        from loopwright.strategies.delegating import DelegatingStrategy

        own = {"converts_layers", "process", "precision", "gradient_state"}
        public = {name for name in vars(Strategy) if not name.startswith("_")} - own
        assert public - vars(DelegatingStrategy).keys() == set()


def test_the_task_is_given_back_after_an_exception() -> None:
    class Fails(Classes):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("on purpose")

    task = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(task, precision=fp8())
    assert converted(task) == []


def test_evaluations_compute_in_it_too() -> None:
    task = make()
    trainer = Trainer(max_epochs=1, progress=False, trackers=False, precision=fp8())
    trainer.validate(task, batches())
    assert task.kinds == {"Float8Linear"}
    assert converted(task) == []


@pytest.mark.gpu
def test_on_a_device_with_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    assert losses(make(), precision={"name": "fp8"}) == pytest.approx(plain(), rel=0.05, abs=0.02)
