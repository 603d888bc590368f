"""`LoaderMethods`: how an `Accelerator` prepares loaders."""

from __future__ import annotations

from typing import Any

from ..data.configuration import DataLoaderConfiguration
from ..data.skip import skip_first_batches


class LoaderMethods:
    """The settings of an `Accelerator` for loaders.

    Args:
        configuration: how loaders are prepared.
    """

    def __init__(self, configuration: DataLoaderConfiguration) -> None:
        self.dataloader_config = configuration
        """How loaders are prepared."""

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

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader like this one whose passes begin `num_batches` later; see `skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)
