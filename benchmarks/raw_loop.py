"""The loop that all others are measured against: what a user would write by hand."""

from __future__ import annotations

from itertools import islice

from ticks import Ticker
from workloads import Workload

# mypy: disable-error-code="no-untyped-call"


def run_raw(work: Workload, ticker: Ticker, steps: int) -> None:
    """Train for `steps` optimizer steps."""
    model, optimizer, loader = work.build(steps)
    loss_function = work.loss
    if work.accumulate > 1:
        return _run_accumulating(work, ticker, steps)
    for x, y in loader:
        ticker.tick()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return None


def _run_accumulating(work: Workload, ticker: Ticker, steps: int) -> None:
    model, optimizer, loader = work.build(steps)
    loss_function, accumulate = work.loss, work.accumulate
    for index, (x, y) in enumerate(loader, start=1):
        ticker.tick()
        loss = loss_function(model(x), y) / accumulate
        loss.backward()
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def run_raw_windows(work: Workload, ticker: Ticker, steps: int) -> None:
    """As `run_raw` with accumulation, but all batches of a window are fetched before the first is used.

    Fetching in a row is quicker than fetching between computations, and Loopwright's Trainer does it too; so this is
    what its own cost is to be read against.
    """
    model, optimizer, loader = work.build(steps)
    loss_function, accumulate = work.loss, work.accumulate
    batches = iter(loader)
    while window := list(islice(batches, accumulate)):
        for x, y in window:
            ticker.tick()
            loss = loss_function(model(x), y) / accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
