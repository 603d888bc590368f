"""`DataMethods`: what an `Accelerator` does with loaders, and with what their batches gave."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from ..data.configuration import DataLoaderConfiguration
from ..data.skip import skip_first_batches
from ..distributed.process import ProcessMethods
from ..strategies.gradient_state import GradientState
from ..strategies.strategy import Strategy
from .gathering import gather_batch
from .preparation import Preparation


class DataMethods(ProcessMethods):
    """The loaders of an `Accelerator`, and what is computed of their batches."""

    gradient_state: GradientState
    """Where the current micro-batch stands in its window and its loader."""
    preparation: Preparation
    """What was prepared."""
    strategy: Strategy
    """How a step is carried out."""

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are prepared."""
        return self.preparation.configuration

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader like this one whose passes begin `num_batches` later; see `skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process alone reads the data; None: for iterable datasets."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether each process gets as many batches as the others."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.preparation.configuration = dataclasses.replace(self.dataloader_config, even_batches=value)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling is by (seed, epoch) alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device go on in the background."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's stateful loader is used."""
        return self.dataloader_config.use_stateful_dataloader

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Every process's values of one evaluation batch, without what was added to make processes even. Collective.

        Call it inside the loop over the prepared loader that gave the batch.

        Args:
            input_data: nested tensors, one row per sample; those without a dimension are one value per process. Or a
                list of any objects, one per sample, with `use_gather_object` or where a leaf is no tensor.
            use_gather_object: send the values as objects.
        Returns:
            The values of process 0 first, each sample's once, on every process.
        """
        loader = self.gradient_state.active_dataloader
        real = loader.real_samples if self.use_distributed and loader is not None else None
        return gather_batch(input_data, real, self.strategy.data_share, as_objects=use_gather_object)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes that have more batches than others go on alone, in a context. Collective.

        Args:
            joinables: the prepared models that communicate.
            even_batches: whether the prepared loaders complete their last round in it; None leaves them as they are.
        """
        if not self.use_distributed:
            warnings.warn("join_uneven_inputs has no effect in one process.", stacklevel=3)
            yield
            return
        is_even = self.even_batches if even_batches is None else even_batches
        # Processes with as many batches as the others have nobody to wait for.
        joining = nullcontext() if is_even else self.strategy.join(list(joinables))
        with self.preparation.even_batches(even_batches), joining:
            yield
