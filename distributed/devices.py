"""Which device a process computes on."""

from __future__ import annotations

import torch

from .errors import ConfigError
from .launched import Place


def choose_device(*, cpu: bool = False, place: Place | None = None) -> torch.device:
    """This process's accelerator (CUDA, XPU, MPS, ...), or the CPU where there is none or `cpu` is set. Local.

    Args:
        cpu: stay on the CPU.
        place: among several processes each takes the device of its index on the machine, and makes it the current one.
    Raises:
        ConfigError: the machine has fewer devices than processes.
    """
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if accelerator.type == "mps":
        return accelerator
    if place is not None and place.num_processes > 1:
        found = torch.accelerator.device_count()
        # SLURM and MPI may show each process its own device alone.
        index = 0 if found == 1 and place.launcher != "torchrun" else place.local_process_index
        if index >= found:
            raise ConfigError(
                f"process {place.local_process_index} of this machine has no device: it has {found} of type "
                f"{accelerator.type}. Start at most {found} processes here, or choose cpu=True."
            )
        torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
