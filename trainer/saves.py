"""Checkpoints of a run: asked for at any time, written at a step boundary, when all that is due there is done.

So a checkpoint closes a boundary: its window was stepped on, its records and its validation are out, and the run goes
on behind it as if it had never stopped. While a window is open that is carried over an epoch's end, saves wait for it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.callback import Callback, StopRun
from ..checkpoint.contents import Contents
from ..checkpoint.manifest import Facts
from ..checkpoint.saving import PendingSave, save_checkpoint, start_saving
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.launched import find_launch
from . import states
from .showing import show_training_weights
from .state_methods import by_plain_names

if TYPE_CHECKING:
    from .run import Run, Training

logger = logging.getLogger("loopwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """A checkpoint that was asked for."""

    path: Path
    scores: Sequence[Mapping[str, Any]] = ()
    """Values of metrics that the weights reached: `{"name": ..., "mode": ..., "value": ...}`."""
    asynchronous: bool | None = None
    """Write in the background. None: unless the device is the CPU."""


@dataclass(slots=True)
class Saves:
    """The checkpoints that a run was asked for and those that are being written."""

    requests: list[SaveRequest] = field(default_factory=list)
    pending: list[PendingSave] = field(default_factory=list)
    """Those that a background thread writes, oldest first."""
    newest: PendingSave | None = None
    """The newest of these, also when it is done: the next one takes over its memory."""
    seconds: float | None = None
    """How long the newest checkpoint took until it was committed."""
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """What tells this run from others, over all its legs."""
    parent: Mapping[str, Any] | None = None
    """The checkpoint that this leg went on from."""
    changes: tuple[str, ...] = ()
    """How the configuration differs from that of the earlier leg."""
    is_told: bool = False
    """Whether `on_stop` has fired."""
    are_over: bool = False
    """Whether no boundary comes any more at which a request would be served."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do at a boundary."""
        return not (self.requests or self.pending)

    def withdraw(self, path: Path) -> bool:
        """Take back the request for a path. Returns whether there was one that is not being written."""
        found = [request for request in self.requests if request.path == path]
        self.requests = [request for request in self.requests if request.path != path]
        return bool(found)


def save_what_was_asked(run: Run, training: Training) -> None:
    """Write the checkpoints that were asked for, if this is a boundary that can be saved. Collective where one was."""
    saves = run.saves
    if saves.is_idle:
        return
    _announce_committed(run)
    if training.carried:
        return
    with run.clock.part("saving"):
        while saves.requests:
            _save(run, training, saves.requests.pop(0))


def save_now(run: Run, training: Training, request: SaveRequest) -> Path:
    """Write one checkpoint at once. Collective; in a run that is failing the main process writes what it has, alone.

    Raises:
        CheckpointError: it can't be written.
    """
    if run.error is None:
        return _write_now(run, training, request)  # nobody would wait for a background thread, or hear of its failure
    if not run.trainer.process.is_main_process:
        return request.path
    if not run.strategy.can_save_alone:
        raise CheckpointError(
            "nothing was saved: an exception ended the run, and each process has a part of the weights alone."
        )
    if training.is_stepping:
        raise CheckpointError("nothing was saved: the exception came out of the optimizer's step, half done.")
    show_training_weights(run)  # where the exception came out of a validation
    reasons = ["an exception ended the run: random states are those of that moment"]
    if run.trainer.process.num_processes > 1:
        reasons.append("the other processes' states are not in it")
    return _write_now(run, training, request, inexact=reasons, alone=True)


def finish_saves(run: Run) -> None:
    """Wait for what is being written. Local.

    Raises:
        CheckpointError: a checkpoint could not be written.
    """
    while run.saves.pending:
        run.saves.pending[0].wait()
        try:
            _announce_committed(run)
        except StopRun as stop:  # the run is over already
            run.heed(stop)


