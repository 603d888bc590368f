"""Training whose layers are in several processes, against one process on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from loopwright.distributed.errors import ConfigError, DataError, DistributedError, TaskError
from loopwright.strategies.pipeline import PipelineStrategy
from loopwright.strategies.pipeline_layers import cut
from loopwright.trainer.trainer import Trainer

from .pipelined import GPT, Records, fit, loader
from .sharded import close

Run = Callable[..., list[Any]]
ROWS = 120


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def pipeline(**options: Any) -> dict[str, Any]:
    return {"name": "pipeline", **options}


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """The whole weights, on the main process. Collective."""
    state = trainer.strategy.whole_model_state(trainer._newest("test").model)
    return {name: value.clone() for name, value in state.items()}


def _train(steps: int, options: dict[str, Any], batch_size: int = 8) -> Any:
    # Process 0's weights count: the others begin with other numbers.
    task, records = GPT(seed=1 + rank()), Records()
    settings = {"callbacks": [records], "max_steps": steps, "val_every": "3 steps"} | options
    trainer = fit(task, loader(ROWS, batch_size), loader(7, 4), **settings)
    again = trainer.validate(task, loader(7, 4))
    assert again["val/loss"] == pytest.approx(trainer.metrics["val/loss"], abs=1e-6)
    return records, state_of(trainer)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_have_the_losses_and_weights_of_one(two_processes: Run, accumulate: int) -> None:
    options = {"accumulate": accumulate, "clip_norm": 0.5, "val_every": "10 steps"}
    wanted, weights = _train(30, options)
    assert wanted.losses[-1] < 0.9 * wanted.losses[0]
    (first, whole), (second, nothing) = two_processes(_train, 30, {**options, "strategy": "pipeline"})
    assert len(first.losses) == 30
    assert first.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert first.validated == pytest.approx(wanted.validated, abs=1e-5)
    assert first.norms == pytest.approx(wanted.norms, abs=1e-5)
    close(whole, weights)
    assert (second.losses, second.norms, nothing) == (first.losses, first.norms, {})


SCHEDULES = {
    "gpipe": {"schedule": "gpipe", "split": ["blocks.3"]},
    "1f1b": {"microbatches": 4},
    "interleaved_1f1b": {"schedule": "interleaved_1f1b"},
    "looped_bfs": {"schedule": "looped_bfs", "microbatches": 2},
    "interleaved_zero_bubble": {"schedule": "interleaved_zero_bubble", "stages_per_process": 3, "microbatches": 4},
    "zbv_zero_bubble": {"schedule": "zbv_zero_bubble"},
    "dual_pipe_v": {"schedule": "dual_pipe_v"},
}


def _train_by(schedules: dict[str, Any], options: dict[str, Any], batch_size: int = 8) -> Any:
    found = {}
    for name, chosen in schedules.items():
        records, weights = _train(6, {**options, "strategy": pipeline(**chosen)}, batch_size)
        found[name] = records.losses, records.validated, weights
    return found


def test_each_schedule_has_the_losses_of_one_process(two_processes: Run) -> None:
    wanted, weights = _train(6, {"accumulate": 2})
    found, _ = two_processes(_train_by, SCHEDULES, {"accumulate": 2}, timeout=120)
    assert found.keys() == SCHEDULES.keys()
    for losses, validated, state in found.values():
        assert losses == pytest.approx(wanted.losses, abs=1e-5)
        assert validated == pytest.approx(wanted.validated, abs=1e-5)
        close(state, weights)


def test_three_processes(three_processes: Run) -> None:
    chosen = {"1f1b": {"split": ["blocks.0", "norm"], "microbatches": 4}, "looped_bfs": {"schedule": "looped_bfs"}}
    wanted, weights = _train(6, {"clip_norm": 0.5}, 12)
    for each in three_processes(_train_by, chosen, {"clip_norm": 0.5}, 12, timeout=120):
        for losses, _, state in each.values():
            assert losses == pytest.approx(wanted.losses, abs=1e-5)
            if state:
                close(state, weights)


def _leg(last: int, options: dict[str, Any], batch_size: int, resume_from: Any = None, save: Any = None) -> Any:
    task, records = GPT(seed=5 + rank()), Records()
    trainer = fit(
        task, loader(ROWS, batch_size), callbacks=[records], max_steps=last, accumulate=2, resume_from=resume_from,
        **options,
    )  # fmt: skip
    if save is not None:
        trainer.save_state(save)
    return records.losses, state_of(trainer)


def test_checkpoints_go_on_here_and_under_other_strategies(two_processes: Run, tmp_path: Any) -> None:
    whole, weights = two_processes(_leg, 10, {"strategy": "pipeline"}, 8)[0]
    path, other = str(tmp_path / "pipeline"), str(tmp_path / "single")
    begun, _ = two_processes(_leg, 5, {"strategy": "pipeline"}, 8, None, path)[0]
    losses, state = two_processes(_leg, 10, {"strategy": "pipeline"}, 8, path)[0]
    assert begun + losses == whole  # bit for bit
    close(state, weights, 0)

    _leg(5, {}, 8, None, other)
    close(_leg(10, {}, 8, path)[1], weights)
    counted = {name for name in weights if name.endswith("num_samples")}  # of process 0 alone where samples are dealt
    for start, strategy, batch_size in [(path, "ddp", 4), (path, "fsdp", 4), (other, "pipeline", 8)]:
        losses, state = two_processes(_leg, 10, {"strategy": strategy}, batch_size, start)[0]
        left = set() if strategy == "pipeline" else counted
        close(_without(state, left), _without(weights, left))
        if strategy == "pipeline":
            assert losses == pytest.approx(whole[5:], abs=1e-5)


def _without(state: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


def _held() -> Any:
    """The bytes of the weights and of the optimizer's state in this process, and the names of the weights it has."""
    task = GPT(num_blocks=6)
    trainer = fit(task, loader(ROWS, 8), max_steps=2, strategy="pipeline")
    held = {name: p.untyped_storage().nbytes() for name, p in task.named_parameters()}
    states = [v for values in trainer.optimizers[0].state.values() for v in values.values()]
    own = sorted({name.rpartition(".")[0] for name, p in task.named_parameters() if any(p.stride())})
    return sum(held.values()), sum(each.numel() * 4 for each in states), own


