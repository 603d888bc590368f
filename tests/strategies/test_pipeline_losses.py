"""Losses of a pipeline that weigh by counts or by a factor, in fp32, bf16 and fp16, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from loopwright.trainer.trainer import Trainer

from .pipelined import GPT, Counted, Records, fit, loader
from .sharded import close
from .test_pipeline import ROWS, pipeline, rank, state_of

Run = Callable[..., list[Any]]


class Halved(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx) * 0.5}


class Paired(GPT):
    """Weighs by samples, of which the last batch has fewer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        size = len(batch[0])
        return super().training_step(batch, batch_idx) * size, size


class Tied(Counted):
    """The first layer and the last share a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head.weight = self.input.words.weight


class Overflowing(GPT):
    """A gradient of one stage is infinite in the third step."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**options)
        self.is_due = False
        dict(self.named_parameters())[name].register_hook(self._overflow)  # type: ignore[no-untyped-call]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = self.trainer.state
        self.is_due = state.step + state.skipped_steps == 2
        return super().training_step(batch, batch_idx)

    def _overflow(self, gradient: Tensor) -> Tensor:
        return gradient * (float("inf") if self.is_due else 1.0)


def overflowing(name: str) -> Callable[..., GPT]:
    return lambda **options: Overflowing(name, **options)


def train(make: Callable[..., GPT], size: int, options: dict[str, Any]) -> tuple[Records, dict[str, Tensor], Trainer]:
    task, records = make(seed=1 + rank()), Records()
    settings = {
        "callbacks": [records],
        "max_steps": 8,
        "accumulate": 2,
        "clip_norm": 0.5,
        "val_every": "4 steps",
    } | options
    trainer = fit(task, loader(ROWS - 3, size), loader(7, 4), **settings)
    return records, state_of(trainer), trainer


# The last batch has 5 samples, which are cut into more parts than others.
CASES: dict[str, tuple[Callable[..., GPT], dict[str, Any]]] = {
    "counted": (Counted, {}),
    "counted, zero bubble": (Counted, {"schedule": "interleaved_zero_bubble", "microbatches": 4}),
    "halved": (Halved, {}),
    "paired": (Paired, {}),
    "tied": (Tied, {"schedule": "zbv_zero_bubble", "microbatches": 4}),
    "tied, dual": (Tied, {"schedule": "dual_pipe_v", "microbatches": 4}),
}


def _train_each() -> list[Any]:
    found = []
    for make, chosen in CASES.values():
        records, state, trainer = train(make, 8, {"strategy": pipeline(**chosen), "max_steps": None, "max_epochs": 1})
        found.append((records.losses, records.norms, state, trainer.state.tokens))
    return found


def test_weights_of_losses(two_processes: Run) -> None:
    found = two_processes(_train_each, timeout=120)[0]
    for (make, _), (losses, norms, state, tokens) in zip(CASES.values(), found, strict=True):
        records, weights, trainer = train(make, 8, {"max_steps": None, "max_epochs": 1})
        assert losses == pytest.approx(records.losses, abs=1e-5)
        assert norms == pytest.approx(records.norms, abs=1e-5)
        close(state, weights)
        assert tokens == trainer.state.tokens


PRECISIONS: list[tuple[Callable[..., GPT], str]] = [
    (GPT, "bf16"),
    (GPT, "fp16"),
    (overflowing("input.words.weight"), "fp16"),
    (overflowing("head.bias"), "fp16"),
]


def _measure(batch_size: int, accumulate: int, options: dict[str, Any]) -> list[Any]:
    found = []
    for make, precision in PRECISIONS:
        # Not clipped: norms of stages differ from those of the whole in their last bits, which 16 bits may round up.
        chosen = {"precision": precision, "accumulate": accumulate, "max_steps": 5, "clip_norm": None} | options
        records, state, trainer = train(make, batch_size, chosen)
        state = {name: value for name, value in state.items() if not name.endswith("num_samples")}
        scaler = trainer.accelerator.scaler
        scale = None if scaler is None else scaler.get_scale()
        found.append((records.norms, state, trainer.state.skipped_steps, scale))
    return found


def test_mixed_precision_of_the_same_parts(two_processes: Run) -> None:
    # One process that is given the parts as batches computes the same products in 16 bits.
    wanted = _measure(4, 4, {})
    for process, found in enumerate(two_processes(_measure, 8, 2, {"strategy": "pipeline"})):
        for (norms, state, skipped, scale), (own_norms, own, own_skipped, own_scale) in zip(found, wanted, strict=True):
            assert norms == pytest.approx(own_norms, abs=1e-6)
            assert (skipped, scale) == (own_skipped, own_scale)
            if process == 0:
                close(state, own, 1e-6)
    assert [each[2] for each in wanted] == [0, 0, 1, 1]
    exact, _, _ = train(GPT, 8, {"max_steps": 5, "clip_norm": None})
    assert wanted[0][0] != pytest.approx(exact.norms, abs=1e-5)


class Turned(GPT):
    """Its losses weigh a third, and one of its weights is turned in memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[3].inner.weight = nn.Parameter(self.blocks[3].inner.weight.detach().t().contiguous().t())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / 3


def _legs(options: dict[str, Any], path: str) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    found = []
    for steps, resume_from in ((6, None), (3, None), (6, path)):
        records = Records()
        trainer = fit(
            Turned(), loader(ROWS, 8), resume_from=resume_from, callbacks=[records], max_steps=steps, precision="bf16",
            **options,
        )  # fmt: skip
        if steps == 3:
            trainer.save_state(path)
        found.append((records.losses, state_of(trainer)))
    (direct, weights), (begun, _), (resumed, state) = found
    return direct, begun + resumed, weights, state


def test_a_weighted_loss_goes_on_bit_for_bit(two_processes: Run, tmp_path: Any) -> None:
    direct, resumed, weights, state = two_processes(_legs, {"strategy": "pipeline"}, str(tmp_path / "two"))[0]
    assert resumed == direct
    close(state, weights, 0)
    wanted, _, whole, _ = _legs({}, str(tmp_path / "one"))
    assert direct == pytest.approx(wanted, abs=2e-2)
    close(weights, whole, 6e-2)
