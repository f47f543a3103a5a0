"""What is measured: each function builds one workload, or a few sizes of it, and ``WORKLOADS`` names them all.

A workload holds one ready forward for each contender that takes part, so it decides itself what a contender
means: those here recompute everything, later ones may keep tensors in ways that differ from peer to peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .contenders import BLIND, FLOOR, NONE, OURS, Wrap, full_recompute, with_reports, without_reports

SAVED_TENSORS = (8, 32, 128, 512, 2000)


@dataclass(frozen=True)
class Workload:
    """One piece of work, ready to run in every contender's way.

    Attributes:
        name: What it is called on the command line and in tables.
        about: One line for the reader of the table.
        leaves: Tensors that get gradients, by name. The gradients are compared bit for bit.
        output_grad: The gradient that backward starts from, in the shape of the output.
        forwards: For each contender, what runs the forward and returns the output.
        ideal_retained_bytes: What forward has to leave allocated: region inputs and outputs born in it. None where
            nobody has counted it by hand: there the bytes of the twin are the limit.
        steps: Steps (forward and backward) in one timed sample.
        saved_tensors: Tensors that autograd saves in the one region, where the time of each is of interest.
        ops: Ops in the one region, where the time of each is of interest.
        ours: Our contenders; the table compares with the first.
        twin: The contender that is told to keep the same; ours may keep no more than it does, and where it keeps ops
            (SAC) replay no more.
    """

    name: str
    about: str
    leaves: Mapping[str, Tensor]
    output_grad: Tensor
    forwards: Mapping[str, Callable[[], Tensor]]
    ideal_retained_bytes: int | None
    steps: int
    saved_tensors: int | None = None
    ops: int | None = None
    ours: tuple[str, ...] = (OURS,)
    twin: str | None = None


def overhead_bound() -> Workload:
    """Six times matmul, sin, scaled add on 4 by 16 floats: next to no arithmetic, so bookkeeping shows."""
    about = "one region, 6 x (matmul, sin, scaled add) on 4 x 16 floats"
    return _one_region("overhead", about, lambda: SineBlock(layers=6), (4, SineBlock.WIDTH), steps=10)


def overhead_of_a_module() -> Workload:
    """The same with its weights as parameters of a module, as those of a model are."""
    about = "the block of overhead as a module that holds its weights"
    return _one_region("overhead-module", about, lambda: SineModule(layers=6), (4, SineBlock.WIDTH), steps=10)


def encoder_layer() -> Workload:
    """PyTorch's own encoder layer, small: many saved tensors of many kinds, little arithmetic."""
    about = "one region, nn.TransformerEncoderLayer of d=64, feed-forward 256, 4 heads, no dropout, 2 x 16 tokens"

    def build() -> nn.Module:
        return nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True)

    return _one_region("encoder-layer", about, build, (2, 16, 64), steps=3)


def transformer() -> Workload:
    """A transformer block of d=256, 4 heads, sequence 128, batch 4: arithmetic decides, so needless ops show."""
    about = "one region, transformer block of d=256, 4 heads, sequence 128, batch 4"
    return _one_region("transformer", about, lambda: TransformerBlock(width=256, heads=4), (4, 128, 256), steps=1)


