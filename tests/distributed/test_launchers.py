"""Functions launched from a program of their own: forks of pytest would carry its state along."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from loopwright import Accelerator, ConfigError, ProcessState
from loopwright.distributed.launchers import debug_launcher, notebook_launcher, started_devices

from ..nursery import nursery

SCRIPT = """
import os, threading
import torch
from loopwright import Accelerator, ConfigError
from loopwright.distributed.errors import LaunchError
from loopwright.distributed.launchers import debug_launcher, notebook_launcher

def work(take, name):
    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]))
    with open(f"{name}-{accelerator.process_index}", "w") as file:
        file.write(f"{take()} {accelerator.num_processes} {accelerator.local_process_index} {total.item()} "
                   f"{accelerator.mixed_precision}")
    # The gradient of a model large enough for several threads, which a fork does not have.
    torch.nn.Linear(300, 300)(torch.randn(300, 300)).sum().backward()

def fail():
    accelerator = Accelerator()
    if accelerator.process_index == 1:
        raise ValueError("boom")
    accelerator.wait_for_everyone()

def use():
    accelerator.wait_for_everyone()

def caught(kind, launcher, *arguments, **options):
    try:
        launcher(*arguments, **options)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")

if __name__ == "__main__":
    torch.nn.Linear(300, 300)(torch.randn(300, 300)).sum().backward()
    before = dict(os.environ), threading.enumerate()
    notebook_launcher(work, (lambda: "first", "a"), num_processes=2, mixed_precision="bf16")
    notebook_launcher(work, (lambda: "second", "b"), num_processes=2)
    debug_launcher(work, (lambda: "third", "c"))
    text = caught(LaunchError, debug_launcher, fail)
    assert text.startswith("process 1 of 2 failed first: ValueError: boom"), text
    assert "in fail" in text and 'raise ValueError("boom")' in text, text
    assert (dict(os.environ), threading.enumerate()) == before
    notebook_launcher(lambda: print("called here with", os.environ["LOOPWRIGHT_MIXED_PRECISION"]), num_processes=1)
    assert "LOOPWRIGHT_MIXED_PRECISION" not in os.environ
    # One that the function makes for itself is nothing to it; it would train alone in each process with this one.
    accelerator = Accelerator()
    notebook_launcher(work, (lambda: "fourth", "d"), num_processes=2)
    text = caught(ConfigError, notebook_launcher, use, num_processes=2)
    assert "uses accelerator, an Accelerator of this process" in text, text
    print("done")
"""


def test_b121_two_launches_in_a_row_and_one_that_fails() -> None:
    Path("script.py").write_text(SCRIPT)
    ended = nursery().run("script.py", timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["called here with no", "done"]
    assert ended.stderr == ""
    for index in (0, 1):
        assert Path(f"a-{index}").read_text() == f"first 2 {index} 3.0 bf16"
        assert Path(f"b-{index}").read_text() == f"second 2 {index} 3.0 no"
        assert Path(f"c-{index}").read_text() == f"third 2 {index} 3.0 no"
        assert Path(f"d-{index}").read_text() == f"fourth 2 {index} 3.0 no"


def test_b121_a_device_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert started_devices() == [] or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"cuda is already in use in this process.*Restart the notebook"):
        notebook_launcher(print, num_processes=2)


STATE = ProcessState()


def through_a_helper() -> None:
    of_this_module()


def of_this_module() -> None:
    def inner() -> None:
        STATE.wait_for_everyone()

    inner()


class Held:
    """As a Trainer holds its Accelerator."""

    def __init__(self) -> None:
        self.accelerator = Accelerator()

    def run(self) -> None:
        """What is launched."""


def uses() -> dict[str, tuple[Callable[..., object], tuple[object, ...], str]]:
    own, held = Accelerator(), Held()
    return {
        "closure": (lambda: own.wait_for_everyone(), (), "uses own, an Accelerator"),
        "default": (lambda given=own: given, (), "uses a default, an Accelerator"),
        "argument": (print, (1, own), r"uses args\[1\], an Accelerator"),
        "partial": (functools.partial(print, 1, end=own), (), "uses argument end, an Accelerator"),
        "holder": (print, (held,), r"uses args\[0\], a Held"),
        "method": (held.run, (), r"uses the object of Held.run, a Held"),
        "helper": (through_a_helper, (), "uses STATE, a ProcessState of this process"),
    }


@pytest.mark.parametrize("way", ["closure", "default", "argument", "partial", "holder", "method", "helper"])
def test_what_knows_nothing_of_the_processes_is_refused_in_the_function(way: str) -> None:
    function, args, says = uses()[way]
    for launcher in (notebook_launcher, debug_launcher):
        with pytest.raises(ConfigError, match=says):
            launcher(function, args, num_processes=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "num_processes is missing"),
        ({"num_processes": 0}, "num_processes=0"),
        ({"num_processes": 1, "num_nodes": 2, "node_rank": 2}, "machine_rank=2 with num_machines=2"),
        ({"num_processes": 2, "mixed_precision": "bf61"}, "mixed_precision='bf61'. Accepted: no, bf16, fp16"),
        ({"num_processes": 2, "use_port": "x"}, "Expected a host and the number of a port"),
    ],
)
def test_bad_input(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        notebook_launcher(print, **options)  # type: ignore[arg-type]
