"""A generator and a critic that train against each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from loopwright import Task

from ..digits.data import Batch
from .frechet import frechet_distance

IMAGE = (1, 8, 8)
PIXELS = 64


def generator_network(latent: int, width: int) -> nn.Sequential:
    """Noise (batch, latent) to images (batch, 1, 8, 8) in 0 to 1."""
    return nn.Sequential(
        nn.Linear(latent, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, PIXELS),
        nn.Sigmoid(),
        nn.Unflatten(1, IMAGE),
    )


def critic_network(width: int) -> nn.Sequential:
    """Images (batch, 1, 8, 8) to the logit, of shape (batch, 1), that each is real."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(PIXELS, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(width, 1),
    )


class DigitGAN(Task):
    """Draws digits. Both optimizers step in each batch; the run counts that as one step.

    Args:
        latent: numbers that describe one image.
        width: features of the hidden layers.
        learning_rate: of both Adam optimizers.
    """

    def __init__(self, latent: int = 32, width: int = 256, learning_rate: float = 5e-4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.learning_rate = learning_rate
        self.generator = generator_network(latent, width)
        self.critic = critic_network(width)

    def forward(self, noise: Tensor) -> Tensor:
        """Images of shape (batch, 1, 8, 8) of noise of shape (batch, latent)."""
        images: Tensor = self.generator(noise)
        return images

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One step of the critic, then one of the generator."""
        real, _ = batch
        generator_optimizer, critic_optimizer = self.optimizers()  # a list: there are two
        fake = self(self._noise(len(real), real.device))

        critic_loss = _says(self.critic(real), 0.9) + _says(self.critic(fake.detach()), 0.0)
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()

        generator_loss = _says(self.critic(fake), 1.0)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()

        self.log("train/critic_loss", critic_loss, progress_bar=True)
        self.log("train/generator_loss", generator_loss, progress_bar=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `val/frechet` between held-out images and as many drawn ones."""
        real, _ = batch
        self.log("val/frechet", frechet_distance(real, self(self._noise(len(real), real.device))), progress_bar=True)

    def configure_optimizers(self) -> tuple[Optimizer, Optimizer]:
        """The generator's optimizer and the critic's."""
        return self._adam(self.generator), self._adam(self.critic)

    def _adam(self, network: nn.Module) -> Optimizer:
        return torch.optim.Adam(network.parameters(), lr=self.learning_rate, betas=(0.5, 0.999))

    def _noise(self, count: int, device: torch.device) -> Tensor:
        return torch.randn(count, self.latent, device=device)


def _says(logits: Tensor, real: float) -> Tensor:
    """The loss of a critic whose answer should be `real` (1) or not (0)."""
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))
