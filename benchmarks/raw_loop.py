"""The loop that all others are measured against: what a user would write by hand."""

from __future__ import annotations

from ticks import Ticker
from workloads import Workload


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
