"""`DistributedType`: how the processes of a run work together."""

from __future__ import annotations

import enum


class DistributedType(enum.StrEnum):
    """How the processes of a run work together; the members are Accelerate's, and equal to their text."""

    NO = "NO"
    """One process."""
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


def kind_of(device_type: str, num_processes: int, kind: DistributedType | None = None) -> DistributedType:
    """How processes on devices of this type work together; `kind`, where there are several and it is given. Local."""
    if device_type == "xla":
        return DistributedType.XLA  # also in one process, as Accelerate: shapes are better padded
    if num_processes == 1:
        return DistributedType.NO
    if kind is not None:
        return kind
    word = {"cuda": "GPU"}.get(device_type, device_type.upper())
    return DistributedType(f"MULTI_{word}") if f"MULTI_{word}" in DistributedType.__members__ else DistributedType.XLA
