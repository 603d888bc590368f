"""A pipeline of two places whose layers are cut over two processes each, against one process on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopwright.checkpoint.sharded import local_part
from loopwright.distributed.errors import ConfigError, DistributedError
from loopwright.strategies.pipeline import PipelineStrategy

from .pipelined import GPT, fit, loader
from .sharded import close
from .test_pipeline import ROWS, pipeline, rank
from .test_pipeline_copies import train as train_copies
from .test_pipeline_losses import Tied
from .test_pipeline_shards import CASES, averaged, check_eight, each_of, train

Run = Callable[..., list[Any]]
PLAN = {"blocks.*.inner": "colwise", "blocks.*.outer": "rowwise", "head": "colwise_gather"}
CUT = {"tensor": 2, "tensor_plan": PLAN}
CHOSEN = ["interleaved_zero_bubble", "fp16"]


@pytest.mark.slow
def test_numbers_of_one_process(four_processes: Run) -> None:
    cases = [(name, 8, pipeline(**CUT, **CASES[name][1])) for name in CHOSEN]
    found = four_processes(each_of, "train", cases, timeout=120)
    for index, name in enumerate(CHOSEN):
        wanted, weights, wanted_skipped = train(name, 8)
        tolerance = CASES[name][2]
        for process, each in enumerate(found):
            records, state, skipped = each[index]
            assert records.losses == pytest.approx(wanted.losses, abs=tolerance), name
            assert records.validated == pytest.approx(wanted.validated, abs=tolerance), name
            assert records.norms == pytest.approx(wanted.norms, abs=tolerance), name
            assert skipped == wanted_skipped
            if process == 0:
                close(state, weights, 3 * tolerance)


@pytest.mark.slow
def test_checkpoints_and_averages(four_processes: Run, two_processes: Run, tmp_path: Path) -> None:
    path, one = str(tmp_path / "four"), str(tmp_path / "one")
    _, weights, counters = train_copies("counted", 6, 8, {})
    train_copies("counted", 3, 8, {}, None, one)
    options = {"strategy": pipeline(**CUT)}
    cases = [("counted", 6, 8, options), ("counted", 3, 8, options, None, path)]
    cases += [("counted", 6, 8, options, path), ("counted", 6, 8, options, one)]
    for counted, begun, resumed, taken in four_processes(each_of, "train_copies", cases, timeout=120):
        assert counted[2] == counters
        assert begun[0].losses + resumed[0].losses == counted[0].losses  # bit for bit
        if counted[1]:
            close(counted[1], weights)
            close(resumed[1], counted[1], 0)
            close(taken[1], counted[1])
    close(train_copies("counted", 6, 8, {}, path)[1], weights)
    close(two_processes(train_copies, "counted", 6, 8, {"strategy": "pipeline"}, path)[0][1], weights)
    wanted, _, _ = averaged(8)
    path = str(tmp_path / "averages")
    found = four_processes(each_of, "averaged", [(8, pipeline(**CUT), None, path, 3), (8, pipeline(**CUT), path)])
    close(found[0][1][0], wanted)
    close(averaged(8, "single", path)[0], wanted)


@pytest.mark.slow
def test_pipelines_of_parts_whose_layers_are_cut(worker_pools: Callable[[int], Any], tmp_path: Path) -> None:
    check_eight(worker_pools(8), tmp_path, 4, pipeline(shards=2, **CUT))


def _held() -> dict[str, int]:
    """The numbers that this process has of each parameter."""
    task = GPT()
    fit(task, loader(ROWS, 8), max_steps=1, strategy=pipeline(**CUT))
    return {name: int(local_part(p).untyped_storage().nbytes()) // 4 for name, p in task.named_parameters()}


def test_each_process_has_its_part_of_its_layers(four_processes: Run) -> None:
    whole = {name: p.numel() for name, p in GPT().named_parameters()}
    first, second, third, fourth = four_processes(_held)
    for name, count in whole.items():
        is_first = not name.startswith(("blocks.2", "blocks.3", "norm", "head"))
        own, other = ((first, second), (third, fourth)) if is_first else ((third, fourth), (first, second))
        assert [each[name] for each in other] == [1, 1]
        is_cut = name.rpartition(".")[0].endswith(("inner", "outer", "head")) and not name.endswith("outer.bias")
        parts = [each[name] for each in own]
        assert (sum(parts) == count and max(parts) < 0.6 * count) if is_cut else parts == [count, count], name


class Alone(GPT):
    """The second process of the first place leaves a batch out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 0 and rank() == 1 else super().training_step(batch, batch_idx)


def _refused(name: str) -> None:
    kinds: dict[str, tuple[type[GPT], dict[str, Any], type[Exception], str]] = {
        "alone": (Alone, CUT, DistributedError, "a batch was left out on process 1 alone"),
        "plan": (GPT, {"tensor": 2}, ConfigError, r"GPT has no plan of its own \(tp_plan\), and none was given"),
        "tied": (
            Tied,
            CUT | {"schedule": "zbv_zero_bubble"},
            ConfigError,
            "tensor_plan cuts a layer, Linear, whose",
        ),
    }
    kind, options, error, message = kinds[name]
    with pytest.raises(error, match=message):
        fit(kind(), loader(16, 8), max_steps=2, accumulate=2, strategy=pipeline(**options))


@pytest.mark.parametrize("name", ["alone", "plan", "tied"])
def test_what_cannot_be_is_refused_on_all_processes(four_processes: Run, name: str) -> None:
    four_processes(_refused, name)


def test_a_plan_without_a_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"PipelineStrategy\(tensor_plan=...\) without tensor"):
        PipelineStrategy(tensor_plan=PLAN)
