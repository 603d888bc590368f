"""Going on from a checkpoint: which one it is, and what of it goes where and when."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks.callback import Callback
from ..checkpoint.finding import best, newest
from ..checkpoint.lineage import as_parent
from ..checkpoint.reading import Checkpoint, open_checkpoint
from ..checkpoint.shards import SUFFIX, listed
from ..checkpoint.verifying import find_damage_together, led_by_first
from ..distributed.errors import CheckpointError, ConfigError
from ..distributed.exchange import exchange
from ..distributed.launched import Launch
from ..distributed.random import restore_random_tree, set_seed
from . import states
from .metric_state import restore_log
from .migrations import migrated

if TYPE_CHECKING:
    from torch import Tensor

    from ..distributed.process import ProcessState
    from .directories import RunDirectories
    from .run import Run, Training

logger = logging.getLogger("loopwright")

LATEST, BEST = "latest", "best"


@dataclass(slots=True)
class Resumption:
    """A checkpoint that a run goes on from."""

    checkpoint: Checkpoint
    inexact: list[str] = field(default_factory=list)
    """Why the run can't be equal bit for bit to one that was never stopped."""
    random: Mapping[str, Any] | None = None
    """This process's random states, None where the earlier leg had no such process."""
    logged: Sequence[Mapping[str, Any]] = ()
    """The trees of the processes whose logged values this one goes on with."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that a task in manual mode had gathered in this process for a step to come."""
    is_inside_epoch: bool = False
    """Whether the run goes on inside an epoch, and has not done so yet."""

    def enter_epoch(self) -> bool:
        """Whether the epoch that begins is the one which the earlier leg was in."""
        was_inside, self.is_inside_epoch = self.is_inside_epoch, False
        return was_inside

    @property
    def step(self) -> int:
        """Optimizer steps that the earlier legs applied."""
        return int(self.checkpoint.manifest.progress["step"])

    def restore_log(self, run: Run) -> None:
        """Put back what was logged in the epoch so far, in the place of what this leg has logged. Local."""
        run.training_log.metrics.clear()
        restore_log(run.training_log, [tree["log"] for tree in self.logged], run.task, run.device)
        if run.training_log.exchange is not None and self.logged:
            run.training_log.exchange.load_state_dict(self.logged[0]["seen"])

    def restore_inside(self, run: Run) -> None:
        """Put back what belongs inside of the epoch: what was logged in it, and the random states. Local."""
        self.restore_log(run)
        self.restore_random(run)

    def restore_gradients(self, run: Run) -> None:
        """Put back the gradients that wait for a step. Local."""
        states.restore_gradients(run.task, self.gradients)

    def restore_random(self, run: Run) -> None:
        """Put this process's random states back. Local.

        Called at the last moment, so that what the run's begin draws changes nothing.
        """
        if self.random is None:
            # As at a run's begin: processes that share batches draw the same.
            text = f"{run.saves.run_id}/{self.step}/{run.strategy.data_share.process_index}"
            set_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little"))
        elif missing := restore_random_tree(self.random, run.device):
            warnings.warn(f"the checkpoint has no random state of {missing}, which go on as they are.", stacklevel=2)


def read_resume_from(resume_from: object) -> str | Path | None:
    """What `fit(resume_from=...)` was given, checked.

    Raises:
        ConfigError: it is neither a word nor a path.
    """
    if resume_from is None or isinstance(resume_from, Path):
        return resume_from
    if not isinstance(resume_from, str) or not resume_from:
        raise ConfigError(
            f"resume_from={resume_from!r}. Expected 'latest', 'best', the path of a checkpoint, or None to begin anew."
        )
    return resume_from if resume_from in (LATEST, BEST) else Path(resume_from)


def find_checkpoint(
    resume_from: str | Path | Launch, folders: Sequence[Path], process: ProcessState
) -> Checkpoint | None:
    """The checkpoint that a run is to go on from; None where the newest one is asked for and there is none. Collective.

    The main process looks, and all of them compare a share of the files that it finds with their checksums.

    Args:
        resume_from: "latest", "best", the path of a checkpoint, or a launch: the newest that its processes saved before
            they were started again.
        folders: where the words look, one after another.
        process: this one.
    Raises:
        CheckpointError: on every process: there is none at the path, it is damaged, none has a score, or those of the
            launch are of several runs.
    """
    found: Checkpoint | None = None
    failure: CheckpointError | None = None
    try:
        found = led_by_first(lambda: _look(resume_from, folders))
    except CheckpointError as error:
        failure = error
    if process.num_processes == 1:
        if failure is not None:
            raise failure
        return found
    own = {"path": None if found is None else str(found.path), "error": None if failure is None else str(failure)}
    told = exchange(own, "find the checkpoint to resume from")[0]
    if told["error"] is not None:
        raise failure or CheckpointError(told["error"])
    if process.is_main_process or told["path"] is None:
        return found
    return open_checkpoint(told["path"], verify="sizes")


