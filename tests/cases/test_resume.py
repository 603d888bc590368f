"""Cases of the category resume: what other frameworks got wrong when a training went on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from loopwright.callbacks.callback import Callback
from loopwright.checkpoint.reading import open_checkpoint
from loopwright.trackers.memory import MemoryTracker
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from ..trainer.tiny import Scalar, Watch, batches, ones, trainer


class Seen(Task):
    """Writes down the numbers that it sees; its one weight becomes minus their running sum, by plain SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.tolist())
        return self.w * batch.float().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", batch.float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def saving(path: Path, *, step: int | None = None, batch: int | None = None, stops: bool = True) -> Watch:
    """Asks for a checkpoint after a step or a micro-batch, and ends the run there."""

    def look(trainer: Any, task: Any, outputs: Any) -> None:
        is_there = trainer.state.micro_step == batch if step is None else trainer.state.step == step
        if is_there and not path.exists():
            trainer.save_state(path)
            if stops:
                trainer.stop("the leg ends")

    return Watch(batch_end=look)


def leg(task: Any, data: Any, val: Any = None, *, resume_from: Path | None = None, **options: Any) -> Trainer:
    found = trainer(**options)
    found.fit(task, data, val, resume_from=resume_from)
    return found


def ids(count: int, batch_size: int = 1, *, shuffle: bool = False) -> DataLoader[int]:
    return DataLoader(list(range(count)), batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type]


def test_b17_no_batch_is_trained_twice(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    whole, first, second = Seen(), Seen(), Seen()
    leg(whole, ids(10))
    leg(first, ids(10), callbacks=saving(path, batch=5))
    found = leg(second, ids(10), resume_from=path)
    assert second.seen == [[5], [6], [7], [8], [9]]
    assert first.seen + second.seen == [[number] for number in range(10)]
    assert found.state.step == 10
    assert torch.equal(second.w, whole.w)


def test_b19_batches_are_skipped_and_not_steps(tmp_path: Path) -> None:
    path, task = tmp_path / "saved", Seen()
    leg(Seen(), ids(20), accumulate=4, callbacks=saving(path, step=3))
    found = leg(task, ids(20), accumulate=4, resume_from=path)
    assert task.seen[0] == [12]
    assert found.state.step - 3 == 2


def test_b20_a_resumed_epoch_is_shuffled_alike(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    whole, first, second = Seen(), Seen(), Seen()
    torch.manual_seed(0)
    leg(whole, ids(48, 4, shuffle=True), max_epochs=2)
    torch.manual_seed(0)
    leg(first, ids(48, 4, shuffle=True), max_epochs=2, callbacks=saving(path, batch=17))
    torch.manual_seed(5)
    leg(second, ids(48, 4, shuffle=True), max_epochs=2, resume_from=path)
    assert len(second.seen) == 7
    assert second.seen == whole.seen[17:]
    epochs = [
        [number for batch in part for number in batch] for part in (whole.seen[:12], first.seen[12:] + second.seen)
    ]
    assert sorted(epochs[1]) == list(range(48))
    assert epochs[0] != epochs[1]


def test_b22_at_an_epochs_edge_the_next_one_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    leg(Seen(), ids(6), max_epochs=2, callbacks=saving(path, batch=6))
    task = Seen()
    assert leg(task, ids(6), max_epochs=2, resume_from=path).state.step == 12
    assert len(task.seen) == 6


def test_b23_the_first_validation_after_a_resume_is_whole(tmp_path: Path) -> None:
    path, seen = tmp_path / "saved", []
    leg(Seen(), ids(5), batches(1, 2, 3, 6), callbacks=saving(path, batch=2))
    watch = Watch(validation_batch_end=lambda trainer, task, outputs: seen.append(1))
    found = leg(Seen(), ids(5), batches(1, 2, 3, 6), callbacks=watch, resume_from=path)
    assert (len(seen), found.metrics["val_loss"]) == (4, 3.0)


class Draws(Callback):
    """Draws from the process's stream in the third step."""

    drawn: float | None = None

    def on_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        if trainer.state.step == 0 and trainer.process.process_index == 1:
            torch.rand(3)
        if trainer.state.step == 2:
            self.drawn = torch.rand(()).item()


def _draws(folder: str) -> tuple[float | None, float | None]:
    path = Path(folder) / "saved"
    whole, resumed = Draws(), Draws()
    torch.manual_seed(7)
    leg(Scalar(), ones(8), callbacks=whole)
    torch.manual_seed(7)
    leg(Scalar(), ones(8), callbacks=[Draws(), saving(path, step=2)])
    torch.manual_seed(1)
    leg(Scalar(), ones(8), callbacks=resumed, resume_from=path)
    return whole.drawn, resumed.drawn


def test_b25_each_process_has_its_own_stream(two_processes: Any) -> None:
    (whole_0, resumed_0), (whole_1, resumed_1) = two_processes(_draws, "runs")
    assert (whole_0, whole_1) == (resumed_0, resumed_1)
    assert whole_0 != whole_1


def test_b26_random_states_come_back_without_pickle(tmp_path: Path) -> None:
    path, drawn = tmp_path / "saved", []

    def draw(trainer: Any, task: Any, batch: Any, index: int) -> None:
        if trainer.state.step == 3:
            drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))

    leg(Scalar(), ones(4), callbacks=[Watch(batch_start=draw), saving(path, step=3, stops=False)])
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    leg(Scalar(), ones(4), callbacks=Watch(batch_start=draw), resume_from=path)
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


