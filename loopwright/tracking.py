"""Experiment trackers, for users of Accelerate who import them from `accelerate.tracking`."""

from __future__ import annotations

from .trackers.csv import CSVTracker
from .trackers.jsonl import JSONLTracker
from .trackers.mlflow import MLflowTracker
from .trackers.registry import create_trackers, register_tracker, tracker_words
from .trackers.tensorboard import TensorBoardTracker
from .trackers.tracker import RunInfo, Tracker
from .trackers.wandb import WandbTracker

__all__ = [
    "CSVTracker",
    "JSONLTracker",
    "MLflowTracker",
    "RunInfo",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "create_trackers",
    "register_tracker",
    "tracker_words",
]
