"""`loopwright test` without a file: do the processes of this machine work together?

Run as a module this is the check itself, in each of the processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ..distributed.errors import LoopwrightError
from ..distributed.outcomes import record_failure
from ..trainer.accelerator import Accelerator
from .launch import run_processes
from .launch_merge import merged_options

SHARE, FEATURES, STEPS = 4, 6, 3


class SelfCheckError(LoopwrightError, AssertionError):
    """A check did not give what it has to."""


def run_selfcheck(given: Mapping[str, Any]) -> int:
    """Run the checks in the processes that the options and the launch file ask for, and return the exit code."""
    options = merged_options(given)
    code = run_processes("test", options, [sys.executable, "-u", "-m", "loopwright.cli.selfcheck"])
    print("All checks passed." if code == 0 else "A check failed; what is above says which.", flush=True)
    return code


def check_collectives(accelerator: Accelerator) -> str:
    """Sums, gathering, broadcasting and padding between the processes. Collective."""
    count, index = accelerator.num_processes, accelerator.process_index
    mine = torch.tensor([float(index)], device=accelerator.device)
    _expect("gather", accelerator.gather(mine).tolist(), [float(other) for other in range(count)])
    _expect("reduce", accelerator.reduce(mine.clone(), "sum").tolist(), [sum(range(count))])
    ragged = accelerator.pad_across_processes(torch.ones(index + 1, device=accelerator.device))
    _expect("pad_across_processes", ragged.shape[0], count)
    accelerator.wait_for_everyone()
    return f"gather, reduce, pad_across_processes and wait_for_everyone over {count} processes on {accelerator.device}"


def check_sharding(accelerator: Accelerator) -> str:
    """Every sample is seen, by one process, and `gather_for_metrics` drops what was repeated. Collective."""
    total = 10 * accelerator.num_processes + 1  # not divisible
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(total)), batch_size=2, shuffle=True))
    seen = [accelerator.gather_for_metrics(batch[0]) for batch in loader]
    _expect("samples of an epoch", sorted(torch.cat(seen).tolist()), list(range(total)))
    return f"a shuffled loader of {total} samples: each is seen once"


def check_training(accelerator: Accelerator) -> str:
    """Training in all processes gives the weights of training in one with the whole batches. Collective."""
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(_data(accelerator.num_processes), batch_size=SHARE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model).values()
    if not weights:  # of weights in parts, the main process has the whole
        return ""
    trained = torch.cat([weight.detach().float().cpu().flatten() for weight in weights])
    tolerance = 1e-5 if accelerator.mixed_precision == "no" else 5e-2
    distance = float((trained - _train_alone(accelerator.num_processes)).abs().max())
    if not distance <= tolerance:
        raise SelfCheckError(f"weights after {STEPS} steps differ by {distance:g} from those of one process.")
    return f"{STEPS} steps of training: the weights of one process, up to {distance:.1g}"


CHECKS: tuple[Callable[[Accelerator], str], ...] = (check_collectives, check_sharding, check_training)


def _data(num_processes: int) -> TensorDataset:
    """As many samples as make whole batches for all processes."""
    total = STEPS * num_processes * SHARE
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(total, FEATURES, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(total, 1, generator=generator))


def _train_alone(num_processes: int) -> torch.Tensor:
    """The weights after the same steps on the CPU of this process alone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(_data(num_processes), batch_size=SHARE * num_processes):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x), y))
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SelfCheckError(f"{what}: got {found}. Expected {wanted}.")


def main() -> None:
    """Run all checks in this process. Collective."""
    accelerator = Accelerator()
    for check in CHECKS:
        text = check(accelerator)
        accelerator.wait_for_everyone()
        accelerator.print(f"ok: {text}")
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        record_failure(error)
        raise
