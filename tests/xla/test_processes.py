"""Two processes, each with a runtime of torch_xla that knows one device alone: gradients go over the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

pytest.importorskip("torch_xla", reason="needs torch_xla: make test-xla", exc_type=ImportError)

from loopwright import Accelerator, ConfigError

from .training import loader, make, numbers, trainer

Run = Callable[..., list[Any]]


def _train(batch_size: int, options: dict[str, Any]) -> Any:
    # Process 0's weights count: the others begin with other numbers.
    task = make(1 + (dist.get_rank() if dist.is_initialized() else 0))
    found = trainer(**options)
    found.fit(task, loader(48, batch_size), loader(12, 4))
    weights = {name: value.tolist() for name, value in found.strategy.whole_model_state(task).items()}
    return numbers(task.losses), dict(found.metrics), weights


@pytest.mark.timeout(400)
def test_the_trainer_trains_as_on_one_process(two_processes: Run) -> None:
    options: dict[str, Any] = {"strategy": "xla", "accumulate": 2, "clip_norm": 0.5}
    losses, metrics, weights = _train(8, options | {"strategy": "single"})
    found = two_processes(_train, 4, options, timeout=380)
    assert found[0][2] == found[1][2]  # bit for bit
    means = [(one + other) / 2 for one, other in zip(found[0][0], found[1][0], strict=True)]
    assert means == pytest.approx(losses, abs=1e-5)
    assert found[0][1] == pytest.approx(metrics, abs=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(found[0][2][name]), torch.tensor(value), atol=1e-5, rtol=1e-5)


def _loop() -> Any:
    accelerator = Accelerator(strategy="xla", gradient_accumulation_steps=2)
    model = make(1 + accelerator.process_index)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(32, 4))
    seen = []
    for words, target in batches:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(words), target))
            gradient = model.output.weight.grad.sum().item()
            seen.append(len(set(accelerator.gather(torch.tensor([gradient], device=accelerator.device)).tolist())))
            optimizer.step()
            optimizer.zero_grad()
    index = torch.tensor([accelerator.process_index], device=accelerator.device)
    operations = [accelerator.gather(index), accelerator.reduce(index.float(), "mean")]
    flag = torch.full((2,), float(accelerator.process_index), device=accelerator.device)
    from loopwright.utils import broadcast

    operations.append(broadcast(flag, from_process=1))
    accelerator.wait_for_everyone()
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
    except ConfigError as error:
        refused = str(error)
    return seen, [(each.device.type, each.tolist()) for each in operations], refused


@pytest.mark.timeout(400)
def test_an_own_loop_averages_where_it_synchronises(two_processes: Run) -> None:
    for seen, operations, refused in two_processes(_loop, timeout=380):
        assert seen == [2, 1, 2, 1]  # different gradients, then the same
        assert operations == [("xla", [0, 1]), ("xla", [0.5]), ("xla", [1.0, 1.0])]
        assert "join_uneven_inputs: processes with XLA devices all run the same steps" in refused
