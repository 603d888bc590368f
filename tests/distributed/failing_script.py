"""What the processes of test_watch.py and test_failures.py run: failures of every kind, on purpose.

`failing_script.py fatal KIND INDEX` ends by that failure of one process; `failing_script.py survivable NAME PORT ...`
goes through failures that a process survives, each in a group of its own, and prints a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from loopwright.distributed import group, watch
from loopwright.distributed.exchange import start_vector
from loopwright.distributed.launched import find_place
from loopwright.distributed.process import ProcessState

PLACE = find_place()
INDEX = PLACE.process_index


def meet(operation: str = "gather") -> float:
    with watch.collective(operation):
        total = torch.ones(1)
        dist.all_reduce(total)
    return float(total)


def agree() -> list[tuple[float, ...]]:
    return start_vector([float(INDEX)], "agree").read()


def attempt(function: Callable[[], object]) -> dict[str, object]:
    """The error that it raises, as what a test compares."""
    try:
        return {"returned": function()}
    except RuntimeError as error:
        return {"type": type(error).__name__, "text": str(error), "cause": str(error.__cause__)}


def explode() -> None:
    raise ValueError("boom")


def caught() -> ValueError:
    try:
        explode()
    except ValueError as error:
        return error
    raise AssertionError


def all_fail_alike() -> dict[str, object]:
    """The last one to announce knows at once that all have failed, the others know it while they wait."""
    error = caught()
    time.sleep(0.5 * INDEX)
    watch.announce_failure(error)
    was_left = watch.leave_group_after(error)
    return {"was_left": was_left, "first": watch.first_failure() is None, **attempt(meet)}


def one_leaves() -> dict[str, object]:
    """The wrapper of a model holds the group, and so its connections, also when the group is destroyed."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    if INDEX == 1:
        return {"was_left": watch.leave_group_after(caught()), "is_connected": group.is_connected()}
    result = attempt(lambda: model(torch.ones(1, 1)) and meet("backward of DDP"))
    return result | {"left_too": watch.leave_group_after(RuntimeError()) and not group.is_connected()}


def one_stays() -> dict[str, object]:
    """It announces its failure and never leaves: the others free themselves."""
    if INDEX == 1:
        watch.announce_failure(caught())
        wait_for_others("stays")
        return {}
    result = attempt(meet)
    say_done("stays")
    return result


def one_leaves_memory() -> dict[str, object]:
    """As `one_leaves`, for a control message: these need no connection of the backend."""
    agree()
    if INDEX == 1:
        return {"was_left": watch.leave_group_after(caught())}
    return attempt(agree)


def one_stays_in_memory() -> dict[str, object]:
    agree()
    if INDEX == 1:
        watch.announce_failure(caught())
        wait_for_others("stays in memory")
        return {}
    result = attempt(agree)
    say_done("stays in memory")
    return result


def one_never_sends() -> dict[str, object]:
    agree()
    watch.stand("training_step", 7)
    if INDEX == 1:
        wait_for_others("sends")
        return {}
    result = attempt(agree)
    say_done("sends")
    return result


def one_never_arrives() -> dict[str, object]:
    watch.stand("training_step", 7)
    if INDEX == 1:
        wait_for_others("arrives")
        return {}
    result = attempt(meet)
    say_done("arrives")
    return result


def one_is_elsewhere() -> dict[str, object]:
    """Process 1 waits in another operation than the others, for what they never send."""
    if INDEX != 1:
        return attempt(meet)

    def receive() -> None:
        with watch.collective("broadcast"):
            dist.recv(torch.ones(1), src=0)

    return attempt(receive)


def say_done(name: str) -> None:
    Path(f"{name}-{INDEX}").touch()


def wait_for_others(name: str) -> None:
    while not all(Path(f"{name}-{other}").exists() for other in range(PLACE.num_processes) if other != INDEX):
        time.sleep(0.05)


SURVIVABLE: dict[str, float] = {
    # each with the group's timeout in seconds
    "all_fail_alike": 60.0,
    "one_leaves": 60.0,
    "one_stays": 60.0,
    "one_leaves_memory": 60.0,
    "one_stays_in_memory": 60.0,
    "one_never_sends": 2.0,
    "one_never_arrives": 2.0,
    "one_is_elsewhere": 2.0,
}


def run_survivable(names: list[str], ports: list[str]) -> None:
    for name, port in zip(names, ports, strict=True):
        os.environ["MASTER_PORT"] = port
        group.connect(PLACE, torch.device("cpu"), timeout=timedelta(seconds=SURVIVABLE[name]))
        watch.stand(name)
        result = globals()[name]()
        print(json.dumps({"name": name, "index": INDEX} | result), flush=True)
        say_done(f"end-{name}")
        wait_for_others(f"end-{name}")
        group.disconnect()


def run_fatal(kind: str, index: int) -> None:
    if kind == "adopted":
        dist.init_process_group("gloo")
    ProcessState(cpu=True, timeout=timedelta(seconds=60))
    together: Callable[[], object] = agree if kind == "kill in memory" else meet
    together()
    watch.stand("training_step", 2)
    if index != INDEX:
        together()
        together()
    elif kind == "error":
        explode()
    elif kind == "exit":
        sys.exit(3)
    elif kind in ("kill", "kill in memory"):
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        watch.announce_failure(caught())
        time.sleep(18.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "fatal":
        run_fatal(sys.argv[2], int(sys.argv[3]))
    else:
        run_survivable(sys.argv[2::2], sys.argv[3::2])
