"""What a callback may read and call on the Trainer and the Task: said here, kept by `trainer/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..distributed.process import ProcessState
    from ..distributed.shares import DataShare
    from .callback import Callback
    from .ledger import Cost
    from .limits import Limits
    from .state import RunState


class TaskView(Protocol):
    """The task, as callbacks see it: a module that can log."""

    training: bool
    automatic_optimization: bool

    def log(self, name: str, value: Any, **options: Any) -> None: ...

    def parameters(self, recurse: bool = True) -> Any: ...

    def named_parameters(self) -> Any: ...

    def named_modules(self) -> Any: ...

    def modules(self) -> Any: ...

    def children(self) -> Any: ...


class TrainerView(Protocol):
    """The trainer, as callbacks see it. Attributes are for reading."""

    state: RunState
    """The counters of the run."""
    metrics: dict[str, float]
    """The newest value of each metric, by name, as plain numbers."""
    progress_metrics: dict[str, Any]
    """The newest values that were logged with `progress_bar=True`, on their devices: reading one may wait."""

    @property
    def error(self) -> BaseException | None:
        """The exception that is ending the run, None while all is well."""
        ...

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended or will end, None while it goes on."""
        ...

    @property
    def callbacks(self) -> Sequence[Callback]:
        """All callbacks in the order in which they run."""
        ...

    @property
    def process(self) -> ProcessState:
        """The process this runs in: `is_main_process`, `device`, `num_processes`, ..."""
        ...

    @property
    def data_share(self) -> DataShare:
        """Which share of the data this process gets: along some axes of a mesh, processes get the same."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def model(self) -> nn.Module:
        """The task as the strategy wrapped it."""
        ...

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The torch optimizers of the task, in the order of `configure_optimizers`."""
        ...

    @property
    def schedulers(self) -> Sequence[Any]:
        """The learning-rate schedulers of the training."""
        ...

    @property
    def limits(self) -> Limits:
        """How long the run goes on."""
        ...

    @property
    def run_directory(self) -> Path:
        """Where this run's files go. It may not exist yet: who writes creates it."""
        ...

    @property
    def is_fast_dev_run(self) -> bool: ...

    @property
    def nonfinite_elsewhere(self) -> bool:
        """Whether another process dropped the newest step for a value that is not finite."""
        ...

    @property
    def num_evaluation_batches(self) -> int | None:
        """Batches of the evaluation that runs, None where none does or a loader has no length."""
        ...

    @property
    def has_validation(self) -> bool:
        """Whether the run validates."""
        ...

    @property
    def validation_was_cut(self) -> bool:
        """Whether the newest validation inside the training is not finished; a run that goes on makes up for it."""
        ...

    @property
    def data_wait_seconds(self) -> float:
        """Time that the training has spent waiting for data."""
        ...

    @property
    def training_seconds(self) -> dict[str, float]:
        """The seconds that each part of the training has taken on this process's host, `"other"` for the rest."""
        ...

    @property
    def callback_costs(self) -> Sequence[Cost]:
        """What each callback has taken in this run, for each of its events."""
        ...

    @property
    def recompilations(self) -> dict[str, int]:
        """How often this process compiled anew what is compiled, by the names of its modules."""
        ...

    @property
    def tracker_seconds(self) -> Mapping[str, float]:
        """What each tracker has taken in this run, by its name."""
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which the run's forward passes are."""
        ...

    @property
    def window_size(self) -> int:
        """Micro-batches per optimizer step."""
        ...

    @property
    def window_start(self) -> int:
        """The micro-step at which the open accumulation window began; between windows the next one."""
        ...

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The task's `training_step` in the run's precision. Fires no event. Local: past the strategy's wrapper."""
        ...

    def training_passes(self) -> AbstractContextManager[Callable[[Any, int], Any]]:
        """A context that gives the task's `training_step` for forward passes alone, in the run's precision. Fires no
        event. Collective where each process has a part of the weights: in it, for each batch, and at its end.
        """
        ...

    @property
    def has_whole_model(self) -> bool:
        """Whether this process has all of the model, so that it can compute and save without the others."""
        ...

    @property
    def shows_weights(self) -> bool:
        """Whether parameters have their values (this process's part, where they are sharded) between two passes."""
        ...

    def weight_part(self, parameter: Tensor) -> Tensor:
        """What this process has of a parameter's values between two steps, to read and to write. Local."""
        ...

    def show_parts(self) -> Callable[[], None]:
        """Let the task compute with what was written into the `weight_part` of parameters; what is returned goes back
        to the former values. Collective where parameters are updated in parts.
        """
        ...

    def writing_weights(self) -> AbstractContextManager[Any]:
        """A context in which every process writes the same weights into the task. Collective where parameters are
        updated in parts.
        """
        ...

    def whole_shapes(self) -> AbstractContextManager[Any]:
        """A context in which the task's parameters have their whole shapes, and not always values. Local."""
        ...

    def once_agreed(self, act: Callable[[], None]) -> None:
        """Call a function behind `on_before_step`, if no callback of any process drops the step: then all processes
        call theirs, which may be collective. For use in `on_before_step`.
        """
        ...

    def gradient_norms(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> list[Tensor | None]:
        """The norm of each parameter's gradient, a scalar on its device; None for one without a gradient. Collective
        where each process has a part of the gradients.
        """
        ...

    def nonfinite_weight(self) -> str | None:
        """The name of the first weight that can't be right, None when all are finite. Collective where each process
        has a part of the weights, unless an exception is ending the run.
        """
        ...

    def training_batches(self) -> Iterator[Any]:
        """One more pass over this process's training batches, on the device; it leaves no trace. Collective where the
        loader is dispatched, or shuffles by a generator that processes share.
        """
        ...

    def take_snapshot(self) -> Any:
        """The state of the training in memory, at a step boundary: see `go_back_to`. Collective."""
        ...

    def go_back_to(self, snapshot: Any) -> None:
        """Put the training back to where a snapshot of this epoch was taken, but for its place in the data. At a step
        boundary; the snapshot stays good. Collective.
        """
        ...

    def log(self, name: str, value: Any, **options: Any) -> None:
        """As `task.log`; for callbacks."""
        ...

    def handles(self, event: Callable[..., None]) -> bool:
        """Whether a callback or a function handles an event of this run, such as `Callback.on_stop`."""
        ...

    def stop(self, reason: str) -> None:
        """Ask for an orderly end at the next step boundary."""
        ...

    def save_model(self, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> Path:
        """Write the model's weights as safetensors, whole or not at all, on the main process. Collective where each
        process has a part of them.
        """
        ...

    def save_state(
        self, path: str | Path, *, scores: Sequence[Mapping[str, Any]] = (), asynchronous: bool | None = None
    ) -> Path:
        """Keep the whole state in a checkpoint, at the end of this step boundary; `on_saved` tells when it is whole.
        Collective. Where an exception is ending the run, at once, by the main process alone.
        """
        ...

    def withdraw_save(self, path: str | Path) -> bool:
        """Take back a checkpoint that was asked for. Returns whether it was still possible. Collective."""
        ...

    @property
    def run_id(self) -> str:
        """What tells this run from others, over all its legs."""
        ...

    @property
    def signal(self) -> str | None:
        """The signal that asked for the end of the run, such as "SIGTERM"; None while none has."""
        ...

    @property
    def signal_seconds(self) -> float | None:
        """How long ago this process learned of that signal, None while there is none. Local."""
        ...

    @property
    def save_seconds(self) -> float | None:
        """How long the newest checkpoint took until it was whole, None before the first."""
        ...

    @property
    def resumed_step(self) -> int | None:
        """The step behind which this leg of the run goes on, None if it began anew."""
        ...

    def unwrapped_model(self) -> nn.Module:
        """The task without what strategy and compiler put around it."""
        ...

    def on(self, event: str, function: Callable[..., Any] | None = None, **filters: Any) -> Any:
        """Call a function at an event."""
        ...
