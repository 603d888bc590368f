"""The process that this code runs in, and its place among others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from . import group, operations
from .affinity import bind_to_cores
from .devices import choose_device
from .environment import read_flag
from .errors import ConfigError
from .exchange import exchange
from .kinds import DistributedType, kind_of
from .launched import Place
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
        return kind_of(self.device.type, self.num_processes)

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
        operations.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process run the body before the others do. Collective.

        The others run it as well when it fails on the main process, so that each process gets its own error.
        """
        return self._first_where(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let each machine's main process run the body before its others do. Collective. See `main_process_first`."""
        return self._first_where(self.is_local_main_process)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's share of the inputs, in a context. In one process: the inputs themselves.

        Args:
            inputs: a list, a tuple, a tensor (in its first dimension), a mapping of these, all equally long, or a
                `datasets.Dataset`. They are not changed. Anything else is the same on each process.
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
        return any(exchange(was_triggered, "check_trigger"))

    @contextmanager
    def _first_where(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

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

    Collective where a launcher has started several processes: they join torch's default group, or adopt the one that
    there is.

    Args:
        cpu: stay on the CPU although there is an accelerator.
        place: this process's place; by default what the launcher says.
        backend: torch's word for another backend than the device's own.
        timeout: how long a collective waits for other processes; by default torch's 30 minutes, 10 for NCCL.
        init_method: torch's URL of where processes meet; by default `MASTER_ADDR` and `MASTER_PORT`.
        connects: False leaves joining the others to a later `connect`.
    Raises:
        ConfigError: the launcher's variables contradict each other, or this machine has fewer devices than processes.
        LaunchError: the others could not be joined.
    """

    def __init__(
        self,
        cpu: bool = False,
        *,
        place: Place | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        init_method: str | None = None,
        connects: bool = True,
    ) -> None:
        self._options: dict[str, Any] = {"backend": backend, "timeout": timeout, "init_method": init_method}
        self._cpu = cpu
        self._take(place or group.own_place())
        if connects:
            self.connect()

    def connect(self, init_method: str | None = None) -> None:
        """Join the others, once. Collective; in one process it does nothing.

        Args:
            init_method: torch's URL of where processes meet, when this process has started the others itself.
        """
        if init_method is not None:
            self._options["init_method"] = init_method
        if read_flag("CPU_AFFINITY"):
            bind_to_cores(self.place, self.device)
        group.connect(self.place, self.device, **self._options)

    @property
    def backend(self) -> str | None:
        """Torch's word for how the processes talk, such as `"gloo"`; None for one process, and before they met."""
        return str(dist.get_backend()) if self.use_distributed and group.is_connected() else None

    @property
    def debug(self) -> bool:
        """Whether the launcher was told to debug. What is sent is compared in any case."""
        return bool(read_flag("DEBUG_MODE"))

    def destroy_process_group(self) -> None:
        """Leave the group of processes. Collective."""
        group.disconnect()

    def __repr__(self) -> str:
        over = "" if self.backend is None else f" over {self.backend}"
        return f"process {self.process_index} of {self.num_processes} on {self.device}, {self.distributed_type}{over}"

    def _take(self, place: Place) -> None:
        self.place = place
        """Where this process stands among all."""
        self.num_processes, self.process_index = place.num_processes, place.process_index
        self.local_process_index = place.local_process_index
        self.device = choose_device(cpu=self._cpu, place=place)


PartialState = ProcessState
"""Accelerate's name of `ProcessState`."""
