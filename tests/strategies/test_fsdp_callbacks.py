"""Callbacks under FSDP: two processes against one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.ema import EMA
from loopwright.callbacks.gradients import GradientMonitor
from loopwright.callbacks.learning_rate import LearningRateMonitor
from loopwright.callbacks.nan_guard import NaNGuard
from loopwright.callbacks.summary import summarize
from loopwright.callbacks.swa import SWA
from loopwright.callbacks.throughput import ThroughputMonitor
from loopwright.checkpoint.sharded import is_sharded, local_part, whole
from loopwright.checkpoint.weights import load_weights

from .sharded import Words, fit, loader, make, state_of

Run = Callable[..., list[Any]]


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


class Watch(Callback):
    """Compares the weights before a validation with those after it, and keeps what was validated."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.inside: list[bool] = []
        self.is_same: list[bool] = []

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        self.before = [local_part(p.detach()).clone() for p in task.parameters()]

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        self.inside.append(self._is_as_before(task))

    def on_epoch_end(self, trainer: Any, task: Any, metrics: Any) -> None:
        self.is_same.append(self._is_as_before(task))

    def _is_as_before(self, task: Any) -> bool:
        return all(torch.equal(local_part(p.detach()), b) for p, b in zip(task.parameters(), self.before, strict=True))


def _average(batch_size: int, name: str, options: dict[str, Any]) -> Any:
    ema, watch = EMA(0.5, start=1), Watch()
    saver = ModelCheckpoint("never", directory=name, save_weights_only=True)
    settings: dict[str, Any] = {"max_epochs": 2, "sanity_val_batches": 0, "callbacks": [ema, watch, saver]} | options
    task = make(1)
    trainer = fit(task, loader(48, batch_size), loader(9, 3), **settings)
    parts = [is_sharded(average) for average in ema.averages.values()]
    with ema.applied_to(task):
        inside = state_of(trainer)
    averages = {name: whole(average) for name, average in ema.averages.items()}
    return averages, dict(trainer.metrics), state_of(trainer), inside, (watch.inside, watch.is_same), parts


def test_averages(two_processes: Run, tmp_path: Path) -> None:
    averages, metrics, weights, inside, watched, _ = _average(8, "one", {})
    found, other = two_processes(_average, 4, "two", {"strategy": "fsdp"})
    assert all(found[5])
    close(found[0], averages)
    close(other[0], averages)
    close(found[2], weights)
    close(found[3], inside)
    assert found[4] == other[4] == watched == ([False, False], [True, True])
    assert found[1] == pytest.approx(metrics, abs=1e-5)
    assert other[1] == pytest.approx(metrics, abs=1e-5)
    saved = make(9)
    load_weights(saved, tmp_path / "two" / "last.safetensors")
    close(dict(saved.named_parameters()), averages)


def test_averages_with_units_that_stay_whole_after_their_forward(two_processes: Run) -> None:
    averages, metrics, _, inside, watched, _ = _average(8, "one", {})
    for found in two_processes(_average, 4, "two", {"strategy": {"name": "fsdp", "reshard_after_forward": False}}):
        close(found[0], averages)
        assert found[1] == pytest.approx(metrics, abs=1e-5)
        close(found[3] or inside, inside)
        assert found[4] == watched


class Records(Callback):
    """All records but rates."""

    after = (GradientMonitor, LearningRateMonitor)

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_log(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        self.found.append({name: value for name, value in metrics.items() if "throughput" not in name})


def _monitored(batch_size: int, norm_type: float, options: dict[str, Any]) -> Any:
    records, task = Records(), make(1)
    monitors = [GradientMonitor(1, norm_type, per_module=True, per_parameter=True), LearningRateMonitor()]
    fit(task, loader(48, batch_size), callbacks=[*monitors, ThroughputMonitor(), records], **options)
    return records.found, summarize(task, 2)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_rates_and_summary(two_processes: Run, norm_type: float) -> None:
    wanted, table = _monitored(8, norm_type, {"accumulate": 2})
    assert len(wanted) == 3
    for way in ({"ignored_modules": [r"layers\.1"]}, {"mesh": [2, 1]}, {"mesh": [1, 2]}):
        options = {"accumulate": 2, "strategy": {"name": "fsdp"} | way}
        for found, shown in two_processes(_monitored, 4, norm_type, options):
            assert shown == table
            for mine, alone in zip(found, wanted, strict=True):
                assert mine == pytest.approx(alone, abs=1e-5)
                assert "grad_norm/layers.1.inner.weight" in mine


class Normed(Words):
    """With batch norm, and batches that one process leaves out before the model is called."""

    def __init__(self) -> None:
        super().__init__(2, "sgd")
        self.norm = torch.nn.BatchNorm1d(8)
        self.gap = -1

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(words))
        logits: Tensor = self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2)) * self.scale
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == self.gap else super().training_step(batch, batch_idx)


