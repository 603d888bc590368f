"""Averages of weights whose layers are in several processes, against one process on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.callbacks.averaging import WeightAveraging
from loopwright.callbacks.checkpoint import ModelCheckpoint
from loopwright.callbacks.ema import EMA
from loopwright.callbacks.swa import SWA
from loopwright.checkpoint.sharded import local_part, whole
from loopwright.checkpoint.weights import load_weights
from loopwright.distributed.errors import ConfigError
from loopwright.strategies.pipeline_groups import PipelineGroups
from loopwright.strategies.pipeline_state import part_of
from loopwright.trainer.trainer import Trainer

from .pipelined import GPT, Records, fit, loader
from .sharded import close
from .test_pipeline import ROWS, pipeline, rank, state_of

Run = Callable[..., list[Any]]


class Drifting(GPT):
    """Its first layer has a fraction in a buffer, which each pass in training changes in place; a later one puts
    another tensor into its place.
    """

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.temperature = nn.Buffer(torch.tensor(3.0))  # in no layer
        self.input.register_buffer("fade", torch.tensor(3.0))
        self.head.register_buffer("drift", torch.tensor([1.0, 2.0]))
        self.head.register_forward_hook(_replace)
        self.input.register_forward_hook(_fade)


def _fade(module: Any, inputs: Any, output: Tensor) -> None:
    if module.training:
        module.fade.mul_(0.99)


def _replace(module: Any, inputs: Any, output: Tensor) -> None:
    if module.training:
        module.drift = module.drift * 0.98 + 0.1


def _averaged(
    name: str, size: int, steps: int, strategy: Any = "single", resume_from: Any = None, save: Any = None
) -> dict[str, Any]:
    """What a run with an EMA ends with, of the whole model on the main process."""
    ema, records, task = EMA(0.5, start=1), Records(), Drifting(seed=1 + rank())
    saver = ModelCheckpoint("never", directory=name, save_weights_only=True)
    trainer = fit(
        task, loader(ROWS, size), loader(7, 4), resume_from, callbacks=[ema, records, saver], max_steps=steps,
        val_every="2 steps", strategy=strategy,
    )  # fmt: skip
    with ema.applied_to(task):
        inside = state_of(trainer)
        tested = trainer.validate(task, loader(7, 4))["val/loss"]
    if save is not None:
        trainer.save_state(save)
    found = {"validated": records.validated, "inside": inside, "tested": tested, "weights": state_of(trainer)}
    held = {each: int(local_part(average).numel()) for each, average in ema.averages.items()}
    return found | {"averages": {each: whole(average).clone() for each, average in ema.averages.items()}, "held": held}


def _averaged_each(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [_averaged(*case) for case in cases]


def _averaged_by_hand(first: float, change: Callable[[float], float]) -> float:
    """The average behind step 6 of a buffer that each of a step's two microbatches changes."""
    value = average = change(change(first))
    for _ in range(5):
        value = change(change(value))
        average = 0.5 * average + 0.5 * value
    return average


def _fractions(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if value.is_floating_point()}


CASES = [
    ("one-stage", 8, 6, "pipeline"),
    ("three-stages", 8, 6, pipeline(schedule="interleaved_zero_bubble", stages_per_process=3, microbatches=4)),
]


def test_averages_are_in_the_process_of_their_layer(two_processes: Run, tmp_path: Path) -> None:
    first, second = two_processes(_averaged_each, CASES)
    for case, found, other in zip(CASES, first, second, strict=True):
        assert found["averages"].keys() == _fractions(found["weights"]).keys()
        close(found["averages"], other["averages"], 0)
        close(_fractions(found["inside"]), found["averages"], 0)
        assert found["tested"] == other["tested"]
        for name, average in found["averages"].items():
            held = found["held"][name], other["held"][name]
            expected = {(1, 1)} if name == "temperature" else {(average.numel(), 0), (0, average.numel())}
            assert held in expected
        saved = Drifting(seed=9)
        load_weights(saved, tmp_path / case[0] / "last.safetensors")
        close(_fractions(dict(saved.state_dict())), found["averages"], 0)
    averages = first[0]["averages"]
    assert float(averages["input.fade"]) == pytest.approx(_averaged_by_hand(3.0, lambda fade: 0.99 * fade))
    drift = [_averaged_by_hand(begin, lambda drift: 0.98 * drift + 0.1) for begin in (1.0, 2.0)]
    assert averages["head.drift"].tolist() == pytest.approx(drift)


def _mean(size: int, callback: Callable[[], WeightAveraging], strategy: Any) -> Any:
    callbacks = [callback(), records := Records()]
    trainer = fit(
        task := GPT(seed=1 + rank()), loader(ROWS, size), loader(7, 4), callbacks=callbacks, max_steps=8,
        val_every="2 steps", strategy=strategy,
    )  # fmt: skip
    return records.validated, state_of(trainer), trainer.validate(task, loader(7, 4))["val/loss"]


def _swa() -> SWA:
    return SWA(0.3, every="1 step", lr=0.05, anneal=1)


def _final_ema() -> EMA:
    return EMA(0.7, every="2 steps", final=True)


@pytest.mark.parametrize("callback", [_swa, _final_ema])
def test_the_average_that_stays_is_that_of_one_process(two_processes: Run, callback: Any) -> None:
    validated, weights, tested = _mean(8, callback, "single")
    (found, state, own), (others, nothing, other) = two_processes(_mean, 8, callback, "pipeline")
    assert found == others == pytest.approx(validated, abs=1e-5)
    assert own == other == pytest.approx(tested, abs=1e-5)
    close(state, weights)
    assert nothing == {}


