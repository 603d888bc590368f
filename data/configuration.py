"""Settings of prepared loaders."""

from __future__ import annotations

from dataclasses import dataclass

from ..distributed.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DataLoaderConfiguration:
    """How `Accelerator` prepares loaders; the names and their order are Accelerate's.

    The first three say how batches are dealt out to processes; in one process they have no effect.
    """

    split_batches: bool = False
    """A loader's batch size is that of all processes together: each batch is split among them."""
    dispatch_batches: bool | None = None
    """The main process alone reads the data and hands it out. None: for iterable datasets."""
    even_batches: bool = True
    """Complete the last round with samples from the beginning, so that each process has as many batches."""
    use_seedable_sampler: bool = True
    """Shuffle by (seed, epoch) alone, so that a pass can be repeated and resumed. False: by torch's random state."""
    data_seed: int | None = None
    """The seed of that order. None: the seed of the loader's own generator, else torch's initial seed."""
    non_blocking: bool = False
    """Let copies to the device go on in the background where the memory is pinned."""
    use_stateful_dataloader: bool = False
    """Accelerate's switch for torchdata's `StatefulDataLoader`; not available in this version."""

    def __post_init__(self) -> None:
        if self.use_stateful_dataloader:
            raise ConfigError(
                "DataLoaderConfiguration.use_stateful_dataloader=True is not available in this version. Leave it out; "
                "skip_first_batches(loader, n) goes on in the middle of a pass, in the same order."
            )
