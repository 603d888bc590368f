"""`get_logger`: a logger for scripts that several processes run."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from .environment import launched_as, read_text


class ProcessLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages come from the main process, unless a call says otherwise.

    Every method takes two arguments more than those of `logging`: `main_process_only` (by default True; False lets each
    process write, with its index before the text), and `in_order` (False; True lets them write one after another, so
    that all of them have to make the call).
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Write a message; as `logging.Logger.log`."""
        main_process_only = kwargs.pop("main_process_only", True)
        kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        index, count = launched_as("RANK", 0), launched_as("WORLD_SIZE", 1)
        if main_process_only and index != 0:
            return
        if not main_process_only and count > 1:
            msg = f"[RANK {index}] {msg}"
        kwargs.setdefault("stacklevel", 2)  # the caller's line, not this one's
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add what the adapter was made with to the record."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Write a warning at the first call with this text and these arguments; later ones do nothing."""
        seen: set[tuple[object, ...]] = self.__dict__.setdefault("_seen", set())
        if (msg, *args) not in seen:
            seen.add((msg, *args))
            kwargs.setdefault("stacklevel", 3)
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> ProcessLogger:
    """The logger of that name, for scripts that several processes run.

    Args:
        name: usually `__name__`.
        log_level: its level; without one `LOOPWRIGHT_LOG_LEVEL` or `ACCELERATE_LOG_LEVEL` decides, and else the level
            stays as it is.
    """
    logger = logging.getLogger(name)
    level = read_text("LOG_LEVEL") if log_level is None else log_level
    if level is not None:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return ProcessLogger(logger, {})
