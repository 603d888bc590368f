"""Meshes under the Accelerator: an own loop with its layers cut over two processes, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from loopwright.checkpoint.sharded import is_sharded
from loopwright.checkpoint.weights import load_weights
from loopwright.distributed.environment import patch_environment
from loopwright.distributed.errors import ConfigError
from loopwright.distributed.parallelism import ParallelismConfig
from loopwright.trainer.accelerator import Accelerator

from .sharded import Words, loader, make, words
from .test_tensor_parallel import PLAN

Run = Callable[..., list[Any]]


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


class Planned(Words):
    """Has a plan of its own, as models of Hugging Face have it."""

    _tp_plan = PLAN


def _loop(path: str, cuts: str | None) -> Any:
    options: dict[str, Any] = {}
    if cuts is not None:
        options["parallelism_config"] = ParallelismConfig(tp_size=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    torch.manual_seed(1 + accelerator.process_index)
    model: Any = Planned() if cuts == "own plan" else Words()
    if cuts == "by the user":
        _cut(model, accelerator)
    optimizer = model.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(26, 8), scheduler)
    norms, seen, rates = [], [], []
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch) / 20)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        gathered = accelerator.gather_for_metrics({"first": batch[0][:, 0], "size": torch.tensor(len(batch[0]))})
        objects = accelerator.gather_for_metrics([len(batch[0])], use_gather_object=True)
        seen.append((gathered["first"].tolist(), gathered["size"].flatten().tolist(), objects))
        rates.append(scheduler.get_last_lr()[0])
    accelerator.save_model(model, f"{path}-weights")
    accelerator.save_state(path)
    cut = sum(is_sharded(p) and p.device_mesh.ndim == 2 for p in model.parameters())
    ranks = accelerator.tensor_parallel_rank, accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank
    return norms, seen, rates, accelerator.get_state_dict(model), cut, ranks


def _cut(model: nn.Module, accelerator: Accelerator) -> None:
    """Process 0's values, cut by the user."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model.load_state_dict(make(1).state_dict())
    mesh = accelerator.torch_device_mesh
    assert mesh is not None
    plan = {"layers.*.inner": ColwiseParallel(), "layers.*.outer": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    found = batch[0]
    logits, targets = model(found[:, :-1]), found[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")


@pytest.mark.parametrize(("cuts", "num_cut"), [("own plan", 13), ("by the user", 12)])
def test_an_own_loop(two_processes: Run, tmp_path: Path, cuts: str, num_cut: int) -> None:
    norms, seen, rates, weights, _, _ = _loop("one", None)
    assert [len(first) for first, _, _ in seen] == [8, 8, 8, 2]
    found = two_processes(_loop, "two", cuts)
    for index, each in enumerate(found):
        close(each[0], norms)
        assert each[1:3] == (seen, rates)
        assert each[4:] == (num_cut, (index, 0, 0))
    close(found[0][3], weights)
    loaded = make(5)
    load_weights(loaded, tmp_path / "two-weights")
    close(dict(loaded.state_dict()), weights)
    # The state goes on in one process.
    accelerator, again = Accelerator(), make(5)
    optimizer = again.configure_optimizers()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    again, optimizer, _, scheduler = accelerator.prepare(again, optimizer, loader(26, 8), scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another number of processes
        accelerator.load_state(tmp_path / "two")
    close(accelerator.get_state_dict(again), weights)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def _batches(dispatches: bool | None) -> list[list[int]]:
    from loopwright.data.configuration import DataLoaderConfiguration

    torch.manual_seed(torch.distributed.get_rank())  # each would draw an order of its own
    configuration = DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2), dataloader_config=configuration)
    shuffled = DataLoader(list(range(10)), batch_size=4, shuffle=True)  # type: ignore[arg-type,var-annotated]
    loaders = [DataLoader(Numbers(), batch_size=4), shuffled]
    return [batch.tolist() for loader in loaders for batch in accelerator.prepare(loader)]


@pytest.mark.parametrize("dispatches", [None, True, False])
def test_peers_get_the_same_batches(two_processes: Run, dispatches: bool | None) -> None:
    first, second = two_processes(_batches, dispatches)
    assert first == second
    assert first[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sorted(number for batch in first[3:] for number in batch) == list(range(10))
    assert [len(batch) for batch in first[3:]] == [4, 4, 2]


def _texts() -> list[str]:
    cases: list[dict[str, Any]] = [
        {"parallelism_config": ParallelismConfig(tp_size=4)},
        {"parallelism_config": ParallelismConfig(tp_size=2), "strategy": "ddp"},
        {"parallelism_config": ParallelismConfig(tp_size=2), "strategy": {"name": "fsdp", "mesh": [2, 1]}},
        {"parallelism_config": ParallelismConfig(sp_size=2), "strategy": "ddp"},
        {"parallelism_config": {"tp_size": 2}},
    ]
    found = []
    for options in cases:
        with pytest.raises(ConfigError, match=" ") as caught:
            Accelerator(**options)
        found.append(str(caught.value))
    return found


def test_what_is_refused(two_processes: Run) -> None:
    wanted = [
        "a mesh of tensor 4 needs 4 processes, and there are 2",
        "DDPStrategy has no mesh of copies, parts and layers, and one was given. Use strategy='fsdp'",
        "FSDPStrategy(mesh=MeshSizes(replicate=2, shard=1, context=1, sequence=1, tensor=1)), and the run is given M",
        "DDPStrategy has no mesh of copies, parts and layers, and one was given. Use strategy='fsdp'",
        "parallelism_config={'tp_size': 2}. Expected ParallelismConfig(...), or None.",
    ]
    for texts in two_processes(_texts):
        for text, begin in zip(texts, wanted, strict=True):
            assert text.startswith(begin), text


def _copies() -> Any:
    accelerator = Accelerator(parallelism_config=ParallelismConfig())
    mesh = accelerator.torch_device_mesh
    assert mesh is not None and accelerator.parallelism_config is not None
    size = accelerator.parallelism_config.dp_replicate_size
    context = accelerator.maybe_context_parallel(buffers=[words(2).tensors[0]], buffer_seq_dims=[1])
    with pytest.warns(UserWarning, match="maybe_context_parallel has no effect"), context:
        pass
    with accelerator.maybe_context_parallel():  # it says so once
        pass
    with patch_environment(accelerate_use_parallelism_config="true", parallelism_config_dp_shard_size="2"):
        word = type(Accelerator().strategy).__name__
    own = Accelerator(parallelism_config=ParallelismConfig(), strategy="fsdp").parallelism_config
    assert own is not None
    assert (own.dp_shard_size, own.dp_replicate_size) == (2, 1)
    return type(accelerator.strategy).__name__, mesh.mesh_dim_names, size, accelerator.data_parallel_rank, word


def test_copies_where_nothing_was_asked_for(two_processes: Run) -> None:
    found = two_processes(_copies)
    assert found == [("DDPStrategy", ("dp_replicate",), 2, index, "FSDPStrategy") for index in range(2)]
