"""Tensor parallelism under the Trainer: layers cut over processes, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from loopwright.callbacks.callback import Callback
from loopwright.checkpoint.sharded import local_part
from loopwright.distributed.errors import ConfigError, DataError
from loopwright.strategies.fsdp import FSDPStrategy
from loopwright.strategies.tensor_parallel import check_divides, find_plan
from loopwright.trainer.accelerator import Accelerator

from .sharded import Records, Words, close, fit, loader, make, state_of, words
from .test_fsdp_callbacks import _average, _monitored
from .test_fsdp_trainer import _gaps

Run = Callable[..., list[Any]]

PLAN = {
    "embedding": "embedding_rowwise",
    "layers.*.inner": "colwise",
    "layers.*.outer": "rowwise",
    "head": "colwise_gather",
}
TENSOR = {"name": "fsdp", "mesh": {"tensor": 2}, "tensor_plan": PLAN}


def _train(batch_size: int, options: dict[str, Any], kind: str = "adamw", num_layers: int = 3, count: int = 50) -> Any:
    # Process 0's weights count: the others begin with other numbers.
    index = dist.get_rank() if dist.is_initialized() else 0
    task, records = make(1 + index, kind=kind, num_layers=num_layers), Records()
    trainer = fit(task, loader(count, batch_size), loader(9, 3), callbacks=[records], **options)
    shapes = {name: tuple(p.to_local().shape) for name, p in task.named_parameters() if hasattr(p, "to_local")}
    counters = trainer.state.samples, trainer.state.tokens, trainer.state.step
    return records.losses, dict(trainer.metrics), state_of(trainer), counters, shapes


def test_numbers_of_one_process(two_processes: Run) -> None:
    # 50 samples: the last batch is short, and is not completed, since there is one share of the data.
    options = {"max_epochs": 2, "accumulate": 2, "clip_norm": 0.5, "clip_value": 0.05, "val_every": 3}
    losses, metrics, weights, counters, _ = _train(8, options)
    found = two_processes(_train, 8, options | {"strategy": TENSOR})
    assert len(losses) == 8
    for own_losses, own_metrics, _, own_counters, _ in found:
        assert own_losses == pytest.approx(losses, abs=1e-5)
        assert own_metrics == pytest.approx(metrics, abs=1e-5)
        assert own_counters == counters
    close(found[0][2], weights)
    shapes = [each[4] for each in found]
    assert [each["embedding.weight"] for each in shapes] == [(6, 8), (5, 8)]
    assert [each["layers.0.inner.weight"] for each in shapes] == [(12, 8)] * 2
    assert [each["layers.0.outer.weight"] for each in shapes] == [(8, 12)] * 2


def _train_each(cases: list[dict[str, Any]]) -> list[Any]:
    return [_train(10, {"strategy": TENSOR | options}, "sgd", 2)[2] for options in cases]


OPTIONS: list[dict[str, Any]] = [
    {"wrap": "none", "reshard_after_forward": False, "mesh": {"tensor": 2, "shard": 1}},
    {"activation_checkpointing": True, "prefetch": 1, "tensor_plan": {"layers.[01].inner": "colwise_gather"}},
    {"cpu_offload": True, "ignored_modules": [r"layers\.\d\.norm"]},
]


def test_options_change_no_number(two_processes: Run) -> None:
    weights = _train(10, {}, "sgd", 2)[2]
    for found in two_processes(_train_each, OPTIONS)[0]:
        close(found, weights)


SEQUENCES = {
    "embedding": "sequence_split",
    "layers.*.norm": "sequence",
    "layers.*.inner": "sequence_colwise",
    "layers.*.outer": "sequence_rowwise",
    "layers.1": "sequence_gather",
}


class Even(Words):
    """Tells words again, so that sequences are as long as they come: 6."""

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten(), ignore_index=0, reduction="sum")
        return loss, (batch[0] != 0).sum()


def _cut_sequences(cls: type[Words], **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return state_of(fit(cls(2, "sgd"), loader(48, 8), clip_norm=0.5, **options))


def _refused() -> str:
    with pytest.raises(DataError, match="sequences of 5 can't be cut into 2 equal parts after Embedding") as caught:
        _cut_sequences(Words, strategy=TENSOR | {"wrap": "none", "tensor_plan": SEQUENCES})
    return str(caught.value)


def test_parts_of_sequences_between_layers(two_processes: Run) -> None:
    wanted = _cut_sequences(Even)
    # A block that gives its outputs whole can't be a unit of its own.
    options = {"wrap": "none", "tensor_plan": SEQUENCES}
    close(two_processes(_cut_each, options)[0], wanted)


def _cut_each(options: dict[str, Any]) -> dict[str, Tensor]:
    return _cut_sequences(Even, strategy=TENSOR | options)


class Normed(Even):
    """With a norm behind the layers, which gives their outputs whole."""

    def __init__(self, num_layers: int, kind: str) -> None:
        super().__init__(num_layers, kind)
        self.norm = nn.LayerNorm(8)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.layers(self.embedding(words)))) * self.scale
        return logits


def _gather_at_the_norm() -> dict[str, Tensor]:
    plan = {name: word for name, word in SEQUENCES.items() if name != "layers.1"} | {"norm": "sequence_gather"}
    return _cut_sequences(Normed, strategy=TENSOR | {"wrap": "Layer", "tensor_plan": plan})


def test_a_norm_that_puts_sequences_together(two_processes: Run) -> None:
    wanted = _cut_sequences(Normed)
    for found in two_processes(_gather_at_the_norm):
        close(found or wanted, wanted)


def test_sequences_of_odd_length(two_processes: Run) -> None:
    two_processes(_refused)


def test_batches_without_a_loss(two_processes: Run) -> None:
    # Peers have the same batches, and so leave the same ones out.
    gaps = "..lesnb."
    wanted = _gaps([gaps], 6, {"accumulate": 2})
    close(two_processes(_gaps, [gaps, gaps], 6, {"strategy": TENSOR, "accumulate": 2})[0], wanted)


def test_averages(two_processes: Run) -> None:
    averages, metrics, weights, inside, watched, _ = _average(8, "one", {})
    for found in two_processes(_average, 8, "cut", {"strategy": TENSOR}):
        close(found[0], averages)
        assert found[4] == watched
        assert found[1] == pytest.approx(metrics, abs=1e-5)
        if found[2]:
            close(found[2], weights)
            close(found[3], inside)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_and_summary(two_processes: Run, norm_type: float) -> None:
    wanted, table = _monitored(8, norm_type, {"accumulate": 2})
    for found, shown in two_processes(_monitored, 8, norm_type, {"accumulate": 2, "strategy": TENSOR}):
        assert shown == table
        for mine, whole_one in zip(found, wanted, strict=True):
            assert mine == pytest.approx(whole_one, abs=1e-5)


class Dropping(Words):
    """With dropout between the layers, sums of what it logs, and predictions."""

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(F.dropout(self.layers(F.dropout(self.embedding(words))), 0.3)) * self.scale
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, count = self.loss(batch)
        self.log("samples", float(len(batch[0])), reduce="sum", on_step=False, on_epoch=True)
        self.log("longest", loss / count, reduce="max", on_step=False, on_epoch=True)
        return loss, count

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows: Tensor = batch[0][:, 0]
        return rows


def _dropped(options: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    task = Dropping()
    trainer = fit(task, DataLoader(words(50), batch_size=8, shuffle=True), max_epochs=2, **options)
    samples = trainer.metrics["samples"]
    whole = [local_part(layer.norm.weight.detach()).clone() for layer in task.layers]
    predicted = trainer.predict(task, loader(9, 2))
    written: list[int] = []
    trainer.predict(task, loader(9, 2), writer=lambda outputs, batch, index: written.append(index))
    return samples, whole, torch.cat(predicted).tolist(), written


def test_what_is_not_cut_stays_the_same_in_each(two_processes: Run) -> None:
    samples, _, predicted, written = _dropped({})
    assert (samples, written) == (50, [0, 1, 2, 3, 4])
    first, second = two_processes(_dropped, {"strategy": TENSOR, "seed": 3})
    # Of each batch both compute with the same dropout: the weights that both have whole don't part.
    torch.testing.assert_close(first[1], second[1], atol=0, rtol=0)
    assert first[0] == second[0] == samples
    assert first[2] == second[2] == predicted
    assert (first[3], second[3]) == (written, [])


class Stops(Callback):
    """Saves behind a step in the middle of the epoch, and stops there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_step(self, trainer: Any, task: Any, outcome: Any) -> None:
        if trainer.state.step == 3:
            trainer.save_state(self.path)
            trainer.stop("saved")