class Counter(Callback):
    def __init__(self, event: str) -> None:
        self.count, self.restored = 0, 0
        setattr(self, f"on_{event}", self.look)

    def look(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = self.restored = state["count"]


def test_b28_two_callbacks_of_one_class_keep_their_states(tmp_path: Path) -> None:
    counters = [Counter("batch_end"), Counter("epoch_end")]
    found = trainer(max_epochs=2, callbacks=counters)
    found.fit(Scalar(), ones(3))
    sizes = []
    for name in ("one", "two"):
        found.save_state(tmp_path / name)
        sizes.append((tmp_path / name / "state.json").stat().st_size)
    assert sizes[0] == sizes[1]
    again = [Counter("batch_end"), Counter("epoch_end")]
    leg(Scalar(), ones(3), max_epochs=2, callbacks=again, resume_from=tmp_path / "two")
    assert [each.restored for each in again] == [6, 2]


def test_b92_the_step_is_right_on_the_second_resume(tmp_path: Path) -> None:
    paths = [tmp_path / "step-5", tmp_path / "step-9"]
    leg(Scalar(), ones(12), callbacks=saving(paths[0], step=5))
    leg(Scalar(), ones(12), callbacks=saving(paths[1], step=9), resume_from=paths[0])
    begun = []
    leg(
        Scalar(), ones(12), callbacks=Watch(fit_start=lambda trainer, task: begun.append(trainer.state.step)),
        resume_from=paths[1],
    )  # fmt: skip
    assert begun == [9]
    assert open_checkpoint(paths[1]).manifest.progress["step"] == 9


def test_b94_the_logged_epoch_goes_on(tmp_path: Path) -> None:
    class Logged(Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("loss", 1.0)
            return super().training_step(batch, batch_idx)

    path, memory = tmp_path / "saved", MemoryTracker()
    leg(Logged(), ones(10), callbacks=saving(path, step=5))
    leg(Logged(), ones(10), trackers=memory, log_every=1, resume_from=path)
    epochs = dict(memory.runs[0].series("epoch"))
    assert (epochs[6], epochs[10]) == (0.6, 1.0)


def test_b95_a_save_in_an_open_window_waits_for_its_end(tmp_path: Path) -> None:
    path, whole, resumed = tmp_path / "saved", Seen(), Seen()
    leg(whole, ids(8), accumulate=4)
    leg(Seen(), ids(8), accumulate=4, callbacks=saving(path, batch=2))
    assert open_checkpoint(path).manifest.progress["micro_step"] == 4
    leg(resumed, ids(8), accumulate=4, resume_from=path)
    assert resumed.seen == [[4], [5], [6], [7]]
    assert torch.equal(whole.w, resumed.w)


def test_b97_a_larger_limit_counts(tmp_path: Path) -> None:
    first = leg(Scalar(), ones(3), max_epochs=2)
    first.save_state(tmp_path / "saved")
    epochs: list[int] = []
    watch = Watch(epoch_start=lambda trainer, task: epochs.append(trainer.state.epoch))
    found = leg(Scalar(), ones(3), max_epochs=4, callbacks=watch, resume_from=tmp_path / "saved")
    assert (epochs, found.state.step) == ([2, 3], 12)


def test_b98_a_stop_inside_an_epoch_leaves_its_number(tmp_path: Path) -> None:
    path, task, begun = tmp_path / "saved", Seen(), []
    leg(Seen(), ids(20), max_epochs=2, callbacks=saving(path, batch=8))
    watch = Watch(batch_start=lambda trainer, task, batch, index: begun.append((trainer.state.epoch, index)))
    found = leg(task, ids(20), max_epochs=2, callbacks=watch, resume_from=path)
    assert (begun[0], task.seen[0], found.state.micro_step) == ((0, 8), [8], 40)


class FineTuned(Task):
    """A head that trains at once, and a backbone that does from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(1, 1), nn.Linear(1, 1)
        self.backbone.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.backbone(batch[:, None])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.01)


class Unfreezes(Callback):
    def on_epoch_start(self, trainer: Any, task: Any) -> None:
        if trainer.state.epoch == 1 and trainer.state.batch == 0:
            task.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(task.backbone.parameters()), "lr": 0.005})


def test_b100_what_was_unfrozen_goes_on_training(tmp_path: Path) -> None:
    first = leg(FineTuned(), batches(1, 2, 3), max_epochs=2, callbacks=Unfreezes())
    first.save_state(tmp_path / "saved")
    task, before = FineTuned(), open_checkpoint(tmp_path / "saved").weights()["backbone.weight"]
    found = leg(task, batches(1, 2, 3), max_epochs=3, callbacks=Unfreezes(), resume_from=tmp_path / "saved")
    assert len(found.optimizers[0].param_groups) == 2
    assert task.backbone.weight.requires_grad
    assert not torch.equal(task.backbone.weight, before)
