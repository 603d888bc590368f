"""`ProcessMethods`: what an `Accelerator` says of its process, and does with the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from ..distributed import operations
from ..distributed.kinds import DistributedType
from ..distributed.process import ProcessState
from ..distributed.splitting import share_of

P = ParamSpec("P")
R = TypeVar("R")


class ProcessMethods:
    """The process of an `Accelerator` and its place among others.

    Args:
        state: the process.
    """

    def __init__(self, state: ProcessState) -> None:
        self.state = state
        """The process and its device."""
        self._is_triggered = False

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """This process's index among all."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """This process's index on its machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process of index 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the process of index 0 on its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process of the highest index."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there are other processes."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether the processes have an accelerator device each."""
        return self.use_distributed and self.device.type != "cpu"

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the main process alone; elsewhere it returns None."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on each machine's main process alone; elsewhere it returns None."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process alone; elsewhere it returns None."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on one process alone; as `ProcessState.on_process`."""
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on one process of each machine; as `ProcessState.on_local_process`."""
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on each machine's main process alone."""
        self.state.print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Return when every process has arrived here. Collective."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process run the body before the others do. Collective."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let each machine's main process run the body before its others do. Collective."""
        return self.state.local_main_process_first()

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
