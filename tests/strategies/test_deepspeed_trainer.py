"""DeepSpeed under the Trainer: two processes against one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.callbacks.callback import Callback, SkipBatch
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from .sharded import Words, close, fit, loader, make, state_of

Run = Callable[..., list[Any]]


def stage(number: int, **options: Any) -> dict[str, Any]:
    """The strategy, with weights in parts at stage 3 although they are small."""
    return {"name": "deepspeed", "zero_stage": number, "stage3_param_persistence_threshold": 50, **options}


def index() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Records(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, trainer: Trainer, task: Any, metrics: dict[str, float], step: int) -> None:
        if "loss" in metrics:
            self.losses.append(metrics["loss"])

    def on_before_step(self, trainer: Trainer, task: Any, optimizer: Any) -> None:
        norms = [norm for norm in trainer.gradient_norms(task.parameters()) if norm is not None]
        self.norms.append(float(torch.linalg.vector_norm(torch.stack(norms))))


class Scheduled(Words):
    """With a schedule of torch's on the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _train(batch_size: int, options: dict[str, Any]) -> Any:
    # Process 0's weights count: the others begin with other numbers.
    torch.manual_seed(1 + index())
    task, records = Scheduled(), Records()
    trainer = fit(task, loader(48, batch_size), loader(9, 3), callbacks=[records], **options)
    again = trainer.validate(task, loader(9, 3))
    assert again["val/loss"] == pytest.approx(trainer.metrics["val/loss"], abs=1e-6)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return records.losses, dict(trainer.metrics), state_of(trainer), rates, records.norms


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_numbers_of_one_process(two_processes: Run, number: int) -> None:
    # Three validation batches for two processes: one of them has none at last.
    options = {"max_epochs": 2, "accumulate": 2, "clip_norm": 1e9, "val_every": 3}
    losses, metrics, weights, rates, norms = _train(8, options)
    found = two_processes(_train, 4, options | {"strategy": stage(number)})
    assert len(losses) == 6
    assert rates == pytest.approx([1e-2 * 0.8**6, 3e-2 * 0.8**6])
    for own_losses, own_metrics, _, own_rates, own_norms in found:
        assert own_losses == pytest.approx(losses, abs=1e-5)
        assert own_metrics == pytest.approx(metrics, abs=1e-5)
        assert own_rates == rates
        assert own_norms == pytest.approx(norms, abs=1e-5)
    close(found[0][2], weights)
    assert found[1][2] == {}


def _train_clipped(batch_size: int, strategies: list[Any]) -> Any:
    found = []
    for strategy in strategies:
        records = Records()
        trainer = fit(
            make(), loader(48, batch_size), None, callbacks=[records], clip_norm=0.3, accumulate=2, strategy=strategy
        )
        found.append((records.losses, state_of(trainer)))
    return found


CLIPPED = [
    stage(1, overlap_comm=True), stage(2, reduce_bucket_size=300), stage(3),
    stage(3, zero_hpz_partition_size=2), stage(2, offload_optimizer="cpu"),
]  # fmt: skip


def test_clipping_is_of_the_whole_norm(two_processes: Run) -> None:
    (losses, weights), (unclipped, _) = _train_clipped(8, ["single"])[0], _train_unclipped()
    assert losses != unclipped
    for own_losses, own_weights in two_processes(_train_clipped, 4, CLIPPED)[0]:
        assert own_losses == pytest.approx(losses, abs=1e-5)
        close(own_weights, weights)


def _train_unclipped() -> Any:
    records = Records()
    return records.losses, fit(make(), loader(48, 8), None, callbacks=[records], accumulate=2)


def _train_twice(batch_size: int, strategy: Any) -> Any:
    task = make()
    for _ in range(2):
        trainer = fit(task, loader(16, batch_size), None, strategy=strategy)
    with trainer.whole_shapes():
        num_parameters = sum(parameter.numel() for parameter in task.parameters())
    return state_of(trainer), len(trainer.optimizers[0].param_groups[0]["params"]), num_parameters


def test_a_second_fit_of_the_same_task(two_processes: Run) -> None:
    # The optimizer's groups go by shapes, which a parameter in parts does not have.
    weights, *sizes = _train_twice(8, "single")
    for strategy in (stage(1), stage(3)):
        (found, *own_sizes), _ = two_processes(_train_twice, 4, strategy)
        assert own_sizes == sizes
        close(found, weights)


@pytest.mark.slow  # this process imports DeepSpeed for it
def test_one_process_alone() -> None:
    wanted = _train_twice(8, "single")[0]
    try:
        for number in (2, 3):
            close(_train_twice(8, stage(number))[0], wanted)
        assert dist.get_world_size() == 1  # DeepSpeed needs a group
    finally:
        dist.destroy_process_group()


class Late(Task):
    """A task that builds its model in `configure_model`."""

    def configure_model(self) -> None:
        torch.manual_seed(1 + index())
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.num_whole = sum(p.numel() for p in self.net.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[:, :4]), batch[:, 4:])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _numbers(batch_size: int) -> Any:
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


def _train_late(batch_size: int, strategy: Any) -> Any:
    task = Late()
    return state_of(fit(task, _numbers(batch_size), None, strategy=strategy)), task.num_whole


def test_a_model_that_is_built_in_parts(two_processes: Run) -> None:
    weights, size = _train_late(8, "single")
    (found, part), _ = two_processes(_train_late, 4, stage(3, zero3_init=True))
    assert part < size
    close(found, weights)


