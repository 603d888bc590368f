"""What a plan says of memory is what runs take."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, TensorDataset

from loopwright.callbacks.callback import Callback
from loopwright.distributed.errors import ConfigError, TaskError
from loopwright.recipes.bytes_gpt.task import BytesGPT
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

Run = Callable[..., list[Any]]
Case = tuple[str, Any, str, int, dict[str, Any]]
"""A model, the strategy, the optimizer, the micro-batches of a step, and options of the Trainer."""

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.01),
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


class Perceptron(Task):
    """Wide layers: 1.1 million weights, 4.4 MB."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(64, 512), nn.Sequential(*layers), nn.Linear(512, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class GPT(BytesGPT):
    """A GPT of 0.43 million weights, 1.7 MB."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(width=128, num_layers=2, num_heads=4, context=64)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def loader(name: str) -> Any:
    if name == "gpt":
        tokens = torch.randint(255, (64, 65))
        return DataLoader(TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), batch_size=4)
    return DataLoader(TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,))), batch_size=64)


class LiveBytes(TorchDispatchMode):
    """Looks behind each operation at the memory of all tensors that any has made: the most at once, in bytes.

    Args:
        outside: tensors that are not counted.
    """

    def __init__(self, outside: Iterable[Tensor]) -> None:
        super().__init__()
        self.highest = 0
        self.counts = False
        self._outside = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in outside)}
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                storage = getattr(leaf, "_local_tensor", leaf).untyped_storage()
                if id(storage) not in self._outside:
                    self._storages[id(storage)] = weakref.ref(storage)
        if not self.counts:
            return outputs
        live = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        self._storages = {id(storage): weakref.ref(storage) for storage in live}
        self.highest = max(self.highest, sum(storage.nbytes() for storage in live))
        return outputs


class Steady(Callback):
    """Takes the peaks of the steps behind the second, which has made the optimizer's state."""

    def __init__(self, window: int, live: LiveBytes) -> None:
        self.window, self.live = window, live
        self.peaks: list[int] = []

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, index: int) -> None:
        step, position = divmod(trainer.state.micro_step, self.window)
        if step >= 2 and position == 0:
            if step > 2:
                self.peaks.append(self.live.highest)
            self.live.counts, self.live.highest = True, 0

    def on_fit_end(self, trainer: Any, task: Any) -> None:
        self.peaks.append(self.live.highest)


def compare(name: str, strategy: Any, optimizer: str, window: int, options: Any) -> tuple[int, int]:
    """The peak that is planned for a step, and that of a real one, in bytes."""
    data = loader(name)
    live = LiveBytes(data.dataset.tensors)
    steady = Steady(window, live)
    trainer = Trainer(
        max_steps=4, strategy=strategy, accumulate=window, callbacks=steady, progress=False, trackers=False,
        project_dir=".", **options,
    )  # fmt: skip
    make = GPT if name == "gpt" else Perceptron
    with torch.device("meta"):
        planned = make(optimizer)
    plan = trainer.plan(planned, data, world_size=trainer.process.num_processes).memory
    assert plan is not None
    (row,) = (row for row in plan.rows if row.is_own)
    assert row.footprint.peak is not None, plan.notes
    with live:
        trainer.fit(make(optimizer), data)
    # gloo's threads may hold on to what was sent for a moment longer: the least of the steps is without that.
    return row.footprint.peak, min(steady.peaks)


def compare_all(cases: Sequence[Case]) -> list[tuple[int, int]]:
    return [compare(*case) for case in cases]


def check(cases: Sequence[Case], found: Sequence[tuple[int, int]]) -> None:
    shown = [f"{case}: {planned:,} planned, {real:,} real" for case, (planned, real) in zip(cases, found, strict=True)]
    wrong = [text for text, (planned, real) in zip(shown, found, strict=True) if not 0.9 * real < planned < 1.1 * real]
    assert not wrong


def matrix(strategy: str) -> list[Case]:
    """Each two of a model, an optimizer and a window come together once."""
    found = [("mlp", "sgd", 1), ("mlp", "adamw", 2), ("gpt", "sgd", 2), ("gpt", "adamw", 1)]
    return [(name, strategy, optimizer, window, {}) for name, optimizer, window in found]


