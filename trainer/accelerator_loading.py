"""Reading the state of an `Accelerator`: from a checkpoint, or from a folder that Accelerate wrote."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ..checkpoint.manifest import FILE_NAME, Manifest
from ..checkpoint.reading import Checkpoint, open_checkpoint
from ..checkpoint.verifying import check_together
from ..checkpoint.weights import LoadReport, compare_weights, load_weights
from ..distributed.errors import CheckpointError
from ..distributed.exchange import exchange
from . import accelerator_trees as trees
from .accelerate_folder import is_accelerate_folder, read_accelerate_folder
from .accelerator_trees import SavedState
from .states import COMMON, process_tree_name

if TYPE_CHECKING:
    from ..distributed.process import ProcessState


class AcceleratorCheckpoint:
    """What a folder holds, read and not yet put anywhere.

    Args:
        path: the folder.
        state: all beside the weights.
        checkpoint: where the weights are; None: Accelerate's own files.
    """

    def __init__(self, path: Path, state: SavedState, checkpoint: Checkpoint | None) -> None:
        self.path = path
        self.state = state
        self._checkpoint = checkpoint

    @property
    def manifest(self) -> Manifest | None:
        """What the checkpoint says of itself; None for Accelerate's."""
        return None if self._checkpoint is None else self._checkpoint.manifest

    def prepare_weights(self, models: Sequence[nn.Module], *, strict: bool) -> Callable[[], None]:
        """What loads the weights, which fit. Local; changes nothing.

        Args:
            models: without wrappers, in order.
            strict: refuse what does not fit; else what fits is loaded, and the rest is told by a warning.
        Raises:
            CheckpointError: the checkpoint has weights of fewer models, or, with `strict`, of others.
        """
        loads = []
        for index, model in enumerate(models):
            report, load = self._compare(index, model)
            if report and strict:
                raise CheckpointError(
                    f"the weights {trees.model_name(index)!r} in {str(self.path)!r} do not fit {type(model).__name__}: "
                    f"{report}. Build the model as it was, or load with strict=False to take what fits."
                )
            if report:
                warnings.warn(f"of {type(model).__name__} these are not loaded: {report}.", stacklevel=4)
            loads.append(load)
        self._tell_left_out(len(models))

        def load_all() -> None:
            for load in loads:
                load()

        return load_all

    def _compare(self, index: int, model: nn.Module) -> tuple[LoadReport, Callable[[], object]]:
        name = trees.model_name(index)
        if self._checkpoint is not None:
            self._checkpoint.weights(name)  # says which there are, where this is none of them
        report = compare_weights(model, self.path, base=name)
        return report, partial(load_weights, model, self.path, strict=False, base=name)

    def _tell_left_out(self, num_models: int) -> None:
        if self._checkpoint is not None and (more := self._checkpoint.weights_names[num_models:]):
            warnings.warn(f"no model takes the weights {', '.join(more)} of the checkpoint.", stacklevel=5)


def verify_saved(path: Path, process: ProcessState) -> None:
    """Compare what was saved in a folder with its checksums, each process a share of the files. Collective.

    Raises:
        CheckpointError: on every process: it is damaged, or can't be read.
    """
    is_alone = process.num_processes == 1  # `open_saved` does it
    if not is_alone and all(exchange((path / FILE_NAME).is_file(), "load_state")):
        check_together(path)


def open_saved(path: Path, process: ProcessState) -> AcceleratorCheckpoint:
    """What was saved in a folder. Local; on several processes after `verify_saved`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or a Trainer saved it.
    """
    if not (path / FILE_NAME).is_file() and is_accelerate_folder(path):
        state = read_accelerate_folder(path, process.process_index, process.num_processes)
        return AcceleratorCheckpoint(path, state, None)
    checkpoint = open_checkpoint(path, verify="full" if process.num_processes == 1 else "sizes")
    if trees.COMMON not in checkpoint.tree_names:
        remedy = (
            "A Trainer saved it: go on by trainer.fit(..., resume_from=path), or load the weights alone."
            if COMMON in checkpoint.tree_names
            else "It holds weights alone: load them into the model with loopwright.load_weights."
        )
        raise CheckpointError(f"{str(path)!r} holds no state of an Accelerator. {remedy}")
    return AcceleratorCheckpoint(path, _read(checkpoint, process), checkpoint)


def _read(checkpoint: Checkpoint, process: ProcessState) -> SavedState:
    common = checkpoint.tree(trees.COMMON)
    if common["version"] != trees.VERSION:
        raise CheckpointError(
            f"the state in {str(checkpoint.path)!r} has the version {common['version']}, and this version "
            f"reads {trees.VERSION}. Update loopwright."
        )
    before, count, index = checkpoint.manifest.world_size, process.num_processes, process.process_index
    saved = [each for each in range(before) if process_tree_name(each) in checkpoint.tree_names]
    first = checkpoint.tree(process_tree_name(saved[0]))
    inexact = [f"{before} processes saved it, and {count} go on"] if before != count else []
    return SavedState(
        common=common,
        optimizers=checkpoint.stored_tree(trees.OPTIMIZERS),
        own=None if before != count else first if index == saved[0] else checkpoint.tree(process_tree_name(index)),
        first=first,
        world_size=before,
        inexact=[*inexact, *checkpoint.manifest.inexact],
    )
