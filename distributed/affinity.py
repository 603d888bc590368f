"""Binding a process to cores of its own, so that processes of one machine do not displace each other."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from .launched import Place

_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_cores(place: Place, device: torch.device) -> set[int]:
    """The cores that this process is bound to from now on; empty where the system can't. Local.

    A process on a GPU takes the cores of the memory node next to it. Others share
    the cores of the machine, in order. A machine with fewer cores than processes is left as it is.

    Args:
        place: this process's place.
        device: where it computes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    available = sorted(os.sched_getaffinity(0))
    cores = _cores_near(device) & set(available) if device.type == "cuda" else set()
    if not cores:
        share = len(available) // place.local_num_processes
        cores = set(available[share * place.local_process_index : share * (place.local_process_index + 1)])
    if cores:
        os.sched_setaffinity(0, cores)
    return cores


def _cores_near(device: torch.device) -> set[int]:
    """The cores of a GPU's memory node, as Linux lists them: `0-15,32-47`; empty where it does not say."""
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:
        return set()
    listing = _DEVICES / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "local_cpulist"
    return _numbers(listing.read_text()) if listing.is_file() else set()


def _numbers(text: str) -> set[int]:
    """The numbers of a list of ranges, `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
