"""What needs processes of its own: how an `Accelerator` makes its group, and leaves it. Prints JSON on each process."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from loopwright.strategies.handlers import InitProcessGroupKwargs
from loopwright.trainer.accelerator import Accelerator


def main() -> dict[str, Any]:
    """Make a group with settings of its own, share it, leave it."""
    settings = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=77))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[settings])
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = Accelerator(cpu=True)
    found = {
        "timeout": backend.options._timeout.total_seconds(),
        "backend": dist.get_backend(),
        "sum": second.reduce(torch.tensor(accelerator.process_index + 1)).item(),
    }
    accelerator.end_training()
    found["is_left"] = not dist.is_initialized()
    accelerator.end_training()  # where there is nothing to leave it does nothing
    return found


if __name__ == "__main__":
    # One write: lines of two processes don't mix then.
    print(json.dumps(main()) + "\n", end="", flush=True)
