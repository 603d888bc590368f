"""`AcceleratorState`: what an `Accelerator` knows of its surroundings, in one object."""

from __future__ import annotations

from ..distributed.environment import read_variable
from ..distributed.errors import ConfigError, suggest
from ..distributed.process import ProcessState
from ..strategies.handlers import Handlers
from ..strategies.precision import PRECISIONS, Precision
from .arguments import read_process
from .process_readings import ProcessReadings


class AcceleratorState(ProcessReadings):
    """The process, its place and device, and the number format. No singleton: each is of its own.

    `accelerator.state` is that of an `Accelerator`. One that you make yourself reads the same place and device, from
    the launcher and the environment, and joins torch's group as an `Accelerator` does (collective, once); what only an
    Accelerator was told, it does not know.

    Args:
        mixed_precision: `"no"`, `"bf16"` or `"fp16"`, or an object; by default what the launcher was told.
        cpu: stay on the CPU although there is an accelerator device; by default the environment decides.
        process: this process, where it is known already.
    Raises:
        ConfigError: the precision is unknown.
    """

    def __init__(
        self,
        mixed_precision: str | Precision | None = None,
        cpu: bool | None = None,
        *,
        process: ProcessState | None = None,
    ) -> None:
        self._mixed_precision = _word(mixed_precision)
        self.process = read_process(cpu, Handlers(None)) if process is None else process
        """The process and its device."""

    @property
    def backend(self) -> str | None:
        """Torch's word for how the processes talk, None for one process."""
        return self.process.backend

    @property
    def debug(self) -> bool:
        """Whether the launcher was told to debug."""
        return self.process.debug

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"bf16"` or `"fp16"`.

        Raises:
            ConfigError: it was not given, and the launcher was not told.
        """
        if self._mixed_precision is None:
            raise ConfigError(
                "AcceleratorState().mixed_precision is known to an Accelerator alone: there are no singletons. Read "
                "accelerator.state.mixed_precision, or make it with AcceleratorState(mixed_precision=...)."
            )
        return self._mixed_precision

    @property
    def deepspeed_plugin(self) -> None:
        """None, as in Accelerate without DeepSpeed."""
        return None

    def destroy_process_group(self) -> None:
        """Leave the group of processes. Collective."""
        self.process.destroy_process_group()

    def __repr__(self) -> str:
        return f"{self.process}, mixed precision {self._mixed_precision or 'not known here'}"


def _word(precision: str | Precision | None) -> str | None:
    if isinstance(precision, Precision):
        return precision.name
    found = read_variable("MIXED_PRECISION") if precision is None else ("mixed_precision", precision)
    if found is None:
        return None
    if not isinstance(found[1], str) or found[1] not in PRECISIONS:
        raise ConfigError(f"AcceleratorState: {found[0]}={found[1]!r} is unknown. {suggest(found[1], PRECISIONS)}")
    return PRECISIONS[found[1]]