def saved_tensor_chain(saved_tensors: int) -> Workload:
    """A chain of sines, each of which saves its input: what one saved tensor costs, and whether more cost more."""
    torch.manual_seed(0)
    x = _input(4, 16)

    def chain(x: Tensor) -> Tensor:
        for _ in range(saved_tensors):
            x = torch.sin(x)
        return x

    def forward(wrap: Wrap) -> Tensor:
        return wrap(chain)(x)

    return Workload(
        name=f"saved-tensors-{saved_tensors}",
        about=f"one region, {saved_tensors} x sin on 4 x 16 floats",
        leaves={"x": x},
        output_grad=torch.randn_like(x),
        forwards=_for_each_contender(forward),
        ideal_retained_bytes=x.nbytes,
        steps=max(1, 64 // saved_tensors),
        saved_tensors=saved_tensors,
    )


def regions_in_a_row() -> Workload:
    """Twelve small regions, one after the other, as a model's layers are."""
    torch.manual_seed(0)
    blocks = [SineBlock(layers=2) for _ in range(12)]
    x = _input(4, SineBlock.WIDTH)

    def forward(wrap: Wrap) -> Tensor:
        h = x
        for block in blocks:
            h = wrap(block)(h)
        return h

    weights = (named for index, block in enumerate(blocks) for named in block.named_parameters(f"{index}."))

    return Workload(
        name="regions",
        about="12 regions in a row, each 2 x (matmul, sin, scaled add) on 4 x 16 floats",
        leaves={"x": x, **dict(weights)},
        output_grad=torch.randn_like(x),
        forwards=_for_each_contender(forward),
        ideal_retained_bytes=len(blocks) * x.nbytes,
        steps=3,
    )


def watching() -> Workload:
    """Twelve small regions that a trace or a report could look at, beside the same regions with that taken out."""
    torch.manual_seed(0)
    blocks = [SineBlock(layers=2) for _ in range(12)]
    x = _input(4, SineBlock.WIDTH)

    def forward(wrap: Wrap) -> Tensor:
        h = x
        for block in blocks:
            h = wrap(block)(h)
        return h

    weights = (named for index, block in enumerate(blocks) for named in block.named_parameters(f"{index}."))
    wraps = {**full_recompute(), OURS: with_reports(), BLIND: without_reports()}

    return Workload(
        name="watching",
        about="12 regions in a row; what traces and reports cost while nothing is traced and nobody asks",
        leaves={"x": x, **dict(weights)},
        output_grad=torch.randn_like(x),
        forwards={name: partial(forward, wraps[name]) for name in (NONE, FLOOR, OURS, BLIND)},
        ideal_retained_bytes=len(blocks) * x.nbytes,
        steps=3,
    )


WORKLOADS: dict[str, dict[str, Callable[[], Workload]]] = {
    "overhead": {"overhead": overhead_bound, "overhead-module": overhead_of_a_module},
    "encoder-layer": {"encoder-layer": encoder_layer},
    "transformer": {"transformer": transformer},
    "saved-tensors": {f"saved-tensors-{count}": partial(saved_tensor_chain, count) for count in SAVED_TENSORS},
    "regions": {"regions": regions_in_a_row},
    "watching": {"watching": watching},
}
"""By the name on the command line: workloads that are measured in the same rounds, by their own names."""


class SineBlock:
    """``layers`` times ``x + 0.1 * sin(x @ weight)``; a plain callable, so that no module's own cost is measured."""

    WIDTH = 16

    def __init__(self, layers: int) -> None:
        width = self.WIDTH
        self.weights = [nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(layers)]

    def __call__(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.add(x, torch.sin(torch.matmul(x, weight)), alpha=0.1)
        return x

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        return ((f"{prefix}weights.{index}", weight) for index, weight in enumerate(self.weights))


class SineModule(nn.Module):
    """``SineBlock`` as a module."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.names = [f"weight_{index}" for index in range(layers)]
        for name, weight in zip(self.names, SineBlock(layers).weights, strict=True):
            self.register_parameter(name, weight)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.add(x, torch.sin(torch.matmul(x, getattr(self, name))), alpha=0.1)
        return x


class TransformerBlock(nn.Module):
    """Pre-norm attention and a four times wider MLP; its last matmul saves nothing that comes after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attention(self.attention_norm(x)))
        hidden: Tensor = self.fc2(F.gelu(self.fc1(self.mlp_norm(x))))
        return x + hidden

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


def clear_gradients(workload: Workload) -> None:
    """Forget the gradients of an earlier step."""
    for leaf in workload.leaves.values():
        leaf.grad = None


def _one_region(
    name: str, about: str, build: Callable[[], SineBlock | nn.Module], shape: tuple[int, ...], steps: int
) -> Workload:
    """Return a workload in which a block is one region; it has to keep its output only."""
    torch.manual_seed(0)
    block = build()
    x = _input(*shape)

    def forward(wrap: Wrap) -> Tensor:
        return wrap(block)(x)

    return Workload(
        name=name,
        about=about,
        leaves={"x": x, **dict(block.named_parameters())},
        output_grad=torch.randn_like(x),
        forwards=_for_each_contender(forward),
        ideal_retained_bytes=x.nbytes,
        steps=steps,
    )


def _input(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def _for_each_contender(forward: Callable[[Wrap], Tensor]) -> dict[str, Callable[[], Tensor]]:
    return {name: partial(forward, wrap) for name, wrap in full_recompute().items()}
