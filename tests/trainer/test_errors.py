"""Bad input: one clear error that names what came, what is accepted and what to do, before any work is lost."""

from __future__ import annotations

import inspect
import typing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import Callback
from loopwright.callbacks.early_stopping import EarlyStopping
from loopwright.distributed.errors import ConfigError, DataError, LoopwrightError, MetricError, TaskError
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.keywords import FOREIGN_KEYWORDS
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from .tiny import Recorder, Scalar, fit, ones, trainer


class Returns(Scalar):
    """`training_step` returns what a function makes of the weight."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(self.w)


LOSSES: dict[str, tuple[Any, str]] = {
    "a vector": (lambda w: w * torch.ones(3), r"returned a loss of shape \(3,\). Expected a scalar: take its mean, or"),
    "a matrix": (lambda w: {"loss": w * torch.ones(2, 2)}, r"returned a loss of shape \(2, 2\)"),
    "a sum that is none": (lambda w: (w * torch.ones(2), 2), r"returned a loss of shape \(2,\)"),
    "detached": (lambda w: w.detach(), r"returned a loss without a gradient. Compute it from the task's parameters"),
    "a constant": (lambda w: torch.tensor(1.0), r"returned a loss without a gradient.*are all parameters frozen"),
    "a number": (
        lambda w: 3.0,
        r"training_step returned a float. Expected a scalar loss, a mapping with 'loss', a pair",
    ),
    "a list": (lambda w: [w], r"training_step returned a list"),
    "a triple": (lambda w: (w, 1, 2), r"training_step returned a tuple"),
    "a word": (lambda w: "loss", r"training_step returned a str"),
    "a mapping without loss": (lambda w: {"los": w}, r"returned a mapping without 'loss'; it has \['los'\]"),
    "an empty mapping": (lambda w: {}, r"returned a mapping without 'loss'; it has \[\]"),
    "a pair of numbers": (
        lambda w: (3.0, 2),
        r"returned \(float, ...\). Expected \(loss_sum, count\), the first a tensor",
    ),
}


@pytest.mark.parametrize(("make", "message"), LOSSES.values(), ids=LOSSES.keys())
def test_what_training_step_may_not_return(make: Any, message: str) -> None:
    recorder = Recorder()
    with pytest.raises(TaskError, match=message):
        fit(Returns(make), ones(2), callbacks=recorder)
    assert recorder.count("exception") == recorder.count("teardown") == 1


@pytest.mark.parametrize("make", [lambda w: w * 1, lambda w: (w * 1)[None], lambda w: (w * 1).reshape(1, 1)])
def test_a_single_element_is_a_scalar(make: Any) -> None:
    task = Returns(make)
    fit(task, ones(2))
    assert task.value == -2


@pytest.mark.parametrize("hook", ["training_step", "configure_optimizers"])
def test_a_task_without_a_hook(hook: str) -> None:
    class Lacks(Scalar):
        pass

    setattr(Lacks, hook, getattr(Task, hook))
    recorder = Recorder()
    with pytest.raises(TaskError, match=rf"Lacks has no {hook}, which trainer.fit needs. Override it in the task"):
        fit(Lacks(), ones(1), callbacks=recorder)
    assert recorder.count("fit_start") == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (nn.Linear(1, 1), r"task is a Linear. Expected a loopwright.Task; wrap the module in one"),
        (Scalar, r"task=Scalar is a class. Pass an object: Scalar\(...\)"),
        (None, r"task is a NoneType"),
    ],
    ids=["module", "class", "none"],
)
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict", "plan"])
def test_what_is_no_task(stage: str, task: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        getattr(trainer(), stage)(task, ones(1))


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"strategy": "singel"}, r"strategy='singel' is unknown. Did you mean 'single'\? Accepted: auto"),
    "strategy object": ({"strategy": 3}, r"strategy=3. Expected a word, a mapping with 'name', or a Strategy object"),
    "strategy mapping": ({"strategy": {"nome": "single"}}, r"strategy=\{'nome': 'single'\} has no 'name'"),
    "strategy option": ({"strategy": {"name": "single", "speed": 2}}, r"strategy='single' does not take these options"),
    "precision": ({"precision": "fp61"}, r"precision='fp61' is unknown. Did you mean 'fp16'\? Accepted: 16-mixed"),
    "tracker": ({"trackers": "tensorbord"}, r"trackers='tensorbord' is unknown. Did you mean 'tensorboard'"),
    "tracker object": ({"trackers": 3}, r"trackers=3 is .*int. Expected a word"),
    "tracker twice": ({"trackers": [MemoryTracker(), MemoryTracker()]}, r"trackers: two of them are named 'memory'"),
    "devices": ({"devices": 0}, r"devices=0. Expected an integer >= 1. It counts the devices of each machine"),
    "devices bool": ({"devices": True}, r"devices=True. Expected an integer"),
    "devices word": ({"devices": "many"}, r"devices='many'. Expected an integer"),
    "nodes": ({"num_nodes": 2}, r"num_nodes=2, but no launcher has started this process. Start .*--num_machines 2"),
    "nodes bool": ({"num_nodes": True}, r"num_nodes=True. Expected an integer >= 1"),
    "callback": (
        {"callbacks": ["EarlyStopping"]},
        r"callbacks holds 'EarlyStopping', which is no Callback. Pass objects",
    ),
    "callback class": (
        {"callbacks": [EarlyStopping]},
        r"callbacks holds <class .*EarlyStopping'>, which is no Callback",
    ),
    "name": ({"name": "a/b"}, r"name='a/b'. Expected the name of one folder, below project_dir"),
    "empty name": ({"name": ""}, r"name=''. Expected the name of one folder"),
    "dots": ({"name": ".."}, r"name='..'. Expected the name of one folder"),
    "log_every": ({"log_every": 0}, r"log_every=0: a duration of 0 steps is empty or endless"),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_an_option_that_can_not_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(**options)


@pytest.mark.parametrize(
    ("name", "near"),
    [("acumulate", "accumulate"), ("max_epoch", "max_epochs"), ("accumulate_grad_batches", "accumulate")],
)
def test_an_unknown_option(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"^Trainer\({name}=\.\.\.\) is unknown\. Did you mean '{near}'\?"):
        Trainer(**{"max_epochs": 1, name: 4})  # type: ignore[arg-type]


def test_other_frameworks_options_are_named_by_ours() -> None:
    own = inspect.signature(Trainer).parameters.keys()
    assert set(FOREIGN_KEYWORDS.values()) <= own
    assert not set(FOREIGN_KEYWORDS) & own


def test_type_checkers_and_documents_see_the_options() -> None:
    assert typing.get_type_hints(Trainer.__init__)["accumulate"] is int
    assert str(inspect.signature(Trainer)).startswith("(*, max_epochs: ")


def test_a_strategy_belongs_to_one_trainer() -> None:
    from loopwright.strategies.single import SingleDeviceStrategy

    strategy = SingleDeviceStrategy()
    trainer(strategy=strategy)
    with pytest.raises(ConfigError, match="SingleDeviceStrategy already belongs to another Trainer"):
        trainer(strategy=strategy)


def test_a_monitor_that_was_never_logged() -> None:
    with pytest.raises(MetricError, match=r"'val/loss'.*(val|Did you mean 'val')"):
        fit(Scalar(), ones(2), ones(1), callbacks=EarlyStopping("val/loss"))


def test_all_of_them_are_of_one_family() -> None:
    with pytest.raises(LoopwrightError, match="fit has no end"):
        Trainer(progress=False, trackers=False).fit(Scalar(), ones(1))
    with pytest.raises(ValueError, match="fit has no end"):
        Trainer(progress=False, trackers=False).fit(Scalar(), ones(1))


def test_nothing_is_written_by_a_run_that_never_began() -> None:
    from pathlib import Path

    with pytest.raises(DataError, match="has no batch"):
        Trainer(max_epochs=1, progress=False, trackers=["jsonl", "csv"]).fit(Scalar(), [])
    assert not Path("runs").exists()


def test_an_error_names_callback_event_and_step() -> None:
    class Breaks(Callback):
        def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
            if trainer.state.step == 2:
                raise KeyError("missing")

    with pytest.raises(KeyError, match="missing") as caught:
        fit(Scalar(), ones(5), callbacks=Breaks())
    assert caught.value.__notes__ == ["raised by Breaks in on_step, at step 2"]


def test_an_error_in_a_function_names_the_function() -> None:
    def report(*_: Any) -> None:
        raise KeyError("missing")

    found = trainer()
    found.on("step", report, once=3)
    with pytest.raises(KeyError, match="missing") as caught:
        found.fit(Scalar(), ones(5))
    assert "report in on_step, at step 3" in caught.value.__notes__[0]


def test_errors_of_torch_come_out_as_they_are() -> None:
    class Shapes(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return nn.functional.linear(batch, torch.ones(2, 3)).sum()

    with pytest.raises(RuntimeError, match="shape"):
        fit(Shapes(), [torch.ones(1, 4)])


def test_a_loader_that_fails_names_nothing_of_ours() -> None:
    class Data(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Tensor:
            raise OSError("disk gone")

    recorder = Recorder()
    with pytest.raises(OSError, match="disk gone"):
        fit(Scalar(), DataLoader(Data()), callbacks=recorder)
    assert recorder.log == ["setup", "fit_start", "epoch_start", "exception", "epoch_end", "fit_end", "teardown"]
