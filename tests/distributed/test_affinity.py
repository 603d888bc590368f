"""Which cores a process is bound to, in a process of its own: this one keeps all of its."""

from __future__ import annotations

import os

import pytest

from loopwright.distributed.affinity import _numbers

from ..nursery import nursery

SCRIPT = """
import os, torch
from loopwright.distributed.affinity import bind_to_cores
from loopwright.distributed.launched import Place
place = Place(num_processes=2, local_num_processes=2, process_index=1, local_process_index=1)
cores = bind_to_cores(place, torch.device("cpu"))
assert cores == os.sched_getaffinity(0)
print(sorted(cores))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
def test_the_second_of_two_processes_takes_the_second_half() -> None:
    ended = nursery().run("-c", SCRIPT, timeout=60)
    assert ended.returncode == 0, ended.stderr
    here = sorted(os.sched_getaffinity(0))
    half = len(here) // 2
    assert ended.stdout.strip() == str(here[half : 2 * half] or here)


def test_ranges_of_cores() -> None:
    assert _numbers("0-2,8\n") == {0, 1, 2, 8}
