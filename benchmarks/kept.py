"""The workloads in which some native ops are kept: by native regions, and by policies for whole regions.

Each contender keeps the results of the same ops: all matrix products, or the attention. Selective activation
checkpointing (SAC) gets a list of ops, and so do our policies; native regions, ours and those of 0.2.2, are written
around the calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat

from .contenders import FLOOR, NONE, OURS_CLOSURE, OURS_NATIVE, OURS_POLICY, REMAT_0_2, SAC, full_recompute, package_of
from .workloads import SineBlock, TransformerBlock, Workload

aten = torch.ops.aten

KEPT_OPS = {
    "overhead": [aten.mm.default],
    "attention": [aten._scaled_dot_product_flash_attention_for_cpu.default],
    "matmuls": [aten.addmm.default],
}
"""The ops whose results are kept, as lists for SAC and for our policies."""

RETAINED_BYTES = {"overhead": 1_792, "attention": 1_056_768, "matmuls": 4_718_592}
"""What has to stay, counted by hand.

Of the small block six products, which the sines save, and the output. Of the transformer block the output, 524,288
bytes, and: what the attention returned with its logarithms (524,288 + 8,192), or the products of ``qkv``, ``proj`` and
``fc1`` (1,572,864 + 524,288 + 2,097,152); that of ``fc2`` is needed by nobody.
"""

Block = Callable[[Tensor], Tensor]
Keep = Callable[..., Tensor]  # (name, function, *args, **kwargs)


def natives() -> list[Workload]:
    """The small block, where native regions cost what they cost, and the transformer block."""
    blocks = {SAC: _plainly, REMAT_0_2: _in_region, OURS_NATIVE: remat.native_save_region}
    return [
        _overhead("native-overhead", {**blocks, OURS_CLOSURE: _closed}),
        _transformer("native-attention", "attention", blocks),
        _transformer("native-matmuls", "matmuls", blocks),
    ]


def policies() -> list[Workload]:
    """The same, where a policy for the whole region chooses the ops."""
    blocks = {SAC: _plainly, OURS_POLICY: _plainly}
    return [
        _overhead("policies-overhead", blocks),
        _transformer("policies-attention", "attention", blocks),
        _transformer("policies-matmuls", "matmuls", blocks),
    ]


WORKLOADS: dict[str, Callable[[], list[Workload]]] = {"native": natives, "policies": policies}
"""By the name on the command line: what builds the workloads that are measured in the same rounds."""


def _overhead(name: str, blocks: dict[str, Keep]) -> Workload:
    torch.manual_seed(0)
    plain = SineBlock(layers=6)
    x = torch.randn(4, SineBlock.WIDTH).requires_grad_()

    def keeping(keep: Keep) -> Block:
        return plain if keep is _plainly else partial(_sines, keep, plain.weights)

    return Workload(
        name=name,
        about="one region, 6 x (matmul, sin, scaled add) on 4 x 16 floats, every matmul kept",
        leaves={"x": x, **dict(plain.named_parameters())},
        output_grad=torch.randn_like(x),
        forwards=_forwards(x, plain, {who: keeping(keep) for who, keep in blocks.items()}, KEPT_OPS["overhead"]),
        ideal_retained_bytes=RETAINED_BYTES["overhead"],
        steps=10,
        **_contenders(blocks),
    )


def _sines(keep: Keep, weights: list[Tensor], x: Tensor) -> Tensor:
    for index, weight in enumerate(weights):
        x = torch.add(x, torch.sin(keep(f"matmul_{index}", torch.matmul, x, weight)), alpha=0.1)
    return x


def _transformer(name: str, kept: str, blocks: dict[str, Keep]) -> Workload:
    torch.manual_seed(0)
    plain = TransformerBlock(width=256, heads=4)
    x = torch.randn(4, 128, 256).requires_grad_()

    def keeping(keep: Keep) -> Block:
        return plain if keep is _plainly else _AnnotatedBlock(plain, kept, keep)

    return Workload(
        name=name,
        about=f"one region, transformer block of d=256, 4 heads, sequence 128, batch 4; kept: {kept}",
        leaves={"x": x, **dict(plain.named_parameters())},
        output_grad=torch.randn_like(x),
        forwards=_forwards(x, plain, {who: keeping(keep) for who, keep in blocks.items()}, KEPT_OPS[kept]),
        ideal_retained_bytes=RETAINED_BYTES[kept],
        steps=1,
        **_contenders(blocks),
    )


class _AnnotatedBlock:
    """The transformer block, written around calls that are kept."""

    def __init__(self, block: TransformerBlock, kept: str, keep: Keep) -> None:
        self.block = block
        self.linear = keep if kept == "matmuls" else _plainly
        self.mix = keep if kept == "attention" else _plainly

    def __call__(self, x: Tensor) -> Tensor:
        block = self.block
        x = x + self._apply("proj", self.attention(block.attention_norm(x)))
        return x + self._apply("fc2", F.gelu(self._apply("fc1", block.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.block.heads
        qkv = self._apply("qkv", x).view(batch, length, 3, heads, width // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.mix("attention", F.scaled_dot_product_attention, query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)

    def _apply(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self.block, name)
        return self.linear(name, F.linear, x, layer.weight, layer.bias)


def _plainly(name: str, function: Block, *args: Any, **kwargs: Any) -> Tensor:
    return function(*args, **kwargs)


def _closed(name: str, function: Block, *args: Any, **kwargs: Any) -> Tensor:
    return remat.native_save_region(name, lambda: function(*args, **kwargs))


def _in_region(name: str, function: Block, *args: Any, **kwargs: Any) -> Tensor:
    package = package_of(REMAT_0_2)
    result: Tensor = package.region(function, name, recompute=False)(*args, **kwargs)
    package.recompute_needs_tensor(result)
    return result


def _forwards(x: Tensor, plain: Block, blocks: dict[str, Block], ops: list[Any]) -> dict[str, Callable[[], Tensor]]:
    wraps = full_recompute()
    regions: dict[str, Callable[[Block], Block]] = {
        SAC: partial(_selectively, ops),
        REMAT_0_2: wraps[REMAT_0_2],
        OURS_NATIVE: lambda block: lambda x: remat.checkpoint()(block)(x),
        OURS_CLOSURE: lambda block: lambda x: remat.checkpoint()(block)(x),
        OURS_POLICY: lambda block: lambda x: remat.checkpoint(policy=ops)(block)(x),
    }
    kept = {who: partial(_run, regions[who], block, x) for who, block in blocks.items()}
    return {NONE: partial(plain, x), FLOOR: partial(_run, wraps[FLOOR], plain, x), **kept}


def _run(wrap: Callable[[Block], Block], block: Block, x: Tensor) -> Tensor:
    # Wrapped anew in each call, as a model's forward does it.
    return wrap(block)(x)


def _selectively(ops: list[Any], block: Block) -> Block:
    contexts = partial(create_selective_checkpoint_contexts, ops)
    return lambda x: torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def _contenders(blocks: dict[str, Keep]) -> dict[str, Any]:
    ours = tuple(name for name in blocks if name in (OURS_NATIVE, OURS_CLOSURE, OURS_POLICY))
    return {"ours": ours, "twin": SAC}