def _swa(strategy: str, gap: int) -> Any:
    index = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1)
    task, swa, watch = Normed(), SWA(0.3, every="1 step", lr=0.05, anneal=1), Watch()
    task.gap = gap if index else -1
    trainer = fit(task, loader(48, 4), loader(9, 3), callbacks=[swa, watch], strategy=strategy, max_epochs=2)
    again = trainer.validate(task, loader(9, 3))
    return (
        state_of(trainer),
        {name: whole(a) for name, a in swa.averages.items()},
        dict(trainer.metrics),
        again,
        watch.inside,
    )


@pytest.mark.parametrize("gap", [-1, 3])
def test_the_mean_and_its_statistics(two_processes: Run, gap: int) -> None:
    # Batch norm sees each process's own batches, so that the copies of DDP are what to compare with.
    wanted = two_processes(_swa, "ddp", gap)[0]
    found, second = two_processes(_swa, "fsdp", gap)
    close(found[0], wanted[0])
    assert found[0]["norm.num_batches_tracked"] == (12 if gap < 0 else 11)
    close(found[1], wanted[1])
    for mine, theirs in ((found, wanted), (second, wanted)):
        assert mine[2] == pytest.approx(theirs[2], abs=1e-5)
        assert mine[3] == pytest.approx(theirs[3], abs=1e-5)
        assert mine[4] == theirs[4]


class Poisoned(Words):
    """Values that are not finite: in a loss of one process, or in a part of a gradient that one process has."""

    def __init__(self, way: str) -> None:
        super().__init__(2, "sgd")
        self.way = way
        self.hooks: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = self.loss(batch)
        if batch_idx == 3 and self.way == "loss" and dist.get_rank() == 1:
            loss = loss * float("nan")
        if batch_idx == 3 and self.way == "gradient":
            # Rows 6 and up are in the part of process 1.
            self.hooks.append(self.embedding.weight.register_hook(_spoil))
        while batch_idx == 4 and self.hooks:
            self.hooks.pop().remove()
        return loss, count


def _spoil(gradient: Tensor) -> Tensor:
    spoiled = gradient.clone()
    spoiled[10] = float("inf")
    return spoiled


