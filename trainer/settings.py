"""The Trainer's settings, read and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from ..callbacks.intervals import Duration, Interval
from ..callbacks.limits import Limits
from ..data.window import Remainder
from ..distributed.errors import ConfigError, check_boolean, check_integer, suggest
from ..distributed.random import check_seed
from ..strategies.compiling import Compiling
from ..strategies.gradient_state import check_num_steps
from .loaders import read_batch_limits
from .modes import check_matmul_precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the arguments of `Trainer` mean; see there."""

    limits: Limits
    accumulate: int
    remainder: Remainder
    splits_batches: bool = False
    clip_norm: float | None
    clip_value: float | None
    val_interval: Interval
    log_interval: Interval
    overhead_budget: float | None
    sanity_val_batches: int
    batch_limits: Mapping[str, int | float]
    overfit_batches: int | None
    is_fast_dev_run: bool = False
    compiling: Compiling | None
    seed: int | None
    is_deterministic: bool
    matmul_precision: str | None
    project_dir: Path
    name: str | None

    def __post_init__(self) -> None:
        check_num_steps(self.accumulate, "accumulate")
        if self.remainder not in get_args(Remainder):
            raise ConfigError(
                f"accumulate_across_epochs={self.remainder!r}. {suggest(self.remainder, get_args(Remainder))}"
            )
        check_boolean("auto_accumulate", self.splits_batches)
        for option, limit in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if limit is not None and not (_is_number(limit) and limit > 0):
                raise ConfigError(
                    f"{option}={limit!r}. Expected a number above 0, or None to leave gradients as they are."
                )
        check_matmul_precision(self.matmul_precision)
        check_integer("sanity_val_batches", self.sanity_val_batches, 0)
        if self.overfit_batches is not None:
            check_integer("overfit_batches", self.overfit_batches, 1)
            if "train" in self.batch_limits:
                raise ConfigError(
                    f"overfit_batches={self.overfit_batches} and limit_batches for 'train' both limit the training "
                    "batches. Give one of them."
                )
        if self.seed is not None:
            check_seed(self.seed)
        check_boolean("deterministic", self.is_deterministic)
        if self.name is not None:
            _check_name(self.name)
        if not isinstance(self.project_dir, Path):
            raise ConfigError(f"project_dir={self.project_dir!r}. Expected the path of a folder.")

    def for_dev_run(self, num_batches: int) -> Settings:
        """These settings for a run that tries everything on so many batches of each stage."""
        left_out = {stage: 0 for stage, limit in self.batch_limits.items() if limit == 0}
        return replace(
            self,
            limits=Limits(max_epochs=Duration(1, "epochs")),
            batch_limits={**read_batch_limits(num_batches), **left_out},
            val_interval=Interval((Duration(1, "epochs"),)),
            sanity_val_batches=0,
            overfit_batches=None,
            is_fast_dev_run=True,
        )


def _check_name(name: object) -> None:
    is_name = isinstance(name, str) and name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
    if not is_name or len(os.fsencode(str(name))) > _LONGEST_NAME:
        raise ConfigError(
            f"name={name!r}. Expected the name of one folder, below project_dir, of at most {_LONGEST_NAME} bytes."
        )


_LONGEST_NAME = 200  # of the 255 that file systems allow: numbers and endings are put behind it


def read_fast_dev_run(value: bool | int) -> int:
    """The batches of each stage that are tried, 0 for a run in earnest.

    Raises:
        ConfigError: it is neither a truth value nor a number of batches.
    """
    if isinstance(value, bool):
        return int(value)
    check_integer("fast_dev_run", value, 0)
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
