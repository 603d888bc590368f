"""`MemoryPlan`: what each strategy holds in memory, which one to take, and the report on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..strategies.memory import Footprint

RESERVE = 0.1
"""The part of a device that stays free: for what the driver, libraries and gaps between tensors take."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One strategy."""

    spec: Mapping[str, Any]
    """As `Trainer(strategy=...)` takes it."""
    footprint: Footprint | None
    """What a process holds; None: the strategy can't be used."""
    is_own: bool
    """Whether it is the run's own."""
    refusal: str = ""
    """Why it can't be used."""


@dataclass(slots=True)
class MemoryPlan:
    """What one process of a run will hold, in bytes, by strategy. `str(plan)` is the report."""

    world_size: int
    device_memory: int | None = None
    """Of one device; None: unknown."""
    batch_samples: int | None = None
    """Samples of a micro-batch in each process."""
    rows: list[MemoryRow] = field(default_factory=list)
    """The simplest strategy first."""
    recommended: Mapping[str, Any] | None = None
    """The simplest strategy that fits, as `Trainer(strategy=...)` takes it; None: none does, or nobody can tell."""
    computes_in_16_bits: bool = False
    """Whether the run's precision is one of 16 bits, so that it is none to recommend."""
    notes: list[str] = field(default_factory=list)
    """What could not be told."""

    def fits(self, row: MemoryRow) -> bool | None:
        """Whether a strategy can be used and leaves `RESERVE` of the device free; None: unknown."""
        if row.footprint is None:
            return False
        if self.device_memory is None:
            return None
        if row.footprint.known > self.device_memory * (1 - RESERVE):
            return False
        return True if row.footprint.peak is not None else None

    def recommend(self) -> None:
        """Choose the first that fits."""
        self.recommended = next((row.spec for row in self.rows if self.fits(row)), None)

    def __str__(self) -> str:
        notes = [*_refusals(self), *self.notes]
        return "\n".join([_head(self), *_table(self), *_advice(self), *(f"Look at     {note}" for note in notes)])


def _head(plan: MemoryPlan) -> str:
    of = "1 process" if plan.world_size == 1 else f"each of {plan.world_size} processes"
    batch = "" if plan.batch_samples is None else f", with {plan.batch_samples} samples in a batch"
    given = "" if plan.device_memory is None else f"; a device has {in_words(plan.device_memory)}"
    return f"Memory      of {of}{batch}{given}"


def _table(plan: MemoryPlan) -> list[str]:
    heads = ["", "strategy", "weights", "gradients", "optimizer", "activations", "peak", ""]
    rows = [heads, *(_cells(plan, row) for row in plan.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if at < 2 else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"          {' '.join(cells[:2])}  {'  '.join(cells[2:-1])}  {row[-1]}".rstrip())
    return lines


def _cells(plan: MemoryPlan, row: MemoryRow) -> list[str]:
    found, name = row.footprint, shown_strategy(_brief(row.spec))
    own = ["as configured"] if row.is_own else []
    if found is None:
        return [" ", name, *[""] * 5, ", ".join(["can't be used", *own])]
    sizes = [found.weights, found.gradients, found.optimizer, found.activations]
    peak = in_words(found.peak) if found.peak is not None else f"> {in_words(found.known)}"
    remarks = [{True: "fits", False: "too large", None: ""}[plan.fits(row)]]
    if found.host:
        remarks.append(f"{in_words(found.host)} on the host")
    mark = "*" if row.spec == plan.recommended else " "
    shown = [in_words(size) if size is not None else "?" for size in sizes]
    return [mark, name, *shown, peak, ", ".join(filter(None, remarks + own))]


def _refusals(plan: MemoryPlan) -> list[str]:
    """Why strategies can't be used, each reason once."""
    found = {(str(row.spec["name"]), row.refusal): None for row in plan.rows if row.footprint is None}
    return [f"{name} can't be used: {reason}" for name, reason in found]


def _advice(plan: MemoryPlan) -> list[str]:
    if plan.recommended is not None:
        return [f"Strategy    {shown_strategy(plan.recommended)} is the simplest that fits"]
    known = [(row.footprint.known, row) for row in plan.rows if row.footprint is not None]
    if plan.device_memory is None or not known:
        return []
    size, smallest = min(known, key=lambda each: each[0])
    if plan.fits(smallest) is None:
        return ["Strategy    none can be recommended while peaks are not known"]
    lacking = size - plan.device_memory * (1 - RESERVE)
    remedies = ["more processes", "smaller batches with more accumulation"]
    more = " or ".join(remedies) if plan.computes_in_16_bits else f"{', '.join(remedies)}, or precision='bf16'"
    return [
        f"Strategy    none fits: the smallest, {shown_strategy(smallest.spec)}, lacks {in_words(lacking)}. Use {more}"
    ]


def shown_strategy(spec: Mapping[str, Any]) -> str:
    """A strategy in one line: its name, or what a YAML file has with its options."""
    if len(spec) == 1:
        return str(spec["name"])
    import yaml  # who makes no plan needs none

    return yaml.safe_dump(_plain(spec), default_flow_style=True, sort_keys=False, width=float("inf")).rstrip("\n")


def _brief(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """A strategy as a row of the table has it: without DeepSpeed's whole configuration."""
    return {**spec, "config": "..."} if isinstance(spec.get("config"), Mapping) else spec


def _plain(value: Any) -> Any:
    """The same of what YAML knows; functions, classes and modules are shown by their names."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return getattr(value, "__qualname__", type(value).__name__)


def in_words(size: float) -> str:
    """A number of bytes with its unit, of powers of ten."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size / 1e3:.2f} kB"
