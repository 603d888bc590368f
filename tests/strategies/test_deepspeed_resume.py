"""Checkpoints of DeepSpeed: exact at the same number of processes, and to and from other strategies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.checkpoint.sharded import whole
from loopwright.trainer.trainer import Trainer

from .sharded import fit, loader, make, state_of
from .test_deepspeed_trainer import Records, close, stage
from .test_fsdp_checkpoints import begin, go_on

Run = Callable[..., list[Any]]
ROWS = 48


def optimizer_of(trainer: Trainer) -> dict[str, Any]:
    """The whole state of the optimizer, on the main process. Collective."""
    newest = trainer._newest("test")
    state = trainer.strategy.optimizer_state(newest.model, trainer.optimizers[0])
    return {"state": {n: {k: _whole(v) for k, v in values.items()} for n, values in state["state"].items()}}


def _whole(value: Any) -> Any:
    return whole(value).clone() if torch.is_tensor(value) else value


class FirstState(Callback):
    """What training begins with."""

    def on_fit_start(self, trainer: Trainer, task: Any) -> None:
        self.found = state_of(trainer), optimizer_of(trainer)


def _fit(
    folder: str, batch_size: int, strategy: Any, steps: int, resume_from: str | None = None, **options: Any
) -> Any:
    task, records, first = make(), Records(), FirstState()
    saves = ModelCheckpoint(every="3 steps", directory=folder, last=False, top_k=-1)
    with warnings.catch_warnings():
        # Where another number of processes goes on, random numbers are others; there are none here.
        warnings.filterwarnings("ignore", "the resumed run can't be equal bit for bit")
        trainer = fit(
            task, loader(ROWS, batch_size), None, callbacks=[records, saves, first], strategy=strategy,
            max_epochs=None, max_steps=steps, accumulate=2, clip_norm=0.5, resume_from=resume_from, seed=3, **options,
        )  # fmt: skip
    return records.losses, state_of(trainer), optimizer_of(trainer), first.found


def _legs(folder: str, strategy: Any, **options: Any) -> Any:
    whole = _fit(f"{folder}/whole", 4, strategy, 6, **options)
    first = _fit(f"{folder}/legs", 4, strategy, 3, **options)
    found = sorted(Path(folder, "legs").iterdir())
    second = _fit(f"{folder}/legs", 4, strategy, 6, str(found[-1]), **options)
    return whole, (first[0] + second[0], *second[1:])


CASES = {
    "stage 0": (stage(0), {}),
    "stage 1": (stage(1), {}),
    "stage 2": (stage(2), {}),
    "stage 3": (stage(3), {}),
    "stage 1 in bf16": (stage(1), {"precision": "bf16"}),
    "stage 3 in bf16": (stage(3), {"precision": "bf16"}),
    "stage 2 offloaded": (stage(2, offload_optimizer="cpu"), {}),
    "stage 3 offloaded": (stage(3, offload_optimizer="cpu", offload_param="cpu"), {}),
}


def _legs_of(folder: str, case: str) -> Any:
    strategy, options = CASES[case]
    return _legs(folder, strategy, **options)


def equal(found: Any, wanted: Any) -> None:
    weights, optimizer = found
    for name, value in wanted[0].items():
        assert torch.equal(weights[name], value), name
    assert len(optimizer["state"]) == len(wanted[1]["state"]) > 0
    for number, values in wanted[1]["state"].items():
        assert optimizer["state"][number].keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(optimizer["state"][number][key], value), (number, key)


SLOW = ("stage 0", "stage 2", "stage 2 offloaded")  # whose parts are kept as those of stage 1 are, or not at all


@pytest.mark.parametrize("case", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_legs_are_equal_to_one_run(two_processes: Run, tmp_path: Path, case: str) -> None:
    (whole_run, legs), _ = two_processes(_legs_of, str(tmp_path), case)
    assert legs[0] == whole_run[0]
    equal(legs[1:3], whole_run[1:3])


def _check_parts(folder: str, strategies: Iterable[str]) -> None:
    """Each number of weights and of the optimizer's states is in one file, and each process has written some."""
    num_weights = sum(parameter.numel() for parameter in make().parameters())
    for name in strategies:
        checkpoint = open_checkpoint(_last(f"{folder}/{name}"))
        assert checkpoint.manifest.format_version == 2
        for tree, copies in (("model", 1), ("optimizers", 2)):
            files = [load_file(checkpoint.path / f"{tree}.part-0000{index}.safetensors") for index in range(2)]
            sizes = [sum(value.numel() for value in file.values() if value.dim()) for file in files]
            assert sum(sizes) == copies * num_weights
            assert min(sizes) > 0.3 * sum(sizes)


def _last(folder: str) -> str:
    return str(sorted(Path(folder).iterdir())[-1])


def _first_leg(folder: str, batch_size: int, strategies: dict[str, Any]) -> Any:
    return {name: _fit(f"{folder}/{name}", batch_size, strategies[name], 3) for name in strategies}


def _second_leg(folder: str, batch_size: int, ways: list[tuple[str, Any]]) -> Any:
    return [
        _fit(f"{folder}/from-{name}-{i}-{batch_size}", batch_size, strategy, 6, _last(f"{folder}/{name}"))
        for i, (name, strategy) in enumerate(ways)
    ]


def _check(found: Any, first: Any, whole_run: Any) -> None:
    """What the second leg begins with is what the first ended with; and it goes on as one process does."""
    equal(found[3], first[1:3])
    assert first[0] + found[0] == pytest.approx(whole_run[0], abs=1e-5)
    close(found[1], whole_run[1])


def test_to_and_from_other_strategies(two_processes: Run, tmp_path: Path) -> None:
    folder = str(tmp_path)
    strategies = {"one": stage(1), "two": stage(2), "three": stage(3), "ddp": "ddp", "fsdp": "fsdp"}
    firsts = two_processes(_first_leg, folder, 4, strategies)[0]
    alone = _first_leg(folder, 8, {"single": "single"})["single"]
    whole_run = _fit(f"{folder}/whole", 8, "single", 6)
    _check_parts(folder, ("one", "two", "three"))
    ways = [("ddp", stage(3)), ("fsdp", stage(1)), ("single", stage(2)), ("two", "ddp"), ("three", "fsdp")]
    for (name, _), found in zip(ways, two_processes(_second_leg, folder, 4, ways)[0], strict=True):
        _check(found, (firsts | {"single": alone})[name], whole_run)
    ways = [("one", "single"), ("three", "single")]
    for (name, _), found in zip(ways, _second_leg(folder, 8, ways), strict=True):
        _check(found, firsts[name], whole_run)


def _in_background(folder: str) -> Any:
    found = []
    for number in (2, 3):
        path, options = f"{folder}/{number}", {"strategy": stage(number)}
        found.append((begin(path, 4, options, asynchronous=True), go_on(path, 4, options)))
    return found


def test_in_the_background(two_processes: Run, tmp_path: Path) -> None:
    for end, found in two_processes(_in_background, str(tmp_path))[0]:
        close(found, end, 0.0)


@pytest.mark.slow
def test_to_another_number_of_processes(two_processes: Run, three_processes: Run, tmp_path: Path) -> None:
    strategies = {"two": stage(2), "three": stage(3)}
    firsts = two_processes(_first_leg, str(tmp_path), 4, strategies)[0]
    ways = [("two", stage(3)), ("three", stage(1))]
    for (name, _), found in zip(ways, three_processes(_second_leg, str(tmp_path), 4, ways)[0], strict=True):
        equal(found[3], firsts[name][1:3])
        assert len(found[0]) == 3
