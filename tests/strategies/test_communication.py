"""In which form DDP sends gradients; the numbers are F28 of the reference semantics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loopwright.distributed.errors import ConfigError
from loopwright.strategies.communication import (
    Communication,
    DDPCommunicationHookType,
    SquareBucket,
    batched_power_sgd,
)
from loopwright.strategies.handlers import DistributedDataParallelKwargs

Run = Callable[..., list[Any]]


def _gradient(options: dict[str, Any]) -> float:
    """The mean of gradients of 0.1 and 0.2."""
    model = nn.Linear(1, 1, bias=False)
    replica = DistributedDataParallel(model)
    DistributedDataParallelKwargs(**options).register_comm_hook(replica)
    replica(torch.tensor([[0.1 * (torch.distributed.get_rank() + 1)]])).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.item()


FP16 = torch.tensor(0.05, dtype=torch.float16) + torch.tensor(0.1, dtype=torch.float16)
BF16 = torch.tensor(0.05, dtype=torch.bfloat16) + torch.tensor(0.1, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.15),
        ({"comm_hook": "fp16"}, 0.14990234375),
        ({"comm_hook": DDPCommunicationHookType.BF16}, BF16.item()),
        ({"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 1}}, 0.15),
        ({"comm_hook": "batched_power_sgd"}, 0.15),
        ({"comm_hook": "power_sgd", "comm_wrapper": "fp16"}, 0.14990234375),
        ({"comm_hook": "fp16", "comm_wrapper": "bf16"}, 0.15),
    ],
)
def test_the_mean_of_two_gradients(two_processes: Run, options: dict[str, Any], expected: float) -> None:
    first, second = two_processes(_gradient, options)
    assert first == second
    tolerance = 1e-3 if options.get("comm_wrapper") == "bf16" else 1e-7
    assert first == pytest.approx(expected, abs=tolerance)


def test_the_expected_numbers_of_short_formats() -> None:
    assert FP16.item() == 0.14990234375
    assert BF16.item() == pytest.approx(0.15, abs=1e-3)


def _trained(options: dict[str, Any], steps: int) -> tuple[list[float], bool]:
    """Weights after some steps of regression to a linear map, and whether gradients were equal on both processes."""
    torch.manual_seed(0)
    target = torch.randn(16, 2) @ torch.randn(2, 16)
    model = nn.Linear(16, 16, bias=False)
    replica = DistributedDataParallel(model)
    Communication(**options).register(replica)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 16, generator=generator)
        loss = ((replica(inputs) - inputs @ target) ** 2).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = model.weight.detach().clone()
    torch.distributed.broadcast(weights, 0)
    return [losses[0], losses[-1]], bool(torch.equal(weights, model.weight.detach()))


@pytest.mark.parametrize("hook", ["power_sgd", "batched_power_sgd"])
@pytest.mark.parametrize("wrapper", ["no", "fp16"])
def test_power_sgd_compresses_and_learns(two_processes: Run, hook: str, wrapper: str) -> None:
    state = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    options = {"hook": hook, "wrapper": wrapper, "options": state}
    for (first, last), is_equal in two_processes(_trained, options, 60):
        assert is_equal
        assert last < first / 20


class OneTensor:
    """What a bucket of DDP gives to its hook."""

    def __init__(self, values: list[float]) -> None:
        self._buffer = torch.tensor(values)

    def buffer(self) -> Tensor:
        return self._buffer

    def index(self) -> int:
        return 3

    def is_last(self) -> bool:
        return True


@pytest.mark.parametrize(("count", "side"), [(1, 1), (4, 2), (5, 3), (9, 3), (10, 4)])
def test_a_bucket_as_a_square(count: int, side: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    square = SquareBucket(OneTensor(values))  # type: ignore[arg-type]
    (matrix,) = square.gradients()
    assert matrix.shape == (side, side)
    assert square.buffer().tolist() == values + [0.0] * (side * side - count)
    assert matrix.data_ptr() == square.buffer().data_ptr()
    assert (square.index(), square.is_last()) == (3, True)


def _low_rank() -> tuple[list[float], list[float]]:
    """The mean of two buckets whose square has rank 1 comes out whole."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    state = PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1, use_error_feedback=True
    )
    state.iter = 2
    rank = torch.distributed.get_rank()
    column = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0])
    values = torch.outer(column, column).flatten()[:-1] * (rank + 1)
    bucket = OneTensor(values.tolist())
    batched_power_sgd(state, bucket).wait()  # type: ignore[arg-type]
    return bucket.buffer()[:10].tolist(), (values / (rank + 1) * 1.5)[:10].tolist()


def test_what_has_the_rank_of_the_approximation_is_sent_whole(two_processes: Run) -> None:
    for found, expected in two_processes(_low_rank):
        assert found == pytest.approx(expected, rel=0.05)


def _refused_options() -> list[str]:
    replica = DistributedDataParallel(nn.Linear(1, 1))
    texts = []
    for options in ({"matrix_rank": 2}, {"start_powerSGD_iter": 1}):
        try:
            Communication("power_sgd", "no", options).register(replica)
        except ConfigError as error:
            texts.append(str(error))
    return texts


def test_options_that_power_sgd_does_not_take(two_processes: Run) -> None:
    for unknown, too_early in two_processes(_refused_options):
        assert unknown.startswith("comm_state_option={'matrix_rank': 2} can't be used. ")
        assert "Accepted: " in unknown
        assert "matrix_approximation_rank" in unknown
        assert "start_powerSGD_iter" in too_early


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_hook": "fp8"}, r"comm_hook='fp8' is unknown\. Did you mean 'fp16'\?|comm_hook='fp8' is unknown\."),
        ({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, r"comm_wrapper='power_sgd' is unknown\. .*bf16, fp16, no"),
        ({"comm_wrapper": "fp16"}, r"comm_wrapper='fp16' has no hook to wrap\. Give comm_hook as well"),
        ({"comm_hook": "fp16", "comm_state_option": {"a": 1}}, r"comm_state_option has a, but comm_hook='fp16' has no"),
        ({"comm_hook": "power_sgd", "comm_state_option": 3}, r"comm_state_option=3\. Expected a mapping"),
    ],
)
def test_what_does_not_fit_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedDataParallelKwargs(**options)


def test_words_of_hooks() -> None:
    assert [str(kind) for kind in DDPCommunicationHookType] == ["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]
    assert DDPCommunicationHookType("bf16") is DDPCommunicationHookType.BF16
