"""`AcceleratorState`: what an `Accelerator` knows of its surroundings; no singleton."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopwright.distributed.errors import ConfigError
from loopwright.distributed.kinds import DistributedType
from loopwright.state import AcceleratorState
from loopwright.trainer.accelerator import Accelerator


def test_that_of_an_accelerator_knows_its_precision_and_its_process() -> None:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    state = accelerator.state
    assert isinstance(state, AcceleratorState)
    assert (state.mixed_precision, state.distributed_type, state.device) == ("bf16", "NO", torch.device("cpu"))
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert (state.use_distributed, state.backend, state.debug, state.deepspeed_plugin) == (False, None, False, None)
    assert str(state) == "process 0 of 1 on cpu, NO, mixed precision bf16"


def test_two_accelerators_have_two_states() -> None:
    first, second = Accelerator(mixed_precision="bf16"), Accelerator(mixed_precision="no")
    assert (first.state.mixed_precision, second.state.mixed_precision) == ("bf16", "no")


def test_one_of_your_own_knows_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    state = AcceleratorState(cpu=True)
    assert (state.num_processes, state.is_main_process, str(state.device)) == (1, True, "cpu")
    with pytest.raises(ConfigError, match=r"is known to an Accelerator alone: .*accelerator\.state\.mixed_precision"):
        state.mixed_precision  # noqa: B018
    assert str(state) == "process 0 of 1 on cpu, NO, mixed precision not known here"
    assert AcceleratorState("16-mixed").mixed_precision == "fp16"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("LOOPWRIGHT_DEBUG_MODE", "1")
    assert (AcceleratorState().mixed_precision, AcceleratorState().debug) == ("bf16", True)
    assert AcceleratorState("no").mixed_precision == "no"
    with pytest.raises(ConfigError, match=r"mixed_precision='bf61' is unknown\. Did you mean 'bf16'\?"):
        AcceleratorState("bf61")
    with pytest.raises(ConfigError, match=r"mixed_precision=\['bf16'\] is unknown"):
        AcceleratorState(["bf16"])  # type: ignore[arg-type]


def _states() -> list[Any]:
    found = []
    for state in (Accelerator(mixed_precision="bf16", cpu=True).state, AcceleratorState("bf16", cpu=True)):
        with state.split_between_processes([1, 2, 3]) as share:
            found.append(
                (state.process_index, state.num_processes, state.distributed_type, state.backend, share, str(state))
            )
    return found


def test_both_know_the_place_among_several(two_processes: Any) -> None:
    for index, found in enumerate(two_processes(_states)):
        text = f"process {index} of 2 on cpu, MULTI_CPU over gloo, mixed precision bf16"
        share = [3] if index else [1, 2]
        assert found == [(index, 2, DistributedType.MULTI_CPU, "gloo", share, text)] * 2
