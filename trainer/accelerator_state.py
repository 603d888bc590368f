"""`AcceleratorState`: what an `Accelerator` knows of its surroundings, in one object."""

from __future__ import annotations

from ..distributed.environment import read_variable
from ..distributed.errors import ConfigError, suggest
from ..distributed.kinds import DistributedType, kind_of
from ..distributed.process import ProcessState
from ..strategies.deepspeed_plugin import DeepSpeedPlugin
from ..strategies.dynamo_plugin import TorchDynamoPlugin
from ..strategies.fsdp_plugin import FullyShardedDataParallelPlugin
from ..strategies.handlers import Handlers
from ..strategies.precision import PRECISIONS, Precision
from ..strategies.strategy import Strategy
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
        strategy: that of the Accelerator.
        dynamo_plugin: how models are compiled; by default as the environment has it.
    Raises:
        ConfigError: the precision is unknown.
    """

    def __init__(
        self,
        mixed_precision: str | Precision | None = None,
        cpu: bool | None = None,
        *,
        process: ProcessState | None = None,
        strategy: Strategy | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
    ) -> None:
        self._mixed_precision = _word(mixed_precision)
        self.process = read_process(cpu, Handlers(None)) if process is None else process
        """The process and its device."""
        self._strategy = strategy
        self.dynamo_plugin = TorchDynamoPlugin() if dynamo_plugin is None else dynamo_plugin
        """How models are compiled."""

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
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        kind = None if self._strategy is None else self._strategy.kind
        return kind_of(self.device.type, self.num_processes, kind)

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are spread over the processes by torch's `fully_shard`."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """Accelerate's options of FSDP that the Accelerator was given; None where it was not."""
        plugin = None if self._strategy is None else self._strategy.plugin
        return plugin if isinstance(plugin, FullyShardedDataParallelPlugin) else None

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """Accelerate's options of DeepSpeed that the Accelerator was given, and uses; None where it was not."""
        plugin = None if self._strategy is None else self._strategy.plugin
        return plugin if isinstance(plugin, DeepSpeedPlugin) else None

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """One of `Accelerator(deepspeed_plugins=...)`.

        Raises:
            ConfigError: there is none of that name.
        """
        plugins = {} if self._strategy is None else self._strategy.plugins
        if not isinstance(plugin := plugins.get(name), DeepSpeedPlugin):
            raise ConfigError(f"there is no DeepSpeed plugin {name!r}. {suggest(name, plugins)}")
        return plugin

    def select_deepspeed_plugin(self, name: str) -> None:
        """Let DeepSpeed use another of `Accelerator(deepspeed_plugins=...)`, before a model is prepared. Local.

        Raises:
            ConfigError: there is none of that name, or a model was prepared.
        """
        plugin = self.get_deepspeed_plugin(name)
        if self._strategy is not None:
            self._strategy.select_plugin(plugin)

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