def _summed(path: str, options: dict[str, Any], resumes: bool, batch_size: int = 8) -> Any:
    torch.manual_seed(1)
    callbacks = [] if resumes else [Stops(path)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the resumed run can't be equal bit for bit")
        data, begin = loader(48, batch_size), path if resumes else None
        trainer = fit(Dropping(), data, callbacks=callbacks, resume_from=begin, **options)
    return trainer.metrics["samples"] if resumes else None


def test_sums_of_an_epoch_that_goes_on_under_another_mesh(two_processes: Run, tmp_path: Path) -> None:
    two_processes(_summed, "cut", {"strategy": TENSOR}, False)
    path = str(tmp_path / "cut")
    assert _summed(path, {}, True) == 48
    assert two_processes(_summed, path, {"strategy": TENSOR}, True) == [48, 48]
    assert two_processes(_summed, path, {"strategy": "fsdp"}, True, 4) == [48, 48]
    _summed("whole", {}, False)
    assert two_processes(_summed, str(tmp_path / "whole"), {"strategy": TENSOR}, True) == [48, 48]


class Measured(Words):
    """With objects of torchmetrics, which add up over the processes themselves."""

    def __init__(self) -> None:
        super().__init__(1, "sgd")
        self.rows, self.first = SumMetric(), MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows.update(len(batch[0]))
        self.first.update(batch[0][:, 0].float())
        self.loss(batch)
        self.log_dict({"rows": self.rows, "first": self.first})


def _measured(options: dict[str, Any]) -> dict[str, float]:
    task = Measured()
    trainer = fit(task, loader(8, 8), **options)
    return trainer.validate(task, loader(9, 2))


def test_objects_of_torchmetrics(two_processes: Run) -> None:
    wanted = _measured({})
    assert wanted["rows"] == 9
    strategy = TENSOR | {"tensor_plan": {"layers.0.inner": "colwise_gather"}}
    assert two_processes(_measured, {"strategy": strategy}) == [pytest.approx(wanted)] * 2


def _texts() -> list[str]:
    cases: list[dict[str, Any]] = [
        {"tensor_plan": {"layers.*.innner": "colwise"}},
        {"tensor_plan": {"layers.*": "colwise"}},
        {"tensor_plan": {"embedding": "embedding_rowwise"}},
        {"tensor_plan": {"layers.*.inner": "colwise"}, "wrap": "Linear"},
        {"tensor_plan": {"layers.1.inner": "colwise"}, "ignored_modules": [r"layers\.1"]},
        {"mesh": None},
        {"tensor_plan": None},
        {"mesh": {"tensor": 3}},
        {"mesh": {"context": 2}, "tensor_plan": None},
    ]
    found = []
    for options in cases:
        with pytest.raises(ConfigError, match=" ") as caught:
            fit(make(), loader(8, 4), strategy=TENSOR | options)
        found.append(str(caught.value))
    return found


def test_what_is_refused(two_processes: Run) -> None:
    wanted = [
        "tensor_plan: Words has no module 'layers.*.innner'. Did you mean 'layers.*.inner'? It holds embedding, ",
        "tensor_plan: layers.0 is a Layer, which 'colwise' can't cut: it is for Linear and Embedding",
        "Embedding and Linear share weight, and the tensor plan cuts it in different ways",
        "a Linear is in the tensor plan, and a unit of its own by wrap",
        "ignored_modules leaves a Linear whole, and the tensor plan cuts it",
        "tensor_plan was given for Words, but no mesh was",
        "Words has no plan of its own (tp_plan), and none was given",
        "a mesh of tensor 3 needs a multiple of 3 processes, and there are 2",
        "a mesh of context 2 on the CPU: torch cuts attention over sequences on accelerators alone. Use mesh={'sequ",
    ]
    for texts in two_processes(_texts):
        for text, begin in zip(texts, wanted, strict=True):
            assert text.startswith(begin), text


def test_one_process_is_no_mesh_of_two() -> None:
    with pytest.raises(ConfigError, match="a mesh of tensor 2 needs a multiple of 2 processes, and there are 1"):
        fit(make(), loader(8, 4), strategy=TENSOR, devices=1)
    model = make()
    with pytest.raises(ConfigError, match="a mesh of tensor 2 needs a multiple of 2 processes, and there are 1"):
        Accelerator(strategy=TENSOR).prepare(model, model.configure_optimizers())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mesh": {"tensr": 2}}, "'tensr' is unknown. Did you mean 'tensor'"),
        ({"mesh": {"tensor": 0}}, "mesh.tensor=0. Expected an integer >= 1"),
        ({"mesh": [2]}, r"mesh=\[2\]\). Expected two sizes"),
        ({"tensor_plan": ["a"]}, "Expected a mapping of modules' names to styles"),
        ({"tensor_plan": {"a": "columnwise"}}, "'columnwise' is unknown. Did you mean 'colwise'"),
        ({"tensor_plan": {"a": 3}}, r"\['a'\]=3. Expected a word or one of torch's ParallelStyle"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FSDPStrategy(**options)


def _mixed(precision: str) -> tuple[list[float], int, list[Tensor]]:
    task, records = make(1), Records()
    trainer = fit(task, loader(48, 6), precision=precision, strategy=TENSOR, clip_norm=0.5, callbacks=[records])
    whole = [local_part(layer.norm.weight.detach()).clone() for layer in task.layers]
    return records.losses, trainer.state.skipped_steps, whole


@pytest.mark.parametrize(("precision", "num_skipped"), [("bf16", 0), ("fp16", 1)])
def test_mixed_precision(two_processes: Run, precision: str, num_skipped: int) -> None:
    # The scale of fp16 begins too high: the first step is dropped on both processes.
    first, second = two_processes(_mixed, precision)
    assert first[:2] == second[:2]
    torch.testing.assert_close(first[2], second[2], atol=0, rtol=0)
    losses, skipped, _ = first
    assert (len(losses), skipped) == (8 - num_skipped, num_skipped)
    batch = words(48).tensors[0][6 * num_skipped : 6 * num_skipped + 6]
    loss, count = make(1).loss([batch])
    assert losses[0] == pytest.approx((loss / count).item(), abs=0.05)
    assert losses[0] != pytest.approx((loss / count).item(), abs=1e-6)


def test_layers_of_which_a_process_would_have_nothing() -> None:
    check_divides(find_plan(make(), {"embedding": "embedding_rowwise", "layers.*.inner": "colwise"}), 4)  # 3, 3, 3, 2
    with pytest.raises(ConfigError, match="a dimension of 11, which gives 6 parts for 8 processes"):
        check_divides(find_plan(make(), {"embedding": "embedding_rowwise"}), 8)
    with pytest.raises(ConfigError, match="a dimension of 8, which gives 8 parts for 9 processes"):
        check_divides(find_plan(make(), {"embedding": "colwise"}), 9)
