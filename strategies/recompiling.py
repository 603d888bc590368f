"""What `torch.compile` compiles anew while a model is trained, and why."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from torch import nn

from .compiling import compiled_codes

logger = logging.getLogger("loopwright")

WARN_AFTER = 4
"""Recompilations of one function until it is warned of: half of the versions that torch keeps by default. It runs the
function uncompiled where none of them fits."""

_VERSION = re.compile(r"^\d+/\d+\S*: ")
"""Which version it was that did not fit, in front of the reason."""


class Recompilations:
    """Counts how often what is compiled was compiled anew, from `start` on, and warns once of each that comes to
    `WARN_AFTER`. It holds for all that this process compiles. Local.

    Nothing of this is public in torch, which tells it in its logs alone; read are those parts that are the same from
    2.6 to 2.13. `guard_failures` has, by the code of a function, for each version of it a text on why it did not fit,
    added whenever none of them did. The callbacks of `callback_handler` are called after each compilation, up to 2.6
    without an argument; a step in which nothing is compiled costs nothing.

    Args:
        models: the modules whose names are told; the list may grow.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._known: dict[CodeType, int] = {}
        """Of each function the number of texts that were read."""
        self._counts: dict[CodeType, int] = {}
        self._stop: Callable[[], Any] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Recompilations so far by the names of modules, else by the name and the place of the function. The one that
        torch refuses at its limit is counted too.
        """
        self._look()
        found: dict[str, int] = {}
        for code, count in self._counts.items():
            name = self._name(code)
            found[name] = found.get(name, 0) + count
        return found

    def start(self) -> None:
        """Count from now on, from 0, where it does not do so yet."""
        if self._stop is not None:
            return
        from torch._dynamo.callback import callback_handler  # here: it takes a second
        from torch._dynamo.utils import guard_failures

        self._known = {code: len(texts) for code, texts in guard_failures.items()}
        self._counts = {}
        look = weakref.WeakMethod(self._look)  # torch's list is not to keep the models

        def compiled(*_: object) -> None:
            if (found := look()) is not None:
                found()

        callback_handler.register_end_callback(compiled)
        self._stop = weakref.finalize(self, _forget, callback_handler.end_callbacks, compiled)

    def stop(self) -> None:
        """Count no more; what was counted stays."""
        if self._stop is not None:
            self._look()
            self._stop()
        self._stop = None

    def _look(self) -> None:
        if self._stop is None:
            return
        from torch._dynamo.utils import guard_failures

        for code, texts in list(guard_failures.items()):
            known = self._known.get(code, 0)
            self._known[code] = len(texts)
            if len(texts) <= known:  # fewer where the compiler was reset
                continue
            self._counts[code] = self._counts.get(code, 0) + 1
            if self._counts[code] == WARN_AFTER:
                self._warn(code, texts[known])

    def _warn(self, code: CodeType, text: str) -> None:
        # A log and no Python warning, which a filter may make an error: an exception here leaves the compiler unusable.
        cause = _VERSION.sub("", text.partition("\n")[0])
        remedy = "Give batches of one shape, or compile with dynamic=True. " if "size mismatch" in cause else ""
        logger.warning(
            "%s was compiled anew %d times, the last time because of: %s. %sEach takes about as long as the first; "
            "beyond torch._dynamo.config.recompile_limit versions it runs uncompiled. TORCH_LOGS=recompiles shows "
            "every cause.",
            self._name(code),
            WARN_AFTER,
            cause,
            remedy,
        )

    def _name(self, code: CodeType) -> str:
        for model in self._models:
            if name := compiled_codes(model).get(code):
                return name
        return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _forget(callbacks: list[Callable[..., None]], callback: Callable[..., None]) -> None:
    if callback in callbacks:  # not where the compiler was reset
        callbacks.remove(callback)
