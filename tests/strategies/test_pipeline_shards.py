"""Two pipelines of two processes that keep each layer's weights in parts, against one process on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from loopwright.callbacks.callback import NonFiniteSkip
from loopwright.callbacks.ema import EMA
from loopwright.checkpoint.sharded import local_part
from loopwright.distributed.errors import ConfigError

from .pipelined import GPT, Counted, Records, fit, loader
from .sharded import close
from .test_pipeline import ROWS, pipeline, rank, state_of
from .test_pipeline_copies import train as train_copies
from .test_pipeline_losses import Halved, Tied

Run = Callable[..., list[Any]]
SHARDS = pipeline(shards=2)


def each_of(function: str, cases: list[tuple[Any, ...]]) -> list[Any]:
    return [globals()[function](*case) for case in cases]


def shared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what counts the samples of one pipeline alone."""
    return {name: value for name, value in state.items() if not name.endswith("num_samples")}


def test_numbers_of_one_process_and_checkpoints(four_processes: Run, two_processes: Run, tmp_path: Path) -> None:
    path, one = str(tmp_path / "four"), str(tmp_path / "one")
    records, weights, counters = train_copies("counted", 6, 8, {})
    train_copies("counted", 3, 8, {}, None, one)
    options = {"strategy": SHARDS}
    cases = [("counted", 6, 4, options), ("counted", 3, 4, options, None, path)]
    cases += [("counted", 6, 4, options, path), ("counted", 6, 4, options, one)]
    found = four_processes(each_of, "train_copies", cases, timeout=120)
    for process, (counted, begun, resumed, taken) in enumerate(found):
        assert counted[0].losses == pytest.approx(records.losses, abs=1e-5)
        assert counted[0].validated == pytest.approx(records.validated, abs=1e-5)
        assert counted[0].norms == pytest.approx(records.norms, abs=1e-5)
        assert counted[2] == counters
        assert bool(counted[1]) is (process == 0)
        assert begun[0].losses + resumed[0].losses == counted[0].losses  # bit for bit
        assert taken[0].losses == pytest.approx(counted[0].losses[3:], abs=1e-5)
    whole_run = found[0][0][1]
    close(shared(whole_run), shared(weights))
    close(found[0][2][1], whole_run, 0)
    close(shared(found[0][3][1]), shared(whole_run))
    # Each process has written what it has; another library reads the parts of the first layer, of two processes.
    parts = [load_file(tmp_path / "four" / f"model.part-{index:05}.safetensors") for index in range(4)]
    assert {name.partition(".")[0] for name in (*parts[0], *parts[2])} == {"input", "blocks"}
    words = torch.cat([parts[0]["input.words.weight"], parts[2]["input.words.weight"]])
    assert words.shape == weights["input.words.weight"].shape
    close(shared(train_copies("counted", 6, 8, {}, path)[1]), shared(whole_run))
    for strategy, size in [("pipeline", 8), ("fsdp", 4)]:
        state = two_processes(train_copies, "counted", 6, size, {"strategy": strategy}, path)[0][1]
        close(shared(state), shared(whole_run))