def _train_short(batch_size: int, strategies: list[Any]) -> Any:
    return [state_of(fit(Late(), _numbers(batch_size), None, strategy=each, accumulate=2)) for each in strategies]


def test_a_last_window_that_is_shorter(two_processes: Run) -> None:
    wanted = _train_short(8, ["single"])[0]
    for found in two_processes(_train_short, 4, [stage(0), stage(1)])[0]:
        close(found, wanted)


class Experts(nn.Module):
    """Each batch goes to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.choices[int(x[0, 0] > 0)](x)
        return chosen


class Mixture(Late):
    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 2))

    def configure_optimizers(self) -> Any:
        # Without a memory, so that an expert which nobody used stays the same, with no gradient or with one of 0.
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _train_mixture(strategies: list[Any]) -> Any:
    return [state_of(fit(Mixture(), _numbers(4), None, strategy=strategy)) for strategy in strategies]


def test_experts_that_processes_choose_differently(two_processes: Run) -> None:
    ddp = {"name": "ddp", "find_unused_parameters": True}
    (wanted, found), _ = two_processes(_train_mixture, [ddp, stage(3, moe_leaf_modules=["Experts"])])
    close(found, wanted)


class Gaps(Words):
    """Process 1 has no loss in some micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return None if index() == 1 and batch_idx in (2, 3, 5) else outputs


def _train_gaps(strategies: list[Any]) -> Any:
    found = []
    for strategy in strategies:
        torch.manual_seed(1)
        found.append(state_of(fit(Gaps(2), loader(48, 4), None, strategy=strategy, accumulate=2)))
    return found


def test_batches_without_a_loss(two_processes: Run) -> None:
    small = stage(2, reduce_bucket_size=200)
    (wanted, *found), _ = two_processes(_train_gaps, ["ddp", stage(0), stage(1), stage(2), small])
    for weights in found:
        close(weights, wanted)


@pytest.mark.slow  # the workers are started anew after it
def test_a_batch_without_a_loss_at_stage_3_ends_all(two_processes: Run) -> None:
    # Process 0 would wait for process 1 in the next gathering of weights.
    with pytest.raises(AssertionError, match=r"PeerFailedError: process 1 failed first.*this process has no loss in a"):
        two_processes(_train_gaps, [stage(3)])


class Drops(Callback):
    """Leaves out the second step, when its gradients are clipped already."""

    num_steps = 0

    def on_before_step(self, trainer: Trainer, task: Any, optimizer: Any) -> None:
        self.num_steps += 1
        if self.num_steps == 2:
            raise SkipBatch


def _train_dropped(batch_size: int, strategies: list[Any]) -> Any:
    options: dict[str, Any] = {"clip_norm": 0.3, "accumulate": 2}
    return [
        state_of(fit(make(), loader(64, batch_size), callbacks=[Drops()], strategy=s, **options)) for s in strategies
    ]


def test_a_step_that_is_left_out(two_processes: Run) -> None:
    wanted = _train_dropped(8, ["single"])[0]
    strategies = [stage(0), stage(1), stage(2, offload_optimizer="cpu"), stage(3)]
    for found in two_processes(_train_dropped, 4, strategies)[0]:
        close(found, wanted)


class Manual(Words):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Grows(Callback):
    def on_step(self, trainer: Trainer, task: Any, outcome: Any) -> None:
        late = nn.Parameter(torch.zeros(2))
        task.late = late
        trainer.optimizers[0].add_param_group({"params": [late]})


class Freezes(Callback):
    def on_step(self, trainer: Trainer, task: Any, outcome: Any) -> None:
        task.embedding.weight.requires_grad_(False)


def _refuse() -> None:
    options: dict[str, Any] = {"strategy": stage(1)}
    with pytest.raises(ConfigError, match="Manual is trained by manual optimization"):
        fit(Manual(), loader(8, 4), None, **options)
    with pytest.raises(ConfigError, match=r"clip_value=0\.1: DeepSpeed has no access"):
        fit(make(), loader(8, 4), None, clip_value=0.1, **options)
    with pytest.raises(ConfigError, match=r"clipped at 0.1 .clip_norm.*gradient_clipping=0.5"):
        fit(make(), loader(8, 4), None, clip_norm=0.1, strategy=stage(1, config={"gradient_clipping": 0.5}))
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=3, and the run accumulates 2"):
        fit(make(), loader(16, 4), None, accumulate=2, strategy=stage(1, config={"gradient_accumulation_steps": 3}))
    with pytest.raises(ConfigError, match="DeepSpeed's config has an optimizer, and AdamW was given"):
        fit(make(), loader(8, 4), None, strategy=stage(1, config={"optimizer": {"type": "SGD"}}))
    with pytest.raises(ConfigError, match=r"moe_leaf_modules has 'Expert', and Words no such"):
        fit(make(), loader(8, 4), None, strategy=stage(3, moe_leaf_modules=["Expert"]))
    with pytest.raises(ConfigError, match="AdamW had parameters frozen or unfrozen after it was set up"):
        fit(make(), loader(16, 4), None, callbacks=[Freezes()], **options)
    with pytest.raises(ConfigError, match="AdamW got parameters after it was set up"):
        fit(make(), loader(16, 4), None, callbacks=[Grows()], **options)


def test_what_it_cannot_serve(two_processes: Run) -> None:
    two_processes(_refuse)