@contextmanager
def waiting_for_saves(run: Run) -> Iterator[None]:
    """A context that ends when all checkpoints of a run are written, also after an exception. Local."""
    try:
        yield
    except BaseException as error:
        try:
            finish_saves(run)
        except CheckpointError as failure:
            error.add_note(f"then a checkpoint could not be written: {failure}")
        raise
    finish_saves(run)


def announce_stop(run: Run, training: Training) -> None:
    """Tell the callbacks, once, that the run ends at this boundary, and write what they ask for. Collective."""
    if not run.saves.is_told:
        run.saves.is_told = True
        run.emit(Callback.on_stop)
    save_what_was_asked(run, training)


def _save(run: Run, training: Training, request: SaveRequest) -> None:
    in_background = run.device.type != "cpu" if request.asynchronous is None else request.asynchronous
    if in_background:
        run.trackers.flush()
        contents, facts = _contents(run, training), _facts(run, training, request, ())
        run.saves.newest = start_saving(request.path, contents, facts, previous=run.saves.newest)
        run.saves.pending.append(run.saves.newest)
    else:
        _write_now(run, training, request)
    _announce_committed(run)


def _write_now(
    run: Run, training: Training, request: SaveRequest, *, inexact: Sequence[str] = (), alone: bool = False
) -> Path:
    began = time.monotonic()
    run.trackers.flush()
    contents, facts = _contents(run, training), _facts(run, training, request, inexact)
    path = save_checkpoint(request.path, contents, facts, alone=alone)
    run.saves.seconds = time.monotonic() - began
    run.emit(Callback.on_saved, path)
    return path


def _announce_committed(run: Run) -> None:
    """Tell the callbacks of checkpoints that were committed in the background; what failed there is raised here."""
    pending = run.saves.pending
    while pending and pending[0].is_done:
        done = pending.pop(0)
        path = done.wait()
        run.saves.seconds = done.seconds
        run.emit(Callback.on_saved, path)


def _contents(run: Run, training: Training) -> Contents:
    """What this process puts in. Collective."""
    process = run.trainer.process
    weights = run.strategy.model_state(run.model)
    common, optimizers = states.common_tree(run, training), states.optimizers_tree(run, training)
    return Contents(
        trees={states.process_tree_name(process.process_index): states.process_tree(run, training)},
        shared_trees={states.COMMON: common, states.OPTIMIZERS: optimizers},
        weights={"model": by_plain_names(run.strategy.unwrap(run.model), weights)},
    )


def _identity(run: Run) -> dict[str, Any]:
    """What tells this run from others, and the launch whose restarted processes are to go on with it."""
    identity = {"id": run.saves.run_id, "name": run.trainer.run_directory.name, "task": type(run.task).__name__}
    launch = find_launch()
    return identity if launch is None else identity | {"launch": launch.id}


def _facts(run: Run, training: Training, request: SaveRequest, inexact: Sequence[str]) -> Facts:
    trainer = run.trainer
    if training.closed_early:
        inexact = [*inexact, "the run's end stepped on an accumulation window that the next epoch would have filled"]
    return Facts(
        progress=states.progress_of(run, training),
        world_size=trainer.process.num_processes,
        strategy=type(run.strategy).__name__,
        run=_identity(run),
        parent=run.saves.parent,
        changes=run.saves.changes,
        scores=request.scores,
        inexact=inexact,
        config=trainer.exactness(),
    )


def read_request(path: object, scores: Sequence[Mapping[str, Any]], asynchronous: object) -> SaveRequest:
    """The request for a checkpoint, checked.

    Raises:
        ConfigError: the path is none, or `asynchronous` is no boolean.
    """
    if not isinstance(path, (str, Path)) or not str(path):
        raise ConfigError(f"save_state({path!r}). Expected the path of the folder that the checkpoint becomes.")
    if asynchronous is not None and not isinstance(asynchronous, bool):
        raise ConfigError(f"save_state(asynchronous={asynchronous!r}). Expected True, False, or None.")
    return SaveRequest(path=Path(path).absolute(), scores=scores, asynchronous=asynchronous)
