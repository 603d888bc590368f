"""The package torchao: imported without what it says of kernels for devices that are not there."""

from __future__ import annotations

import logging
import warnings
from types import ModuleType

from ..distributed.imports import require

_LOGGERS = ("torchao", "torch.utils._pytree")
"""Whose warnings are those of the import."""


def import_torchao(module: str, purpose: str) -> ModuleType:
    """A module of torchao. Local; the first import takes seconds.

    Args:
        module: its name, `"torchao.float8"`.
        purpose: what asked for it, for the error's text.
    Raises:
        MissingDependencyError: it is not installed.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return require(module, extra="fp8", purpose=purpose)
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