def go_on_from(run: Run, checkpoint: Checkpoint, directories: RunDirectories) -> Resumption:
    """Make a run the next leg of the one that the checkpoint belongs to, or a branch of it. Local.

    Raises:
        CheckpointError: it holds no state of a training.
    """
    manifest, saves = checkpoint.manifest, run.saves
    if manifest.kind != "state" or states.COMMON not in checkpoint.tree_names:
        what = "weights alone" if manifest.kind != "state" else "the state of an Accelerator"
        raise CheckpointError(
            f"{str(checkpoint.path)!r} holds {what}, so that no run of a Trainer can go on from it. Load the weights "
            "into the task before fit, or resume from a checkpoint that a Trainer has saved."
        )
    if directories.continues(manifest.run["name"]):
        saves.run_id = manifest.run["id"]
    saves.parent = as_parent(checkpoint.path.name, manifest)
    now = run.trainer.exactness()
    changes = [
        f"{name} was {before!r} and is {now[name]!r}"
        for name, before in manifest.config.items()
        if name in now and now[name] != before
    ]
    saves.changes = tuple(changes)
    return Resumption(checkpoint, list(changes))


def _look(resume_from: str | Path | Launch, folders: Sequence[Path]) -> Checkpoint | None:
    if isinstance(resume_from, Launch):
        return _look_for_launch(resume_from, folders)
    if isinstance(resume_from, Path):
        try:
            return open_checkpoint(resume_from, find_damage=find_damage_together)
        except CheckpointError as error:
            if resume_from.exists():
                raise
            expected = "Expected 'latest', 'best', or the path of a checkpoint."
            raise CheckpointError(f"resume_from: {error} {expected}") from None
    if resume_from == BEST:
        for folder in folders:
            if (found := best(folder, find_damage=find_damage_together)) is not None:
                return found
        raise CheckpointError(
            f"resume_from='best': no checkpoint with a score in {_listed(folders)}. ModelCheckpoint(monitor=...) gives "
            "them one."
        )
    for folder in folders:
        if (found := newest(folder, find_damage=find_damage_together)) is not None:
            return found
    where, hint = _listed(folders), _hint_at_weights(folders)
    logger.warning("resume_from='latest': no checkpoint in %s. The run begins anew.%s", where, hint)
    return None


