"""Comparing what two runs have left behind: the first thing in which they are not equal bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.reading import open_checkpoint
from .proof_leg import Leg

_ABSENT = object()
_LEFT_OUT = ("progress.seconds", "trackers", "callbacks.ModelCheckpoint")
"""Of the common state: time passes, trackers have ids of their own, and what `ModelCheckpoint` keeps depends on where a
run was stopped, since it saves there."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place in which two runs are not equal."""

    path: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if isinstance(self.before, Tensor) and isinstance(self.now, Tensor):
            return f"{self.path}: {_tensors_differ(self.before, self.now)}"
        return f"{self.path}: {_shown(self.before)} became {_shown(self.now)}"


class Evidence:
    """What a run has left behind, of which the last leg came to its end.

    Args:
        legs: all of them, in their order.
    """

    def __init__(self, legs: Sequence[Leg]) -> None:
        self.checkpoint = open_checkpoint(legs[-1].checkpoint)
        """The state at the end."""
        self.validated_at: list[int] = []
        """The micro-steps at which a validation began."""
        batches: dict[int, dict[str, Any]] = {}
        for leg in legs:
            for line in map(json.loads, leg.batches.read_text(encoding="utf-8").splitlines()):
                if "validated_at" in line:
                    self.validated_at.append(line["validated_at"])
                else:
                    batches[line["micro_step"]] = line  # a later leg saw it again
        self.batches = [batches[number] for number in sorted(batches)]
        """Each batch of the training with its place and digest."""
        rows = Path(legs[-1].folder) / "run" / "metrics.jsonl"
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        """Those of the tracker."""
        self._folder = legs[-1].folder

    def part(self, name: str) -> Any:
        """One of `PARTS`, as nested values."""
        checkpoint = self.checkpoint
        if name == "order of samples":
            return {f"batch {each['micro_step']} ({_place(each)})": each["digest"] for each in self.batches}
        if name == "tracker rows":
            return {f"row {number} (step {row['step']})": row for number, row in enumerate(self.rows)}
        if name == "weights":
            return dict(checkpoint.weights())
        if name == "optimizers":
            return checkpoint.tree("optimizers")
        own = checkpoint.tree("process-00000")
        if name == "random states":
            return own["random"]
        if name == "position in the data":
            return {key: own[key] for key in ("data", "validation", "log", "strategy")}
        common = self._without_folder(checkpoint.tree("state"))
        if name in ("callbacks", "metrics"):
            return common[name]
        return {key: value for key, value in common.items() if key not in ("callbacks", "metrics")}

    def _without_folder(self, value: Any) -> Any:
        """The same for runs in different folders."""
        if isinstance(value, str):
            return value.replace(self._folder, "...")
        if isinstance(value, dict):
            return {key: self._without_folder(each) for key, each in value.items()}
        return [self._without_folder(each) for each in value] if isinstance(value, list) else value


PARTS = (
    "order of samples", "tracker rows", "weights", "optimizers", "random states", "position in the data",
    "counters and schedules", "metrics", "callbacks",
)  # fmt: skip
"""What is compared, in the order in which a difference shows first."""
MAY_VARY = ("tracker rows", "metrics", "callbacks")
"""The parts in which a run may differ from itself: a rate of samples per second is never the same twice."""


def differences(whole: Evidence, other: Evidence, part: str) -> Iterator[Difference]:
    """Where two runs differ in a part, the first place first."""
    prefix = "callbacks." if part == "callbacks" else ""
    for found in tree_differences(whole.part(part), other.part(part)):
        if not f"{prefix}{found.path}".startswith(_LEFT_OUT):
            yield found


def tree_differences(before: Any, now: Any, path: str = "") -> Iterator[Difference]:
    """The places in which two nested values are not equal bit for bit, in the order of the first one."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            inner = f"{path}.{key}" if path else str(key)
            yield from tree_differences(before.get(key, _ABSENT), now.get(key, _ABSENT), inner)
    elif isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from tree_differences(*pair, f"{path}[{index}]")
    elif not is_same(before, now):
        yield Difference(path, before, now)


def is_same(before: Any, now: Any) -> bool:
    """Whether two values are equal bit for bit, NaN and NaN as well."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.dtype == now.dtype and before.shape == now.shape and _bytes_of(before).equal(_bytes_of(now))
    if type(before) is not type(now):
        return False
    if isinstance(before, float) and math.isnan(before) and math.isnan(now):
        return True
    return bool(before == now)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _place(batch: Mapping[str, Any]) -> str:
    return f"number {batch['batch']} of epoch {batch['epoch']}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _tensors_differ(before: Tensor, now: Tensor) -> str:
    if before.shape != now.shape or before.dtype != now.dtype:
        return f"{before.dtype} {tuple(before.shape)} became {now.dtype} {tuple(now.shape)}"
    unequal = before != now
    largest = (before.double() - now.double()).abs().max().item()
    return f"{int(unequal.sum())} of {before.numel()} values differ, by {largest:.3g} at most"
