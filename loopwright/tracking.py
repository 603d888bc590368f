"""The names that users of Accelerate import from `accelerate.tracking`."""

from __future__ import annotations

from .trackers.general import GeneralTracker, on_main_process
from .trackers.mlflow import MLflowTracker
from .trackers.tensorboard import TensorBoardTracker
from .trackers.wandb import WandbTracker as WandBTracker

__all__ = ["GeneralTracker", "MLflowTracker", "TensorBoardTracker", "WandBTracker", "on_main_process"]
