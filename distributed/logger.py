"""`get_logger`: a logger for scripts that several processes run."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from .environment import read_text
from .group import index_and_count
from .operations import wait_for_everyone


class ProcessLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose messages come from the main process, unless a call says otherwise.

    Every method takes two arguments more than those of `logging`:

    - `main_process_only`: True lets the main process alone write, False each process, with its index before the text.
      By default True, unless `in_order` is.
    - `in_order`: True lets the processes write one after another. Collective: all of them have to make the call.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Write a message; as `logging.Logger.log`."""
        in_order = kwargs.pop("in_order", False)
        main_process_only = kwargs.pop("main_process_only", not in_order)
        kwargs.setdefault("stacklevel", 2)  # the caller's line, not this one's
        kwargs["stacklevel"] += 1
        if not in_order and not self.isEnabledFor(level):
            return
        index, count = index_and_count()
        if main_process_only:
            if index == 0:
                self._write(level, msg, args, kwargs)
            return
        if count > 1:
            msg = f"[RANK {index}] {msg}"
        # All take part in the waiting, also where the level is another one.
        for turn in range(count) if in_order else [index]:
            if turn == index:
                self._write(level, msg, args, kwargs)
            if in_order:
                wait_for_everyone()

    def _write(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
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
