"""`StateMethods`: the state of what an `Accelerator` has prepared."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..checkpoint.weights import save_weights
from ..distributed.errors import ConfigError
from ..distributed.units import convert_file_size_to_int, size_bytes
from ..strategies.forward import extract_model_from_parallel
from ..strategies.strategy import Strategy


class StateMethods:
    """The state of prepared models, and of further objects.

    Args:
        is_main_process: whether this process writes.
    """

    strategy: Strategy
    """How a step is carried out, and how the models are wrapped."""

    def __init__(self, is_main_process: bool) -> None:
        self._writes = is_main_process
        self._custom_objects: list[Any] = []

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model without what `prepare` put around it.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: keep its forward in mixed precision. False gives the model its own back, in place.
            keep_torch_compile: keep the wrapper of `torch.compile`.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)  # type: ignore[no-any-return]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full state by name; without `unwrap` with the names of what was put around it. Collective."""
        return self.strategy.model_state(model) if unwrap else model.state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights as `model.safetensors` into a folder, whole or not at all.

        Args:
            model: prepared or not.
            save_directory: it is made if need be.
            max_shard_size: above it a warning says that this version writes one file.
            safe_serialization: False, Accelerate's pickled weights, is refused.
        Raises:
            ConfigError: pickled weights were asked for, or the size is none.
            CheckpointError: a value can't be stored; names it.
        """
        if not safe_serialization:
            raise ConfigError("save_model(safe_serialization=False): weights are not pickled. Leave it out.")
        limit = convert_file_size_to_int(max_shard_size)
        plain = self.unwrap_model(model, keep_torch_compile=False)
        size = size_bytes(value for value in plain.state_dict().values() if isinstance(value, Tensor))
        if size > limit:
            warnings.warn(
                f"save_model: the weights have {size} bytes, more than max_shard_size={max_shard_size!r}. This version "
                "writes them as one file.",
                stacklevel=2,
            )
        if self._writes:
            save_weights(plain, Path(save_directory))

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have the state of further objects saved with that of the prepared ones.

        Raises:
            ConfigError: one has no `state_dict` and `load_state_dict`; names its place and type.
        """
        wrong = [f"{index} ({type(item).__name__})" for index, item in enumerate(objects) if not _has_state(item)]
        if wrong:
            raise ConfigError(
                f"register_for_checkpointing: the objects at {', '.join(wrong)} have no state_dict() and "
                "load_state_dict(state). Give them both."
            )
        self._custom_objects.extend(objects)


def _has_state(item: Any) -> bool:
    return all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))