class Whole(Tied):
    """The first layer and the last share a weight, one layer is frozen, and one has a parameter without a dimension."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blocks[1].requires_grad_(False)
        self.norm.factor = nn.Parameter(torch.tensor(0.5))
        self.norm.register_forward_hook(lambda norm, inputs, output: output * (1 + norm.factor))


class Overflowing(GPT):
    """The gradients of the first two layers are infinite in the third step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_due = False
        self.blocks[0].register_forward_hook(self._watch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = self.trainer.state
        self.is_due = state.step + state.skipped_steps == 2
        return super().training_step(batch, batch_idx)

    def _watch(self, block: Any, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * (float("inf") if self.is_due else 1.0))


CASES: dict[str, tuple[Callable[..., GPT], dict[str, Any], float]] = {
    "halved": (Halved, {"schedule": "gpipe"}, 1e-5),
    "interleaved": (Counted, {"schedule": "interleaved_1f1b"}, 1e-5),
    "interleaved_zero_bubble": (Counted, {"schedule": "interleaved_zero_bubble", "microbatches": 4}, 1e-5),
    "whole": (Whole, {"schedule": "zbv_zero_bubble", "microbatches": 4}, 1e-5),
    "bf16": (Counted, {}, 2e-2),
    "fp16": (Overflowing, {}, 1e-2),
}


def train(name: str, size: int, strategy: Any = "single") -> Any:
    make, _, _ = CASES[name]
    task, records = make(seed=1 + rank()), Records()
    trainer = fit(
        task, loader(ROWS, size), loader(20, 4), callbacks=[records], max_steps=5, accumulate=2, clip_norm=0.5,
        val_every="2 steps", strategy=strategy, precision=name if name in ("bf16", "fp16") else "no",
    )  # fmt: skip
    return records, state_of(trainer), trainer.state.skipped_steps


@pytest.mark.slow
def test_each_schedule_and_precision(four_processes: Run) -> None:
    # Five batches of the validation are two for one pipeline, three for the other.
    cases = [(name, 4, pipeline(shards=2, **options)) for name, (_, options, _) in CASES.items()]
    found, *_ = four_processes(each_of, "train", cases, timeout=120)
    for name, (records, state, skipped) in zip(CASES, found, strict=True):
        wanted, weights, wanted_skipped = train(name, 8)
        tolerance = CASES[name][2]
        assert records.losses == pytest.approx(wanted.losses, abs=tolerance), name
        assert records.validated == pytest.approx(wanted.validated, abs=tolerance), name
        close(shared(state), shared(weights), 3 * tolerance)
        assert skipped == wanted_skipped == (name == "fp16")


def _held() -> tuple[int, int, int]:
    """Numbers of weights, gradients and states in this process behind a step, and while a batch is on its way."""
    counts = []

    class Looking(GPT):
        def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
            counts.append(sum(local_part(p).nbytes for p in self.head.parameters()))
            return super().pipeline_loss(output, batch)

    task = Looking(num_blocks=6)
    trainer = fit(task, loader(ROWS, 4), max_steps=2, strategy=SHARDS)
    weights = sum(local_part(p).untyped_storage().nbytes() for p in task.parameters())
    states = trainer.optimizers[0].state.values()
    held = sum(local_part(each).nbytes for values in states for each in values.values() if each.dim())
    return weights, held, max(counts, default=0)


def test_each_process_has_half_of_its_layers(four_processes: Run) -> None:
    every = sum(p.nbytes for p in GPT(num_blocks=6).parameters())
    head = sum(p.nbytes for p in GPT().head.parameters())
    for weights, states, gathered in four_processes(_held):
        assert weights < 0.3 * every
        assert states < 0.3 * 2 * every
        assert gathered in (0, head)


class Uneven(Counted):
    """The second pipeline leaves out a batch in the middle of a window, one at its end, and both of the third window;
    all drop the fourth behind its first batch, and leave out those of the fifth.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 7:
            raise NonFiniteSkip("to drop the step")
        skips = batch_idx in (0, 3, 4, 5) if rank() > 1 else False
        return None if skips or batch_idx in (8, 9) else super().training_step(batch, batch_idx)


class Some(Uneven):
    """The same in one process: half of a batch is the first pipeline's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        kept = batch[0][:4] if batch_idx in (0, 3, 4, 5) else batch[0]
        return super().training_step([kept], batch_idx)


def train_uneven(kind: type[Counted], size: int, strategy: Any = "single") -> Any:
    trainer = fit(kind(), loader(ROWS, size), max_steps=5, accumulate=2, strategy=strategy)
    return state_of(trainer), (trainer.state.step, trainer.state.skipped_steps, trainer.state.batch)


def test_a_pipeline_may_leave_out_batches(four_processes: Run) -> None:
    (found, counters), *_ = four_processes(train_uneven, Uneven, 4, SHARDS)
    wanted, wanted_counters = train_uneven(Some, 8)
    close(shared(found), shared(wanted))
    assert counters == wanted_counters


def averaged(size: int, strategy: Any = "single", resume_from: Any = None, save: Any = None, steps: int = 6) -> Any:
    ema, task = EMA(0.5, start=1), GPT(seed=1 + rank())
    trainer = fit(
        task, loader(ROWS, size), loader(7, 4), resume_from, callbacks=[ema], max_steps=steps, val_every="2 steps",
        strategy=strategy,
    )  # fmt: skip
    with ema.applied_to(task):
        inside = state_of(trainer)
        tested = trainer.validate(task, loader(7, 4))["val/loss"]
    if save is not None:
        trainer.save_state(save)
    return inside, tested, state_of(trainer)


def test_averages_of_parts(four_processes: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "averages")
    wanted, tested, weights = averaged(8)
    cases = [(4, SHARDS), (4, SHARDS, None, path, 3), (4, SHARDS, path)]
    found = four_processes(each_of, "averaged", cases)
    close(shared(found[0][0][0]), shared(wanted))
    close(shared(found[0][0][2]), shared(weights))
    close(found[0][2][0], found[0][0][0], 0)
    assert [direct[1] for direct, _, _ in found] == pytest.approx([tested] * 4, abs=1e-5)
    close(shared(averaged(8, "single", path)[0]), shared(wanted))


def check_eight(pool: Any, folder: Path, size: int, strategy: dict[str, Any]) -> None:
    """See that eight processes have the numbers of one, resume bit for bit, and go on in one."""
    path, options = str(folder / "eight"), {"strategy": strategy}
    records, weights, _ = train_copies("counted", 6, 8, {})
    cases = [("counted", 6, size, options), ("counted", 3, size, options, None, path)]
    cases += [("counted", 6, size, options, path)]
    for counted, begun, resumed in pool.run(each_of, "train_copies", cases, folder=folder, timeout=300):
        assert counted[0].losses == pytest.approx(records.losses, abs=1e-5)
        assert counted[0].norms == pytest.approx(records.norms, abs=1e-5)
        assert begun[0].losses + resumed[0].losses == counted[0].losses
        if counted[1]:
            close(shared(counted[1]), shared(weights))
    pool.close()
    close(shared(train_copies("counted", 6, 8, {}, path)[1]), shared(weights))


@pytest.mark.slow
def test_copies_of_pipelines_in_parts(worker_pools: Callable[[int], Any], tmp_path: Path) -> None:
    check_eight(worker_pools(8), tmp_path, 2, pipeline(copies=2, shards=2))


def _refused() -> None:
    class Mixed(GPT):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.blocks[0].inner.half()
            self.blocks[3].inner.half()

    with pytest.raises(
        ConfigError, match=r"of the unit Block have several number formats: torch\.float16, torch\.float"
    ):
        fit(Mixed(), loader(16, 4), max_steps=1, strategy=SHARDS)


def test_what_cannot_be_spread_is_refused(four_processes: Run) -> None:
    four_processes(_refused)


def _too_many() -> None:
    with pytest.raises(ConfigError, match=r"PipelineStrategy\(shards=2\) with 2 processes. Expected a multiple"):
        fit(GPT(), loader(16, 8), max_steps=1, strategy=SHARDS)


def test_shards_that_do_not_divide_the_processes(two_processes: Run) -> None:
    two_processes(_too_many)
