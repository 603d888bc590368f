"""Keys of other frameworks, and what is meant by them here."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN_KEYS: Mapping[str, str] = {
    # The sections and options of a file.
    "model": "task",
    "datamodule": "data",
    "seed_everything": "trainer.seed",
    "ckpt_path": "--weights of validate, test and predict",
    # The Trainer's arguments: Lightning's names, then those of Transformers and Accelerate.
    "max_epoch": "trainer.max_epochs",
    "accumulate_grad_batches": "trainer.accumulate",
    "gradient_clip_val": "trainer.clip_norm",
    "val_check_interval": "trainer.val_every",
    "check_val_every_n_epoch": "trainer.val_every",
    "num_sanity_val_steps": "trainer.sanity_val_batches",
    "limit_train_batches": "trainer.limit_batches",
    "limit_val_batches": "trainer.limit_batches",
    "limit_test_batches": "trainer.limit_batches",
    "limit_predict_batches": "trainer.limit_batches",
    "logger": "trainer.trackers",
    "enable_progress_bar": "trainer.progress",
    "log_every_n_steps": "trainer.log_every",
    "default_root_dir": "trainer.project_dir",
    "gradient_accumulation_steps": "trainer.accumulate",
    "max_grad_norm": "trainer.clip_norm",
    "num_train_epochs": "trainer.max_epochs",
    "eval_steps": "trainer.val_every",
    "logging_steps": "trainer.log_every",
    "report_to": "trainer.trackers",
    "output_dir": "trainer.project_dir",
    "mixed_precision": "trainer.precision",
}
"""By name, the dotted key of a file; they are suggested where a key is unknown."""