def _leg(steps: int, size: int, strategy: Any, resume_from: Any = None, save: Any = None) -> Any:
    ema, task = EMA(0.5), GPT(seed=5 + rank())
    trainer = fit(
        task, loader(ROWS, size), resume_from=resume_from, callbacks=[ema], max_steps=steps, strategy=strategy
    )
    if save is not None:
        trainer.save_state(save)
    return {name: whole(average).clone() for name, average in ema.averages.items()}, _weights(trainer)


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value for name, value in state_of(trainer).items() if value.is_floating_point()}


def test_averages_go_on_here_and_under_other_strategies(two_processes: Run, tmp_path: Path) -> None:
    path, other = str(tmp_path / "pipeline"), str(tmp_path / "fsdp")
    averages, weights = two_processes(_leg, 6, 8, "pipeline")[0]
    two_processes(_leg, 3, 8, "pipeline", None, path)
    resumed, state = two_processes(_leg, 6, 8, "pipeline", path)[0]
    close(resumed, averages, 0)
    close(state, weights, 0)
    two_processes(_leg, 3, 4, "fsdp", None, other)
    for size, strategy, start in [(4, "fsdp", path), (8, pipeline(split=["blocks.3"]), path), (8, "pipeline", other)]:
        close(two_processes(_leg, 6, size, strategy, start)[0][0], averages)
    close(_leg(6, 8, "single", path)[0], averages)


def _copies(path: str) -> Any:
    strategy = pipeline(copies=2)
    whole_run, begun = _leg(6, 4, strategy), _leg(3, 4, strategy, None, path)
    return whole_run, begun, _leg(6, 4, strategy, path)


@pytest.mark.slow
def test_of_pipelines_side_by_side_each_has_all_averages(four_processes: Run, tmp_path: Path) -> None:
    wanted, _ = _leg(6, 8, "single")
    path = str(tmp_path / "four")
    for (averages, _), _, (resumed, _) in four_processes(_copies, path):
        close(averages, wanted)
        close(resumed, averages, 0)
    close(_leg(6, 8, "single", path)[0], wanted)


def _turned() -> None:
    groups, turned = PipelineGroups(1, 1, 1, 1, torch.device("cpu")), torch.zeros(8, 11).t()
    with pytest.raises(ConfigError, match=r"a weight of shape \(11, 8\) lies in memory with the strides \(1, 11\)"):
        part_of(turned, groups, is_here=True)
    assert local_part(part_of(turned, groups, is_here=False)).numel() == 0


def test_a_weight_that_is_turned_in_memory(two_processes: Run) -> None:
    two_processes(_turned)


class Peaked(GPT):
    """Its last layer has the largest of its outputs so far in a buffer, which is not finite before the first pass."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.head.register_buffer("peak", torch.tensor([-torch.inf]))
        self.head.register_forward_hook(_keep_largest)


def _keep_largest(module: Any, inputs: Any, output: Tensor) -> None:
    if module.training:
        torch.maximum(module.peak, output.detach().max(), out=module.peak)


def _peaks(
    start: int | None, steps: int, size: int, strategy: Any, resume_from: Any = None, save: Any = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The averages, whole, and what this process holds of the buffer's, or has in the buffer itself."""
    ema, task = EMA(0.5, start=start), Peaked(seed=1 + rank())
    trainer = fit(
        task, loader(ROWS, size), resume_from=resume_from, callbacks=[ema], max_steps=steps, strategy=strategy
    )
    if save is not None:
        trainer.save_state(save)
    found = {name: whole(average).clone() for name, average in ema.averages.items()}
    other = Peaked(seed=9)
    with ema.applied_to(other):
        for name, average in found.items():
            assert torch.equal(other.state_dict()[name], average)
    return found, local_part(ema.averages.get("head.peak", task.head.peak)).clone()


def _peaks_twice(start: int | None, size: int, strategy: Any, path: str) -> Any:
    whole_run = _peaks(start, 6, size, strategy)
    _peaks(start, 3, size, strategy, None, path)
    return whole_run, _peaks(start, 6, size, strategy, path)


@pytest.mark.parametrize("start", [None, 1])
def test_a_buffer_that_is_finite_later_where_its_layer_is(two_processes: Run, tmp_path: Path, start: Any) -> None:
    wanted, _ = _peaks(start, 6, 8, "single")
    assert ("head.peak" in wanted) is (start == 1)
    for (found, _), (resumed, _) in two_processes(_peaks_twice, start, 8, "pipeline", str(tmp_path / "state")):
        close(found, wanted)
        close(resumed, found, 0)
    close(_peaks(start, 6, 8, "single", str(tmp_path / "state"))[0], wanted)


@pytest.mark.slow
def test_of_buffers_that_differ_the_first_pipeline_has_the_averages(four_processes: Run, tmp_path: Path) -> None:
    found = four_processes(_peaks_twice, 1, 4, pipeline(copies=2), str(tmp_path / "state"))
    held = [own for (_, own), _ in found]
    assert [own.numel() for own in held] == [0, 1, 0, 1]
    assert held[1] != held[3]
    for (averages, _), (resumed, _) in found:
        assert torch.equal(averages["head.peak"], held[1])
        close(resumed, averages, 0)
