"""Trains three steps with parts of the sequences on each of two devices, and compares the losses with whole ones.

Its argument is the axis: `cp_size` or `sp_size`.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from loopwright import Accelerator, ParallelismConfig

WIDTH, WORDS, LENGTH = 64, 50, 128


class Attends(nn.Module):
    """One layer of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.input = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        hidden = self.words(words) + self.places(places)
        query, key, value = self.input(hidden).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.head(mixed.transpose(1, 2).flatten(2))
        return logits


def main() -> None:
    """Run on two devices."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(**{sys.argv[1]: 2}))
    torch.manual_seed(0)
    model = Attends().to(accelerator.device)
    whole = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, whole))
    model, optimizer = accelerator.prepare(model, optimizer)
    for goes_back_inside in (True, False, True):
        words = torch.randint(WORDS, (2, LENGTH + 1)).to(accelerator.device)
        places = torch.arange(LENGTH, device=accelerator.device).expand(2, -1).contiguous()
        inputs, targets = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        wanted = F.cross_entropy(whole(inputs, places).flatten(0, 1), targets.flatten())
        other.zero_grad()
        wanted.backward()
        other.step()
        buffers = [inputs, targets, places]
        with (
            accelerator.maybe_context_parallel(buffers, [1, 1, 1], {*buffers}),
            sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]),
        ):
            loss = F.cross_entropy(model(inputs, places).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            if goes_back_inside:
                accelerator.backward(loss)
        if not goes_back_inside:  # as of a Task
            accelerator.backward(loss)
        optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean")
        torch.testing.assert_close(mean, wanted.detach(), atol=1e-4, rtol=1e-4)
    accelerator.end_training()


if __name__ == "__main__":
    main()
