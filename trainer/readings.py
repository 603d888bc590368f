"""`RunReadings`: what a Trainer shows of the run that goes on, or of the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..callbacks.bus import Event
from ..callbacks.ledger import Cost
from ..callbacks.limits import Limits
from ..callbacks.state import RunState
from ..distributed.errors import ConfigError
from ..distributed.exchange import exchange
from ..distributed.process import ProcessState
from ..distributed.shares import DataShare
from ..strategies.optimizer import GatedOptimizer
from ..strategies.strategy import Strategy
from .accelerator import Accelerator
from .run import Run
from .settings import Settings
from .showing import batches_again
from .signature import bind_step


class RunReadings:
    """The part of a Trainer that is only read: of the run that goes on, or of the last training."""

    accelerator: Accelerator
    """The layer that carries out the steps."""
    settings: Settings
    """What the arguments mean."""
    state: RunState
    """The counters of the run."""
    _run: Run | None
    _newest_run: Run | None
    _newest_fit: Run | None

    @property
    def process(self) -> ProcessState:
        """This process and its place among others."""
        return self.accelerator.process

    @property
    def data_share(self) -> DataShare:
        """Which share of the data this process gets."""
        return self.accelerator.strategy.data_share

    @property
    def strategy(self) -> Strategy:
        """How a step is carried out."""
        return self.accelerator.strategy

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def error(self) -> BaseException | None:
        """The exception that is ending the run, or that ended the last one."""
        run = self._newest_run
        return None if run is None else run.error

    @property
    def stop_reason(self) -> str | None:
        """Why the run ended or will end: a limit that was reached, or what `stop` was given. None while it goes on."""
        run = self._newest_run
        return None if run is None else run.stop_reason

    @property
    def run_id(self) -> str:
        """What tells this run from others, over all its legs."""
        return self._newest("run_id").saves.run_id

    def handles(self, event: Event) -> bool:
        """Whether a callback or a function handles an event of this run, such as `Callback.on_stop`. Local."""
        return self._newest("handles").events[event] is not None

    @property
    def signal(self) -> str | None:
        """The signal that asked for the end of the run, such as "SIGTERM"; None while none has."""
        run = self._newest_run
        return None if run is None else run.signal

    @property
    def signal_seconds(self) -> float | None:
        """How long ago this process learned of that signal, None while there is none. Local."""
        run = self._newest_run
        return None if run is None or run.signalled_at is None else time.monotonic() - run.signalled_at

    @property
    def save_seconds(self) -> float | None:
        """How long the newest checkpoint took until it was whole, None before the first."""
        run = self._newest_run
        return None if run is None else run.saves.seconds

    @property
    def resumed_step(self) -> int | None:
        """The step behind which this leg of the run goes on, None if it began anew."""
        run = self._newest_run
        return None if run is None or run.resumption is None else run.resumption.step

    @property
    def model(self) -> nn.Module:
        """The task as the strategy wrapped it."""
        return self._newest("model").model

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The torch optimizers of the training, in the order of `configure_optimizers`."""
        training = self._newest("optimizers").training
        return [] if training is None else training.optimizers

    @property
    def gated_optimizers(self) -> Sequence[GatedOptimizer]:
        """The optimizers as `Task.optimizers` gives them."""
        training = self._newest("gated_optimizers").training
        return [] if training is None else training.gated

    @property
    def schedulers(self) -> Sequence[Any]:
        """The learning-rate schedulers of the training."""
        training = self._newest("schedulers").training
        return [] if training is None else [rate.scheduler for rate in training.schedulers]

    @property
    def limits(self) -> Limits:
        """How long a training goes on."""
        return self.settings.limits

    @property
    def part_size(self) -> int | None:
        """The most samples of a batch that go through the model at once, which `auto_accumulate` has found where memory
        ran out, the same in all processes; None: whole batches.
        """
        run = self._run or self._newest_fit
        splitting = None if run is None or run.training is None else run.training.splitting
        return None if splitting is None else splitting.sizes.most

    @property
    def window_size(self) -> int:
        """Micro-batches per optimizer step."""
        return self.settings.accumulate

    @property
    def window_start(self) -> int:
        """The micro-step at which the open accumulation window began; between windows the next one."""
        run = self._newest("window_start")
        opened_at = None if run.training is None else run.training.opened_at
        return run.state.micro_step if opened_at is None else opened_at[1]

    @property
    def is_fast_dev_run(self) -> bool:
        """Whether this only tries everything."""
        return self.settings.is_fast_dev_run

    @property
    def has_validation(self) -> bool:
        """Whether the training run validates."""
        run = self._run or self._newest_fit
        return run is not None and run.training is not None and run.training.validation is not None

    @property
    def validation_was_cut(self) -> bool:
        """Whether the newest validation inside the training is not finished; a run that goes on makes up for it."""
        training = self._newest("validation_was_cut").training
        return training is not None and training.validation_due

    @property
    def num_evaluation_batches(self) -> int | None:
        """Batches of the evaluation that runs, None where none does or a loader has no length."""
        run = self._run
        return None if run is None or run.evaluation is None else run.evaluation.num_batches

    @property
    def evaluation_loader(self) -> int:
        """The number of the loader whose batches the evaluation goes through, 0 where there is one."""
        run = self._run
        if run is None or run.evaluation is None:
            return 0
        names = list(run.evaluation.loaders)
        return names.index(run.log.suffix) if run.log.suffix in names else 0

    @property
    def nonfinite_elsewhere(self) -> bool:
        """Whether another process dropped the newest step for a value that is not finite."""
        agreement = None if self._run is None else self._run.agreement
        return agreement is not None and agreement.consensus.nonfinite_elsewhere

    @property
    def data_wait_seconds(self) -> float:
        """Time that the training has spent waiting for data."""
        training = self._newest("data_wait_seconds").training
        if training is None:
            return 0.0
        return training.wait_seconds + (training.reader.wait_seconds if training.reader else 0.0)

    @property
    def training_seconds(self) -> dict[str, float]:
        """The seconds that each part of the training has taken on this process's host, `"other"` for the rest.

        The parts are `"data"` (waiting for it), `"forward"`, `"backward"`, `"step"`, `"callbacks"`, `"trackers"`,
        `"validation"` and `"saving"`; no moment is in two of them.
        """
        return self._newest("training_seconds").clock.seconds(self.data_wait_seconds)

    @property
    def callback_costs(self) -> Sequence[Cost]:
        """What each callback has taken in this run, for each of its events."""
        return self._newest("callback_costs").clock.ledger.costs

    @property
    def recompilations(self) -> dict[str, int]:
        """How often this process compiled anew what is compiled, by names of modules; empty without `compile`."""
        found = self._newest("recompilations").recompilations
        return {} if found is None else found.counts

    @property
    def tracker_seconds(self) -> Mapping[str, float]:
        """What each tracker has taken in this run, by its name."""
        return self._newest("tracker_seconds").trackers.seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The task's `training_step` in the run's precision. Fires no event. Local: past the strategy's wrapper."""
        run = self._newest("training_step")
        if run.training is None:
            raise ConfigError("trainer.training_step before the first fit: there is no training to do a step of.")
        return bind_step(run.task.training_step, run.precision)(batch, batch_idx)

    def training_batches(self) -> Iterator[Any]:
        """One more pass over this process's training batches, on the device; it leaves no trace. Collective where the
        loader is dispatched, or shuffles by a generator that processes share.
        """
        run = self._newest("training_batches")
        if run.training is None:
            raise ConfigError("trainer.training_batches outside of fit: there is no training data.")
        return batches_again(run, run.training)

    @contextmanager
    def training_passes(self) -> Iterator[Callable[[Any, int], Any]]:
        """A context that gives the task's `training_step` for forward passes alone, in the run's precision. Fires no
        event. Collective where each process has a part of the weights: in it, for each batch, and at its end.
        """
        run = self._newest("training_passes")
        if run.training is None:
            raise ConfigError("trainer.training_passes before the first fit: there is no training to do a step of.")
        through = run.strategy.evaluation_method(run.model, "training_step")
        yield bind_step(run.task.training_step, run.precision, through)
        run.strategy.finish_evaluation()

    @property
    def has_whole_model(self) -> bool:
        """Whether this process has all of the model, so that it can compute and save without the others."""
        return self.strategy.can_save_alone

    @property
    def shows_weights(self) -> bool:
        """Whether parameters have their values (this process's part, where they are sharded) between two passes."""
        return self.strategy.shows_weights

    def weight_part(self, parameter: Tensor) -> Tensor:
        """What this process has of a parameter's values between two steps, to read and to write. Local."""
        return self.strategy.weight_part(self._newest("weight_part").model, parameter)

    def show_parts(self) -> Callable[[], None]:
        """Let the task compute with what was written into the `weight_part` of parameters; what is returned goes back
        to the former values. Collective where parameters are updated in parts.
        """
        return self.strategy.show_parts(self._newest("show_parts").model)

    def writing_weights(self) -> AbstractContextManager[Any]:
        """A context in which every process writes the same weights into the task. Collective where parameters are
        updated in parts.
        """
        return self.strategy.writing_weights(self._newest("writing_weights").model)

    def whole_shapes(self) -> AbstractContextManager[Any]:
        """A context in which the task's parameters have their whole shapes, and not always values. Local."""
        return self.strategy.whole_shapes(self.unwrapped_model())

    def once_agreed(self, act: Callable[[], None]) -> None:
        """Call a function behind `on_before_step`, if no callback of any process drops the step: then all processes
        call theirs, which may be collective. For use in `on_before_step`.
        """
        training = self._newest("once_agreed").training
        if training is None:
            raise ConfigError("trainer.once_agreed outside of fit: there is no step to agree on.")
        training.agreed.append(act)

    def gradient_norms(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> list[Tensor | None]:
        """The norm of each parameter's gradient, a scalar on its device; None for one without a gradient. Collective
        where each process has a part of the gradients.
        """
        return self.strategy.gradient_norms(parameters, norm_type)

    def nonfinite_weight(self) -> str | None:
        """The name of the first weight that can't be right, None when all are finite. Collective where each process
        has a part of the weights, unless an exception is ending the run.
        """
        run = self._newest("nonfinite_weight")
        own = self.strategy.nonfinite_weight(run.model)
        if self.strategy.can_save_alone or self.error is not None:
            return own
        return next((name for name in exchange(own, "looking at the weights") if name is not None), None)

    def unwrapped_model(self) -> nn.Module:
        """The task without what strategy and compiler put around it."""
        return self.strategy.unwrap(self._newest("unwrapped_model").model)

    def _newest(self, what: str) -> Run:
        run = self._run or self._newest_fit or self._newest_run
        if run is None:
            raise ConfigError(f"trainer.{what} before the first run: call fit, validate, test or predict.")
        return run
