"""Run as a script: writes the weights of one model with Accelerate, Lightning and torch, as their users do.

The folder is the argument. `expected.safetensors` has what every file has to give.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import accelerate
import lightning
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        self[3].weight = self[2].weight


class Module(lightning.LightningModule):
    def __init__(self, width: int, note: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Net()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(module: Module, data: torch.utils.data.DataLoader[list[Tensor]], file: Path) -> None:
    trainer = lightning.Trainer(
        max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=file.parent / "lightning",
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint(file)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 3)), batch_size=2)
    module = Module(8)
    fit(module, data, folder / "plain.ckpt")
    fit(Module(8, argparse.Namespace(a=1)), data, folder / "classes.ckpt")
    net = module.model
    save_file({name: value.clone() for name, value in net.state_dict().items()}, folder / "expected.safetensors")

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(net, folder / "whole")
    accelerator.save_model(net, folder / "sharded", max_shard_size=300)
    accelerator.save_model(net, folder / "pickled", safe_serialization=False)
    accelerator.save_model(net, folder / "pickled-sharded", max_shard_size=300, safe_serialization=False)
    model, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.save_state(folder / "state")
    accelerator.save_state(folder / "pickled-state", safe_serialization=False)
    torch.distributed.checkpoint.save(dict(net.state_dict()), checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(nn.DataParallel(torch.compile(model, backend="eager")).state_dict(), folder / "wrapped.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
