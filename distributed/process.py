"""The process that this code runs in, and its place among others."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

import torch

from . import operations
from .devices import choose_device
from .environment import launched_as
from .errors import ConfigError
from .kinds import DistributedType
from .splitting import share_of

P = ParamSpec("P")
R = TypeVar("R")


class ProcessMethods:
    """What a process says of itself and does with the others, from its place among them, which subclasses set."""

    num_processes: int
    """How many processes there are."""
    process_index: int
    """This process's index among all."""
    local_process_index: int
    """This process's index on its machine."""
    device: torch.device
    """Where this process computes."""
    _is_triggered = False

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return DistributedType.NO

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process of index 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the process of index 0 on its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process of the highest index."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.num_processes > 1

    @property
    def multi_device(self) -> bool:
        """Whether the processes have an accelerator device each."""
        return self.use_distributed and self.device.type != "cpu"

    def wait_for_everyone(self) -> None:
        """Return when every process has arrived here. Collective."""

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the main process run the body before the others do. Collective."""
        yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let each machine's main process run the body before its others do. Collective."""
        yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's share of the inputs, in a context. In one process: the inputs themselves.

        Args:
            inputs: a list, a tuple, a tensor, or a mapping of these, all equally long. They are not changed.
            apply_padding: make all shares equally long, by the last item.
        Raises:
            DataError: the values of a mapping differ in length.
        """
        yield share_of(inputs, self.process_index, self.num_processes, apply_padding)

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the main process alone; elsewhere it returns None."""
        return self._only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on each machine's main process alone; elsewhere it returns None."""
        return self._only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process alone; elsewhere it returns None."""
        return self._only_if(lambda: self.is_last_process, function)

    @overload
    def on_process(self, function: Callable[P, R], process_index: int | None = None) -> Callable[P, R | None]: ...

    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...

    def on_process(self, function: Callable[P, R] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on the process of that index alone; elsewhere it returns None.

        Raises:
            ConfigError: no index was given.
        """
        if process_index is None:
            raise ConfigError("on_process needs process_index=, the index of the process that runs the function.")
        decorate = functools.partial(self._only_if, lambda: self.process_index == process_index)
        return decorate if function is None else decorate(function)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...

    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int | None = None) -> Any:
        """As `on_process`, by the index on the machine.

        Raises:
            ConfigError: no index was given.
        """
        if local_process_index is None:
            raise ConfigError("on_local_process needs local_process_index=, the index on the machine.")
        decorate = functools.partial(self._only_if, lambda: self.local_process_index == local_process_index)
        return decorate if function is None else decorate(function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on each machine's main process alone."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Every process's tensors, joined along dimension 0 on every process. Collective. See `operations.gather`."""
        return operations.gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors added up over processes, or averaged. Collective. See `operations.reduce`."""
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors filled up to the largest size on any process. Collective. See `operations.pad_across_processes`."""
        return operations.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Pull the trigger of this process; `check_trigger` tells all of them. Local."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has pulled its trigger since the last check, on every process. Collective."""
        was_triggered, self._is_triggered = self._is_triggered, False
        return was_triggered

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes that have more batches than others go on alone, in a context. In one process: no effect.

        Args:
            joinables: the prepared models that communicate.
            even_batches: whether loaders complete their last round meanwhile; None leaves them as they are.
        """
        if not self.use_distributed:
            warnings.warn("join_uneven_inputs has no effect in one process.", stacklevel=3)
        yield

    def _only_if(self, condition: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            # One process runs everything, as a script does without a launcher.
            if not self.use_distributed or condition():
                return function(*args, **kwargs)
            return None

        return guarded


class ProcessState(ProcessMethods):
    """This process: its device and its place in the world. One object per run, no singleton.

    Args:
        cpu: stay on the CPU although there is an accelerator.
    Raises:
        ConfigError: several processes were started, which this version can't join.
    """

    def __init__(self, cpu: bool = False) -> None:
        world = launched_as("WORLD_SIZE", 1)
        if world > 1:
            raise ConfigError(
                f"WORLD_SIZE={world}: this version trains in one process. Start the script without a launcher, "
                "or unset WORLD_SIZE."
            )
        self.num_processes = 1
        self.process_index = 0
        self.local_process_index = 0
        self.device = choose_device(cpu=cpu)


PartialState = ProcessState
"""Accelerate's name of `ProcessState`."""
