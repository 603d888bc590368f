"""FSDP under the Trainer: two processes against one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from loopwright.callbacks.callback import Callback, EndEpoch, SkipBatch
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.preemption import Preemption

from .sharded import Records, Words, close, fit, loader, make, state_of, words

Run = Callable[..., list[Any]]


def _train(batch_size: int, options: dict[str, Any], kind: str = "adamw", num_layers: int = 3) -> Any:
    # Process 0's weights count: the others begin with other numbers.
    index = dist.get_rank() if dist.is_initialized() else 0
    task, records = make(1 + index, kind=kind, num_layers=num_layers), Records()
    trainer = fit(task, loader(48, batch_size), loader(9, 3), callbacks=[records], **options)
    shards = {name: tuple(p.to_local().shape) for name, p in task.named_parameters() if hasattr(p, "to_local")}
    again = trainer.validate(task, loader(9, 3))
    assert again["val/loss"] == pytest.approx(trainer.metrics["val/loss"], abs=1e-6)
    return records.losses, dict(trainer.metrics), state_of(trainer), shards


def test_numbers_of_one_process(two_processes: Run) -> None:
    # Three validation batches for two processes: one of them has none at last.
    options = {"max_epochs": 2, "accumulate": 2, "clip_norm": 0.5, "clip_value": 0.05, "val_every": 3}
    losses, metrics, weights, _ = _train(8, options)
    found = two_processes(_train, 4, options | {"strategy": "fsdp"})
    assert len(losses) == 6
    for own_losses, own_metrics, *_ in found:
        assert own_losses == pytest.approx(losses, abs=1e-5)
        assert own_metrics == pytest.approx(metrics, abs=1e-5)
    close(found[0][2], weights)
    assert found[1][2] == {}
    assert found[0][3]["embedding.weight"] == (6, 8)
    assert found[1][3]["embedding.weight"] == (5, 8)
    assert found[0][3]["layers.0.inner.weight"] == (12, 8)


OPTIONS: list[dict[str, Any]] = [
    {"wrap": "none", "reshard_after_forward": False},
    {"wrap": ["Layer", "LayerNorm"], "activation_checkpointing": True, "prefetch": 1},
    {"wrap": 400, "cpu_offload": True, "mesh": [2, 1], "find_unused_parameters": True},
    {"mesh": [1, 2], "ignored_modules": [r"layers\.1", "head"]},
]


def _train_each(cases: list[dict[str, Any]]) -> list[Any]:
    return [_train(6, {"strategy": {"name": "fsdp"} | options}, "sgd", 2)[2] for options in cases]


def test_options_change_no_number(two_processes: Run) -> None:
    weights = _train(12, {}, "sgd", 2)[2]
    for found in two_processes(_train_each, OPTIONS)[0]:
        close(found, weights)


class Gaps(Words):
    """Batches without a loss, in one process: for each micro-batch how it is left out."""

    def __init__(self, ways: str) -> None:
        super().__init__(2, "sgd")
        self.ways = ways

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        way = self.ways[batch_idx]
        if way == "e":  # early: nothing was called
            return None
        outputs = self.loss(batch)
        if way == "l":  # late
            return None
        if way == "n":  # a value that is not finite, on the way
            self.embedding(batch[0]).mul(float("nan")).sum()
            return None
        if way == "s":
            raise SkipBatch
        return outputs


class LeavesOut(Callback):
    """Leaves batches out before their step, and the epoch in the middle of a window."""

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if task.ways[batch_idx] == "b":
            raise SkipBatch
        if task.ways[batch_idx] == "x":
            raise EndEpoch

    def on_backward(self, trainer: Any, task: Any, loss: Any) -> None:
        if task.ways[trainer.state.batch] == "y":
            raise EndEpoch


def _gaps(ways: list[str], batch_size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    index = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1)
    trainer = fit(Gaps(ways[index]), loader(48, batch_size), callbacks=[LeavesOut()], **options)
    return state_of(trainer)


def test_batches_without_a_loss(two_processes: Run) -> None:
    gaps = "..lesnb."
    # One process has the batches of both in turns.
    wanted = _gaps(["".join(f".{way if way == '.' else 'e'}" for way in gaps)], 3, {"accumulate": 4})
    for strategy in ("ddp", "fsdp"):
        close(two_processes(_gaps, ["........", gaps], 3, {"strategy": strategy, "accumulate": 2})[0], wanted)


@pytest.mark.parametrize("way", "xy")
def test_leaving_an_epoch_in_a_window(two_processes: Run, way: str) -> None:
    ways = ["........", f"......{way}."]
    wanted, found = (
        two_processes(_gaps, ways, 3, {"strategy": strategy, "max_epochs": 2, "accumulate": 2})[0]
        for strategy in ("ddp", "fsdp")
    )
    close(found, wanted)


def _mixed(precision: str) -> tuple[list[float], int, str]:
    task, records = make(1), Records()
    trainer = fit(task, loader(48, 6), precision=precision, strategy="fsdp", callbacks=[records])
    return records.losses, trainer.state.skipped_steps, str(task.head.weight.dtype)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(two_processes: Run, precision: str) -> None:
    found, other = two_processes(_mixed, precision)
    assert found == other
    mixed, num_skipped, weights = found
    # The scale of fp16 begins too high: the first step is dropped on both processes.
    assert num_skipped == (1 if precision == "fp16" else 0)
    loss, count = make(1).loss([words(48).tensors[0][12 * num_skipped : 12 * num_skipped + 12]])
    assert mixed[0] == pytest.approx((loss / count).item(), abs=0.05)
    assert mixed[0] != pytest.approx((loss / count).item(), abs=1e-6)
    assert weights == "torch.float32"


def _legs(path: str, options: dict[str, Any], batch_size: int, begins: bool) -> dict[str, Tensor]:
    task, settings = make(1), {"max_epochs": 2, "accumulate": 2, "clip_norm": 0.5} | options
    if begins:
        trainer = fit(task, loader(48, batch_size), callbacks=[Saves(path, 3)], **settings)
    else:
        trainer = fit(task, loader(48, batch_size), resume_from=path, **settings)
    return state_of(trainer)


class Saves(Callback):
    """Saves at a step, and stops there."""

    def __init__(self, path: str, at: int) -> None:
        self.path, self.at = path, at

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == self.at:
            trainer.save_state(self.path)
            trainer.stop("saved")


@pytest.mark.filterwarnings("ignore:the resumed run can't be equal bit for bit")
def test_a_run_goes_on_under_another_strategy(two_processes: Run, tmp_path: Path) -> None:
    wanted = _whole()
    _legs("one", {}, 8, begins=True)
    close(two_processes(_quiet_legs, str(tmp_path / "one"), {"strategy": "fsdp"}, 4, False)[0], wanted)
    two_processes(_quiet_legs, str(tmp_path / "parts"), {"strategy": "fsdp"}, 4, True)
    close(_legs("parts", {}, 8, begins=False), wanted)
    close(two_processes(_quiet_legs, str(tmp_path / "parts"), {"strategy": "fsdp"}, 4, False)[0], wanted)
    close(two_processes(_quiet_legs, str(tmp_path / "parts"), {"strategy": "ddp"}, 4, False)[0], wanted)


def _quiet_legs(*args: Any) -> dict[str, Tensor]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _legs(*args)


def _whole() -> dict[str, Tensor]:
    return state_of(fit(make(1), loader(48, 8), max_epochs=2, accumulate=2, clip_norm=0.5))


class Signalled(Callback):
    """Process 1 gets a signal at step 2."""

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 2 and not trainer.process.is_main_process:
            os.kill(os.getpid(), signal.SIGUSR1)


def _preempted(grace: str) -> tuple[Any, list[str]]:
    saver = ModelCheckpoint("never", directory="out")
    try:
        fit(
            make(),
            loader(48, 4),
            strategy="fsdp",
            callbacks=[saver, Signalled(), Preemption(grace=grace, requeue=False)],
        )
    except SystemExit as end:
        dist.barrier()
        return end.code, sorted(path.name for path in Path("out").iterdir() if not path.name.startswith("."))
    return None, []


@pytest.mark.parametrize(("grace", "kept"), [("60 s", "step=000002"), ("0.001 s", "step=000002-weights.safetensors")])
def test_a_signal_before_any_save_keeps_nobody_waiting(two_processes: Run, grace: str, kept: str) -> None:
    assert two_processes(_preempted, grace) == [(128 + signal.SIGUSR1, [kept])] * 2
