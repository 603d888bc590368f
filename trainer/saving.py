"""`RunSaving`: the part of a Trainer that saves weights and states, of the run that goes on or of the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import NoneType
from typing import Any

from ..checkpoint.reading import open_checkpoint
from ..checkpoint.weights import weights_file, write_weights
from ..distributed.errors import CheckpointError, ConfigError
from ..strategies.precision import Precision
from .readings import RunReadings
from .resume import read_resume_from
from .run import Run, Training
from .saves import read_request, save_now
from .showing import showing_weights
from .snapshots import Snapshot, go_back_to, take_snapshot
from .state_methods import plain_state

EXACTNESS = (
    "precision", "compile", "accumulate", "auto_accumulate", "accumulate_across_epochs", "clip_norm", "clip_value",
    "limit_batches", "overfit_batches", "seed", "deterministic",
)  # fmt: skip
"""The arguments on which the numbers of a training depend."""


class RunSaving(RunReadings):
    """What a Trainer writes of a run when it is asked to."""

    config: dict[str, Any]
    """The Trainer's arguments."""
    _next_resume: str | Path | None = None
    """What `load_state` was given."""

    def save_model(self, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> Path:
        """Write the task's weights as safetensors, whole or not at all, on the main process. Collective where each
        process has a part of them, else local.

        A process that reads the file waits for it first: `trainer.process.wait_for_everyone()`, on all of them. Inside
        `fit`, where a callback averages the weights, these are the averages.

        Args:
            path: of the file, or of a folder that gets `model.safetensors`.
            metadata: texts that stand in the file beside the weights.
        Returns:
            The file's path.
        Raises:
            CheckpointError: an exception is ending the run, and the main process has a part of the weights alone.
        """
        if self._run is not None and self._run.error is not None and not self.strategy.can_save_alone:
            raise CheckpointError(
                "no weights were saved: an exception ended the run, and each process has a part of them alone."
            )
        with nullcontext() if self._run is None else showing_weights(self._run):
            state = plain_state(self.strategy, self._newest("save_model").model)
            is_main = self.process.is_main_process
            return write_weights(state, path, metadata=metadata) if is_main else weights_file(path)

    def save_state(
        self, path: str | Path, *, scores: Sequence[Mapping[str, Any]] = (), asynchronous: bool | None = None
    ) -> Path:
        """Keep the whole state of the training in a checkpoint, from which `fit(resume_from=path)` goes on. Collective.

        Inside `fit` it is written at the end of the running step boundary, when everything that is due there is done;
        `on_saved` tells that it is whole. Where an exception is ending the run, in `on_teardown` and after `fit`, it is
        written at once, and never in the background.

        Args:
            path: the folder that it becomes, which must not exist.
            scores: values of metrics that these weights reached, by which `resume_from="best"` chooses: mappings with
                `"name"`, `"mode"` (`"min"` or `"max"`) and `"value"`.
            asynchronous: copy the state and write it in the background. None: unless the device is the CPU.
        Returns:
            The path.
        Raises:
            ConfigError: no training has begun, or an argument can't be used.
            CheckpointError: it can't be written.
        """
        request = read_request(path, scores, asynchronous)
        run = self._run or self._newest_fit
        if run is None or run.training is None:
            raise ConfigError("trainer.save_state without a training. Call fit first, or save_model for the weights.")
        if run is not self._run or run.error is not None or run.saves.are_over:
            return save_now(run, run.training, request)
        run.saves.requests.append(request)
        return request.path

    def withdraw_save(self, path: str | Path) -> bool:
        """Take back a checkpoint that `save_state` was asked for. Collective.

        Returns:
            Whether that was still possible: it is not once the boundary is over at which it is written.
        """
        return self._run is not None and self._run.saves.withdraw(Path(path))

    def load_state(self, path: str | Path) -> None:
        """Let the next `fit` go on from a checkpoint, as `fit(resume_from=path)` does. Local.

        Raises:
            CheckpointError: there is none at the path, or it is damaged; on several processes checksums are compared by
                `fit`, each process reading a share of the files.
        """
        wanted = read_resume_from(path)
        if isinstance(wanted, Path):
            open_checkpoint(wanted, verify="full" if self.process.num_processes == 1 else "sizes")
        self._next_resume = wanted

    def take_snapshot(self) -> Snapshot:
        """The state of the training in memory, for `go_back_to`. At a step boundary of `fit`. Collective.

        Raises:
            ConfigError: no training goes on, or it is inside an accumulation window; or the strategy can't.
        """
        return take_snapshot(*self._at_boundary("take_snapshot"))

    def go_back_to(self, snapshot: Snapshot) -> None:
        """Put the training back to where a snapshot of this epoch was taken, but for its place in the data. At a step
        boundary of `fit`; the snapshot stays good. Collective.

        Raises:
            ConfigError: no training goes on, or it is inside an accumulation window.
        """
        go_back_to(*self._at_boundary("go_back_to"), snapshot)

    def _at_boundary(self, what: str) -> tuple[Run, Training]:
        run = self._run
        training = None if run is None else run.training
        if run is None or training is None or training.boundary(run.state)["micro_step"] != run.state.micro_step:
            raise ConfigError(f"trainer.{what} is for the boundaries between the optimizer steps of fit.")
        if not run.strategy.can_go_back:
            raise ConfigError(
                f"{type(run.strategy).__name__} can't put a training back to a snapshot in memory: the weights that it "
                "trains are inside another library or in other processes. Use 'single', 'ddp' or 'fsdp', or resume "
                "from a checkpoint."
            )
        return run, training

    def exactness(self) -> dict[str, Any]:
        """The settings on which the numbers of a training depend, as a checkpoint keeps them."""
        return {name: _plain(self.config[name]) for name in EXACTNESS}


def _plain(value: Any) -> Any:
    if isinstance(value, Precision):
        return value.name
    return value if isinstance(value, (str, int, float, bool, NoneType)) else repr(value)
