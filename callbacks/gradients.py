"""`GradientMonitor`: the norms of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint.finite import tensor_norms
from ..distributed.errors import ConfigError, check_boolean, check_number
from ..distributed.numbers import to_numbers
from ..strategies.optimizer import parameters_of
from .callback import Callback
from .intervals import Interval, IntervalLike

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from .view import TaskView, TrainerView


class GradientMonitor(Callback):
    """Logs the norm of the gradients that the optimizer is about to apply: unscaled, and after clipping.

    Metrics: `grad_norm`, over all parameters of the optimizer; with `per_module` also `grad_norm/MODULE` over each
    module's own parameters, and with `per_parameter` `grad_norm/PARAMETER`. With several optimizers each has its own
    total, `grad_norm/optimizer_0` and so on. Nothing is computed on other steps, and nothing is read from the device
    until the next record, which takes the newest values; so that they belong to its very step, `every` should be the
    Trainer's `log_every` or a multiple of it.

    Args:
        every: how often, in optimizer steps; also `"first"`.
        norm_type: the order of the norm; `math.inf` for the largest magnitude.
        per_module: also log each module.
        per_parameter: also log each parameter.
    Raises:
        ConfigError: an argument can't be used.
    """

    provides = ("grad_norm",)
    steers = False

    def __init__(
        self,
        every: IntervalLike = "50 steps",
        norm_type: float = 2.0,
        *,
        per_module: bool = False,
        per_parameter: bool = False,
    ) -> None:
        interval = Interval.parse(every, unit="steps", option="GradientMonitor(every)")
        if interval.is_never or interval.last or any(duration.unit != "steps" for duration in interval.every):
            raise ConfigError(
                f"GradientMonitor(every={every!r}) has to know beforehand which step is due. Expected optimizer "
                "steps, such as '50 steps', or 'first'."
            )
        check_number("GradientMonitor(norm_type)", norm_type, above=0, hint="math.inf takes the largest magnitude.")
        check_boolean("GradientMonitor(per_module)", per_module)
        check_boolean("GradientMonitor(per_parameter)", per_parameter)
        self._every = [int(duration.amount) for duration in interval.every]
        self._first = interval.first
        self.norm_type = float(norm_type)
        self.per_module = per_module
        self.per_parameter = per_parameter
        self._names: dict[int, str] = {}
        self._newest: dict[str, Tensor] = {}
        self._restored: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        self._names = {id(parameter): name for name, parameter in task.named_parameters()}
        self._newest, self._restored = self._restored, {}

    def on_before_step(self, trainer: TrainerView, task: TaskView, optimizer: Optimizer) -> None:
        step = trainer.state.step + 1  # the one that these gradients will make
        if any(step % every == 0 for every in self._every) or (self._first and step == 1):
            trainer.once_agreed(lambda: self._measure(trainer, optimizer))

    def on_log(self, trainer: TrainerView, task: TaskView, metrics: dict[str, float], step: int) -> None:
        metrics.update(to_numbers(self._newest))
        self._newest = {}

    def state_dict(self) -> dict[str, Any]:
        return {"newest": dict(self._newest)} if self._newest else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Norms that were measured and wait for the next record."""
        self._restored = state["newest"]

    def _total_name(self, trainer: TrainerView, optimizer: Optimizer) -> str:
        if len(trainer.optimizers) == 1:
            return "grad_norm"
        index = next(i for i, other in enumerate(trainer.optimizers) if other is optimizer)
        return f"grad_norm/optimizer_{index}"

    def _measure(self, trainer: TrainerView, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        found = zip(parameters, trainer.gradient_norms(parameters, self.norm_type), strict=True)
        norms = {self._names[id(parameter)]: norm for parameter, norm in found if norm is not None}
        if not norms:
            return
        self._newest[self._total_name(trainer, optimizer)] = self._joint(list(norms.values()))
        if self.per_module:
            modules: dict[str, list[Tensor]] = {}
            for name, norm in norms.items():
                modules.setdefault(name.rpartition(".")[0], []).append(norm)
            self._newest |= {f"grad_norm/{name}": self._joint(parts) for name, parts in modules.items() if name}
        if self.per_parameter:
            self._newest |= {f"grad_norm/{name}": norm for name, norm in norms.items()}

    def _joint(self, norms: list[Tensor]) -> Tensor:
        """The norm of several tensors together, from the norm of each."""
        stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
        return tensor_norms([stacked], self.norm_type)[0]
