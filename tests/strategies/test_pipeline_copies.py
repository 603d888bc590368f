"""Two pipelines of two processes, side by side with batches of their own, against one process on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loopwright.distributed.errors import ConfigError

from .pipelined import GPT, Counted, Records, fit, loader
from .sharded import close
from .test_pipeline import ROWS, pipeline, rank, state_of

Run = Callable[..., list[Any]]
COPIES = pipeline(copies=2)
OPTIONS = {"accumulate": 2, "clip_norm": 0.5, "val_every": "3 steps"}
KINDS = {"mean": GPT, "counted": Counted}


def train(kind: str, steps: int, size: int, options: dict[str, Any], resume_from: Any = None, save: Any = None) -> Any:
    task, records = KINDS[kind](seed=1 + rank()), Records()
    settings = OPTIONS | {"callbacks": [records], "max_steps": steps} | options
    trainer = fit(task, loader(ROWS, size), loader(7, 4), resume_from, **settings)
    if save is not None:
        trainer.save_state(save)
    return records, state_of(trainer), (trainer.state.samples, trainer.state.tokens)


def _train_each(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [train(*case) for case in cases]


def _without(state: dict[str, Any], ending: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.endswith(ending)}


@pytest.mark.slow
def test_numbers_of_one_process_and_a_resume(four_processes: Run, tmp_path: Any) -> None:
    path, one = str(tmp_path / "four"), str(tmp_path / "one")
    wanted = {kind: train(kind, 6, 8, {}) for kind in KINDS}
    train("counted", 3, 8, {}, None, one)
    cases = [
        ("mean", 6, 4, {"strategy": COPIES}),
        ("counted", 6, 4, {"strategy": COPIES}),
        ("counted", 3, 4, {"strategy": COPIES}, None, path),
        ("counted", 6, 4, {"strategy": COPIES}, path),
        ("counted", 6, 4, {"strategy": COPIES}, one),
    ]
    found = four_processes(_train_each, cases, timeout=120)
    for process, (mean, counted, begun, resumed, taken) in enumerate(found):
        for kind, (records, state, counters) in {"mean": mean, "counted": counted}.items():
            losses = wanted[kind][0]
            assert records.losses == pytest.approx(losses.losses, abs=1e-5)
            assert records.validated == pytest.approx(losses.validated, abs=1e-5)
            assert records.norms == pytest.approx(losses.norms, abs=1e-5)
            assert counters == wanted[kind][2]
            assert bool(state) is (process == 0)
        assert begun[0].losses + resumed[0].losses == counted[0].losses  # bit for bit
        assert taken[0].losses == pytest.approx(counted[0].losses[3:], abs=1e-5)
    counted = found[0][1][1]
    close(found[0][3][1], counted, 0)
    for state, other in [(found[0][0][1], wanted["mean"]), (counted, wanted["counted"]), (found[0][4][1], counted)]:
        weights = other if isinstance(other, dict) else other[1]
        close(_without(state, "num_samples"), _without(weights, "num_samples"))  # of pipeline 0 alone
    records, state, _ = train("counted", 6, 8, {}, path)
    assert records.losses == pytest.approx(wanted["counted"][0].losses[3:], abs=1e-5)
    close(_without(state, "num_samples"), _without(counted, "num_samples"))


class Uneven(Counted):
    """The second pipeline leaves out a batch in the middle of a window and one at its end."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        skips = (batch_idx in (0, 3)) if rank() > 1 else False
        return None if skips else super().training_step(batch, batch_idx)


def _train_uneven() -> Any:
    trainer = fit(Uneven(), loader(ROWS, 4), max_steps=3, accumulate=2, strategy=COPIES)
    return state_of(trainer)


@pytest.mark.slow
def test_a_pipeline_may_leave_out_a_batch(four_processes: Run) -> None:
    class Some(Counted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kept = batch[0][:4] if batch_idx in (0, 3) else batch[0]
            return super().training_step([kept], batch_idx)

    wanted = fit(Some(), loader(ROWS, 8), max_steps=3, accumulate=2)
    found, *_ = four_processes(_train_uneven)
    close(_without(found, "num_samples"), _without(state_of(wanted), "num_samples"))


def _refused(copies: int) -> None:
    with pytest.raises(ConfigError, match=rf"PipelineStrategy\(copies={copies}\) with 2 processes. Expected a mult"):
        fit(GPT(), loader(16, 8), max_steps=1, strategy=pipeline(copies=copies))


@pytest.mark.parametrize("copies", [2, 3])
def test_copies_that_do_not_divide_the_processes(two_processes: Run, copies: int) -> None:
    two_processes(_refused, copies)
