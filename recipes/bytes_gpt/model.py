"""A GPT over bytes: pre-norm blocks with rotary positions; the embedding is tied to the output."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import FILE_START, VOCABULARY


class Rotary(nn.Module):
    """Rotary positions: turns each pair of features by an angle that grows with the position.

    Args:
        head_width: features of a head, an even number.
        context: the longest sequence.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, head_width: int, context: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.arange(context)[:, None] * frequencies
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Queries or keys of shape (batch, heads, length, head_width), turned."""
        length = heads.shape[-2]
        cosine, sine = self.cosine[:length], self.sine[:length]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


class Block(nn.Module):
    """Causal self-attention, then an MLP, each added to its input. At first both add nothing, which eases learning.

    Args:
        width: features of a token.
        num_heads: attention heads; they divide `width` into even parts.
        context: the longest sequence.
    """

    def __init__(self, width: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.rotary = Rotary(width // num_heads, context)
        self.attention_norm = nn.LayerNorm(width)
        self.attention_input = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_input = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)
        nn.init.zeros_(self.attention_output.weight)
        nn.init.zeros_(self.mlp_output.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features of shape (batch, length, width) to features of the same shape."""
        tokens = tokens + self._attend(self.attention_norm(tokens))
        mixed: Tensor = tokens + self.mlp_output(F.gelu(self.mlp_input(self.mlp_norm(tokens))))
        return mixed

    def _attend(self, tokens: Tensor) -> Tensor:
        batch, length, width = tokens.shape
        heads = self.attention_input(tokens).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        output: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class BytesModel(nn.Module):
    """Logits of the next byte after each token.

    Args:
        width: features of a token.
        num_layers: blocks.
        num_heads: attention heads of a block.
        context: the longest sequence.
    """

    def __init__(self, *, width: int, num_layers: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads, context) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, length, 256) after tokens of shape (batch, length); length is at most `context`."""
        hidden = self.norm(self.blocks(self.embedding(tokens)))
        return F.linear(hidden, self.embedding.weight[:FILE_START])

    @torch.no_grad()
    def generate(self, num_bytes: int, *, prompt: bytes = b"", temperature: float = 0.8, seed: int = 0) -> bytes:
        """Write a file's beginning: the prompt and sampled bytes, the same ones for the same seed.

        Args:
            num_bytes: how many to sample.
            prompt: how the file begins.
            temperature: below 1 prefers likely bytes.
            seed: of a generator of its own; the run's random state is not touched.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([[FILE_START, *prompt]], device=self.embedding.weight.device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.context :])[0, -1].float().cpu()
            chosen = torch.multinomial((logits / temperature).softmax(dim=0), 1, generator=generator)
            tokens = torch.cat([tokens, chosen.to(tokens.device)[None]], dim=1)
        return bytes(tokens[0, 1:].tolist())
