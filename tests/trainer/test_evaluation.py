"""`validate`, `test` and `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loopwright.distributed.errors import DataError, TaskError
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task

from .tiny import Recorder, Scalar, Watch, batches, ones, trainer


class TestValidateAndTest:
    @pytest.mark.parametrize(("stage", "name"), [("validate", "val"), ("test", "test")])
    def test_means_over_all_samples(self, stage: str, name: str) -> None:
        data = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]
        assert getattr(trainer(), stage)(Scalar(), data) == {name: 4}

    def test_no_limit_of_training_is_needed(self) -> None:
        from loopwright.trainer.trainer import Trainer

        assert Trainer(trackers=False, progress=False).test(Scalar(), batches(3)) == {"test": 3}

    def test_weights_are_left_alone(self) -> None:
        task = Scalar()
        trainer().validate(task, ones(3))
        assert (task.value, task.w.grad) == (0, None)

    def test_a_gradient_that_was_there_stays(self) -> None:
        task = Scalar()
        task.w.grad = torch.tensor(5.0)
        trainer().validate(task, ones(3))
        assert task.w.grad.item() == 5

    def test_the_random_state_goes_on_as_if_nothing_was(self) -> None:
        class Draws(Scalar):
            def test_step(self, batch: Tensor, batch_idx: int) -> None:
                torch.rand(7)

        torch.manual_seed(1)
        expected = torch.rand(1)
        torch.manual_seed(1)
        trainer().test(Draws(), ones(3))
        assert torch.rand(1) == expected

    def test_records_go_to_the_trackers(self) -> None:
        memory = MemoryTracker()
        trainer(trackers=memory).test(Scalar(), batches(1, 3))
        assert memory.runs[0].records == [(0, {"test": 2, "epoch": 0})]
        assert memory.runs[0].status == "success"

    def test_a_metric_that_a_callback_adds_is_returned(self) -> None:
        add = Watch(test_end=lambda trainer, task, metrics: metrics.update(more=1.0))
        assert trainer(callbacks=add).test(Scalar(), ones(2)) == {"test": 1, "more": 1}

    def test_what_a_step_returns_is_shown_to_callbacks(self) -> None:
        class Returns(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
                return batch.item()

        seen: list[Any] = []
        watch = Watch(validation_batch_end=lambda trainer, task, outputs: seen.append(outputs))
        trainer(callbacks=watch).validate(Returns(), batches(1, 2))
        assert seen == [1, 2]

    def test_an_empty_loader_is_warned_of(self) -> None:
        recorder = Recorder()
        with pytest.warns(UserWarning, match="the test loader gave no batch, so that it has no metrics"):
            assert trainer(callbacks=recorder).test(Scalar(), []) == {}
        assert recorder.log == ["setup", "test_start", "test_end", "teardown"]

    def test_generators_and_iterators(self) -> None:
        assert trainer().validate(Scalar(), (batch for batch in batches(1, 3))) == {"val": 2}
        assert trainer().validate(Scalar(), iter(batches(1, 3))) == {"val": 2}

    @pytest.mark.parametrize("stage", ["validate", "test"])
    def test_a_task_without_the_step(self, stage: str) -> None:
        class Bare(Task):
            pass

        name = {"validate": "validation"}.get(stage, stage)
        with pytest.raises(TaskError, match=rf"Bare has no {name}_step, which {name} needs. Override it in the task"):
            getattr(trainer(), stage)(Bare(), ones(1))

    @pytest.mark.parametrize(("stage", "short"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
    def test_without_data(self, stage: str, short: str) -> None:
        name = {"validate": "validation"}.get(stage, stage)
        message = rf"there is no {name} data. Pass it, or give the task a {short}_dataloader\(\)"
        with pytest.raises(DataError, match=message):
            getattr(trainer(), stage)(Scalar())

    def test_no_optimizer_is_made(self) -> None:
        class Refuses(Scalar):
            def configure_optimizers(self) -> Any:
                raise AssertionError("not needed")

        assert trainer().validate(Refuses(), batches(2)) == {"val": 2}

    def test_configure_model_is_called(self) -> None:
        class Late(Scalar):
            def configure_model(self) -> None:
                self.net = nn.Linear(1, 1)

            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                self.log("val", self.net(batch[:, None]).sum() * 0 + 1)

        assert trainer().validate(Late(), batches(2)) == {"val": 1}

    def test_hooks_for_gradients_may_be_used_inside(self) -> None:
        class Attack(Scalar):
            def validation_step(self, batch: Tensor, batch_idx: int) -> None:
                with torch.enable_grad():
                    x = batch.clone().requires_grad_()
                    (gradient,) = torch.autograd.grad((x**2).sum(), x)
                self.log("val", gradient.mean())

        assert trainer().validate(Attack(), batches(3)) == {"val": 6}


class TestPredict:
    def test_one_output_per_batch_in_order(self) -> None:
        found = trainer().predict(Scalar(), batches(1, 2, 3))
        assert [output.item() for output in found] == [2, 4, 6]

    def test_the_task_itself_by_default(self) -> None:
        class Net(Task):
            def forward(self, x: Tensor) -> Tensor:
                return x + 1

        assert [o.item() for o in trainer().predict(Net(), batches(1, 2))] == [2, 3]

    def test_outputs_have_no_graph(self) -> None:
        class Net(Scalar):
            def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                return self.w * batch

        assert not any(output.requires_grad for output in trainer().predict(Net(), ones(2)))

    def test_a_writer_takes_them(self) -> None:
        seen: list[tuple[float, float, int]] = []
        found = trainer().predict(
            Scalar(),
            batches(1, 2),
            writer=lambda outputs, batch, index: seen.append((outputs.item(), batch.item(), index)),
        )
        assert found == []
        assert seen == [(2, 1, 0), (4, 2, 1)]

    def test_a_writer_keeps_nothing_in_memory(self) -> None:
        import weakref

        alive: list[weakref.ref[Tensor]] = []

        class Net(Scalar):
            def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                output = torch.zeros(8)
                alive.append(weakref.ref(output))
                return output

        def writer(outputs: Tensor, batch: Tensor, index: int) -> None:
            assert sum(ref() is not None for ref in alive) <= 2

        trainer().predict(Net(), ones(20), writer=writer)

    def test_several_loaders_follow_one_another(self) -> None:
        found = trainer().predict(Scalar(), {"a": batches(1), "b": batches(2, 3)})
        assert [output.item() for output in found] == [2, 4, 6]

    def test_events_and_no_record(self) -> None:
        recorder, memory = Recorder(), MemoryTracker()
        trainer(callbacks=recorder, trackers=memory).predict(Scalar(), ones(1))
        assert recorder.log == [
            "setup", "predict_start", "predict_batch_start", "predict_batch_end", "predict_end", "teardown",
        ]  # fmt: skip
        assert memory.runs[0].records == []

    def test_logging_in_predict_step_is_allowed(self) -> None:
        class Net(Scalar):
            def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.log("a", 1)
                return batch

        assert len(trainer().predict(Net(), ones(2))) == 2


def test_save_model_writes_what_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    task, found = Scalar(), trainer()
    found.fit(task, ones(3))
    path = found.save_model(tmp_path / "here")
    assert path == tmp_path / "here" / "model.safetensors"
    assert load_file(path)["w"].item() == -3
    assert load_file(found.save_model(tmp_path / "w.safetensors"))["w"].item() == -3
