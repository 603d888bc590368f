"""What the tests of `Accelerator` on several processes share; the workers import it as well."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from loopwright.trainer.accelerator import Accelerator


class Stream(IterableDataset[int]):
    """Numbers, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def on_cpu(**options: Any) -> Accelerator:
    """An accelerator on the CPU, also where there is a device."""
    return Accelerator(cpu=True, **options)


def ids(count: int, batch_size: int, **options: Any) -> DataLoader[int]:
    """A loader of the numbers below `count`."""
    return DataLoader(list(range(count)), batch_size=batch_size, **options)  # type: ignore[arg-type]
