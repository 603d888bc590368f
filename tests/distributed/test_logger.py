"""Messages and bars of several processes."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

import torch.distributed as dist

from loopwright.distributed.logger import get_logger
from loopwright.distributed.operations import gather_object
from loopwright.distributed.progress import tqdm


class Times(logging.Handler):
    """Keeps each message with the order in which it came over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(0.1)  # the others would write meanwhile
        self.found.append((time.monotonic(), record.getMessage(), record.funcName or ""))


def _messages() -> Any:
    logger = get_logger(f"loopwright.tests.processes.{dist.get_rank()}", log_level="INFO")
    handler = Times()
    logger.logger.addHandler(handler)
    logger.info("main")
    logger.info("each %d", 7, main_process_only=False)
    for _ in range(2):
        logger.info("turn", in_order=True)
        logger.warning_once("once", main_process_only=False)
    logger.info("own", main_process_only=True, in_order=True)
    # A process whose level is another one takes part in the waiting.
    logger.logger.setLevel(logging.WARNING if dist.get_rank() == 0 else logging.INFO)
    logger.info("level", main_process_only=False, in_order=True)
    logger.logger.removeHandler(handler)
    shown, all_shown = io.StringIO(), io.StringIO()
    list(tqdm(range(2), file=shown))
    list(tqdm(range(2), file=all_shown, main_process_only=False))
    return handler.found, gather_object(handler.found), "2/2" in shown.getvalue(), "2/2" in all_shown.getvalue()


def test_messages_of_two_processes(two_processes: Any) -> None:
    (first, everyone, first_bar, first_all), (second, _, second_bar, second_all) = two_processes(_messages)
    assert [text for _, text, _ in first] == [
        "main", "[RANK 0] each 7", "[RANK 0] turn", "[RANK 0] once", "[RANK 0] turn", "own",
    ]  # fmt: skip
    assert [text for _, text, _ in second] == [
        "[RANK 1] each 7", "[RANK 1] turn", "[RANK 1] once", "[RANK 1] turn", "[RANK 1] level",
    ]  # fmt: skip
    in_order = [text for _, text, _ in sorted(everyone) if "turn" in text]
    assert in_order == ["[RANK 0] turn", "[RANK 1] turn"] * 2
    assert {name for _, _, name in everyone} == {"_messages"}
    assert (first_bar, second_bar, first_all, second_all) == (True, False, True, True)
