"""Callbacks under DeepSpeed: two processes against one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.ema import EMA
from loopwright.callbacks.gradients import GradientMonitor
from loopwright.callbacks.summary import summarize
from loopwright.callbacks.swa import SWA
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.sharded import is_sharded, local_part, whole
from loopwright.checkpoint.weights import load_weights

from .sharded import close, fit, loader, make, state_of
from .test_deepspeed_trainer import stage
from .test_fsdp_callbacks import Records, Watch

Run = Callable[..., list[Any]]


def _average(batch_size: int, name: str, strategies: list[Any], **options: Any) -> Any:
    return [_average_once(batch_size, f"{name}{i}", strategy, options) for i, strategy in enumerate(strategies)]


def _average_once(batch_size: int, name: str, strategy: Any, options: dict[str, Any]) -> Any:
    ema, watch, task = EMA(0.5, start=1), Watch(), make(1)
    saver = ModelCheckpoint("never", directory=name, save_weights_only=True)
    settings: dict[str, Any] = {"max_epochs": 2, "sanity_val_batches": 0, "callbacks": [ema, watch, saver]}
    trainer = fit(task, loader(48, batch_size), loader(9, 3), strategy=strategy, **settings, **options)
    sizes = [local_part(average).numel() for average in ema.averages.values() if is_sharded(average)]
    with ema.applied_to(task):
        inside = state_of(trainer)
        tested = trainer.validate(task, loader(9, 3))
    after = trainer.validate(task, loader(9, 3))
    averages = {name: whole(average).clone() for name, average in ema.averages.items()}
    return averages, dict(trainer.metrics) | tested, after, state_of(trainer), inside, sum(sizes)


STAGES = [stage(1), stage(2, offload_optimizer="cpu"), stage(3), stage(3, zero_hpz_partition_size=2)]


def test_averages_are_kept_in_parts(two_processes: Run, tmp_path: Path) -> None:
    (wanted,) = _average(8, "one", ["single"])
    num_weights = sum(parameter.numel() for parameter in make(1).parameters())
    found, others = two_processes(_average, 4, "two", STAGES)
    for index, (own, other) in enumerate(zip(found, others, strict=True)):
        for mine, theirs in zip((own[0], own[3], own[4]), (wanted[0], wanted[3], wanted[4]), strict=True):
            close(mine, theirs)
        close(other[0], wanted[0])
        assert own[5] + other[5] == num_weights
        assert max(own[5], other[5]) < 0.6 * num_weights
        assert own[1] == pytest.approx(wanted[1], abs=1e-5)
        assert own[2] == pytest.approx(wanted[2], abs=1e-5)
        saved = make(9)
        load_weights(saved, tmp_path / f"two{index}" / "last.safetensors")
        close(dict(saved.named_parameters()), wanted[0])


def _average_in_half(strategies: list[Any]) -> Any:
    return [_average_once(4, f"half{i}", each, {"precision": "bf16"}) for i, each in enumerate(strategies)]


def test_averages_of_weights_in_16_bits_have_32(two_processes: Run) -> None:
    for averages, _, _, weights, inside, _ in two_processes(_average_in_half, [stage(1), stage(3)])[0]:
        for name, average in averages.items():
            assert torch.equal(inside[name], average)
            assert average.dtype == torch.float32
            assert not torch.equal(average, average.bfloat16().float())
            assert not torch.equal(average, weights[name])


def _mean(batch_size: int, strategies: list[Any]) -> Any:
    found = []
    for strategy in strategies:
        task, swa = make(1), SWA(0.3, every="1 step", lr=0.05, anneal=1)
        trainer = fit(task, loader(48, batch_size), None, callbacks=[swa], strategy=strategy)
        found.append((state_of(trainer), trainer.validate(task, loader(9, 3))))
    return found


def test_the_mean_stays(two_processes: Run) -> None:
    ((weights, metrics),) = _mean(8, ["single"])
    for found, own in two_processes(_mean, 4, [stage(2), stage(3)])[0]:
        close(found, weights)
        assert own == pytest.approx(metrics, abs=1e-5)


def _best(folder: str, strategies: list[Any]) -> Any:
    found = []
    for index, strategy in enumerate(strategies):
        saver = ModelCheckpoint("1 step", monitor="val/loss", directory=f"{folder}/{index}", restore_best=True)
        settings: dict[str, Any] = {"val_every": "1 step", "precision": "bf16", "callbacks": [saver]}
        trainer = fit(make(1, kind="sgd"), loader(24, 4), loader(8, 2), strategy=strategy, **settings)
        found.append((str(saver.best_path), state_of(trainer)))
    return found


def test_the_best_weights_are_restored(two_processes: Run, tmp_path: Path) -> None:
    for path, weights in two_processes(_best, str(tmp_path), [stage(1), stage(3)])[0]:
        close(weights, dict(open_checkpoint(path).weights().state_dict()), 0.0)


def _monitored(batch_size: int, strategies: list[Any], norm_type: float) -> Any:
    found = []
    for strategy in strategies:
        task, records = make(1), Records()
        monitor = GradientMonitor(1, norm_type, per_module=True, per_parameter=True)
        trainer = fit(task, loader(48, batch_size), strategy=strategy, accumulate=2, callbacks=[monitor, records])
        with trainer.whole_shapes():
            found.append((records.found, summarize(task, 2)))
    return found


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_and_summary(two_processes: Run, norm_type: float) -> None:
    ((wanted, table),) = _monitored(8, ["single"], norm_type)
    assert len(wanted) == 3
    for process in two_processes(_monitored, 4, [stage(0), *STAGES[:3]], norm_type):
        for found, shown in process:
            assert shown == table
            for mine, alone in zip(found, wanted, strict=True):
                assert mine == pytest.approx(alone, abs=1e-5)
