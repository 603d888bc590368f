"""`Task`: the model together with how it is trained, validated and used."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.sizes import find_batch_size
from ..distributed.errors import TaskError
from ..strategies.pipeline_layers import whole_loss

if TYPE_CHECKING:
    from .metrics import Reduce
    from .trainer import Trainer


class Task(nn.Module):
    """A module that says how it is trained. Subclass it and override `training_step` and `configure_optimizers`.

    Everything else is optional. A task that also derives from `Callback` receives the events.
    """

    automatic_optimization: bool = True
    """False: `training_step` calls `manual_backward` and steps `optimizers()` itself."""

    _trainer: Trainer | None = None

    # What a subclass overrides. Those that are left out are asked for only where they are needed.

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """One micro-batch of training.

        Returns:
            The mean loss, a scalar with a gradient; or a mapping that holds it as `"loss"`; or `(loss_sum, count)`,
            from which the gradient is that of the sum over the sum of counts, exactly, over the whole window and all
            processes; or None to leave this batch out.
        """
        raise self._missing("training_step", "trainer.fit")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """One batch of validation, in eval mode and without gradients. Log its metrics by `self.log`.

        With several loaders it may take a third argument, `dataloader_idx`.
        """
        raise self._missing("validation_step", "validation")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """One batch of `trainer.test`, as `validation_step`."""
        raise self._missing("test_step", "trainer.test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """One batch of `trainer.predict`; returns the predictions. By default the task is called with the batch."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """The optimizer, and the learning-rate scheduler if there is one.

        Returns:
            An optimizer; a pair of optimizer and scheduler; or a mapping with `"optimizer"` and `"lr_scheduler"`,
            which is a scheduler or a mapping with `"scheduler"`, `"interval"` (`"step"` or `"epoch"`), `"frequency"`
            (in optimizer steps or epochs) and `"monitor"` (for plateau schedulers). In manual mode also a list of
            these.
        """
        raise self._missing("configure_optimizers", "trainer.fit")

    def configure_model(self) -> None:
        """Build what is too large or too late for `__init__`. Called once, before the optimizers are configured."""

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """The layers of the model in the order in which they are called, each with the one tensor that the one before
        gave. `run_pipeline` needs them, and `strategy="pipeline"` deals them to processes.
        """
        raise self._missing("pipeline_layers", "run_pipeline")

    def pipeline_input(self, batch: Any) -> Tensor:
        """What the first layer takes of a batch. By default its first entry, or the batch itself if a tensor."""
        found: Tensor = batch[0] if isinstance(batch, (tuple, list)) else batch
        return found

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor | tuple[Tensor, Any]:
        """The loss of a batch, or of some of its samples, from what the last of these layers gave: the mean, a scalar;
        or `(loss_sum, count)`.
        """
        raise self._missing("pipeline_loss", "run_pipeline")

    def train_dataloader(self) -> Any:
        """The training batches, where `trainer.fit` is given none."""
        return None

    def val_dataloader(self) -> Any:
        """The validation batches, where `trainer.fit` or `trainer.validate` is given none."""
        return None

    def test_dataloader(self) -> Any:
        """The test batches, where `trainer.test` is given none."""
        return None

    def predict_dataloader(self) -> Any:
        """The batches of `trainer.predict`, where it is given none."""
        return None

    def count_samples(self, batch: Any) -> int | None:
        """Samples in a batch: the weight of its logged means. By default the common first dimension of its tensors.

        Raises:
            AmbiguousBatchSizeError: they disagree.
        """
        return find_batch_size(batch)

    def count_tokens(self, batch: Any) -> int:
        """Tokens in a training batch, for counters and throughput. Not asked where steps return `(loss_sum, count)`."""
        return 0

    # What a subclass calls.

    def log(
        self,
        name: str,
        value: Any,
        *,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce: Reduce = "mean",
        batch_size: int | Tensor | None = None,
        progress_bar: bool = False,
        sync: bool = True,
    ) -> None:
        """Record a metric. It stays on its device; nothing is copied to the host until a record is due.

        Args:
            name: such as `"train/loss"`.
            value: a number, a tensor of one element, a torchmetrics object, or a pair `(sum, count)`.
            on_step: put it into step records: the value of the newest window. Default: in training.
            on_epoch: put its mean over the epoch into the epoch's record. Default: in evaluation. With both, the names
                get the endings `_step` and `_epoch`.
            reduce: `"mean"` (weighted by samples), `"sum"`, `"min"` or `"max"` over batches.
            batch_size: the weight of this value in a mean; by default the samples of the batch.
            progress_bar: also show the newest value in the progress bar.
            sync: reduce it over processes. False: the value of process 0, or of the first that has one.
        Raises:
            MetricError: the value is no single number, the options differ from those of earlier calls, or the batch's
                number of samples can't be told.
        """
        if self._trainer is None:
            raise TaskError(
                f"self.log({name!r}, ...) outside of fit, validate, test and predict. There is no record to go to."
            )
        self._trainer.log(
            name, value, on_step=on_step, on_epoch=on_epoch, reduce=reduce,
            batch_size=batch_size, progress_bar=progress_bar, sync=sync,
        )  # fmt: skip

    def log_dict(self, metrics: Mapping[str, Any], **options: Any) -> None:
        """Record several metrics with the same options, those of `log`."""
        for name, value in metrics.items():
            self.log(name, value, **options)

    def run_pipeline(self, batch: Any) -> Any:
        """The loss of a batch that goes through `pipeline_layers` to `pipeline_loss`, as the latter gives it: what
        `training_step` returns and validation logs, under every strategy. With `strategy="pipeline"` the layers are in
        several processes, all of which get the same value. Collective there.
        """
        if self._trainer is None:
            return whole_loss(self, batch)
        return self._trainer.strategy.pipelined_loss(self, batch)

    def optimizers(self) -> Any:
        """The `GatedOptimizer`, or the list of them, for manual optimization."""
        found = self.trainer.gated_optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """The scheduler, or the list of them, for manual optimization. None where there is none."""
        found = list(self.trainer.schedulers)
        return found[0] if len(found) == 1 else found or None

    def manual_backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward as the strategy and the precision want it, in manual optimization.

        Args:
            loss: a scalar.
            kwargs: as `Tensor.backward` takes them.
        """
        self.trainer.manual_backward(loss, **kwargs)

    @property
    def trainer(self) -> Trainer:
        """The trainer that runs this task.

        Raises:
            TaskError: none does.
        """
        if self._trainer is None:
            raise TaskError(f"{type(self).__name__}.trainer: no trainer runs this task now.")
        return self._trainer

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        tensor: Tensor | None = next(self.parameters(), None)
        if tensor is None:
            tensor = next(self.buffers(), None)
        if tensor is not None:
            return tensor.device
        return torch.device("cpu") if self._trainer is None else self._trainer.device

    @property
    def hparams(self) -> dict[str, Any]:
        """What trackers are told of the task: the arguments that `save_hyperparameters` kept, and what you add."""
        kept: dict[str, Any] = self.__dict__.setdefault("_hparams", {})
        return kept

    def save_hyperparameters(self, *names: str, ignore: Sequence[str] = ()) -> None:
        """Keep the arguments of the `__init__` that calls this, in `hparams`. Modules among them are left out.

        Args:
            names: those to keep; without any, all.
            ignore: those to leave out.
        """
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        own_name = caller.f_code.co_varnames[0] if caller is not None and caller.f_code.co_argcount else ""
        if caller is None or caller.f_locals.get(own_name) is not self:
            raise TaskError("save_hyperparameters() has to be called in the task's own __init__.")
        arguments, _, keywords, values = inspect.getargvalues(caller)
        found = {name: values[name] for name in arguments if name != own_name}
        found.update(values.get(keywords or "", {}))
        if missing := set(names) - set(found):
            raise TaskError(
                f"save_hyperparameters: {sorted(missing)} are no arguments of __init__. It has {sorted(found)}."
            )
        chosen = {k: v for k, v in found.items() if (not names or k in names) and k not in ignore}
        self.hparams.update({k: v for k, v in chosen.items() if not isinstance(v, nn.Module)})

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle of the task takes its run along otherwise.
        return {key: value for key, value in self.__dict__.items() if key != "_trainer"}

    def _missing(self, hook: str, caller: str) -> TaskError:
        return TaskError(f"{type(self).__name__} has no {hook}, which {caller} needs. Override it in the task.")