def _hint_at_weights(folders: Sequence[Path]) -> str:
    """What to say of weights that lie where checkpoints are looked for."""
    files = [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if not files:
        return ""
    likely = next((path for path in files if path.stem == "last"), files[-1])
    return (
        f" There are weights alone: {listed([path.name for path in files])}. No run can go on from them; one can start "
        f"with them: load_weights(task, {str(likely)!r}) before fit, or load_weights(self, ...) in the task's "
        "__init__. ModelCheckpoint() without save_weights_only keeps what a run can go on from."
    )


def _look_for_launch(launch: Launch, folders: Sequence[Path]) -> Checkpoint | None:
    def accepts(checkpoint: Checkpoint) -> bool:
        return checkpoint.manifest.run.get("launch") == launch.id

    whole = (newest(folder, accepts=accepts, find_damage=find_damage_together) for folder in folders)
    found = [each for each in whole if each is not None]
    runs = {each.manifest.run["id"]: each for each in found}
    if len(runs) > 1:
        raise CheckpointError(
            f"the processes were started again (restart {launch.num_restarts}), and have saved {len(runs)} runs: "
            f"{_listed([each.path for each in runs.values()])}. Which one this fit goes on with can't be told: give "
            "each Trainer a name=, or pass resume_from=."
        )
    if not found:
        logger.info("restart %d: no checkpoint of this launch was found. The run begins anew.", launch.num_restarts)
    return next(iter(found), None)


def _listed(folders: Sequence[Path]) -> str:
    return ", ".join(map(repr, map(str, folders))) or "any folder"


def restore(run: Run, training: Training, resumption: Resumption) -> None:
    """Put everything back but the random states. The model is placed, no event of fit has fired. Collective.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or to other optimizers or schedulers.
    """
    checkpoint = resumption.checkpoint
    tree = migrated(states.read_common_tree(checkpoint, run.trainer.callbacks), checkpoint.path)
    with run.strategy.writing_weights(run.model):
        checkpoint.load_weights_into(run.strategy.unwrap(run.model))
    states.restore_frozen(run.task, tree["frozen"])
    states.restore_counters(run, tree)
    resumption.inexact += states.restore_callbacks(run.trainer.callbacks, tree["callbacks"])
    run.emit(Callback.on_load_state, tree)
    states.restore_optimizers(run, training.optimizers, checkpoint.stored_tree(states.OPTIMIZERS))
    states.restore_training(run, training, tree)
    run.trackers.load_state_dict(tree["trackers"])
    _restore_processes(run, training, resumption)
    training.begin_schedules(run.state, tree["due_since"])
    for function in run.trainer.functions:
        function.reset(run.state)
    if run.trainer.settings.overfit_batches is not None:
        resumption.inexact.append(
            "overfit_batches takes the loader's first batches anew, which are others where it shuffles or augments"
        )
    resumption.inexact += checkpoint.manifest.inexact


def _restore_processes(run: Run, training: Training, resumption: Resumption) -> None:
    """What each process had of its own; where their number has changed, each one's share of it."""
    found = _find_trees(resumption.checkpoint, run)
    own = found.own
    resumption.random = None if own is None else own["random"]
    resumption.gradients = {} if own is None else own["gradients"]
    resumption.logged = found.logged
    resumption.restore_log(run)
    if run.agreement is not None:
        run.agreement.had_loss = any(tree["had_loss"] for tree in found.logged)
    if own is not None:
        run.strategy.load_process_state(run.model, training.optimizers, own["strategy"])
    else:
        before, count = resumption.checkpoint.manifest.world_size, run.trainer.process.num_processes
        resumption.inexact.append(
            f"{before} processes trained so far, of which the states of {found.num_saved} were saved, and {count} go on"
            f"{' in another mesh' if before == count == found.num_saved else ''}: "
            "the weights, the optimizer and the counters are the same, and each sample of the epoch is seen once; "
            "random numbers and the samples of a batch are others"
        )
    resumption.inexact += training.resume_data(run.state, found.first["data"])
    training.resume_validation(found.first["validation"])
    resumption.is_inside_epoch = run.state.batch > 0 or run.state.epoch_ended


@dataclass(frozen=True, slots=True)
class _Trees:
    """What a checkpoint has of its processes, as this one needs it."""

    num_saved: int
    own: dict[str, Any] | None
    """That of this process; None where the earlier leg had other processes."""
    first: dict[str, Any]
    """Its own, or that of the first one."""
    logged: Sequence[dict[str, Any]]
    """Those whose logged values this process goes on with."""


def _find_trees(checkpoint: Checkpoint, run: Run) -> _Trees:
    index, count = run.trainer.process.process_index, run.trainer.process.num_processes
    before, share = checkpoint.manifest.world_size, run.strategy.data_share
    named = {number: states.process_tree_name(number) for number in range(before)}
    names = {number: name for number, name in named.items() if name in checkpoint.tree_names}
    first = checkpoint.tree(next(iter(names.values())))
    kept = first.get("share", {"peers": 1, "twins": 1})
    if before == len(names) == count and kept == {"peers": share.num_peers, "twins": share.num_twins}:
        own = checkpoint.tree(names[index])
        return _Trees(len(names), own, own, [own])
    # Twins have logged the same: of the earlier ones the first counts, and those of now get the same.
    counted = [name for number, name in names.items() if number % kept["twins"] == 0]
    shared = counted[index // share.num_twins :: share.num_losses]
    return _Trees(len(names), None, first, [checkpoint.tree(name) for name in shared])


def tell(run: Run, resumption: Resumption) -> None:
    """Say where the run goes on, and what can't be exact. Local."""
    if not run.trainer.process.is_main_process:
        return
    state = run.state
    logger.info(
        "resuming from %s: step %d, epoch %d, batch %d",
        resumption.checkpoint.path,
        state.step,
        state.epoch,
        state.batch,
    )
    if resumption.inexact:
        warnings.warn(
            "the resumed run can't be equal bit for bit to one that was never stopped: "
            + "; ".join(resumption.inexact) + ".",
            stacklevel=2,
        )  # fmt: skip
