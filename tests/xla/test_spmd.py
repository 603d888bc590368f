"""One process that computes on two virtual devices: `CPU_NUM_DEVICES=2`, which `make test-xla` sets for this file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

torch_xla = pytest.importorskip("torch_xla", reason="needs torch_xla: make test-xla", exc_type=ImportError)

if os.environ.get("CPU_NUM_DEVICES") != "2":
    pytest.skip("needs CPU_NUM_DEVICES=2 in a process of its own: make test-xla", allow_module_level=True)

import torch_xla.runtime as runtime  # noqa: E402

runtime.use_spmd()
torch_xla.real_devices()  # before the first backward pass of the process

from loopwright import Accelerator, ConfigError, ModelCheckpoint  # noqa: E402
from loopwright.distributed import xla  # noqa: E402
from loopwright.distributed.launched import Place  # noqa: E402
from loopwright.strategies.xla_mesh import is_cut  # noqa: E402

from .training import assert_equal, loader, make, numbers, state_of, trainer  # noqa: E402

SPMD = {"name": "xla", "spmd": True, "warn_of_shapes": False}
FSDP = {"name": "xla", "fsdp": True, "warn_of_shapes": False}


def fit(strategy: Any, *, drop: float = 0.0, resume_from: Any = None, **options: Any) -> Any:
    task, found = make(drop=drop), trainer(strategy, **options)
    # The last batch of an epoch can't be cut: it is whole on both devices.
    found.fit(task, loader(45, 8, shuffle=True), loader(16, 8), resume_from=resume_from)
    return task, found


def sharding(tensor: torch.Tensor) -> str:
    text: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return text


@pytest.mark.parametrize("strategy", [SPMD, FSDP], ids=["copies", "fsdp"])
def test_losses_are_those_of_one_device(strategy: dict[str, Any]) -> None:
    options: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.5}
    single, one = fit("single", **options)
    task, found = fit(strategy, **options)
    assert numbers(task.losses) == pytest.approx(numbers(single.losses), abs=1e-5)
    assert found.metrics == pytest.approx(one.metrics, abs=1e-5)
    assert found.process.num_processes == 1
    for name, value in state_of(single).items():
        torch.testing.assert_close(state_of(task)[name], value, atol=1e-5, rtol=1e-5)


def test_weights_are_spread_with_fsdp_and_stay_so(working_folder: Path) -> None:
    saving = ModelCheckpoint(every=6)
    stopped, _ = fit(FSDP, drop=0.2, max_steps=6, name="run", callbacks=[saving])
    assert sharding(stopped.blocks[0][0].weight) == "{devices=[2,1]0,1}" and is_cut(stopped.blocks[1][0].bias)
    assert stopped.output.weight is stopped.embedding.weight
    resumed, _ = fit(FSDP, drop=0.2, name="run", callbacks=[ModelCheckpoint(every=6)], resume_from="latest")
    assert all(is_cut(parameter) for parameter in resumed.parameters())
    whole, _ = fit(FSDP, drop=0.2, name="whole")
    assert numbers(resumed.losses) == numbers(whole.losses)[6:]
    assert_equal(state_of(whole), state_of(resumed))


def test_checkpoints_of_fsdp_go_to_one_device(working_folder: Path) -> None:
    fit(FSDP, max_steps=6, name="run", callbacks=[ModelCheckpoint(every=6)])
    task, _ = fit("single", name="run", callbacks=[ModelCheckpoint(every=6)], resume_from="latest")
    whole, _ = fit("single", name="whole")
    for name, value in state_of(whole).items():
        torch.testing.assert_close(state_of(task)[name], value, atol=1e-5, rtol=1e-5)


def test_batches_are_cut_over_the_devices() -> None:
    accelerator = Accelerator(strategy=SPMD)
    words, target = next(iter(accelerator.prepare(loader(8, 8))))
    assert sharding(words) == "{devices=[2,1]0,1}" and sharding(target) == "{devices=[2]0,1}"
    words, _ = next(iter(accelerator.prepare(loader(7, 7))))
    assert not is_cut(words)


def test_another_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="spmd=True uses all devices in one process, and 2 were started"):
        xla.choose_device(Place(num_processes=2, local_num_processes=2), spmd=True)
