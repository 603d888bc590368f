"""`load_state` of an `Accelerator` whose loader has workers that outlive a pass: bit for bit, as if never stopped."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from loopwright.data.configuration import DataLoaderConfiguration
from loopwright.trainer.accelerator import Accelerator

SIZE, EPOCHS = 10, 4
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


class BySeed(Dataset[Any]):
    """Samples that say their number and a number that the seed of their worker decides."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        seed = index if info is None else info.seed - info.id + index
        return torch.tensor([index / SIZE, torch.rand((), generator=torch.Generator().manual_seed(seed)), 1.0])


class Batches:
    """A batch sampler that draws when a pass begins."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return SIZE // 2

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE, generator=self.generator).tolist()
        return iter([order[begin : begin + 2] for begin in range(0, SIZE, 2)])


@pytest.fixture(autouse=True)
def child_signal() -> Iterator[None]:
    """torch handles the end of worker processes by a handler, which it leaves."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


class Leg:
    """A script with dropout; a loader that goes on draws from what it was given."""

    def __init__(self, seed: int, *, own: bool, batches: bool = False, config: Any = None, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(seed) if own else None
        how = {"batch_sampler": Batches(generator)} if batches else {"batch_size": 2, "shuffle": True}
        loader: Any = DataLoader(BySeed(), generator=generator, **(how | PERSISTENT | options))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self, epochs: range, skipped: int = 0, save_at: tuple[int, int] | None = None, path: Any = None) -> Any:
        """Each batch's epoch, its samples, and its loss. Saves behind a batch of an epoch, or before the first."""
        seen = []
        for epoch in epochs:
            if save_at == (epoch, 0):
                self.accelerator.save_state(path)
            skips = skipped and epoch == epochs[0]
            loader = self.accelerator.skip_first_batches(self.loader, skipped) if skips else self.loader
            for number, batch in enumerate(loader, skipped if skips else 0):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                seen.append((epoch, batch.tolist(), loss.item()))
                if save_at == (epoch, number + 1):
                    self.accelerator.save_state(path)
        return seen


def check(path: Path, stop: tuple[int, int], **options: Any) -> None:
    """Stopped and resumed, and once more in the next epoch, against a run that was never stopped."""
    whole = Leg(3, **options)
    seen = whole.train(range(EPOCHS), save_at=stop, path=path)
    begin = stop[0] * SIZE // 2 + stop[1]
    for seed, place, first in ((77, stop, begin), (78, (stop[0] + 1, 2), (stop[0] + 1) * SIZE // 2 + 2)):
        resumed = Leg(seed, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.accelerator.load_state(path)
        again = path.with_name("again")
        rest = resumed.train(range(place[0], EPOCHS), place[1], save_at=(stop[0] + 1, 2), path=again)
        assert rest == seen[first:]
        pairs = zip(resumed.model.parameters(), whole.model.parameters(), strict=True)
        assert all(torch.equal(now, before) for now, before in pairs)
        path = again


@pytest.mark.parametrize("stop", [(0, 2), (1, 2), (2, 0)])
def test_workers_that_outlive_a_pass_are_as_if_they_had_lived_on(tmp_path: Path, stop: Any) -> None:
    check(tmp_path / "state", stop, own=False)


@pytest.mark.parametrize("stop", [(0, 2), (1, 2), (2, 0)])
def test_the_order_from_the_loaders_own_generator_is_the_same(tmp_path: Path, stop: Any) -> None:
    check(tmp_path / "state", stop, own=True, config=DataLoaderConfiguration(use_seedable_sampler=False))


@pytest.mark.parametrize("stop", [(0, 2), (1, 2)])
def test_the_order_of_a_sampler_that_draws_at_once_is_the_same(tmp_path: Path, stop: Any) -> None:
    check(tmp_path / "state", stop, own=True, batches=True)


def test_a_stateful_loader_draws_its_seed_once(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    whole = Leg(3, own=False, config=config)
    seen = whole.train(range(EPOCHS), save_at=(1, 2), path=tmp_path / "state")
    resumed = Leg(77, own=False, config=config)
    resumed.accelerator.load_state(tmp_path / "state")
    assert resumed.train(range(1, EPOCHS)) == seen[SIZE // 2 + 2 :]


def test_other_workers_than_before_are_told(tmp_path: Path) -> None:
    Leg(3, own=False).train(range(1), save_at=(0, 2), path=tmp_path / "state")
    other = Leg(77, own=False, persistent_workers=False)
    with pytest.warns(UserWarning, match="1 loaders had persistent workers and 0 have, which draw other seeds"):
        other.accelerator.load_state(tmp_path / "state")