def _guarded(way: str, policy: Any, strategy: str) -> Any:
    torch.manual_seed(1)
    task, guard = Poisoned(way), NaNGuard(policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(task, loader(48, 3), strategy=strategy, accumulate=2, callbacks=[GradientMonitor(1), guard])
    texts = [str(each.message) for each in caught if "NaNGuard" in str(each.message)]
    return state_of(trainer), guard.nonfinite_steps, trainer.stop_reason, texts


@pytest.mark.parametrize("way", ["loss", "gradient"])
def test_steps_that_are_not_finite(two_processes: Run, way: str) -> None:
    what = "the loss is nan" if way == "loss" else "gradients are not finite"
    for policy in ("skip", "stop"):
        wanted, _ = two_processes(_guarded, way, policy, "ddp")
        found, other = two_processes(_guarded, way, policy, "fsdp")
        close(found[0], wanted[0])
        assert found[1] == other[1] == wanted[1] == 1
        reason = other[2] if policy == "stop" else other[3][0]
        assert what in reason
        assert "The first bad module is not looked for, since each process has a part of the model" in reason


class Spoils(Callback):
    """Makes a weight infinite, in the part of process 1, behind one step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == self.at:
            weight = local_part(task.embedding.weight.detach())
            if trainer.process.process_index == 1:
                weight[-1, -1] = float("inf")


def _saved(weights_only: bool) -> Any:
    saver = ModelCheckpoint("1 step", directory="out", save_weights_only=weights_only)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(make(1), loader(48, 4), strategy="fsdp", callbacks=[saver, Spoils(3)], max_steps=5)
    dist.barrier()
    names = sorted(path.name for path in Path("out").iterdir() if not path.name.startswith("."))
    return names, [str(each.message) for each in caught if "ModelCheckpoint" in str(each.message)]


@pytest.mark.parametrize("weights_only", [False, True])
def test_bad_weights_of_another_process_are_not_saved(two_processes: Run, weights_only: bool) -> None:
    (names, texts), (again, silent) = two_processes(_saved, weights_only)
    assert names == again == (["last.safetensors"] if weights_only else ["step=000002"])
    assert len(texts) == 1
    assert texts[0].startswith("ModelCheckpoint: 'embedding.weight' is not finite at step 3")
    assert silent == []


class Thaws(Callback):
    """Begins with a frozen layer and a frozen matrix; adds them to the optimizer later, and freezes others."""

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        self.thawed = [*task.layers[0].parameters(), task.layers[1].inner.weight]

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 2:
            for parameter in self.thawed:
                parameter.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": self.thawed, "lr": 0.05})
        if trainer.state.step == 4:
            task.layers[1].requires_grad_(False)


class Frozen(Words):
    def configure_optimizers(self) -> Any:
        for parameter in (*self.layers[0].parameters(), self.layers[1].inner.weight):
            parameter.requires_grad_(False)
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def _thawed(batch_size: int, options: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    ema = EMA(0.5)
    trainer = fit(Frozen(2), loader(48, batch_size), callbacks=[Thaws(), ema], accumulate=2, max_epochs=2, **options)
    return state_of(trainer), {name: whole(average) for name, average in ema.averages.items()}


def test_weights_that_are_frozen_for_a_while(two_processes: Run) -> None:
    weights, averages = _thawed(8, {"clip_norm": 0.5})
    untrained = _thawed(8, {"clip_norm": 0.5, "max_steps": 2})[0]
    assert not torch.equal(weights["layers.0.inner.weight"], untrained["layers.0.inner.weight"])
    for options in ({"name": "fsdp"}, {"name": "fsdp", "wrap": "LayerNorm", "cpu_offload": True}):
        found, other = two_processes(_thawed, 4, {"clip_norm": 0.5, "strategy": options})
        close(found[0], weights)
        close(found[1], averages)
        close(other[1], averages)


class Saves(Callback):
    """Saves at a step, and stops there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 3:
            trainer.save_state(self.path)
            trainer.stop("saved")


def _legs(path: str, batch_size: int, options: dict[str, Any], begins: bool | None) -> Any:
    """A run, its first leg, or its second."""
    ema = EMA(0.5, start=2)
    callbacks = [ema, Saves(path)] if begins else [ema]
    resume_from = path if begins is False else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another number of processes
        task = make(1, kind="sgd")
        trainer = fit(task, loader(48, batch_size), loader(9, 3), resume_from, callbacks=callbacks, **options)
    return (
        state_of(trainer),
        {name: whole(each) for name, each in ema.averages.items()},
        trainer.metrics.get("val/loss"),
    )


def test_averages_go_on_over_numbers_of_processes(two_processes: Run, tmp_path: Path) -> None:
    wanted = _legs("whole", 8, {}, None)
    sharded = {"strategy": "fsdp"}
    two_processes(_legs, "parts", 4, sharded, True)
    _legs("one", 8, {}, True)
    close(_legs(str(tmp_path / "parts"), 8, {}, False), wanted)
    close(two_processes(_legs, "parts", 4, sharded, False)[0], wanted)
    close(two_processes(_legs, str(tmp_path / "one"), 4, sharded, False)[0], wanted)
    # Weights, averages and momenta, each once; what is tied is one of them.
    files = [path for path in (tmp_path / "parts").glob("*.safetensors") if not path.name.startswith("process")]
    assert sum(map(_num_elements, files)) == 3 * sum(parameter.numel() for parameter in make(1).parameters())


def _num_elements(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (it is no mapping)


def test_an_error_of_one_process_ends_both(two_processes: Run) -> None:
    with pytest.raises(AssertionError, match=r"NonFiniteError: gradients are not finite at step 2 .*batch 3"):
        two_processes(_raised)


def _raised() -> None:
    fit(Poisoned("gradient"), loader(48, 3), strategy="fsdp", accumulate=2, callbacks=[NaNGuard()])
