"""What `ModelCheckpoint` accepts."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoint.shards import SUFFIX
from ..distributed.errors import ConfigError, check_boolean, check_integer
from .file_names import FileName
from .state_folders import STEP_NAME


def check_options(*, monitor: str | None, mode: str, top_k: int, asynchronous: bool | None, **switches: bool) -> None:
    """Refuse what can't be used together.

    Args:
        monitor: as `ModelCheckpoint` takes it, and so the others.
        switches: the arguments that are true or false.
    Raises:
        ConfigError: an argument can't be used or would be ignored, or nothing would ever be saved.
    """
    check_integer("ModelCheckpoint(top_k)", top_k, -1, "It is a number of checkpoints; -1 keeps all, 0 none.")
    for name, value in (switches | ({} if asynchronous is None else {"asynchronous": asynchronous})).items():
        check_boolean(f"ModelCheckpoint({name})", value)
    if monitor is None and mode != "min":
        raise ConfigError(f"ModelCheckpoint(mode={mode!r}) has no metric to compare. Name it by monitor=.")
    if not switches["last"] and top_k == 0:
        raise ConfigError("ModelCheckpoint(top_k=0, last=False) saves nothing. Keep one of them, or leave it out.")
    if switches["restore_best"] and (monitor is None or top_k == 0):
        raise ConfigError("ModelCheckpoint(restore_best=True) has no best one. Name monitor=, and keep top_k.")
    if asynchronous is not None and switches["save_weights_only"]:
        raise ConfigError(
            f"ModelCheckpoint(asynchronous={asynchronous}) is for whole states. Leave it out for weights only."
        )


def read_directory(directory: str | Path | None) -> Path | None:
    """The folder that was named, None where none was.

    Raises:
        ConfigError: it is no path.
    """
    if directory is None:
        return None
    if not isinstance(directory, (str, os.PathLike)) or not str(directory):
        raise ConfigError(
            f"ModelCheckpoint(directory={directory!r}). Expected the path of a folder; leave it out for `checkpoints` "
            "in the run's directory."
        )
    return Path(directory)


def read_file_name(template: str | None, monitor: str | None, top_k: int, weights_only: bool) -> FileName:
    """What checkpoints are called.

    Raises:
        ConfigError: the template can't be read, or names a metric without a monitor.
    """
    if template is not None and (not isinstance(template, str) or not template):
        raise ConfigError(f"ModelCheckpoint(filename={template!r}). Expected a text, such as '{{epoch}}-{{step}}'.")
    if template is None and weights_only and monitor is not None and top_k != 1:
        return FileName.of_metric(monitor)
    if template is None:
        template = STEP_NAME if not weights_only else "{step}" if monitor is None else "best"
    suffix = SUFFIX if weights_only else ""
    return FileName(template, metrics_allowed=monitor is not None, option="ModelCheckpoint(filename)", suffix=suffix)
