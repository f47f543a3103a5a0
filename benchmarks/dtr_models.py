"""Small models for budgets of dynamic rematerialization, each with a training step.

They are so sized that no op's results take more than 3 % of the peak of what a step makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Step:
    """A model, its parameters' owner, and a function that makes the loss and all gradients."""

    model: nn.Module
    run: Callable[[], torch.Tensor]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5).softmax(-1)
        mixed = (self.drop(scores) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def transformer(layers: int = 10) -> Step:
    model = nn.ModuleList([_Block(32, 2) for _ in range(layers)])
    x, y = torch.randn(8, 16, 32), torch.randn(8, 16, 32)

    def run() -> torch.Tensor:
        h = x
        for block in model:
            h = block(h)
        loss = F.mse_loss(h, y)
        loss.backward()
        return loss

    return Step(model, run)


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 or inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu_(self.norm2(self.conv2(h)) + self.short(x))


def resnet32(width: int = 4) -> Step:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inner = width
    for stage in range(3):
        for at in range(5):
            layers.append(_Residual(inner, width * 2**stage, 2 if stage and not at else 1))
            inner = width * 2**stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10))
    x, y = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))

    def run() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return Step(model, run)


class _UNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()

        def double(inner: int, outer: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inner, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU(),
                nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
                nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
                nn.Conv2d(outer, outer, 3, 1, 1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
            )  # fmt: skip

        sizes = [width + width * at // 2 for at in range(depth)]
        self.down = nn.ModuleList([double(inner, outer) for inner, outer in zip([3, *sizes], sizes, strict=False)])
        self.up = nn.ModuleList([double(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True)])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for at, layer in enumerate(self.down):
            x = layer(x if not at else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.last(x)


def unet() -> Step:
    model = _UNet(4, 3)
    x, y = torch.randn(2, 3, 16, 16), torch.randint(2, (2, 16, 16))

    def run() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return Step(model, run)


def lstm(length: int = 24) -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell1, self.cell2 = nn.LSTMCell(16, 24), nn.LSTMCell(24, 24)
            self.drop, self.last = nn.Dropout(0.2), nn.Linear(24, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state1 = state2 = (x.new_zeros(x.shape[1], 24), x.new_zeros(x.shape[1], 24))
            for part in x:
                state1 = self.cell1(part, state1)
                state2 = self.cell2(self.drop(state1[0]), state2)
            return self.last(state2[0])

    model = Model()
    x, y = torch.randn(length, 16, 16), torch.randn(16, 16)

    def run() -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return Step(model, run)


def treelstm(depth: int = 5) -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.gates, self.last = nn.Linear(8, 32), nn.Linear(32, 80), nn.Linear(16, 4)

        def forward(self, leaves: list[torch.Tensor]) -> torch.Tensor:
            level = [self.leaf(leaf).chunk(2, -1) for leaf in leaves]
            while len(level) > 1:
                joined = []
                for (h1, c1), (h2, c2) in zip(level[::2], level[1::2], strict=True):
                    i, o, u, f1, f2 = self.gates(torch.cat([h1, h2], -1)).chunk(5, -1)
                    c = i.sigmoid() * u.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
                    joined.append((o.sigmoid() * c.tanh(), c))
                level = joined
            return self.last(level[0][0])

    model = Model()
    leaves, y = [torch.randn(16, 8) for _ in range(2**depth)], torch.randint(4, (16,))

    def run() -> torch.Tensor:
        loss = F.cross_entropy(model(leaves), y)
        loss.backward()
        return loss

    return Step(model, run)


def unrolled_gan(unrolled: int = 5) -> Step:
    generator = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))
    discriminator = nn.Sequential(nn.Linear(2, 24), nn.Softplus(), nn.Linear(24, 24), nn.Softplus(), nn.Linear(24, 1))
    real = torch.randn(32, 2)
    one, zero = torch.ones(32, 1), torch.zeros(32, 1)

    def run() -> torch.Tensor:
        fake = generator(torch.randn(32, 8))
        weights = dict(discriminator.named_parameters())
        for _ in range(unrolled):

            def judge(x: torch.Tensor, weights: dict[str, torch.Tensor] = weights) -> torch.Tensor:
                return torch.func.functional_call(discriminator, weights, (x,))

            bce = F.binary_cross_entropy_with_logits
            loss = bce(judge(real), one) + bce(judge(fake), zero)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        loss = F.binary_cross_entropy_with_logits(torch.func.functional_call(discriminator, weights, (fake,)), one)
        loss.backward()
        return loss

    return Step(nn.ModuleList([generator, discriminator]), run)


MODELS: dict[str, Callable[[], Step]] = {
    "transformer": transformer,
    "resnet32": resnet32,
    "unet": unet,
    "lstm": lstm,
    "treelstm": treelstm,
    "unrolled_gan": unrolled_gan,
}


@dataclass
class Outcome:
    """All that a step leaves behind."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]
    random: torch.Tensor

    def equals(self, other: Outcome) -> bool:
        pairs: Any = [
            *zip(self.gradients, other.gradients, strict=True),
            *zip(self.buffers, other.buffers, strict=True),
            (self.loss, other.loss),
            (self.random, other.random),
        ]
        return all(one is two if one is None or two is None else torch.equal(one, two) for one, two in pairs)


def outcome(name: str, around: Callable[[Callable[[], torch.Tensor]], torch.Tensor]) -> Outcome:
    """Run a step from the same start in whatever the function puts around it."""
    torch.manual_seed(0)
    step = MODELS[name]()
    torch.manual_seed(1)
    loss = around(step.run)
    return Outcome(
        loss.detach(),
        [parameter.grad for parameter in step.model.parameters()],
        list(step.model.buffers()),
        torch.get_rng_state(),
    )
