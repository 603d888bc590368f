"""The meeting of the processes of a run, before anything else in it."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed.errors import DistributedError
from ..distributed.exchange import exchange
from .agreement import Agreement
from .metric_exchange import MetricExchange
from .run import Run


def join_others(run: Run, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Let the processes of a run meet, and decide together from now on. Collective.

    Args:
        run: of this process.
        facts: what this process knows of it.
    Returns:
        The facts of all processes, process 0 first.
    Raises:
        DistributedError: they don't run the same.
    """
    metrics = run.training_log.exchange = MetricExchange(run.strategy.data_share)
    metrics.see("", 1)
    run.agreement = Agreement(run, metrics)
    own = {"stage": run.state.stage, "task": type(run.task).__name__, "seed": torch.initial_seed()}
    found: list[dict[str, Any]] = exchange(facts | own)
    for key in ("stage", "task"):
        values = [each[key] for each in found]
        if len(set(values)) > 1:
            shown = ", ".join(f"process {index}: {value}" for index, value in enumerate(values))
            raise DistributedError(
                f"the processes don't run the same {key} ({shown}). All of them have to call the Trainer's methods "
                "in the same order: not under `if trainer.process.is_main_process`."
            )
    run.agreement.seed = found[0]["seed"]
    return found
