"""`StateMethods`: the weights of what an `Accelerator` has prepared, and other objects in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from ..checkpoint.entries import check_tensor, tied_names
from ..checkpoint.names import plain_names
from ..checkpoint.tensor_file import write_tensors
from ..checkpoint.weights import write_weights
from ..distributed.atomic import whole_file
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.process import ProcessState
from ..distributed.units import convert_file_size_to_int
from ..strategies.forward import extract_model_from_parallel
from ..strategies.strategy import Strategy
from .preparation import is_spread
from .project import ProjectConfiguration


class StateMethods:
    """The weights of prepared models, and other objects in files."""

    strategy: Strategy
    """How a step is carried out, and how the models are wrapped."""
    process: ProcessState
    """The main one writes."""
    project_configuration: ProjectConfiguration
    """Where files go, and whether each machine has its own."""

    @property
    def _writes(self) -> bool:
        """Whether this process writes what is written once."""
        each_node = self.project_configuration.save_on_each_node
        return self.process.is_local_main_process if each_node else self.process.is_main_process

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes a model's weights."""
        return self._writes

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model without what `prepare` put around it.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: keep its forward in mixed precision, and layers in FP8. False gives the model its own
                back, in place.
            keep_torch_compile: keep the wrapper of `torch.compile`.
        """
        if not keep_fp32_wrapper:
            self.strategy.restore_layers(model)
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)  # type: ignore[no-any-return]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full state by name; without `unwrap` with the names of what was put around it. Collective."""
        is_whole = unwrap or not self.strategy.can_save_alone
        return self.strategy.whole_model_state(model) if is_whole else model.state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights as safetensors into a folder, whole or not at all. Collective.

        Args:
            model: prepared or not.
            save_directory: it is made if need be. Weights that are there already are replaced.
            max_shard_size: larger weights are spread over files of at most this size, with an index.
            safe_serialization: False, Accelerate's pickled weights, is refused.
        Raises:
            ConfigError: pickled weights were asked for, or the size is none.
            CheckpointError: a value can't be stored (names it), or the folder can't be written to.
        """
        if not safe_serialization:
            raise ConfigError("save_model(safe_serialization=False): weights are not pickled. Leave it out.")
        convert_file_size_to_int(max_shard_size)
        state = plain_state(self.strategy, model)
        if not self._writes:
            return
        try:
            write_weights(state, Path(save_directory) / "model.safetensors", max_shard_size=max_shard_size)
        except OSError as error:
            raise CheckpointError(
                f"save_model: the weights can't be written to {str(save_directory)!r}: {error.strerror or error}. Give "
                "a folder that this process may write to."
            ) from error

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object to a file, on the main process alone; on each machine's with `save_on_each_node`. Local.

        Args:
            obj: anything that `torch.save` takes; with `safe_serialization` a mapping of tensors by name.
            f: a path, which is written whole or not at all, or an open file.
            safe_serialization: write safetensors, and no pickle.
        Raises:
            ConfigError: safetensors were asked for something else than a mapping of tensors.
            CheckpointError: a tensor can't be stored; names it.
        """
        if not self._writes:
            return
        write = tensor_writer(obj) if safe_serialization else partial(torch.save, obj)
        if isinstance(f, (str, os.PathLike)):
            with whole_file(Path(f)) as path:
                write(path)
        else:
            write(f)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model, or a part of it, is spread over several devices, and so can't be trained by processes."""
        return any(map(is_spread, model.modules()))


def plain_state(strategy: Strategy, model: nn.Module) -> dict[str, Any]:
    """A model's full state by plain names, without those of wrappers. Collective."""
    return by_plain_names(strategy.unwrap(model), strategy.whole_model_state(model))


def by_plain_names(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A model's state without the names of wrappers. Local."""
    names = plain_names(model, state)
    return {names[name]: value for name, value in state.items()}


def tensor_writer(obj: Any) -> Callable[[Path | BinaryIO], None]:
    """What writes a mapping of tensors as safetensors to a path or an open file; checked before anything is written.

    Raises:
        ConfigError: it is something else.
        CheckpointError: a tensor can't be stored; names it.
    """
    if not isinstance(obj, Mapping) or not all(isinstance(value, Tensor) for value in obj.values()):
        raise ConfigError(
            f"accelerator.save(safe_serialization=True) got a {type(obj).__name__}. Expected a mapping of tensors by "
            "name; leave safe_serialization out for other objects."
        )
    for name, tensor in obj.items():
        check_tensor(name, tensor)
    ties = tied_names(obj)
    tensors = {name: tensor for name, tensor in obj.items() if name not in ties}

    def write(target: Path | BinaryIO) -> None:
        with target.open("xb") if isinstance(target, Path) else nullcontext(target) as file:
            write_tensors(file, tensors, {"format": "pt"})

    return write
