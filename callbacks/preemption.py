"""`Preemption`: the signals by which a cluster takes a machine away, the time that is left, and the way back."""

from __future__ import annotations

import logging
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..distributed.environment import launched_as
from ..distributed.errors import ConfigError, suggest
from ..distributed.exchange import exchange
from .callback import Callback
from .intervals import Duration

if TYPE_CHECKING:
    from .view import TaskView, TrainerView

logger = logging.getLogger("loopwright")

SIGNALS = ("SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Those by which clusters tell that the end is near."""
_REQUEUE_SECONDS = 60.0


class Preemption(Callback):
    """Ends a training in order when the cluster is about to take the machine away, and has the job requeued.

    SIGTERM ends every training in order; with this callback other signals do as well. Whichever process gets one, all
    leave at the same step boundary. Then `ModelCheckpoint` saves: all, or the weights alone where `grace` is too short
    for all by the measured time of a save. Exit codes are 128 and the signal's number: 143 for SIGTERM, 138 for
    SIGUSR1, 140 for SIGUSR2 (on Linux).

    Under SLURM, `sbatch --signal=USR1@120 --requeue` sends SIGUSR1 two minutes before the end. After the checkpoint is
    whole the main process calls `scontrol requeue`; with `fit(resume_from="latest")` the job goes on where it was. It
    is not requeued for SIGTERM, by which a job is cancelled, nor where there is no checkpoint to go on from.

    Args:
        signals: their names, beside SIGTERM.
        grace: how long after the signal the process will be killed, such as `"30 s"`; a bare number is in seconds.
            None: nobody knows, and all is saved in any case.
        requeue: `"auto"`: where SLURM runs the job; True: the same, and an error at the begin of `fit` where it does
            not; False: never.
    Raises:
        ConfigError: an argument can't be used.
    """

    steers = False
    after = ("ModelCheckpoint",)

    def __init__(
        self,
        signals: str | Sequence[str] = ("SIGUSR1",),
        grace: int | float | str | timedelta | Duration | None = None,
        requeue: Literal["auto"] | bool = "auto",
    ) -> None:
        self.signals = _read_signals(signals)
        self.grace_seconds = None if grace is None else _read_grace(grace)
        """Seconds between a signal and the end of the process, None where nobody knows."""
        if requeue != "auto" and not isinstance(requeue, bool):
            raise ConfigError(f"Preemption(requeue={requeue!r}). Expected 'auto', True or False.")
        self.requeue = requeue
        self._scontrol: str | None = None
        self._is_active = self._has_saved = False

    def on_fit_start(self, trainer: TrainerView, task: TaskView) -> None:
        self._is_active = True
        self._has_saved = trainer.resumed_step is not None
        self._scontrol = None
        if self.requeue is not False and launched_as("SLURM_JOB_ID", 0):
            self._scontrol = shutil.which("scontrol")
        if self.requeue is True and self._scontrol is None:
            missing = "no 'scontrol' on PATH" if launched_as("SLURM_JOB_ID", 0) else "no SLURM_JOB_ID"
            raise ConfigError(f"Preemption(requeue=True): {missing}, so that no job can be requeued. Leave it 'auto'.")
        if trainer.process.is_main_process and not trainer.handles(Callback.on_stop):
            warnings.warn(
                "Preemption: nothing will be saved when a signal ends this run. Add ModelCheckpoint() to the "
                "callbacks, or save by a function of your own: trainer.on('stop', ...).",
                stacklevel=2,
            )

    def on_saved(self, trainer: TrainerView, task: TaskView, path: Path) -> None:
        self._has_saved = True

    def on_teardown(self, trainer: TrainerView, task: TaskView) -> None:
        # The last event: what was being written in the background is whole by now.
        was_active, self._is_active = self._is_active, False
        if not was_active or trainer.error is not None or not trainer.process.is_main_process:
            return
        if trainer.signal not in self.signals or trainer.signal == "SIGTERM" or self._scontrol is None:
            return
        if not self._has_saved:
            warnings.warn(
                "Preemption: the job is not requeued, since there is no checkpoint that it could go on from. Add "
                "ModelCheckpoint().",
                stacklevel=2,
            )
            return
        _requeue(self._scontrol, str(launched_as("SLURM_JOB_ID", 0)))


def grace_left(trainer: TrainerView) -> float | None:
    """Seconds until the process will be killed for the signal that ends the run. Collective where that is known.

    Returns:
        The least of all processes; None where there was no signal, or where no `Preemption` says how long it is.
    """
    graces = [each.grace_seconds for each in trainer.callbacks if isinstance(each, Preemption)]
    known = [grace for grace in graces if grace is not None]
    if trainer.signal is None or not known:
        return None
    passed = trainer.signal_seconds or 0.0
    if trainer.process.num_processes > 1:
        passed = max(exchange(passed, "tell how long ago the signal came"))
    return min(known) - passed


def _requeue(scontrol: str, job: str) -> None:
    try:
        done = subprocess.run(
            [scontrol, "requeue", job], capture_output=True, text=True, timeout=_REQUEUE_SECONDS, check=False
        )
        failure = "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr.strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        warnings.warn(
            f"Preemption: '{scontrol} requeue {job}' failed, {failure}. The checkpoint is whole; submit the job again.",
            stacklevel=3,
        )
    else:
        logger.info("Preemption: job %s is requeued", job)


def _read_signals(signals: str | Sequence[str]) -> tuple[str, ...]:
    names = [signals] if isinstance(signals, str) else list(signals)
    for name in names:
        if name not in SIGNALS:
            raise ConfigError(f"Preemption(signals): {name!r}. {suggest(str(name), SIGNALS)}")
    return tuple(names)


def _read_grace(grace: int | float | str | timedelta | Duration) -> float:
    duration = Duration.parse(grace, unit="seconds", option="Preemption(grace)")
    if duration.unit != "seconds":
        raise ConfigError(f"Preemption(grace={grace!r}). Expected a time, such as '30 s'.")
    return duration.amount
