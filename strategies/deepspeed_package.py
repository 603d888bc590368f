"""The package DeepSpeed: imported for a device, quiet, and over the group of processes that there is."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.environment import patch_environment
from ..distributed.group import backend_of
from ..distributed.imports import require

_NEW_NAMES = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}
"""Attributes of DeepSpeed's backend, and what newer versions of torch call the functions in them."""
_OPERATORS = "__compatible_ops__"
"""Where DeepSpeed keeps which operators it can build; it asks the compiler at the first look."""


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed for a device. Local; the first import takes seconds.

    Raises:
        MissingDependencyError: it is not installed; has the pip command.
    """
    chosen = {} if "DS_ACCELERATOR" in os.environ else {"DS_ACCELERATOR": device.type}
    with patch_environment(**chosen), _kept_environment(), warnings.catch_warnings():
        # torch's compiler warns of another part of torch, which DeepSpeed imports both of when it first needs them.
        warnings.filterwarnings("ignore", r"`torch\.jit\..*` is deprecated", DeprecationWarning)
        deepspeed = require("deepspeed", extra="deepspeed", purpose="strategy='deepspeed'")
        deepspeed.get_accelerator()
        require("deepspeed.runtime.zero.muon.muon_optimizer", extra="deepspeed", purpose="strategy='deepspeed'")
    logger = deepspeed.utils.logger
    logger.addFilter(_says_something)
    for handler in logger.handlers:
        if handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    return deepspeed


def connect_deepspeed(deepspeed: Any, device: torch.device) -> None:
    """Let DeepSpeed use torch's group of processes; one process without a group gets one of its own. Local.

    Args:
        deepspeed: the package.
        device: where tensors are that it sends.
    """
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    if not dist.is_initialized():
        functions: Any = dist
        dist.init_process_group(backend_of(device), store=functions.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    if comm.cdb is not None and vars(comm.cdb).get("served") is not group:  # of a group that was left since
        comm.cdb = None
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        for kept in (groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP, groups._ALL_TO_ALL_GROUP):
            kept.clear()
    if comm.cdb is None:
        with _without_operators(deepspeed, device):
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        vars(comm.cdb)["served"] = group
        groups._WORLD_GROUP = group  # in the place of a copy, whose connections are not watched
        _use_new_names(comm.cdb)


@contextmanager
def launched(local_index: int) -> Iterator[None]:
    """A context in which the variable is set by which DeepSpeed knows this process's place on its machine."""
    with patch_environment(local_rank=local_index):
        yield


@contextmanager
def _without_operators(deepspeed: Any, device: torch.device) -> Iterator[None]:
    """A context in which DeepSpeed builds no operator on the CPU. It would build one from C++ to talk to the processes
    of a machine, for minutes; without it tensors travel over gloo, as those of the other strategies do.
    """
    known = vars(deepspeed.ops)
    if device.type != "cpu":
        yield
        return
    before = known.get(_OPERATORS)
    known[_OPERATORS] = {}
    try:
        yield
    finally:
        del known[_OPERATORS]
        if before is not None:
            known[_OPERATORS] = before


def _says_something(record: logging.LogRecord) -> bool:
    """Whether a line of DeepSpeed's log is shown: not that each optimizer which is not its own is untested, nor that a
    schedule is asked for its first rate.
    """
    text = str(record.msg)
    return "untested optimizer" not in text and "before it has started" not in text


def _use_new_names(backend: Any) -> None:
    """Let DeepSpeed call torch's collectives by the names that they have in newer versions, which warn of the old."""
    for attribute, name in _NEW_NAMES.items():
        setattr(backend, attribute, vars(dist).get(name, getattr(backend, attribute)))


@contextmanager
def _kept_environment() -> Iterator[None]:
    """A context after which no environment variable is new: the import sets one."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
