"""What several processes with XLA devices call of torch_xla: its interface alone, since its CPU has no second process.

On TPUs nothing of this has run. `test_processes.py` runs two processes whose runtimes don't know each other.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

torch_xla = pytest.importorskip("torch_xla", reason="needs torch_xla: make test-xla", exc_type=ImportError)

from loopwright import ConfigError, XLAStrategy  # noqa: E402
from loopwright.distributed import xla  # noqa: E402
from loopwright.strategies.xla import reduce_gradients  # noqa: E402
from loopwright.strategies.xla_launch import place_variables  # noqa: E402

torch_xla.real_devices()  # before the first backward pass of the process


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Fail where the function would not take these arguments."""
    inspect.signature(function).bind(*args, **kwargs)


def test_interface_of_the_reduction_of_gradients() -> None:
    model = xla.load("core.xla_model")
    takes(model.all_reduce, model.REDUCE_SUM, [torch.ones(1)], scale=0.5)
    assert "place" in (model.all_reduce.__doc__ or "") and model.REDUCE_SUM == "sum"


def test_the_reduction_scales_in_place_and_fills_in_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    # One replica: the sum over replicas is its own, so that the scale alone is left.
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # else torch_xla leaves it out
    layer = nn.Linear(2, 1).to("xla")
    layer.weight.grad = torch.full((1, 2), 6.0, device="xla")
    reduce_gradients(list(layer.parameters()), 2)
    assert layer.weight.grad.tolist() == [[3.0, 3.0]]
    assert layer.bias.grad is not None and layer.bias.grad.tolist() == [0.0]


def test_interface_of_the_start_of_processes() -> None:
    takes(torch_xla.launch, print, (1,), "spawn")
    takes(xla.load("_internal.pjrt").initialize_multiprocess, 0, 2)


def test_interface_of_the_place_of_a_process() -> None:
    runtime = xla.load("runtime")
    for name in ("world_size", "global_ordinal", "local_ordinal", "local_device_count", "addressable_device_count"):
        takes(getattr(runtime, name))
    assert (runtime.world_size(), runtime.global_ordinal(), runtime.local_ordinal()) == (1, 0, 0)
    assert place_variables(("127.0.0.1", "1")) == {}  # nobody to find
    assert not xla.is_connected(2)


def test_launch_refuses_a_process_that_uses_its_device() -> None:
    with pytest.raises(ConfigError, match="has used its XLA device already"):
        XLAStrategy.launch(print)


LAUNCHED = """
import sys
import torch
from pathlib import Path
from loopwright import Accelerator, XLAStrategy

def train(folder):
    accelerator = Accelerator(strategy="xla")
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(4, 2, device=accelerator.device)).mean())
    optimizer.step()
    Path(folder, str(accelerator.process_index)).write_text(f"{accelerator.device} {model.weight.grad.tolist()}")

if __name__ == "__main__":
    XLAStrategy.launch(train, (sys.argv[1],))
"""


@pytest.mark.timeout(300)
def test_launch_runs_a_function_in_a_process_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=280)
    assert (tmp_path / "0").read_text() == "xla:0 [[1.0, 1.0]]"


LATE = """
import torch
from loopwright import Accelerator
torch.ones(1, requires_grad=True).backward()
Accelerator(strategy="xla")
"""


@pytest.mark.timeout(300)
def test_a_backward_pass_before_the_device_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1 and "before its XLA device was there" in done.stderr
