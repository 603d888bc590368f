"""Settings of prepared loaders."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..distributed.errors import ConfigError, check_boolean, check_integer


@dataclass(frozen=True, slots=True)
class DataLoaderConfiguration:
    """How loaders are prepared; the names and their order are Accelerate's.

    The first three say how batches are dealt out to processes; in one process they have no effect.
    """

    split_batches: bool = False
    """A loader's batch size is that of all processes together: each batch is split among them."""
    dispatch_batches: bool | None = None
    """The main process alone reads the data and hands it out. None: for iterable datasets that go to the device."""
    even_batches: bool = True
    """Complete the last round with samples from the beginning, so that each process has as many batches."""
    use_seedable_sampler: bool = True
    """Shuffle by (seed, epoch) alone, so that a pass can be repeated and resumed. False: by torch's random state."""
    data_seed: int | None = None
    """The seed of that order. None: the seed of the loader's own generator, else torch's initial seed; that of process
    0 counts.
    """
    non_blocking: bool = False
    """Don't wait for copies to the device out of pinned memory; with loaders that pin it this is always so."""
    use_stateful_dataloader: bool = False
    """Make each `DataLoader` one of torchdata's `StatefulDataLoader`, whose position is saved and restored."""
    seed_batches: bool | None = None
    """What the data draws (datasets, transforms, collate functions, samplers) is decided by (seed, epoch, batch),
    whatever the number of workers and wherever a run was resumed, and the training's random states are left alone. The
    seed is `data_seed`; without one torch's initial seed, that of process 0. None: True in the Trainer, else False.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "data_seed":
                if value is not None:
                    check_integer("DataLoaderConfiguration.data_seed", value, 0)
            elif not (field.name in ("dispatch_batches", "seed_batches") and value is None):
                check_boolean(f"DataLoaderConfiguration.{field.name}", value)
        if self.data_seed is not None and self.data_seed >= 2**64:
            raise ConfigError(f"DataLoaderConfiguration.data_seed={self.data_seed}. Expected an integer below 2**64.")
