"""The models of `benchmarks.budgets`, whose blocks may be run in any way.

Twelve equal blocks, unequal ones, and batches whose lengths vary: a GPT, a U-Net, an encoder and a decoder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Run = Callable[[int, nn.Module], Callable[..., Tensor]]


def plain(_: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run a block as it is."""
    return block


@dataclass
class Model:
    """A model whose blocks are run by ``run[0]``, which may be changed; a step goes over all its batches."""

    name: str
    blocks: int
    module: nn.Module
    losses: Sequence[Callable[[], Tensor]]
    run: list[Run]

    def __post_init__(self) -> None:
        """Give each parameter a gradient, so that a step makes none anew."""
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def clear(self) -> None:
        """Zero the gradients."""
        for parameter in self.module.parameters():
            parameter.grad.zero_()  # type: ignore[union-attr]

    def step(self) -> None:
        """Run forward and backward of each batch, with gradients from before."""
        self.clear()
        for loss in self.losses:
            loss().backward()

    def gradients(self) -> list[Tensor]:
        """Return copies of the gradients."""
        return [parameter.grad.clone() for parameter in self.module.parameters()]  # type: ignore[union-attr]


def gpt(length: int = 64) -> Model:
    """Return the GPT of the demo, with twelve blocks, on one batch of real text."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "docs" / "examples"))
    from gpt import GPT, GPTConfig
    from text import Batches, standard_library

    run: list[Run] = [plain]
    config = GPTConfig(layers=12, heads=4, width=96, context=max(length, 64), dropout=0.05)
    module = GPT(config, lambda name, block, x: run[0](int(name.rpartition(".")[2]), block)(x))
    batches = Batches(standard_library(), batch=8, context=length, seed=0, device=torch.device("cpu"))
    tokens, targets = batches.next()

    def loss() -> Tensor:
        torch.manual_seed(1)
        return module(tokens, targets)

    return Model("gpt", 12, module, [loss], run)


class Convs(nn.Module):
    """Two convolutions, each with a norm."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(taken, given, 3, padding=1), nn.GroupNorm(4, given), nn.SiLU(),
            nn.Conv2d(given, given, 3, padding=1), nn.GroupNorm(4, given), nn.SiLU(),
        )  # fmt: skip

    def forward(self, *given: Tensor) -> Tensor:
        """Run on what is given, joined by channels."""
        return self.body(torch.cat(given, 1) if len(given) > 1 else given[0])


class UNet(nn.Module):
    """Four levels down and up, with skip connections: blocks of a factor of eight in size."""

    def __init__(self, run: list[Run], width: int = 12) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.run = run
        self.down = nn.ModuleList(Convs(3 if not level else widths[level - 1], widths[level]) for level in range(4))
        self.up = nn.ModuleList(Convs(widths[level] + widths[level + 1], widths[level]) for level in (2, 1, 0))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image."""
        skips = []
        for place, block in enumerate(self.down):
            x = self.run[0](place, block)(x if not place else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for place, block in enumerate(self.up, start=4):
            x = self.run[0](place, block)(skips.pop(), F.interpolate(x, scale_factor=2.0))
        return self.head(x)


def unet() -> Model:
    """Return a U-Net on a batch of noise."""
    run: list[Run] = [plain]
    torch.manual_seed(0)
    module, images = UNet(run), torch.randn(2, 3, 96, 96)
    return Model("unet", 7, module, [lambda: module(images).square().mean()], run)


class Encoder(nn.Module):
    """A block that reads a source: attention, and a network four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """Attend in heads; all have the shape batch, length, width."""
        split = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(*split, is_causal=is_causal).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes after the block."""
        x = x + self.out(self.attend(*self.qkv(self.norms[0](x)).chunk(3, -1)))
        return x + F.dropout(self.wide(self.norms[1](x)), 0.05)


class Decoder(Encoder):
    """A block that writes a target, and reads the source too."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.cross_norm = nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.cross_out = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:  # type: ignore[override]
        """Return what comes after the block."""
        x = x + self.out(self.attend(*self.qkv(self.norms[0](x)).chunk(3, -1), is_causal=True))
        query = self.query(self.cross_norm(x))
        x = x + self.cross_out(self.attend(query, *self.key_value(source).chunk(2, -1)))
        return x + F.dropout(self.wide(self.norms[1](x)), 0.05)


class Translator(nn.Module):
    """An encoder and a decoder, over symbols."""

    def __init__(self, run: list[Run], width: int = 64, depth: int = 4, symbols: int = 256) -> None:
        super().__init__()
        self.run = run
        self.symbols = nn.Embedding(symbols, width)
        self.encoder = nn.ModuleList(Encoder(width, 4) for _ in range(depth))
        self.decoder = nn.ModuleList(Decoder(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, symbols)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch: each symbol of the target is foretold from those before it, and the source."""
        read, written = self.symbols(source), self.symbols(target[:, :-1])
        for place, block in enumerate(self.encoder):
            read = self.run[0](place, block)(read)
        for place, block in enumerate(self.decoder, start=len(self.encoder)):
            written = self.run[0](place, block)(written, read)
        return F.cross_entropy(self.head(written).flatten(0, 1), target[:, 1:].flatten())


LENGTHS = ((16, 128), (128, 16), (32, 64), (64, 32), (48, 96), (128, 128))
"""Of source and target, batch by batch: both vary by a factor of eight."""


def translation() -> Model:
    """Return an encoder and decoder on batches of noise, whose lengths vary; a step goes over all of them."""
    run: list[Run] = [plain]
    torch.manual_seed(0)
    module = Translator(run)
    batches = [(torch.randint(256, (4, read)), torch.randint(256, (4, written + 1))) for read, written in LENGTHS]

    def loss(source: Tensor, target: Tensor) -> Tensor:
        torch.manual_seed(1)
        return module(source, target)

    return Model("translation", 8, module, [partial(loss, *batch) for batch in batches], run)
