"""`ParallelismConfig`: the sizes of a mesh by Accelerate's names and variables."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .environment import read_parallelism, str_to_bool
from .errors import ConfigError, check_boolean, check_integer, suggest
from .meshes import CONTEXT, JOINTS, REPLICATE, SEQUENCE, SHARD, TENSOR, MeshSizes, build_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_BACKENDS = {"cp_backend": "torch", "sp_backend": "deepspeed"}
ROTATIONS = ("allgather", "alltoall")
"""How keys and values of the other parts of a sequence come to a process."""


@dataclass(frozen=True, kw_only=True)
class TorchTensorParallelConfig:
    """Accelerate's settings of tensor parallelism."""

    enable_async_tp: bool = False
    """Accepted as Accelerate has it, which ignores it with a warning."""

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn("enable_async_tp=True has no effect.", stacklevel=3)


@dataclass(frozen=True, kw_only=True)
class TorchContextParallelConfig:
    """Settings of context parallelism.

    Raises:
        ConfigError: the word is unknown.
    """

    cp_comm_strategy: str | None = None
    """`"allgather"` or `"alltoall"`: how keys and values of the other parts of a sequence come to a process. None: by
    the environment, else `"allgather"`."""

    def __post_init__(self) -> None:
        word = self.cp_comm_strategy or read_parallelism("PARALLELISM_CONFIG_CP_COMM_STRATEGY") or ROTATIONS[0]
        if word not in ROTATIONS:
            raise ConfigError(f"cp_comm_strategy={word!r} is unknown. {suggest(word, ROTATIONS)}")
        object.__setattr__(self, "cp_comm_strategy", word)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSequenceParallelConfig:
    """Accelerate's settings of sequence parallelism.

    Raises:
        ConfigError: an option can't be used.
    """

    sp_seq_length: int | None = None
    """The length of whole sequences, where they all have the same. None: by the environment."""
    sp_seq_length_is_variable: bool | None = None
    """Whether sequences have the length they come with; where not, other lengths than `sp_seq_length` are an error.
    None: by the environment, else True."""
    sp_attn_implementation: str | None = None
    """`"sdpa"`: attention is torch's `scaled_dot_product_attention`. None: the same."""

    def __post_init__(self) -> None:
        kernel = self.sp_attn_implementation or _read_text("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")
        if kernel not in (None, "sdpa"):
            raise ConfigError(
                f"sp_attn_implementation={kernel!r}: heads are exchanged around torch's scaled_dot_product_attention "
                "alone, which chooses among kernels itself. Leave it out, or give 'sdpa'."
            )
        object.__setattr__(self, "sp_attn_implementation", kernel)
        name = "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"
        if self.sp_seq_length_is_variable is None:
            object.__setattr__(self, "sp_seq_length_is_variable", _read_claim(name, default=True))
        check_boolean("sp_seq_length_is_variable", self.sp_seq_length_is_variable)
        if self.sp_seq_length is None:
            object.__setattr__(self, "sp_seq_length", _read_number("PARALLELISM_CONFIG_SP_SEQ_LENGTH"))
        if self.sp_seq_length is not None:
            check_integer("sp_seq_length", self.sp_seq_length, 1, "It counts positions.")
        elif not self.sp_seq_length_is_variable:
            raise ConfigError("sp_seq_length_is_variable=False needs the length. Give sp_seq_length=...")


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How processes share the work, for `Accelerator(parallelism_config=...)`; the names are Accelerate's.

    Sizes that are None are read from `PARALLELISM_CONFIG_*`, and are 1 by default.

    Raises:
        ConfigError: a size is below 1, or options contradict each other.
    """

    dp_replicate_size: int | None = None
    """Copies of the model, over which gradients are averaged."""
    dp_shard_size: int | None = None
    """Parts of the weights, each process with batches of its own."""
    tp_size: int | None = None
    """Parts of the layers: tensor parallelism."""
    cp_size: int | None = None
    """Parts of each sequence: context parallelism."""
    cp_backend: str | None = None
    """`"torch"`."""
    sp_size: int | None = None
    """Parts of each sequence, between which attention exchanges heads: Ulysses, sequence parallelism."""
    sp_backend: str | None = None
    """`"deepspeed"`, as Accelerate has it; heads are exchanged by torch, and DeepSpeed is not needed."""
    tp_handler: TorchTensorParallelConfig | None = None
    """Settings of tensor parallelism."""
    cp_handler: TorchContextParallelConfig | None = None
    """Settings of context parallelism."""
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    """Settings of sequence parallelism."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            object.__setattr__(self, name, _read_size(name, getattr(self, name)))
        for name, only in _BACKENDS.items():
            word = getattr(self, name) or read_parallelism(f"PARALLELISM_CONFIG_{name.upper()}") or only
            if word != only:
                raise ConfigError(f"ParallelismConfig({name}={word!r}) is unknown. Accepted: {only}.")
            object.__setattr__(self, name, word)
        self._check_together()
        self._fill_handlers()

    @property
    def sizes(self) -> MeshSizes:
        """The same sizes as a strategy takes them."""
        return MeshSizes(
            replicate=self._size("dp_replicate"), shard=self._size("dp_shard"), context=self._size("cp"),
            sequence=self._size("sp"), tensor=self._size("tp"),
        )  # fmt: skip

    @property
    def total_size(self) -> int:
        """How many processes it is for."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """How many shares of the data there are."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes get the same batches."""
        return self._size("tp") * self._size("cp") * self._size("sp")

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether there are several parts of the weights."""
        return self._size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether there are several parts of the layers."""
        return self._size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether there are several parts of each sequence, by torch."""
        return self._size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether there are several parts of each sequence, between which heads are exchanged."""
        return self._size("sp") > 1

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes along which batches differ."""
        return self._enabled(REPLICATE, SHARD)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes along which batches are the same."""
        return self._enabled(TENSOR, CONTEXT, SEQUENCE)

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes over which weights are spread, taken together."""
        return self._enabled(*JOINTS["dp_shard_cp"])

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes over which losses are averaged."""
        return self._enabled(*JOINTS["dp_cp"])

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of copies and of parts, as FSDP takes them."""
        return [*self._enabled(REPLICATE), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes along which there are several processes."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of all processes, with its joints; None where all sizes are 1. Collective."""
        return build_mesh(self.sizes, device_type, joins=True)

    def _size(self, axis: str) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    def _enabled(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size(axis) > 1]

    def _check_together(self) -> None:
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both cut sequences. Set one of them to 1."
            )
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ConfigError(
                f"dp_replicate_size={self.dp_replicate_size} with tp_size={self.tp_size}, cp_size={self.cp_size} and "
                "dp_shard_size=1: Accelerate has no copies there that are not spread. Use dp_shard_size in place of "
                "dp_replicate_size, or strategy={'name': 'fsdp', 'mesh': {'replicate': ..., 'shard': 1, ...}}."
            )

    def _fill_handlers(self) -> None:
        kinds: dict[str, type[Any]] = {
            TENSOR: TorchTensorParallelConfig,
            CONTEXT: TorchContextParallelConfig,
            SEQUENCE: DeepSpeedSequenceParallelConfig,
        }
        for axis, kind in kinds.items():
            handler = getattr(self, f"{axis}_handler")
            if handler is None:
                if self._size(axis) > 1:
                    object.__setattr__(self, f"{axis}_handler", kind())
            elif not isinstance(handler, kind):
                raise ConfigError(f"ParallelismConfig({axis}_handler={handler!r:.80}). Expected {kind.__name__}(...).")
            elif self._size(axis) == 1:
                warnings.warn(f"{axis}_handler has no effect, since {axis}_size is 1.", stacklevel=4)


def _read_size(name: str, given: int | None) -> int:
    if given is None:
        given = _read_number(f"PARALLELISM_CONFIG_{name.upper()}") or 1
    check_integer(f"ParallelismConfig({name})", given, 1, "It counts processes.")
    return given


def _read_number(variable: str) -> int | None:
    text = _read_text(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r} is not an integer. Set a whole number, or unset it.")
    return int(text)


def _read_claim(variable: str, *, default: bool) -> bool:
    text = _read_text(variable)
    return default if text is None else bool(str_to_bool(text))


def _read_text(variable: str) -> str | None:
    text = read_parallelism(variable)
    return None if text == "None" else text  # Accelerate's launcher writes it for nothing
