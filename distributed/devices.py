"""Which device a process computes on."""

from __future__ import annotations

import torch


def choose_device(*, cpu: bool = False) -> torch.device:
    """The current accelerator of this machine (CUDA, XPU, MPS, ...), or the CPU where there is none or `cpu` is set."""
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if accelerator.type == "mps":
        return accelerator
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
