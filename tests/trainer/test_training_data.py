"""How the Trainer shares training data among two processes. B: cases; pain: a pain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from loopwright import Accelerator, ConfigError, DataLoaderConfiguration
from loopwright.distributed.process import ProcessState
from loopwright.trainer.task import Task
from loopwright.trainer.trainer import Trainer

from .several import Stream


class Keeping(Task):
    """Keeps every batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[float]] = []
        self.validated: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.reshape(-1).tolist())
        return (self.weight * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(batch.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fitted(loader: Any, val: Any = None, **options: Any) -> Keeping:
    task = Keeping()
    Trainer(**{"max_epochs": 2, "progress": False, "trackers": False, "sanity_val_batches": 0} | options).fit(
        task, loader, val
    )
    return task


def configured() -> dict[str, Any]:
    data: Any = list(range(8))
    found: dict[str, Any] = {}
    for name, options in {
        "default": {},
        "split": {"split_batches": True},
        "uneven": {"even_batches": False},
        "seeded": {"data_seed": 42},
    }.items():
        loader = DataLoader(data[:7] if name == "uneven" else data, batch_size=2, shuffle=name == "seeded")
        configuration = DataLoaderConfiguration(**options)
        task = fitted(loader, loader, max_epochs=1, dataloader_config=configuration)
        found[name] = (task.seen, task.validated)
    found["stream"] = fitted(DataLoader(Stream(8), batch_size=2), max_epochs=1).seen
    own = DataLoaderConfiguration(dispatch_batches=False)
    found["stream read by each"] = fitted(DataLoader(Stream(8), batch_size=2), max_epochs=1, dataloader_config=own).seen
    return found


def test_training_loaders_are_shared_as_configured(two_processes: Any) -> None:
    first, second = two_processes(configured)
    whole = ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert (first["default"][0], second["default"][0]) == whole
    assert (first["split"][0], second["split"][0]) == ([[0], [2], [4], [6]], [[1], [3], [5], [7]])
    assert (first["uneven"][0], second["uneven"][0]) == ([[0, 1], [4, 5]], [[2, 3], [6]])
    assert (first["stream"], second["stream"]) == whole
    assert (first["stream read by each"], second["stream read by each"]) == whole
    # An evaluation counts each sample once, however training is shared.
    for name in ("default", "split"):
        assert (first[name][1], second[name][1]) == whole
    order = torch.randperm(8, generator=torch.Generator().manual_seed(42)).tolist()
    for part in (0, 1):
        pairs = zip(first["seeded"][part], second["seeded"][part], strict=True)
        assert [number for one, two in pairs for number in one + two] == order


def test_in_one_process_the_seed_decides_and_sharing_has_no_effect() -> None:
    data: Any = list(range(6))
    options = DataLoaderConfiguration(data_seed=3, split_batches=True, even_batches=False, dispatch_batches=True)
    task = fitted(DataLoader(data, batch_size=2, shuffle=True), max_epochs=1, dataloader_config=options)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3)).tolist()
    assert [number for batch in task.seen for number in batch] == order


def test_another_thing_than_a_configuration_is_refused() -> None:
    for cls in (Trainer, Accelerator):
        with pytest.raises(
            ConfigError, match=r"dataloader_config=\{'split_batches': True\}. Expected a DataLoaderConf"
        ):
            cls(dataloader_config={"split_batches": True})


class Noise(Dataset[Tensor]):
    """Samples of noise, as an augmentation draws it: by torch, NumPy and Python in turn."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        import random

        import numpy

        drawn = (lambda: float(torch.rand(())), numpy.random.rand, random.random)[index % 3]()
        return torch.tensor(drawn, dtype=torch.float64)


def noise(seed: int | None) -> tuple[list[float], list[float]]:
    """Two epochs by two workers, with validation after each."""
    val = DataLoader(Noise(), batch_size=1, num_workers=2)
    task = fitted(DataLoader(Noise(), batch_size=1, shuffle=True, num_workers=2), val, seed=seed)
    return [number for (number,) in task.seen], [number for (number,) in task.validated]


@pytest.mark.parametrize("seed", [5, None])
def test_pain_32_b58_b59_workers_draw_distinct_noise_and_the_same_on_a_re_run(two_processes: Any, seed: Any) -> None:
    found = two_processes(noise, seed)
    assert [(len(seen), len(validated)) for seen, validated in found] == [(12, 12)] * 2
    drawn = [number for seen, validated in found for number in seen + validated]
    assert len(set(drawn)) == 48
    assert two_processes(noise, seed) == found


class Own(Sampler[int]):
    """A user's sampler that draws from torch's random state."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        return iter(torch.randperm(8).tolist())


def sampled() -> dict[str, list[list[float]]]:
    """Two passes each, where the processes have drawn different numbers before."""
    data: Any = list(range(8))
    weighted = WeightedRandomSampler([1.0] * 8, 8)
    samplers = {
        "weighted": {"sampler": weighted, "batch_size": 2},
        "subset": {"sampler": SubsetRandomSampler(data), "batch_size": 2},
        "weighted in batches": {"batch_sampler": BatchSampler(weighted, 2, False)},
        "random in batches": {"batch_sampler": BatchSampler(RandomSampler(data), 2, False)},
        "items": {"sampler": weighted, "batch_size": None, "collate_fn": torch.tensor},
        "own": {"sampler": Own(), "batch_size": 2},
    }
    found: dict[str, list[list[float]]] = {}
    for name, options in samplers.items():
        torch.manual_seed(100 + ProcessState(cpu=True).process_index)
        loader: Any = DataLoader(data, **options)  # type: ignore[call-overload]
        task = fitted(loader)
        found[f"trainer, {name}"] = task.seen
        torch.manual_seed(100 + ProcessState(cpu=True).process_index)
        prepared = Accelerator(cpu=True).prepare(loader)
        found[f"accelerator, {name}"] = []
        for _ in range(2):
            found[f"accelerator, {name}"] += [batch.reshape(-1).tolist() for batch in prepared]
            torch.rand(3 + 2 * ProcessState(cpu=True).process_index)
    return found


def test_b61_samplers_that_draw_from_torchs_random_state_draw_alike(two_processes: Any) -> None:
    first, second = two_processes(sampled)
    assert two_processes(sampled) == [first, second]
    for name, own in first.items():
        rounds = [one + two for one, two in zip(own, second[name], strict=True)]
        passes = [[n for r in half for n in r] for half in (rounds[: len(rounds) // 2], rounds[len(rounds) // 2 :])]
        assert [len(each) for each in passes] == [8, 8], name
        assert passes[0] != passes[1], name
        if "weighted" not in name and "items" not in name:  # those draw with replacement
            assert [sorted(each) for each in passes] == [list(range(8))] * 2, name
