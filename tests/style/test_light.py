"""Importing is cheap and changes nothing: measured in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# In the order in which the package promises more: nothing at all, then torch but no tracker and no optional package.
HEAVY = ["torch", "numpy", "tensorboard", "wandb", "mlflow", "torchmetrics", "tqdm", "yaml", "jsonargparse"]
OPTIONAL = [
    "tensorboard",
    "torch.utils.tensorboard",
    "wandb",
    "mlflow",
    "torchmetrics",
    "deepspeed",
    "transformers",
    "accelerate",
    "lightning",
    "sklearn",
    "jsonargparse",
    "torch._dynamo",
    "torch.distributed.checkpoint",
]

PROBE = """
import json, logging, os, signal, sys, threading
def state():
    handlers = {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}
    return {"signals": handlers, "environment": dict(os.environ), "threads": threading.active_count(),
            "logging": [len(logging.root.handlers), logging.root.level], "path": list(sys.path),
            "hooks": [repr(sys.excepthook), repr(sys.displayhook)]}
%s
before = state()
%s
after = state()
changed = [name for name in before if before[name] != after[name]]
print(json.dumps({"modules": sorted(sys.modules), "changed": changed}))
"""


def probe(statement: str, *, before: str = "") -> dict[str, Any]:
    """What a statement imports and changes in a new interpreter."""
    command = [sys.executable, "-c", PROBE % (before, statement)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    report: dict[str, Any] = json.loads(run.stdout)
    return report


@pytest.mark.parametrize(
    "statement",
    [
        "import loopwright",
        "import loopwright; dir(loopwright); loopwright.__version__",
        "from loopwright import ConfigError",
        "import loopwright.cli.main",
    ],
)
def test_light_imports_load_no_torch(statement: str) -> None:
    report = probe(statement)
    assert not set(HEAVY) & set(report["modules"])
    assert report["changed"] == []


def test_pain_30_importing_the_trainer_loads_no_tracker_and_no_optional_package() -> None:
    report = probe("from loopwright import Accelerator, Callback, Task, Trainer", before="import torch")
    assert not set(OPTIONAL) & set(report["modules"])
    assert report["changed"] == []


def test_no_public_name_changes_the_process_when_it_loads() -> None:
    report = probe("from loopwright import *", before="import torch")
    assert not set(OPTIONAL) & set(report["modules"])
    assert report["changed"] == []
