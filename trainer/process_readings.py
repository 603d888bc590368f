"""`ProcessReadings`: what an object says of the process that it holds."""

from __future__ import annotations

import torch

from ..distributed.process import ProcessMethods, ProcessState


class ProcessReadings(ProcessMethods):
    """The base of what holds a process and answers for it.

    The place is read through, since a Trainer that starts the other processes itself learns it after this was made.
    """

    process: ProcessState
    """The process and its device."""

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """How many processes there are."""
        return self.process.num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """This process's index among all."""
        return self.process.process_index

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """This process's index on its machine."""
        return self.process.local_process_index

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where this process computes."""
        return self.process.device
