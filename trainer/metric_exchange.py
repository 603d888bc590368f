"""Logged values over all processes: one collective for all names of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..distributed import watch
from ..distributed.errors import MetricError
from ..distributed.exchange import exchange
from ..distributed.numbers import to_numbers
from ..distributed.shares import DataShare
from .metrics import STEP, Sum, extreme


class MetricExchange:
    """Takes sums over all processes, and knows which of them have to log what others log.

    Args:
        share: of the data on this process; of processes that compute the same losses one counts.
    """

    def __init__(self, share: DataShare) -> None:
        self._share = share
        self._seen: dict[str, int] = {}
        """Batches that this process has seen, by the suffix that metrics of their loader have: one that has seen none
        need not log what the others log. In training: those of the epoch that gave a loss, and by `STEP` those of the
        newest window, where they are counted.
        """

    def see(self, suffix: str, num_batches: int) -> None:
        """Note so many more batches of a suffix's loader; 0 for a loader that begins. Local."""
        self._seen[suffix] = self._seen.get(suffix, 0) + num_batches

    def expect_all(self) -> None:
        """What is logged next belongs to no batch: every process has to log it. Local."""
        self._seen.update(dict.fromkeys(self._seen, 1))

    def begin_counting_losses(self) -> None:
        """From now on only a process whose batches gave a loss has to log. Local, on all processes."""
        self._seen.update({"": 0, STEP: 0})

    def begin_epoch(self) -> None:
        """An epoch of training begins. Local."""
        if self._counts_losses:
            self._seen[""] = 0

    def begin_window(self) -> None:
        """A window of training begins. Local."""
        if self._counts_losses:
            self._seen[STEP] = 0

    def count_losses(self, in_window: int, in_epoch: int) -> None:
        """Note the losses on this process of the window of training that ends, and those of them that its epoch gave.
        Local.
        """
        self._seen[STEP] = in_window
        self.see("", in_epoch)

    def state_dict(self) -> dict[str, int]:
        """What this process has seen."""
        return dict(self._seen)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take back what `state_dict` gave."""
        self._seen.update(state)

    @property
    def _counts_losses(self) -> bool:
        return STEP in self._seen

    def __call__(self, sums: Mapping[str, Sum], sources: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all names over all processes, as plain numbers. Collective.

        Args:
            sums: this process's, by name.
            sources: torchmetrics objects by name, which exchange their states themselves.
        Raises:
            MetricError: a process did not log what others did, or with other options.
        """
        numbers = to_numbers(
            {f"{name}\n{part}": value for name, each in sums.items() for part, value in _flat(each).items()}
        )
        shared: dict[str, list[Any]] = {}
        own: dict[str, Any] = {}
        for name, each in sums.items():
            for part in _parts(each):
                key = name if part is None else f"{name}/{part}"
                total = numbers[f"{name}\ntotal" if part is None else f"{name}\ntotal/{part}"]
                weight = numbers[f"{name}\nweight"]
                if each.sync:
                    shared[key] = [each.reduce, total, weight]
                else:
                    own[key] = Sum(each.reduce, total, weight, False).value()
        told = {"sums": shared, "own": own, "sources": sorted(sources), "seen": self._seen}
        rows = exchange(told, "exchange logged values")
        self._check(rows)
        counted = self._share.by_losses(rows)
        values = {name: _merge(name, counted) for name in _names(counted, "sums")}
        first = {name: value for row in reversed(rows) for name, value in row["own"].items()}
        return first | values | self._compute(rows, sources)

    def _check(self, rows: Sequence[dict[str, Any]]) -> None:
        for kind in ("sums", "sources"):
            for name in _names(rows, kind):
                has = [index for index, row in enumerate(rows) if name in row[kind]]
                lacks = [index for index, row in enumerate(rows) if index not in has and _was_to_log(name, row, rows)]
                if lacks:
                    raise MetricError(
                        f"log({name.removeprefix(STEP)!r}): processes {has} logged it and processes {lacks} did "
                        "not. Log the same names on every process, or this one with sync=False: process 0's value then."
                    )

    def _compute(self, rows: Sequence[dict[str, Any]], sources: Mapping[str, Any]) -> dict[str, Any]:
        """What torchmetrics objects give, in the same order everywhere. Processes without an object are told."""
        values: dict[str, Any] = {}
        is_partial = False
        for name in sorted(_names(rows, "sources")):
            members = [index for index in self._share.by_losses(range(len(rows))) if name in rows[index]["sources"]]
            with watch.collective(f"compute {name}"):
                if len(members) == len(rows):
                    values[name] = sources[name].compute()
                    continue
                is_partial = True
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    values[name] = _compute_in(sources[name], group)
                    dist.destroy_process_group(group)
        if not is_partial:
            return values
        flat = {key: value for name, each in values.items() for key, value in _named(name, each).items()}
        told = exchange(to_numbers(flat), "tell computed metrics")
        return {key: value for row in reversed(told) for key, value in row.items()}


def _compute_in(metric: Any, group: Any) -> Any:
    """A torchmetrics object's value over the members of a group."""
    outer, metric.process_group = metric.process_group, group
    try:
        return metric.compute()
    finally:
        metric.process_group = outer


def _was_to_log(name: str, row: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a process that has seen a batch which this name belongs to."""
    if name.startswith(STEP):
        return bool(row["seen"].get(STEP, 1))
    suffixes = sorted({suffix for each in rows for suffix in each["seen"]}, key=len, reverse=True)
    suffix = next((each for each in suffixes if each and name.endswith(each)), "")
    return bool(row["seen"].get(suffix, 0))


def _names(rows: Sequence[dict[str, Any]], kind: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row[kind]))


def _merge(name: str, rows: Sequence[dict[str, Any]]) -> Any:
    found = [row["sums"][name] for row in rows if name in row["sums"]]
    reduces = {each[0] for each in found}
    if len(reduces) > 1:
        raise MetricError(f"log({name!r}) with reduce={sorted(reduces)} on different processes. Use one for all.")
    reduce = found[0][0]
    total, weight = found[0][1], found[0][2]
    for _, other, more in found[1:]:
        total = total + other if reduce in ("mean", "sum") else extreme(reduce, total, other)
        weight = weight + more
    return Sum(reduce, total, weight, True).value()


def _parts(each: Sum) -> list[Any]:
    return list(each.total) if isinstance(each.total, dict) else [None]


def _flat(each: Sum) -> dict[str, Any]:
    totals = _named("total", each.total)
    return totals | {"weight": each.weight}


def _named(name: str, value: Any) -> dict[str, Any]:
    return {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