def test_each_process_holds_its_stage(two_processes: Run) -> None:
    every = sum(p.numel() * 4 for p in GPT(num_blocks=6).parameters())
    (first, first_states, own), (second, second_states, others) = two_processes(_held)
    assert max(first, second) < 0.55 * every
    assert max(first_states, second_states) < 0.55 * 2 * every
    assert "input.words" in own and "blocks.5.inner" in others and not set(own) & set(others)


class Tied(GPT):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head.weight = self.input.words.weight


class Normed(GPT):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = torch.nn.BatchNorm1d(5)  # type: ignore[assignment]


class Outside(GPT):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.factor = torch.nn.Parameter(torch.ones(()))


class Frozen(GPT):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.input.requires_grad_(False)


class Manual(GPT):
    automatic_optimization = False


class Added(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run_pipeline(batch) + self.head.weight.square().sum()


class Decayed(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run_pipeline(batch) * 0.5**batch_idx


class Whole(GPT):
    def forward(self, words: Tensor) -> Tensor:
        for layer in self.pipeline_layers():
            words = layer(words)
        return words

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.pipeline_loss(self(self.pipeline_input(batch)), batch))


class Beside(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([*batch, torch.ones(3)], batch_idx)


class LeftOut(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 and rank() == 1 else super().training_step(batch, batch_idx)


class Dropped(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Alone(GPT):
    """Fails in one process alone."""

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        raise ZeroDivisionError("no words")


@pytest.mark.parametrize(
    ("kind", "num_stages", "split", "message"),
    [
        (Tied, 2, [], r"parameter input.words.weight of Tied is in the stages 0 and 1 of the pipeline"),
        (Normed, 2, [], r"layer norm of Normed is a BatchNorm1d"),
        (Outside, 2, [], r"parameter factor of Outside is in none of its pipeline_layers\(\)"),
        (Frozen, 2, ["blocks.0"], r"the first stage of Frozen has no trainable parameter"),
        (GPT, 8, [], r"gives 7 layers, and there are 8 stages"),
        (GPT, 2, ["block.1"], r"split: 'block.1' is none of GPT's layers.*blocks.1"),
        (GPT, 2, ["norm", "head"], r"makes 3 stages, and there are 2"),
        (GPT, 2, ["input"], r"names the first\. .*'input', 'blocks.0'"),
        (GPT, 3, ["norm", "blocks.1"], r"is not in the order of the layers"),
        (torch.nn.ReLU, 2, [], r"ReLU has no pipeline_layers"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind: Any, num_stages: int, split: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut(kind(), num_stages, num_stages, split)


REFUSED: dict[str, tuple[type[GPT], dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "manual": (Manual, {}, {"accumulate": 1}, ConfigError, "Manual is trained by manual optimization"),
    "chunks": (GPT, {"microbatches": 1}, {}, ConfigError, ".*schedule='1f1b', 2 stages and microbatches=1"),
    "uneven": (GPT, {"microbatches": 3}, {}, UserWarning, "a batch of 8 samples can't be cut into 3 equal"),
    "beside": (Beside, {}, {}, DataError, r"a batch has a tensor of shape \[3\] beside 8 samples"),
    "added": (Added, {}, {}, TaskError, "training_step returned another loss than self.run_pipeline"),
    "decayed": (Decayed, {}, {}, TaskError, r"multiplied the loss of self.run_pipeline\(batch\) with 0.5, and with 1 "),
    "whole": (Whole, {}, {}, ConfigError, "(Input|Block) was called in a process that has no weights of it"),
    "left out": (LeftOut, {}, {}, DistributedError, "a batch was left out on process 1 alone"),
    "dropped": (Dropped, {}, {}, ConfigError, r"a batch was left out after self.run_pipeline\(batch\)"),
}


def _refused(name: str) -> None:
    kind, chosen, options, error, message = REFUSED[name]
    settings = {"max_steps": 2, "strategy": pipeline(**chosen), "accumulate": 2} | options
    with pytest.raises(error, match=message):
        fit(kind(), loader(16, 8), loader(4, 4), **settings)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_all_processes(two_processes: Run, name: str) -> None:
    two_processes(_refused, name)


class Some(GPT):
    """Leaves batches out on all processes: in the middle of a window, and at its end."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (2, 5) else super().training_step(batch, batch_idx)


def _train_some(options: dict[str, Any]) -> Any:
    trainer = fit(Some(), loader(ROWS, 8), max_steps=4, accumulate=2, clip_value=0.01, **options)
    return state_of(trainer)


def test_batches_that_all_processes_leave_out(two_processes: Run) -> None:
    found, _ = two_processes(_train_some, {"strategy": "pipeline"})
    close(found, _train_some({}))


def _fail() -> None:
    fit(Alone(), loader(16, 8), max_steps=2, strategy="pipeline")


def test_an_error_in_one_stage_keeps_its_kind_and_ends_all(two_processes: Run) -> None:
    with pytest.raises(AssertionError, match=r"ZeroDivisionError: no words") as failed:
        two_processes(_fail)
    first, last = str(failed.value).split("--- process 1 raised:")
    assert "PeerFailedError: process 1 failed first, at training_step" in first
    assert "\nZeroDivisionError: no words" in last  # behind it comes what the process has logged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1F1B"}, r"schedule='1F1B'\) is unknown\. .*1f1b, dual_pipe_v, gpipe"),
        ({"microbatches": 0}, r"PipelineStrategy\(microbatches=0\)\. Expected an integer"),
        ({"stages_per_process": 2}, r"does not fit schedule='1f1b', which is for one\. Choose one of \['interleaved"),
        (
            {"schedule": "looped_bfs", "stages_per_process": 1},
            r"which is for several\. Choose one of \['1f1b', 'gpipe'",
        ),
        ({"split": "head"}, r"split='head'\)\. Expected a list"),
        ({"copies": 0}, r"PipelineStrategy\(copies=0\)\. Expected an integer >= 1"),
        (
            {"schedule": "zbv_zero_bubble", "stages_per_process": 3},
            r"schedule='zbv_zero_bubble', which is for two\. Lea",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineStrategy(**options)


def test_stages_are_as_even_as_can_be() -> None:
    class Layers(torch.nn.Module):
        def __init__(self, sizes: list[int]) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(size, 1, bias=False) for size in sizes)

        def pipeline_layers(self) -> list[torch.nn.Module]:
            return list(self.layers)

        def pipeline_input(self, batch: Any) -> Tensor:
            raise NotImplementedError

        def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
            raise NotImplementedError

    def sizes(given: list[int], count: int) -> list[list[int]]:
        found = cut(Layers(given), 1, count, ()).stages
        return [[layer.in_features for layer in stage] for stage in found]  # type: ignore[misc]

    assert sizes([1, 1, 1, 9, 1, 1], 3) == [[1, 1, 1], [9], [1, 1]]
    assert sizes([5, 1, 1, 1, 5], 2) == [[5, 1], [1, 1, 5]]
    assert sizes([4, 4, 4], 3) == [[4], [4], [4]]


def test_one_process_has_all_layers() -> None:
    wanted, weights = _train(3, {})
    found, state = _train(3, {"strategy": "pipeline"})
    assert found.losses == wanted.losses
    close(state, weights, 0)


def test_without_a_trainer_it_is_the_loss_of_all_layers() -> None:
    task, batch = GPT(), next(iter(loader(8, 8)))
    value = task.pipeline_input(batch)
    for layer in task.pipeline_layers():
        value = layer(value)
    assert torch.equal(task.run_pipeline(batch), task.pipeline_loss(value, batch))
