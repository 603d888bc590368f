"""`TensorBoardTracker`: event files that TensorBoard shows; the default tracker."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed.errors import check_number
from .config import flatten_config
from .event_files import SUFFIX, EventCount, event_files, put_before_new_ones, remove_later_events
from .files import flush_to_disk, say_removed, strict_json
from .tracker import RunInfo, Status, Tracker, opened

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_STATUS = {"success": "STATUS_SUCCESS", "failed": "STATUS_FAILURE", "interrupted": "STATUS_UNKNOWN"}


class TensorBoardTracker(Tracker):
    """Writes scalars under their own names; the configuration as the text `config` and for the HPARAMS view.

    The HPARAMS view shows the run itself as a session with its outcome, without an extra folder; an interrupted run's
    status is unknown there. TensorBoard keeps scalars in 32-bit floats: for exact large counts add the JSON lines or
    CSV tracker.

    A resumed run has an event file for each leg. Those of earlier legs are written anew without what came after the
    checkpoint that it resumes from, and a TensorBoard that is running is told of it; what such a one has read of the
    checkpoint's very step it shows until it is started again. The text `config` has one version for each leg, the
    HPARAMS view the newest.

    Args:
        directory: where the event files go. The default is the run's folder, so that `tensorboard --logdir` on the
            project's folder shows each run by its name.
        flush_seconds: the longest time that records wait in memory before they are in the file.
        name: the tracker's name, where a run has two of them.
    Raises:
        ConfigError: `flush_seconds` is no number of seconds.
    """

    def __init__(
        self, directory: str | Path | None = None, *, flush_seconds: int = 30, name: str = "tensorboard"
    ) -> None:
        hint = "It is a time in seconds."
        check_number("TensorBoardTracker(flush_seconds)", flush_seconds, least=0, allows_infinity=False, hint=hint)
        self.directory = None if directory is None else Path(directory)
        self.flush_seconds = flush_seconds
        self.name = name
        self._writer: SummaryWriter | None = None
        self._count: EventCount | None = None
        self._num_saved: int | None = None

    def start(self, run: RunInfo, config: Mapping[str, Any]) -> None:
        """Open a new event file in the folder and write the configuration into it."""
        from torch.utils.tensorboard import SummaryWriter

        directory, step = self.directory or run.directory, run.resumed_step
        num_saved, self._num_saved = self._num_saved, None
        if step is not None:
            say_removed(self.name, remove_later_events(directory, step, num_saved), step, directory)
            put_before_new_ones(directory)
        writer = SummaryWriter(
            str(directory),
            flush_secs=self.flush_seconds,
            filename_suffix=SUFFIX,
            # A viewer that has the old files in memory forgets from here on.
            purge_step=None if step is None else step + 1,
        )
        try:
            writer.add_text("config", f"```json\n{strict_json(dict(config), indent=2)}\n```", step and max(step, 0))
            _write_session(writer, "session_start_info", _session_start(config))
            writer.flush()
        except BaseException:
            writer.close()
            raise
        self._writer, self._count = writer, EventCount(directory)

    def log(
        self,
        metrics: Mapping[str, float],
        step: int | None = None,
        *,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        """Write one scalar per metric.

        Args:
            metrics: by name.
            step: the step that they belong to.
            walltime: seconds since 1970 that stand in place of now.
            new_style: write them as tensors, which TensorBoard reads faster.
            double_precision: keep 64 bits of each; it needs `new_style`.
        Raises:
            TrackerError: no run is open.
        """
        writer = opened(self._writer, self)
        for name, value in metrics.items():
            writer.add_scalar(
                name, value, step, walltime=walltime, new_style=new_style, double_precision=double_precision
            )

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write pictures.

        Args:
            values: several by name, as one array or tensor of shape (pictures, channels, height, width).
            step: the step that they belong to.
            options: of `SummaryWriter.add_images`, such as `dataformats="NHWC"`.
        Raises:
            TrackerError: no run is open.
        """
        writer = opened(self._writer, self)
        for name, images in values.items():
            writer.add_images(name, images, global_step=step, **options)

    @property
    def tracker(self) -> SummaryWriter | None:
        """The `SummaryWriter` while a run is open."""
        return self._writer

    @property
    def writer(self) -> SummaryWriter | None:
        """The same, by the name that Accelerate's tracker has for it as well."""
        return self._writer

    def flush(self) -> None:
        """Put everything on the disk."""
        if self._writer is not None:
            self._writer.flush()
            for path in event_files(Path(self._writer.log_dir)):
                with path.open("rb+") as file:
                    flush_to_disk(file)

    def state_dict(self) -> dict[str, Any]:
        """The number of values that are in the files, as far as they are flushed."""
        return {} if self._count is None else {"values": self._count.read()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that number back."""
        self._num_saved = state.get("values")

    def finish(self, status: Status) -> None:
        """Write the outcome and close the event file."""
        self._count = None
        writer, self._writer = self._writer, None
        if writer is not None:
            _write_session(writer, "session_end_info", _session_end(status))
            writer.close()


def _session_start(config: Mapping[str, Any]) -> Any:
    data = _hparams("plugin_data_pb2").SessionStartInfo(start_time_secs=time.time())
    for name, value in flatten_config(config).items():
        if isinstance(value, bool):
            data.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            data.hparams[name].number_value = value
        else:
            data.hparams[name].string_value = str(value)
    return data


def _session_end(status: Status) -> Any:
    code = _hparams("api_pb2").Status.Value(_STATUS[status])
    return _hparams("plugin_data_pb2").SessionEndInfo(status=code, end_time_secs=time.time())


def _write_session(writer: Any, kind: str, message: Any) -> None:
    """Write one message of TensorBoard's hyperparameter plugin.

    `SummaryWriter.add_hparams` isn't used: it opens another run in a folder of its own and calls every run a success.
    """
    metadata = _hparams("metadata")
    data = _hparams("plugin_data_pb2").HParamsPluginData(**{kind: message}, version=metadata.PLUGIN_DATA_VERSION)
    proto = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    plugin = proto.SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    value = proto.Summary.Value(
        tag=getattr(metadata, f"{kind.upper()}_TAG"),
        metadata=proto.SummaryMetadata(plugin_data=plugin),
        tensor=metadata.NULL_TENSOR,
    )
    writer.file_writer.add_summary(proto.Summary(value=[value]))


def _hparams(module: str) -> Any:
    """A module of TensorBoard's hyperparameter plugin, loaded when a run starts and not before."""
    return importlib.import_module(f"tensorboard.plugins.hparams.{module}")
