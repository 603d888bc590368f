"""`LoggerType`: experiment trackers by Accelerate's names."""

from __future__ import annotations

import enum


class LoggerType(enum.StrEnum):
    """The words of `log_with`; the members are Accelerate's, and equal to their text.

    A word that this version has no tracker for is refused where it is used; `register_tracker` gives it one.
    """

    ALL = "all"
    """Every one whose package is installed."""
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