class TestMeasured:
    """Within a tenth of the real peak; most are within a hundredth."""

    def test_one_process(self) -> None:
        cases = matrix("single")
        check(cases, compare_all(cases))

    @pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
    def test_two_processes(self, two_processes: Run, strategy: str) -> None:
        cases = matrix(strategy)
        check(cases, two_processes(compare_all, cases)[0])

    @pytest.mark.slow
    def test_options_of_ddp(self, two_processes: Run) -> None:
        views = {"name": "ddp", "gradient_as_bucket_view": True}
        cases: list[Case] = [
            ("mlp", views, "sgd", 1, {}), ("mlp", views, "sgd", 2, {}),
            ("gpt", "ddp", "adafactor", 1, {}), ("gpt", "ddp", "adamw", 1, {"precision": "bf16"}),
        ]  # fmt: skip
        check(cases, two_processes(compare_all, cases)[0])

    @pytest.mark.slow
    def test_options_of_fsdp(self, two_processes: Run) -> None:
        def fsdp(**options: Any) -> dict[str, Any]:
            return {"name": "fsdp", **options}

        cases: list[Case] = [
            ("mlp", fsdp(reshard_after_forward=False), "sgd", 1, {}),
            ("gpt", fsdp(activation_checkpointing=True), "sgd", 2, {}),
            ("mlp", fsdp(mesh=[2, 1]), "sgd", 1, {}), ("mlp", fsdp(wrap="none"), "sgd", 1, {}),
            ("mlp", fsdp(prefetch=1), "sgd", 1, {}), ("mlp", fsdp(ignored_modules=["net.1.0"]), "sgd", 1, {}),
            ("gpt", "fsdp", "adamw", 1, {"precision": "bf16"}), ("mlp", "fsdp", "sgd", 3, {"precision": "bf16"}),
            ("mlp", fsdp(param_dtype="bf16", reduce_dtype="bf16"), "sgd", 2, {}),
        ]  # fmt: skip
        check(cases, two_processes(compare_all, cases)[0])


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"name": "deepspeed", "zero_stage": stage, **options}


class TestMeasuredDeepSpeed:
    """As above, for the larger of two processes: they have different parameters in their parts."""

    def check(self, two_processes: Run, cases: list[Case]) -> None:
        found = two_processes(compare_all, cases, timeout=300)
        check(cases, [(planned, max(real, other)) for (planned, real), (_, other) in zip(*found, strict=True)])

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_stages(self, two_processes: Run, stage: int) -> None:
        self.check(two_processes, [("mlp", zero(stage), "sgd", 1, {})])

    @pytest.mark.slow
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_models_optimizers_and_options(self, two_processes: Run, stage: int) -> None:
        cases: list[Case] = [
            ("mlp", zero(stage), "adamw", 2, {}), ("gpt", zero(stage), "sgd", 2, {}),
            ("gpt", zero(stage), "adamw", 1, {}), ("mlp", zero(stage), "sgd", 3, {}),
            ("gpt", zero(stage), "adamw", 1, {"precision": "bf16"}),
            ("mlp", zero(stage), "adamw", 2, {"precision": "bf16"}),
            ("mlp", zero(stage, reduce_bucket_size=200_000), "adamw", 2, {}),
            ("mlp", zero(stage, reduce_bucket_size=400_000), "sgd", 1, {}),
            ("gpt", zero(stage, reduce_bucket_size=50_000), "sgd", 1, {}),
        ]  # fmt: skip
        self.check(two_processes, cases)


