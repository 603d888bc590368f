"""The modules whose names users of Accelerate know."""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import loopwright.data_loader
import loopwright.launchers
import loopwright.local_sgd
import loopwright.logging
import loopwright.optimizer
import loopwright.scheduler
import loopwright.state
import loopwright.tracking
import loopwright.utils
from loopwright.cli.launch_config import read_launch_file
from loopwright.distributed.errors import ConfigError
from loopwright.trainer.accelerator import Accelerator

MODULES = [
    loopwright.data_loader,
    loopwright.launchers,
    loopwright.local_sgd,
    loopwright.logging,
    loopwright.optimizer,
    loopwright.scheduler,
    loopwright.state,
    loopwright.tracking,
    loopwright.utils,
]

# Names that Accelerate does not have in these modules.
OWN_UTILS = {"PartialState", "clear_device_cache", "should_reduce_batch_size"}

# What this version does not have of Accelerate's class: each belongs to states on disk, or to backends that come later.
LATER = {
    "deepspeed_ulysses_dl_adapter", "fp8_backend", "is_composable_parallelism_enabled",
    "lomo_backward", "pipeline_parallel_rank",
}  # fmt: skip


# What Accelerate defines in these modules and Loopwright does not: trackers that come later, and what is done here by
# words (`loopwright.register_tracker`, `Accelerator(log_with="all")`).
ABSENT = {
    "tracking": {
        "AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker", "LOGGER_TYPE_TO_CLASS", "SwanLabTracker",
        "TrackioTracker", "filter_trackers", "get_available_trackers", "register_tracker_class",
    },
    # One class of loaders does what these do; a loader is prepared by an `Accelerator`.
    "data_loader": {
        "DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderStateMixin", "SkipDataLoader", "additional_kwargs",
        "get_sampler", "prepare_data_loader", "v",
    },
    "logging": set[str](),
    "optimizer": {"move_to_device", "patch_optimizer_step"},
    "scheduler": set[str](),
    "launchers": {"ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "test_launch"},
    "local_sgd": set[str](),
    # What Accelerate's singletons are made with.
    "state": {"ThreadLocalSharedDict", "do_nothing", "is_initialized"},
}  # fmt: skip


PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-accelerate.md"
CLASSES = [
    ("state", "PartialState"), ("state", "AcceleratorState"), ("state", "GradientState"),
    ("tracking", "GeneralTracker"), ("tracking", "TensorBoardTracker"), ("tracking", "WandBTracker"),
    ("tracking", "MLflowTracker"), ("data_loader", "DataLoaderShard"), ("optimizer", "AcceleratedOptimizer"),
]  # fmt: skip


def listed() -> set[str]:
    """The names, also with stars, on the left of the page's table of names that are not there."""
    table = PAGE.read_text().partition("## Names that are not there")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    return {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([\w.*]+)`", row)}


def public(owner: object) -> set[str]:
    return {name for name in dir(owner) if not (name.startswith("_") or inspect.ismodule(getattr(owner, name)))}


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_every_name_is_there_or_on_the_page() -> None:
    theirs = importlib.import_module("accelerate")
    missing = public(theirs) - set(loopwright.__all__)
    missing |= public(importlib.import_module("accelerate.utils")) - set(loopwright.utils.__all__)
    names = listed()
    for module, name in CLASSES:
        ours = getattr(importlib.import_module(f"loopwright.{module}"), name)
        own = ours() if name in ("PartialState", "AcceleratorState", "GradientState") else ours
        missing |= public(getattr(importlib.import_module(f"accelerate.{module}"), name)) - set(dir(own)) - {"name"}
    assert {name for name in missing if not any(fnmatch.fnmatchcase(name, pattern) for pattern in names)} == set()
    assert {pattern for pattern in names if "*" in pattern and not fnmatch.filter(missing, pattern)} == set()
    assert not names & set(loopwright.__all__) and not names & set(loopwright.utils.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_is_there_and_has_a_docstring(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert names == sorted(names)
    assert [name for name in names if not getattr(module, name).__doc__] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_the_names_are_accelerates() -> None:
    utils = importlib.import_module("accelerate.utils")
    memory = importlib.import_module("accelerate.utils.memory")
    assert {name for name in loopwright.utils.__all__ if not hasattr(utils, name)} == OWN_UTILS
    assert hasattr(memory, "should_reduce_batch_size")
    theirs = {name for name in dir(importlib.import_module("accelerate").Accelerator) if not name.startswith("_")}
    assert theirs - set(dir(Accelerator())) == LATER


def test_a_launch_file_is_written_once() -> None:
    path = loopwright.utils.write_basic_config("bf16", "configs/launch.yaml")
    assert path == Path("configs/launch.yaml")
    assert read_launch_file(path).options["mixed_precision"] == "bf16"
    text = path.read_text()
    with pytest.warns(UserWarning, match="launch.yaml is there already, and stays as it is"):
        assert loopwright.utils.write_basic_config(save_location=path) is False
    assert path.read_text() == text
    with pytest.raises(ConfigError, match="mixed_precision"):
        loopwright.utils.write_basic_config("bf61", "other.yaml")


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("name", ABSENT)
def test_every_name_that_accelerate_defines_is_there_or_listed(name: str) -> None:
    theirs = importlib.import_module(f"accelerate.{name}")
    defined = {
        key
        for key, value in vars(theirs).items()
        if not (key.startswith("_") or inspect.ismodule(value))
        and getattr(value, "__module__", theirs.__name__) == theirs.__name__
    }
    ours = importlib.import_module(f"loopwright.{name}").__all__
    assert defined - set(ours) == ABSENT[name]
    assert set(ours) <= defined
