"""A small GPT whose blocks can be split: over ranks by data, by tensors and by sequence, and into pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; tokens are bytes."""

    blocks: int = 8
    heads: int = 8
    width: int = 128
    context: int = 128
    vocabulary: int = 256


class Attention(nn.Module):
    """Causal attention; of a split model it has this rank's heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.head_width = width // sizes.heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to this position and those before it; ``x`` has shape ``(batch, context, width)``."""
        heads = (part(x).unflatten(-1, (-1, self.head_width)) for part in (self.query, self.key, self.value))
        query, key, value = (head.transpose(1, 2) for head in heads)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and beside a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(sizes)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and the linear layers say."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """Tokens in, logits out; or a stage of it: the first has the embedding, the last the head.

    Args:
        sizes: Sizes of the whole model.
        stage: Which stage this is.
        stages: How many there are. Blocks have the names that they have in the whole model.
    """

    def __init__(self, sizes: Sizes, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width) if stage == 0 else nn.Identity()
        first, last = (sizes.blocks * place // stages for place in (stage, stage + 1))
        self.blocks = nn.ModuleDict({str(index): Block(sizes) for index in range(first, last)})
        is_last = stage == stages - 1
        self.norm = nn.LayerNorm(sizes.width) if is_last else nn.Identity()
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False) if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of shape ``(batch, context, vocabulary)``, or what the next stage gets."""
        x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))

    def stage(self, stage: int, stages: int) -> Transformer:
        """Return a stage of this model, with a copy of its weights."""
        part = Transformer(self.sizes, stage, stages)
        part.load_state_dict(self.state_dict(), strict=False)  # its names are those of the whole model
        return part


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss, in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def split_tensors(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the large weights over the ranks of a mesh: each has some heads, and a part of the hidden layer."""
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
    }
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)


def split_sequence(model: Transformer, mesh: DeviceMesh) -> None:
    """The same, and between the large weights each rank has a part of the sequence, so no tensor is there twice.

    Stages of a pipeline hand on such parts.
    """
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": gathered,
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    if isinstance(model.embedding, nn.Embedding):
        mine = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        parallelize_module(model.blocks["0"], mesh, mine)
    if isinstance(model.head, nn.Linear):
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": whole})
