"""A script as users of Hugging Face Accelerate write it. The test runs it with one package and with the other.

It takes the name of the package, the precision and the micro-batches per step, and prints what it computed as JSON, on
the first of its processes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

PACKAGE, PRECISION, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])

# `from accelerate import Accelerator`, and so on: the lines that a user changes.
Accelerator = importlib.import_module(PACKAGE).Accelerator
utils = importlib.import_module(f"{PACKAGE}.utils")
get_logger = importlib.import_module(f"{PACKAGE}.logging").get_logger


def data() -> TensorDataset:
    """Points of the plane, and whether they are inside a circle."""
    points = torch.randn(45, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points.norm(dim=1) < 1.2).long())


def evaluate(accelerator: Any, model: nn.Module, loader: Any) -> tuple[int, int]:
    """Samples seen, and those that were right."""
    model.eval()
    right: list[torch.Tensor] = []
    for points, labels in loader:
        with torch.no_grad():
            predictions = model(points).argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, labels))
        right.extend(predictions == references)
    model.train()
    return len(right), int(torch.stack(right).sum())


def main(folder: str) -> dict[str, Any]:
    """Train, evaluate in the middle of each epoch, skip the beginning of the last one, save."""
    accelerator = Accelerator(
        mixed_precision=PRECISION,
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=STEPS),
        dataloader_config=utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7, non_blocking=True),
        kwargs_handlers=[
            utils.DistributedDataParallelKwargs(find_unused_parameters=True),
            utils.GradScalerKwargs(growth_interval=2),
        ],
        project_config=utils.ProjectConfiguration(project_dir=folder),
        step_scheduler_with_optimizer=True,
        cpu=True,
    )
    logger = get_logger(__name__, log_level="INFO")
    logger.info("process %d of %d", accelerator.process_index, accelerator.num_processes, main_process_only=False)
    utils.set_seed(3)
    with accelerator.main_process_first():
        train, val = DataLoader(data(), batch_size=8, shuffle=True), DataLoader(data(), batch_size=16)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    model, optimizer, train, val, scheduler = accelerator.prepare(model, optimizer, train, val, scheduler)
    accelerator.register_for_checkpointing(scheduler)

    losses, norms, rates, syncs, metrics = [], [], [], "", []
    for epoch in range(3):
        train.set_epoch(epoch)
        loader = accelerator.skip_first_batches(train, 2) if epoch == 2 else train
        for step, (points, labels) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            rates.append(scheduler.get_last_lr()[0])
            syncs += "T" if accelerator.sync_gradients else "F"
            if step == 1:
                metrics.append(evaluate(accelerator, model, val))
    accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    accelerator.save_model(model, folder)
    weights = [value.double().sum().item() for value in accelerator.get_state_dict(model).values()]
    accelerator.end_training()
    return {
        "losses": losses, "norms": norms, "rates": rates, "syncs": syncs, "metrics": metrics, "weights": weights,
        "skipped": accelerator.optimizer_step_was_skipped, "type": type(plain).__name__,
    }  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        found = main(where)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))
