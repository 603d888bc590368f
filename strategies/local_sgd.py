"""`LocalSGD`: each process steps alone, and the weights are averaged now and then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from ..distributed.errors import ConfigError, check_boolean, check_integer
from .averaging import average

if TYPE_CHECKING:
    from .strategy import Strategy


class _Owner(Protocol):
    """What this asks of an `Accelerator`."""

    strategy: Strategy

    @property
    def num_processes(self) -> int: ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]: ...

    def unwrap_model(self, model: nn.Module) -> nn.Module: ...


class LocalSGD:
    """A context of training in which gradients stay in their process and weights are averaged every few steps.

    Buffers and the state of optimizers are not averaged. On leaving, the weights are averaged once more, so that all
    processes go on with the same; not after an exception, when others may not arrive. In one process it does nothing.

    ```python
    with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        for batch in loader:
            ...
            optimizer.step()
            local_sgd.step()
    ```

    Args:
        accelerator: the one that prepared the model.
        model: the prepared model.
        local_sgd_steps: calls of `step` from one averaging to the next.
        enabled: False trains as without this.
    Raises:
        ConfigError: an argument can't be used, or each process has a part of the weights alone.
    """

    def __init__(self, accelerator: _Owner, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        check_integer("LocalSGD(local_sgd_steps)", local_sgd_steps, 1, "It counts calls of step().")
        check_boolean("LocalSGD(enabled)", enabled)
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        if self.enabled and not accelerator.strategy.can_save_alone:
            name = type(accelerator.strategy).__name__
            raise ConfigError(
                f"LocalSGD lets the weights of processes differ for some steps, and with {name} each process has "
                "a part of the weights alone. Use strategy='ddp'."
            )
        self.num_steps = 0
        """Calls of `step` so far."""
        self._no_sync: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._no_sync is None:
            return
        self._no_sync.__exit__(kind, error, traceback)
        self._no_sync = None
        if error is None:
            self._average()

    def step(self) -> None:
        """Count an optimizer step, and average the weights when that is due. Collective then."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        average(self.accelerator.unwrap_model(self.model).parameters(), "averaging of weights (LocalSGD)")
