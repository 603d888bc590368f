"""The modules whose names users of Accelerate know."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
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
    "context_parallel_rank", "data_parallel_rank", "data_parallel_shard_rank", "deepspeed_plugin",
    "deepspeed_ulysses_dl_adapter", "fp8_backend", "is_composable_parallelism_enabled", "is_fsdp2", "load_state",
    "lomo_backward", "maybe_context_parallel", "parallelism_config", "pipeline_parallel_rank",
    "register_load_state_pre_hook", "register_save_state_pre_hook", "save_iteration", "save_state",
    "tensor_parallel_rank", "torch_device_mesh",
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
    # Accelerate's singletons, and what they are made with.
    "state": {"AcceleratorState", "ThreadLocalSharedDict", "do_nothing", "is_initialized"},
}  # fmt: skip


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
