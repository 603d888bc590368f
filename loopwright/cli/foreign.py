"""Keys of other frameworks, and what is meant by them here."""

from __future__ import annotations

from collections.abc import Mapping

from ..trainer.keywords import FOREIGN_KEYWORDS

FOREIGN_KEYS: Mapping[str, str] = {
    # The sections and options of a file.
    "model": "task",
    "datamodule": "data",
    "seed_everything": "trainer.seed",
    "ckpt_path": "--weights of validate, test and predict",
    **{name: f"trainer.{own}" for name, own in FOREIGN_KEYWORDS.items()},
}
"""By name, the dotted key of a file; they are suggested where a key is unknown."""
