"""Show in the terminal what the generator draws."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loopwright import Callback

SHADES = " .:-=+*#%@"


def as_text(images: Tensor) -> str:
    """Images of shape (count, 1, height, width) in 0 to 1, side by side, two letters a pixel."""
    rows = []
    for line in range(images.shape[2]):
        pixels = (images[:, 0, line].clamp(0, 1) * (len(SHADES) - 1)).round().int().tolist()
        rows.append("  ".join("".join(2 * SHADES[pixel] for pixel in image) for image in pixels))
    return "\n".join(rows)


class DrawDigits(Callback):
    """Prints drawn digits, on the main process, at the end of a run that went well.

    Args:
        count: how many.
        seed: of their noise; the run's random state is not touched.
    """

    after = ("ProgressBar",)  # which has drawn its last bar then

    def __init__(self, count: int = 5, seed: int = 0) -> None:
        self.count = count
        self.seed = seed

    def on_fit_end(self, trainer: Any, task: Any) -> None:
        """Draw."""
        if trainer.error is None and trainer.process.is_main_process:
            noise = torch.randn(self.count, task.latent, generator=torch.Generator().manual_seed(self.seed))
            task.eval()
            with torch.no_grad():
                images = task(noise.to(trainer.device)).cpu()
            task.train()
            print(f"\n{as_text(images)}\n", flush=True)
