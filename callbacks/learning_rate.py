"""`LearningRateMonitor`: the learning rates of all optimizers, in each record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..distributed.errors import ConfigError, check_boolean
from .callback import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from .view import TaskView, TrainerView


class LearningRateMonitor(Callback):
    """Adds the learning rate to each record, as the next step will use it.

    | the run has | the names are |
    |---|---|
    | one optimizer, one parameter group | `lr` |
    | one optimizer, several groups | `lr/group0`, `lr/group1`, or `lr/NAME` for a group with a `"name"` |
    | several optimizers | `lr/Adam`, `lr/SGD`; a second one of a class is `lr/Adam-1` |
    | both | `lr/Adam/group0`, `lr/Adam/NAME`, ... |

    A group that is added while training gets a name of its own; those that were there keep theirs. It costs nothing
    per step.

    Args:
        momentum: also add `momentum` (for the Adam family the first of the `betas`), named in the same way.
        weight_decay: also add `weight_decay`, named in the same way.
    Raises:
        ConfigError: an argument is neither True nor False.
    """

    provides = ("lr",)
    steers = False

    def __init__(self, *, momentum: bool = False, weight_decay: bool = False) -> None:
        check_boolean("LearningRateMonitor(momentum)", momentum)
        check_boolean("LearningRateMonitor(weight_decay)", weight_decay)
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._prefixes: list[str] = []  # of each optimizer
        self._had_one_group: list[bool] = []
        self._last_step: int | None = None
        self._restored: dict[str, Any] | None = None

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        """Settle the names.

        Raises:
            ConfigError: there is no optimizer.
        """
        if not trainer.optimizers:
            raise ConfigError(
                "LearningRateMonitor found no optimizer. Return one from `configure_optimizers`, "
                "or leave the callback out."
            )
        self._prefixes = _prefixes(trainer.optimizers)
        self._had_one_group = [len(optimizer.param_groups) == 1 for optimizer in trainer.optimizers]
        self._last_step = None
        restored, self._restored = self._restored, None
        if restored is not None:
            self._had_one_group, self._last_step = restored["had_one_group"], restored["last_step"]

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        """Add the rates, once per step."""
        if not self._prefixes or step == self._last_step:  # not a fit; or another record of the same step
            return
        self._last_step = step
        for name, group in self._named_groups(trainer.optimizers):
            metrics["lr" + name] = float(group["lr"])
            if self._momentum and (momentum := _momentum(group)) is not None:
                metrics["momentum" + name] = momentum
            if self._weight_decay and "weight_decay" in group:
                metrics["weight_decay" + name] = float(group["weight_decay"])

    def on_fit_end(self, trainer: TrainerView, task: TaskView) -> None:
        """Records of a later `validate` or `test` have no learning rate."""
        self._prefixes = []

    def state_dict(self) -> dict[str, Any]:
        if not self._had_one_group:
            return {}  # it has seen no run, so that a checkpoint without its state lacks nothing
        return {"had_one_group": list(self._had_one_group), "last_step": self._last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved until the run begins: a step that has its rates gets them in no other record."""
        self._restored = state

    def _named_groups(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
        for prefix, had_one_group, optimizer in zip(self._prefixes, self._had_one_group, optimizers, strict=True):
            for index, group in enumerate(optimizer.param_groups):
                is_alone = had_one_group and index == 0
                yield prefix if is_alone else f"{prefix}/{group.get('name', f'group{index}')}", group


def _prefixes(optimizers: Sequence[Optimizer]) -> list[str]:
    """What follows `lr` in the names of each optimizer: nothing where there is only one."""
    if len(optimizers) == 1:
        return [""]
    seen: dict[str, int] = {}
    prefixes: list[str] = []
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        number = seen[kind] = seen.get(kind, -1) + 1
        prefixes.append(f"/{kind}-{number}" if number else f"/{kind}")
    return prefixes


def _momentum(group: dict[str, Any]) -> float | None:
    if "momentum" in group:
        return float(group["momentum"])
    return float(group["betas"][0]) if "betas" in group else None
