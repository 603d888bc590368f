"""A leg of a run in a process of its own, killed in the middle: no tracker of it finishes."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import Any

from loopwright.trackers.group import TrackerGroup
from loopwright.trackers.registry import create_trackers
from loopwright.trackers.tracker import RunInfo

from ..nursery import nursery

_SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from loopwright.trackers.registry import create_trackers
from loopwright.trackers.tracker import RunInfo

specs, name, project, directory = json.loads(sys.argv[1])
group = create_trackers(specs)
group.start(RunInfo(name, project, Path(directory)), {"lr": 0.5})
for step in range(1, 11):
    group.log({"loss": float(step)}, step)
    if step == 6:
        group.flush()
        sys.stdout.write(json.dumps(group.state_dict()))
        sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_leg(run: RunInfo, *specs: dict[str, Any]) -> TrackerGroup:
    """Log steps 1 to 10 in another process, with what a checkpoint does at step 6, and kill it.

    Returns:
        The trackers, ready to go on from there.
    """
    arguments = json.dumps([specs, run.name, run.project, str(run.directory)])
    done = nursery().run("-c", _SCRIPT, arguments, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    group = create_trackers(list(specs))
    group.load_state_dict(json.loads(done.stdout))
    return group


def resumed_leg(run: RunInfo, group: TrackerGroup) -> RunInfo:
    """Log steps 7 to 12 behind step 6."""
    leg = replace(run, resumed_step=6)
    group.start(leg, {"lr": 0.25})
    for step in range(7, 13):
        group.log({"loss": step + 0.5}, step)
    group.finish("success")
    return leg


ONE_VALUE_FOR_EACH_STEP = {"loss": [(step, step + 0.5 * (step > 6)) for step in range(1, 13)]}
