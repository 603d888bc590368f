"""Predictions of several processes in one file, in the order of the data."""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..distributed.atomic import whole_file
from ..distributed.exchange import exchange
from ..trainer.trainer import Trainer
from .predictions import PredictionWriter, line_of, rows_of


class SpoolWriter(PredictionWriter):
    """Keeps this process's lines in a temporary file, batch by batch, each with its place in the data.

    Args:
        stream: the temporary file; None to count only.
        trainer: that predicts.
    """

    def __init__(self, stream: TextIO | None, trainer: Trainer) -> None:
        super().__init__(stream)
        self._trainer = trainer

    def __call__(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take what `predict_step` returned for one batch."""
        rows = list(rows_of(outputs))
        self.count += len(rows)
        if self.stream is not None:
            text = "".join(map(line_of, rows))
            self.stream.write(json.dumps([self._trainer.evaluation_loader, batch_idx, text]) + "\n")


@contextmanager
def shared_writer(file: Path | None, trainer: Trainer) -> Iterator[PredictionWriter]:
    """A context with a writer for each of several processes. Collective at its end, in order.

    No process needs to see another's disk: batches travel one by one to the main process, which writes the file. It
    appears whole, and replaces an older one. At the end `count` is that of all processes.

    Args:
        file: None only counts.
        trainer: that predicts.
    """
    with ExitStack() as stack:
        spool = target = None
        if file is not None:
            spool = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8"))
            if trainer.process.is_main_process:
                temporary = stack.enter_context(whole_file(file))
                target = stack.enter_context(temporary.open("w", encoding="utf-8"))
        writer = SpoolWriter(spool, trainer)
        yield writer
        writer.count = sum(exchange(writer.count, "count predictions"))
        if spool is None:
            return
        spool.seek(0)
        for text in _in_order(spool, trainer.process.num_processes):
            if target is not None:
                target.write(text)


def _in_order(spool: TextIO, num_processes: int) -> Iterator[str]:
    """The texts of all processes' batches in the order of the data. Collective: one round for a batch of each."""
    waiting: list[deque[list[Any]]] = [deque() for _ in range(num_processes)]
    ended = [False] * num_processes
    while not all(ended):
        line = spool.readline()
        for index, batch in enumerate(exchange(json.loads(line) if line else None, "gather predictions")):
            if batch is None:
                ended[index] = True
            else:
                waiting[index].append(batch)
        # Each process's batches are in order, so that the first is known once every one has shown its next.
        while any(waiting) and all(queue or is_over for queue, is_over in zip(waiting, ended, strict=True)):
            first = min((queue for queue in waiting if queue), key=lambda queue: queue[0][:2])
            yield first.popleft()[2]
