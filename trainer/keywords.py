"""The Trainer's keywords: what other frameworks call them, and an error that knows it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec

from ..distributed.errors import suggest

P = ParamSpec("P")

FOREIGN_KEYWORDS: Mapping[str, str] = {
    # Lightning's names, then those of Transformers and Accelerate.
    "accumulate_grad_batches": "accumulate",
    "gradient_clip_val": "clip_norm",
    "val_check_interval": "val_every",
    "check_val_every_n_epoch": "val_every",
    "num_sanity_val_steps": "sanity_val_batches",
    "limit_train_batches": "limit_batches",
    "limit_val_batches": "limit_batches",
    "limit_test_batches": "limit_batches",
    "limit_predict_batches": "limit_batches",
    "logger": "trackers",
    "enable_progress_bar": "progress",
    "log_every_n_steps": "log_every",
    "default_root_dir": "project_dir",
    "gradient_accumulation_steps": "accumulate",
    "auto_find_batch_size": "auto_accumulate",
    "max_grad_norm": "clip_norm",
    "num_train_epochs": "max_epochs",
    "eval_steps": "val_every",
    "logging_steps": "log_every",
    "report_to": "trackers",
    "output_dir": "project_dir",
    "mixed_precision": "precision",
}
"""By name, the Trainer's argument."""


def naming_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that says of an unknown keyword which one is meant; to type checkers it stays as it was.

    Raises:
        TypeError: when it is called: a keyword is unknown.
    """
    known = inspect.signature(init).parameters.keys() - {"self"}

    @functools.wraps(init)
    def named(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                near = FOREIGN_KEYWORDS.get(name)
                hint = f"Did you mean {near!r}?" if near else suggest(name, known)
                raise TypeError(f"{type(args[0]).__name__}({name}=...) is unknown. {hint}")
        init(*args, **kwargs)

    return named
