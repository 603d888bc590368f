"""`CheckpointMethods`: the whole state of an `Accelerator`, in checkpoints that training goes on from."""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..checkpoint.contents import Contents
from ..checkpoint.lineage import as_parent
from ..checkpoint.manifest import Facts
from ..checkpoint.meeting import ForegroundMeeting, together
from ..checkpoint.saving import save_checkpoint
from ..distributed.errors import CheckpointError, ConfigError, suggest
from ..distributed.exchange import exchange
from . import accelerator_trees as trees
from .accelerator_loading import AcceleratorCheckpoint, open_saved, verify_saved
from .hook_files import files_of_hooks
from .numbered import next_path, number_of, numbered, numbered_folder, remove_oldest
from .preparation import Preparation
from .state_methods import StateMethods, by_plain_names
from .states import process_tree_name
from .tracking_methods import TrackingMethods

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
T = TypeVar("T")
LoadHook = Callable[[list[nn.Module], str], None]

logger = logging.getLogger("loopwright")


class CheckpointMethods(StateMethods, TrackingMethods):
    """The state of all that an `Accelerator` has prepared, and of what was registered."""

    preparation: Preparation
    """What was prepared."""

    def __init__(self) -> None:
        self._custom_objects: list[Any] = []
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._run_id = secrets.token_hex(8)
        self._parent: Mapping[str, Any] | None = None
        self._changes: tuple[str, ...] = ()

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint under automatic naming; it may be set."""
        return self.project_configuration.iteration

    @save_iteration.setter
    def save_iteration(self, value: int) -> None:
        self.project_configuration.iteration = value

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

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have a function called in `save_state` before anything is written, on every process.

        Args:
            hook: called with the prepared models, their state dicts with plain names, and a folder. Taking a state dict
                out of the list leaves those weights out of the checkpoint. Files that the main process writes into the
                folder become part of the checkpoint's.
        Returns:
            What removes it again.
        """
        return _registered(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have a function called in `load_state` before anything is loaded, on every process.

        Args:
            hook: called with the prepared models and the checkpoint's folder. Models that it takes out of the list are
                left as they are.
        Returns:
            What removes it again.
        """
        return _registered(self._load_hooks, hook)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **others: Any
    ) -> str:
        """Save the state of all that was prepared or registered as a checkpoint, whole or not at all. Collective.

        Call it between two steps. Inside a window the gradients that were accumulated are saved as well.

        Args:
            output_dir: the folder that it becomes. A checkpoint that is there is replaced; any other content is an
                error. Left out under automatic naming: then it is `project_dir/checkpoints/checkpoint_N`, and after it
                is there, the oldest beyond `total_limit` are removed.
            safe_serialization: False, Accelerate's pickled weights, is refused.
            others: there are none.
        Returns:
            The folder.
        Raises:
            ConfigError: there is no folder to save to, or an option can't be used.
            CheckpointError: on every process: something is in the folder already, a value can't be stored, or the file
                system is full or can't be written to.
        """
        if not safe_serialization:
            raise ConfigError("save_state(safe_serialization=False): nothing is pickled. Leave it out.")
        _refuse("save_state", others, ())
        path = self._path_to_save(output_dir)
        project = self.project_configuration
        models = list(self.preparation.models)
        weights = [by_plain_names(self.strategy.unwrap(each), self.strategy.model_state(each)) for each in models]
        members = self._members()
        with files_of_hooks(path, members, self.process, needed=bool(self._save_hooks)) as folder:
            for hook in list(self._save_hooks.values()):
                hook(models, weights, str(folder))
            saved = save_checkpoint(
                path, self._contents(weights, folder), self._facts(path), replaces=True, members=members
            )
        if self._writes and project.automatic_checkpoint_naming:
            remove_oldest(project, saved)
        project.iteration += 1
        logger.info("saved the state to %s", saved)
        return str(saved)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Put back what `save_state` has saved, here or in Accelerate, after everything was prepared. Collective.

        All is compared before anything is changed. A loader goes on with the epoch that it was in: pass over what was
        done of it with `skip_first_batches`; stateful loaders go on behind it by themselves.

        Args:
            input_dir: the checkpoint's folder. Left out under automatic naming: the one with the highest number.
            load_kwargs: Accelerate's arguments of `torch.load`; only `weights_only=True` can be meant.
            options: `strict=False` loads of the weights what fits; `map_location` may be "cpu" or "on_device", though
                nothing is read elsewhere than needed.
        Raises:
            ConfigError: there is no folder to load from, or an option can't be used.
            CheckpointError: there is no checkpoint, it is damaged, or it does not fit; says what differs.
        """
        strict = _read_load_options(load_kwargs or {}, options)
        path = self._path_to_load(input_dir)
        verify_saved(path, self.process)
        found = _agreed(lambda: open_saved(path, self.process))
        _agreed(lambda: trees.check_saved(found.state, self.preparation, self._custom_objects))
        models = list(self.preparation.models)
        for hook in list(self._load_hooks.values()):
            hook(models, str(path))
        plain = [self.strategy.unwrap(model) for model in models]
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.strategy.writing_weights(model))
            load_weights = _agreed(lambda: found.prepare_weights(plain, strict=strict))
            load_weights()
        trees.restore(found.state, self.preparation, self._custom_objects)
        self._go_on_from(path, found)
        logger.info("loaded the state from %s", path)

    def _path_to_save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            if output_dir is not None:
                warnings.warn(
                    f"save_state({str(output_dir)!r}): automatic_checkpoint_naming=True gives checkpoints their names, "
                    "so that this one is not used.",
                    stacklevel=3,
                )
            return next_path(project).absolute()
        if output_dir is None:
            raise ConfigError(
                "save_state() without a folder. Give one, or number the checkpoints: "
                "ProjectConfiguration(automatic_checkpoint_naming=True)."
            )
        return Path(output_dir).expanduser().absolute()

    def _path_to_load(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return Path(input_dir).expanduser().absolute()
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError("load_state() without a folder. Give that of the checkpoint.")
        folder = numbered_folder(self.project_configuration)
        found = numbered(folder)
        if not found:
            raise CheckpointError(
                f"load_state(): there is no checkpoint in {str(folder)!r}. Save one, or give a folder."
            )
        return found[max(found)].absolute()

    def _contents(self, weights: list[dict[str, Any]], files: Path | None) -> Contents:
        """What this process puts in. Collective."""
        preparation = self.preparation
        own = process_tree_name(self.process.process_index)
        common = trees.common_tree(preparation, self._custom_objects) | {
            "iteration": self.save_iteration,
            "trackers": self.tracking_state(),
        }
        return Contents(
            trees={own: trees.process_tree(preparation)},
            shared_trees={trees.COMMON: common, trees.OPTIMIZERS: trees.optimizers_tree(preparation)},
            weights={trees.model_name(index): state for index, state in enumerate(weights)},
            files_beside=files if self._writes else None,
        )

    def _members(self) -> Sequence[int]:
        """The processes that save one checkpoint: all, or with `save_on_each_node` those of a machine. Collective."""
        everyone = range(self.process.num_processes)
        if not self.project_configuration.save_on_each_node or len(everyone) == 1:
            return everyone
        places = exchange(self.process.local_process_index, "save_state")
        firsts = [index for index in everyone if places[index] == 0]
        begin = max(index for index in firsts if index <= self.process.process_index)
        return range(begin, min((index for index in firsts if index > begin), default=len(everyone)))

    def _facts(self, path: Path) -> Facts:
        positions = [loader.current_position() for loader in self.preparation.loaders[:1]]
        progress = {"epoch": positions[0]["epoch"], "batch": positions[0]["batch"]} if positions else {}
        return Facts(
            progress=progress,
            world_size=self.process.num_processes,
            strategy=type(self.strategy).__name__,
            run={"id": self._run_id, "name": path.parent.name, "task": "Accelerator"},
            parent=self._parent,
            changes=self._changes,
            config=self._exactness(),
        )

    def _exactness(self) -> dict[str, Any]:
        """The settings on which the numbers of a training depend."""
        data = self.preparation.configuration
        return {
            "gradient_accumulation_steps": self.strategy.gradient_state.num_steps,
            "mixed_precision": self.strategy.precision.name,
            "split_batches": data.split_batches,
            "even_batches": data.even_batches,
            "use_seedable_sampler": data.use_seedable_sampler,
        }

    def _go_on_from(self, path: Path, found: AcceleratorCheckpoint) -> None:
        """Become the next leg of the run that saved it."""
        project = self.project_configuration
        number = number_of(path) if found.state.common["iteration"] is None else found.state.common["iteration"]
        if project.automatic_checkpoint_naming and number is not None:
            project.iteration = max([number, *numbered(numbered_folder(project))]) + 1
        if (manifest := found.manifest) is not None:
            self._run_id = manifest.run["id"]
            self._parent = as_parent(path.name, manifest)
            now = self._exactness()
            self._changes = tuple(
                f"{name} was {before!r} and is {now[name]!r}"
                for name, before in manifest.config.items()
                if name in now and now[name] != before
            )
            self.restore_tracking(found.state.common["trackers"])
        inexact = [*self._changes, *found.state.inexact]
        if inexact and self.process.is_main_process:
            warnings.warn(
                f"what goes on from {str(path)!r} can't be equal bit for bit to a run that was never stopped: "
                + "; ".join(dict.fromkeys(inexact)) + ".",
                stacklevel=3,
            )  # fmt: skip


def _agreed(act: Callable[[], T]) -> T:
    """What a part of loading gives, in which nothing is changed; an error of one process is one of all. Collective."""
    found: list[T] = []
    together(ForegroundMeeting(), "load_state", lambda: found.append(act()))
    return found[0]


def _has_state(item: Any) -> bool:
    return all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))


def _registered(hooks: OrderedDict[int, Any], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse(method: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            raise ConfigError(f"{method}({name}=...) is unknown. {suggest(name, known) if known else 'Leave it out.'}")


def _read_load_options(load_kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the weights have to fit."""
    for name, value in load_kwargs.items():
        if (name, value) != ("weights_only", True):
            raise ConfigError(
                f"load_state(load_kwargs={{{name!r}: {value!r}}}) can't be used: no pickle is run here. Leave it out."
            )
    _refuse("load_state", options, ("strict", "map_location"))
    place = options.get("map_location")
    if place not in (None, "cpu", "on_device"):
        raise ConfigError(f"load_state(map_location={place!r}). Expected 'cpu', 'on_device', or None.")
    return bool(options.get("strict", True))
