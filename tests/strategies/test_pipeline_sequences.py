"""Two pipelines of two processes that have parts of the same sequences, against one process on whole ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.meshes import MeshSizes
from loopwright.strategies.pipeline import PipelineStrategy
from loopwright.strategies.pipeline_groups import pipeline_share

from .pipelined import GPT, WIDTH, Block, Input, Records, fit, loader
from .sharded import close
from .test_pipeline import ROWS, pipeline, rank, state_of
from .test_pipeline_shards import shared

Run = Callable[..., list[Any]]
NOTHING = -100


class Placed(Input):
    """Takes words with their positions."""

    def forward(self, pairs: Tensor) -> Tensor:
        found: Tensor = self.words(pairs[..., 0]) + self.places(pairs[..., 1])
        return found


class Headed(Block):
    """Attention of two heads."""

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            self.attention(self.first(x)).unflatten(-1, (3, 2, WIDTH // 2)).transpose(1, 3).unbind(2)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2).flatten(2)
        x = x + mixed
        found: Tensor = x + self.outer(F.gelu(self.inner(self.second(x))))
        return found


class Whole(GPT):
    """Predicts the next word but for the last; the second half of each sequence has fewer that count."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(11)
        self.input = Placed()
        self.blocks = nn.ModuleList(Headed() for _ in range(4))

    def pipeline_input(self, batch: Any) -> Tensor:
        return torch.stack(batch[:2], -1)

    def pipeline_loss(self, output: Tensor, batch: Any) -> Any:
        targets = batch[2]
        loss = F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=NOTHING, reduction="sum")
        return loss, (targets != NOTHING).sum()

    def run_pipeline(self, batch: Any) -> Any:
        words = batch[0]
        targets = words.roll(-1, 1)
        targets[:, -1] = NOTHING
        buffers = [words.clone(), torch.arange(words.shape[1]).expand_as(words).contiguous(), targets]
        if self.trainer.process.num_processes == 1:
            return super().run_pipeline(buffers)
        context = self.trainer.accelerator.maybe_context_parallel
        with context(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers={*buffers}):
            return super().run_pipeline(buffers)


def train(steps: int, size: int, strategy: Any = "single", resume_from: Any = None, save: Any = None) -> Any:
    task, records = Whole(seed=1 + rank()), Records()
    trainer = fit(
        task, loader(ROWS, size), loader(7, 4), resume_from, callbacks=[records], max_steps=steps, accumulate=2,
        clip_norm=0.5, val_every="3 steps", strategy=strategy,
    )  # fmt: skip
    if save is not None:
        trainer.save_state(save)
    return records, state_of(trainer), (trainer.state.samples, trainer.state.step)


def each_of_these(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train(*case) for case in cases]


@pytest.mark.slow
def test_numbers_of_one_process(four_processes: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "four")
    wanted, weights, counters = train(6, 8)
    parts = pipeline(sequence=2)
    cases = [(6, 8, parts), (3, 8, parts, None, path), (6, 8, parts, path)]
    cases += [(6, 8, pipeline(sequence=2, schedule="interleaved_1f1b"))]
    for direct, begun, resumed, interleaved in four_processes(each_of_these, cases, timeout=120):
        for records, state, found in (direct, interleaved):
            assert records.losses == pytest.approx(wanted.losses, abs=1e-5)
            assert records.validated == pytest.approx(wanted.validated, abs=1e-5)
            assert records.norms == pytest.approx(wanted.norms, abs=1e-5)
            assert found == counters
            if state:
                close(shared(state), shared(weights))
        assert begun[0].losses + resumed[0].losses == direct[0].losses  # bit for bit
    close(shared(train(6, 8, "single", path)[1]), shared(weights))


@pytest.mark.slow
def test_beside_parts_of_weights_and_layers(worker_pools: Callable[[int], Any], tmp_path: Path) -> None:
    wanted, weights, counters = train(6, 8)
    plan = {"blocks.*.inner": "colwise", "blocks.*.outer": "rowwise"}
    cases = [(6, 4, pipeline(sequence=2, shards=2)), (6, 4, pipeline(sequence=2, copies=2))]
    cases += [(6, 8, pipeline(sequence=2, tensor=2, tensor_plan=plan))]
    for each in worker_pools(8).run(each_of_these, cases, folder=tmp_path, timeout=300):
        for records, state, found in each:
            assert records.losses == pytest.approx(wanted.losses, abs=1e-5)
            assert records.norms == pytest.approx(wanted.norms, abs=1e-5)
            assert found == counters
            if state:
                close(shared(state), shared(weights))
    worker_pools(8).close()


def test_who_gets_what() -> None:
    # Two shares of the data; of each two parts of the sequences, in pipelines of two.
    shares = [pipeline_share(index, 8, 2, 2) for index in range(8)]
    assert [each.process_index for each in shares] == [0] * 4 + [1] * 4
    assert shares[0].by_batches(range(8)) == range(0, 8, 4)
    assert shares[0].by_losses(range(8)) == range(0, 8, 2)
    assert shares[0].num_losses == 4
    strategy = PipelineStrategy()
    strategy.use_mesh(MeshSizes(replicate=2, shard=3, sequence=5, tensor=4))
    assert (strategy.copies, strategy.shards, strategy.sequence, strategy.tensor) == (2, 3, 5, 4)
    with pytest.raises(ConfigError, match=r"mesh of .*context=2.*Use sequence \(sp_size\)"):
        strategy.use_mesh(MeshSizes(context=2))
    with pytest.raises(ConfigError, match=r"= \(2, 1, 1, 1\), and the run is given MeshSizes\(replicate=3"):
        PipelineStrategy(copies=2).use_mesh(MeshSizes(replicate=3))
