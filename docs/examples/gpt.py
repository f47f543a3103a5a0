"""A small GPT over bytes: pre-norm blocks, causal attention, dropout, a head tied to the embedding.

The model does not know how its blocks are run. It hands each one to a ``RunBlock``, and queries, keys and values to an
``Attend``. What these do (call the block or checkpoint it, keep what the attention returns or not) is all that differs
between the ways which the demo compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

RunBlock = Callable[[str, nn.Module, Tensor], Tensor]
"""Runs ``block(x)``; the arguments are the block's name, the block and ``x``."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Mixes values by queries and keys, each of shape ``(batch, heads, context, width / heads)``."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to this position and those before it."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. ``vocabulary`` is 256 because the tokens are bytes."""

    layers: int = 6
    heads: int = 4
    width: int = 128
    context: int = 128
    dropout: float = 0.05
    vocabulary: int = 256


class Attention(nn.Module):
    """Causal multi-head self-attention, ``(batch, context, width)`` to the same shape."""

    def __init__(self, config: GPTConfig, attend: Attend = causal_attention) -> None:
        super().__init__()
        self.heads = config.heads
        self.attend = attend
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to this position and those before it."""
        batch, context, width = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, width / heads)
        attended = self.attend(query, key, value)
        return self.out(attended.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """Attention and a two-layer MLP, each behind a norm and inside a residual connection with dropout."""

    def __init__(self, config: GPTConfig, attend: Attend = causal_attention) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, attend)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the MLP have to say to the residual stream."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """The whole model: bytes in, the mean cross entropy of the next byte out.

    Args:
        config: Sizes.
        run_block: How each block is run.
        attend: How values are mixed in it.
    """

    def __init__(self, config: GPTConfig, run_block: RunBlock, attend: Attend = causal_attention) -> None:
        super().__init__()
        self.run_block = run_block
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)  # small enough for the head, large enough to be told apart

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, in nats per byte; ``tokens`` and ``targets`` are int64 of shape ``(batch, context)``."""
        x = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        for index, block in enumerate(self.blocks):
            x = self.run_block(f"blocks.{index}", block, x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