class Late(Task):
    """Builds its layers when it is asked to: 10^10 weights, 40 GB."""

    def __init__(self, width: int = 50_000) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(4)]
        self.net = nn.Sequential(nn.Linear(8, self.width), *layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Deciding(Perceptron):
    """Computes what a batch's values ask for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (batch[1] == 0).any():
            return None
        return super().training_step(batch, batch_idx)


class Reading(Perceptron):
    """Reads its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/again", loss.item())
        return loss


class Stubborn(Late):
    """Looks at its weights while it builds them."""

    def configure_model(self) -> None:
        super().configure_model()
        self.largest = max(weight.max().item() for weight in self.parameters())


class Manual(Perceptron):
    automatic_optimization = False


def new_trainer(**options: Any) -> Trainer:
    return Trainer(max_steps=2, progress=False, trackers=False, project_dir=".", **options)


def memory_of(task: Task, data: Any = None, **options: Any) -> Any:
    found = new_trainer().plan(task, loader("mlp") if data is None else data, **options).memory
    assert found is not None
    return found


class TestPlan:
    def test_nothing_is_said_unless_it_is_asked_for(self) -> None:
        plan = new_trainer().plan(Perceptron("sgd"), loader("mlp"))
        assert plan.memory is None
        assert "Memory" not in str(plan)

    def test_a_model_that_is_too_large_for_this_machine(self) -> None:
        task = Late()
        plan = new_trainer().plan(task, [torch.ones(2, 8)], world_size=64, device_memory="80GB")
        memory = plan.memory
        assert memory is not None
        assert not hasattr(task, "net")
        weights = (4 * 50_000**2 + 9 * 50_000) * 4
        whole, *_, full = [row for row in memory.rows if row.spec["name"] in ("ddp", "fsdp")][:4]
        assert (whole.footprint.weights, whole.footprint.optimizer) == (weights, 2 * weights + 6 * 4)
        assert full.footprint.weights == pytest.approx(weights / 64, rel=0.01)
        assert memory.fits(whole) is False
        # Where all units stay gathered they are 40 GB; beside them are the gradient of one and its reduction.
        assert memory.recommended == {"name": "fsdp", "reshard_after_forward": False}
        assert "Strategy    {name: fsdp, reshard_after_forward: false} is the simplest that fits" in str(plan)

    def test_it_says_what_is_lacking(self) -> None:
        task = Late()
        text = str(new_trainer().plan(task, [torch.ones(2, 8)], world_size=2, device_memory="24GB"))
        assert (
            "Strategy    none fits: the smallest, {name: fsdp, activation_checkpointing: true, cpu_offload: true}"
            in text
        )
        assert "Use more processes, smaller batches with more accumulation, or precision='bf16'" in text
        half = new_trainer(precision="bf16").plan(task, [torch.ones(2, 8)], world_size=2, device_memory="1GB")
        assert str(half).endswith(" Use more processes or smaller batches with more accumulation")

    def test_the_report(self) -> None:
        lines = str(memory_of(Perceptron("adamw"), world_size=1, device_memory="1GB")).splitlines()
        assert lines[0] == "Memory      of 1 process, with 64 samples in a batch; a device has 1.00 GB"
        assert lines[1].split() == ["strategy", "weights", "gradients", "optimizer", "activations", "peak"]
        # (65 + 4 * 513) * 512 + 513 * 10 weights of 4 bytes.
        assert lines[2].split()[:8] == ["*", "single", "4.36", "MB", "4.36", "MB", "8.71", "MB"]
        assert lines[2].endswith("fits, as configured")
        assert lines[3] == "Strategy    single is the simplest that fits"

    def test_a_step_that_depends_on_values(self) -> None:
        memory = memory_of(Deciding("sgd"), world_size=2, device_memory="1GB")
        assert all(row.footprint.peak is None and row.footprint.activations is None for row in memory.rows)
        (note,) = memory.notes
        assert "training_step can't run on tensors without data, on whose values it may not depend" in note
        assert memory.recommended is None
        assert "> 8.71 MB" in str(memory)

    def test_a_number_may_be_read(self) -> None:
        reading, plain = (memory_of(kind("sgd"), world_size=1).rows[0] for kind in (Reading, Perceptron))
        assert reading.footprint == plain.footprint

    def test_an_iterator_is_not_read(self) -> None:
        batches = iter([(torch.ones(2, 64), torch.zeros(2, dtype=torch.long))] * 3)
        memory = memory_of(Perceptron("sgd"), batches, world_size=2)
        assert memory.notes == [
            "activations are not known: the training data is an iterator, and a plan takes nothing."
        ]
        assert len(list(batches)) == 3

    def test_manual_mode(self) -> None:
        memory = memory_of(Manual("sgd"), world_size=2)
        assert memory.notes == ["activations are not known: a task in manual mode can't be traced."]

    def test_strategies_that_cant_be_used(self) -> None:
        memory = memory_of(Perceptron("adafactor"), world_size=2, device_memory="1GB")
        refused = {row.spec["name"]: row for row in memory.rows if row.footprint is None}
        assert refused.keys() == {"fsdp", "deepspeed"}
        assert memory.recommended == {"name": "ddp"}
        assert "can't be used: Adafactor computes with whole weights, and torch can't step it on parts" in str(memory)
        assert memory_of(Manual("sgd"), world_size=2).rows[1].refusal.startswith("strategy='fsdp' can't serve manual")

    def test_a_refused_strategy_of_ones_own(self) -> None:
        trainer = new_trainer(strategy={"name": "fsdp", "wrap": "Linear"})
        memory = trainer.plan(Perceptron("adafactor"), loader("mlp"), world_size=2, device_memory="1MB").memory
        assert memory is not None
        (row,) = (row for row in memory.rows if row.is_own)
        assert row.footprint is None
        assert "Strategy    none fits: the smallest, ddp, lacks " in str(memory)

    def test_a_recommendation_has_ones_own_options(self) -> None:
        def is_wide(module: nn.Module) -> bool:
            return isinstance(module, nn.Sequential)

        trainer = new_trainer(strategy={"name": "fsdp", "wrap": is_wide, "ignored_modules": ["net.2"]})
        memory = trainer.plan(Perceptron("sgd"), loader("mlp"), world_size=64, device_memory="1TB").memory
        assert memory is not None
        row = memory.rows[1]
        assert row.spec["wrap"] is is_wide
        assert "is_wide, ignored_modules: [net.2], reshard_after_forward: false}" in str(memory)

    def test_a_model_that_needs_its_memory(self) -> None:
        memory = memory_of(Stubborn(8), [torch.ones(2, 8)], world_size=2)
        (note,) = memory.notes
        assert note.startswith("the model was built with its memory: configure_model can't run on the meta device (")
        assert memory.rows[0].footprint.peak is not None

    def test_nothing_is_changed(self) -> None:
        task, generator = Perceptron("adamw"), torch.Generator().manual_seed(3)
        data = DataLoader(loader("mlp").dataset, batch_size=64, shuffle=True, generator=generator)
        before = {name: (id(value), value.clone()) for name, value in task.named_parameters()}
        states = torch.get_rng_state(), generator.get_state()
        task.eval()
        first = memory_of(task, data, world_size=4)
        assert not task.training
        assert all(id(value) == before[name][0] for name, value in task.named_parameters())
        assert all(torch.equal(value, before[name][1]) for name, value in task.named_parameters())
        assert all(value.grad is None and not value._backward_hooks for value in task.parameters())
        assert not any(module._forward_hooks or "forward" in vars(module) for module in task.modules())
        assert torch.equal(states[0], torch.get_rng_state())
        assert torch.equal(states[1], generator.get_state())
        assert "log" not in vars(task)
        assert str(memory_of(task, data, world_size=4)) == str(first)

    def test_a_dataset_that_may_draw(self) -> None:
        class Rows(Dataset[Any]):
            def __getitem__(self, index: int) -> Any:
                return torch.rand(64), index % 10

            def __len__(self) -> int:
                return 1024

        drawn = memory_of(Perceptron("sgd"), DataLoader(Rows(), batch_size=64), world_size=4)
        assert str(drawn) == str(memory_of(Perceptron("sgd"), loader("mlp"), world_size=4))

    def test_batches_of_all_processes_together(self) -> None:
        from loopwright.data.configuration import DataLoaderConfiguration

        trainer = new_trainer(dataloader_config=DataLoaderConfiguration(split_batches=True))
        memory = trainer.plan(Perceptron("sgd"), loader("mlp"), world_size=4).memory
        assert memory is not None
        assert memory.batch_samples == 16

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"world_size": 0}, r"world_size=0\. Expected an integer >= 1"),
            ({"world_size": "8"}, r"world_size='8'\. Expected an integer >= 1"),
            ({"device_memory": "80"}, r"device_memory='80' has no unit\. Expected such as '80GB'"),
            ({"device_memory": "x"}, r"device_memory='x'\. Expected a number of bytes, or text such as '80GB'"),
            ({"device_memory": 0}, r"device_memory=0 is nothing"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            memory_of(Perceptron("sgd"), **options)

    def test_lazy_layers(self) -> None:
        class Lazy(Late):
            def configure_model(self) -> None:
                self.net = nn.LazyLinear(3)

        message = r"parameter net\.weight of Lazy has no shape yet, as its layer is lazy"
        with pytest.raises(ConfigError, match=message):
            memory_of(Lazy(), [torch.ones(2, 8)], world_size=2)

    def test_a_task_without_optimizers(self) -> None:
        class Bare(Task):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return None

        with pytest.raises(TaskError, match="Bare has no configure_optimizers"):
            memory_of(Bare(), world_size=2)

    def test_a_mesh_for_other_processes(self) -> None:
        trainer = new_trainer(strategy={"name": "fsdp", "mesh": [2, 2]}, devices=4)
        with pytest.raises(ConfigError, match="needs 4 processes, and there are 6"):
            trainer.plan(Perceptron("sgd"), loader("mlp"), world_size=6)
