"""The workloads in which some native ops are kept: by native regions, and by policies for whole regions.

Each contender keeps the results of the same ops: all matrix products, or the attention. Selective activation
checkpointing (SAC) gets a list of ops, and so do our policies by op; those by function get the functions that run these
ops. Native regions, ours and those of 0.2.2, are written around the calls. A native region takes a function of torch's
own, with its arguments, or one written in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .contenders import (
    FLOOR,
    NONE,
    OURS,
    OURS_CALLS,
    OURS_CLOSURE,
    OURS_FUNCTION,
    OURS_MODULES,
    OURS_NATIVE,
    OURS_OP,
    OURS_OP_CLOSURE,
    OURS_POLICY,
    REMAT_0_2,
    SAC,
    Wrap,
    full_recompute,
    package_of,
    policy_function,
    region,
    selectively,
    versions,
)
from .workloads import SineBlock, TransformerBlock, Workload

aten = torch.ops.aten
GROUPED = [F.grouped_mm] if hasattr(F, "grouped_mm") else []  # which torch 2.10 may lack

SMALL_BLOCKS = 32

KEPT_OPS = {
    "overhead": [aten.mm.default],
    "attention": [aten._scaled_dot_product_flash_attention_for_cpu.default],
    "matmuls": [aten.addmm.default],
}
"""The ops whose results are kept, as lists for SAC and for our policies."""

ATTENTION = KEPT_OPS["attention"]

RETAINED_BYTES = {
    "overhead": 1_792,
    "attention": 1_056_768,
    "matmuls": 4_718_592,
    "blocks": SMALL_BLOCKS * (4_096 + 4_096 + 256),
}
"""What has to stay, counted by hand.

Of the small block six products, which the sines save, and the output. Of the transformer block the output, 524,288
bytes, and: what the attention returned with its logarithms (524,288 + 8,192), or the products of ``qkv``, ``proj`` and
``fc1`` (1,572,864 + 524,288 + 2,097,152); that of ``fc2`` is needed by nobody. Of each small transformer block the
output, 4,096 bytes, and what the attention returned (4,096 + 256).
"""

Block = Callable[[Tensor], Tensor]
Keep = Callable[..., Tensor]  # (name, function, *args, **kwargs)


@dataclass(frozen=True)
class Way:
    """How one contender keeps the results of some ops.

    Attributes:
        wrap: Makes a block a region.
        keep: Runs a call inside, whose result is to be kept.
    """

    wrap: Wrap
    keep: Keep


def ways(ops: list[Any], *contenders: str) -> dict[str, Way]:
    """Return how SAC, which all are compared with, and each of the contenders keep the results of ``ops``."""
    found = {SAC: Way(partial(selectively, ops), plainly)}
    for contender in contenders:
        if contender == REMAT_0_2:
            found[contender] = Way(full_recompute()[REMAT_0_2], _in_region)
            continue
        for name, package in versions(contender).items():
            found[name] = _way_of_ours(contender, package, ops)
    return found


def _way_of_ours(contender: str, package: ModuleType, ops: list[Any]) -> Way:
    if contender == OURS_NATIVE:
        return Way(partial(region, package), package.native_save_region)
    if contender == OURS_CLOSURE:
        return Way(partial(region, package), partial(_closed, package))
    if contender in _CALLS:
        return Way(partial(region, package), partial(_CALLS[contender], package))
    if contender == OURS_MODULES:
        return Way(partial(region, package, policy=package.save_modules("mix")), plainly)
    by_function = [F.scaled_dot_product_attention] if ops is ATTENTION else [F.linear, torch.matmul, *GROUPED]
    policy = {OURS_POLICY: ops, OURS_FUNCTION: policy_function(ops), OURS_CALLS: by_function}[contender]
    return Way(partial(region, package, policy=policy), plainly)


def native_overhead() -> Workload:
    """The small block, where native regions cost what they cost."""
    return _overhead("native-overhead", REMAT_0_2, OURS_NATIVE, OURS_CLOSURE, *_CALLS)


def policies_overhead() -> Workload:
    """The same, where a policy for the whole region chooses the ops."""
    return _overhead("policies-overhead", OURS_POLICY, OURS_FUNCTION, OURS_CALLS)


def native_blocks() -> Workload:
    """Many small blocks whose attention, a function in Python, a native region keeps."""
    torch.manual_seed(0)
    blocks = [TransformerBlock(width=32, heads=2) for _ in range(SMALL_BLOCKS)]
    x = torch.randn(2, 16, 32).requires_grad_()
    weights = [named for index, block in enumerate(blocks) for named in block.named_parameters(f"{index}")]

    def keeping(name: str, way: Way) -> list[Block]:
        if name in versions(OURS_MODULES):
            return [BlockOfModules(block) for block in blocks]
        return [AnnotatedBlock(block, mix=partial(way.keep, "attention", causal_attention)) for block in blocks]

    def forward(wrap: Wrap, functions: list[Block]) -> Tensor:
        h = x
        for function in functions:
            h = wrap(function)(h)
        return h

    chosen = {**_references(), **ways(ATTENTION, OURS_NATIVE, OURS_OP, OURS_CALLS, OURS_MODULES)}
    return Workload(
        name="native-blocks",
        about=f"{SMALL_BLOCKS} regions, transformer blocks of d=32, 2 heads, 2 x 16 tokens; kept: attention, in Python",
        leaves={"x": x, **dict(weights)},
        output_grad=torch.randn_like(x),
        forwards={name: partial(forward, way.wrap, keeping(name, way)) for name, way in chosen.items()},
        ideal_retained_bytes=RETAINED_BYTES["blocks"],
        steps=1,
        **_contenders(chosen),
    )


WORKLOADS: dict[str, dict[str, Callable[[], Workload]]] = {
    "native": {
        "native-overhead": native_overhead,
        "native-attention": lambda: _transformer("native-attention", "attention", REMAT_0_2, OURS_NATIVE),
        "native-matmuls": lambda: _transformer("native-matmuls", "matmuls", REMAT_0_2, OURS_NATIVE),
    },
    "native-blocks": {"native-blocks": native_blocks},
    "policies": {
        "policies-overhead": policies_overhead,
        "policies-attention": lambda: _transformer("policies-attention", "attention", OURS_POLICY, OURS_CALLS),
        "policies-matmuls": lambda: _transformer("policies-matmuls", "matmuls", OURS_POLICY, OURS_CALLS),
    },
}
"""By the name on the command line: workloads that are measured in the same rounds, by their own names."""


def _overhead(name: str, *contenders: str) -> Workload:
    torch.manual_seed(0)
    block = SineBlock(layers=6)
    x = torch.randn(4, SineBlock.WIDTH).requires_grad_()
    chosen = {**_references(), **ways(KEPT_OPS["overhead"], *contenders)}

    def keeping(way: Way) -> Block:
        return block if way.keep is plainly else partial(_sines, way.keep, block.weights)

    return Workload(
        name=name,
        about="one region, 6 x (matmul, sin, scaled add) on 4 x 16 floats, every matmul kept",
        leaves={"x": x, **dict(block.named_parameters())},
        output_grad=torch.randn_like(x),
        forwards={name: partial(_run, way.wrap, keeping(way), x) for name, way in chosen.items()},
        ideal_retained_bytes=RETAINED_BYTES["overhead"],
        steps=10,
        **_contenders(chosen),
    )


def _sines(keep: Keep, weights: list[Tensor], x: Tensor) -> Tensor:
    for index, weight in enumerate(weights):
        x = torch.add(x, torch.sin(keep(f"matmul_{index}", torch.matmul, x, weight)), alpha=0.1)
    return x


def _transformer(name: str, kept: str, *contenders: str) -> Workload:
    torch.manual_seed(0)
    block = TransformerBlock(width=256, heads=4)
    x = torch.randn(4, 128, 256).requires_grad_()
    chosen = {**_references(), **ways(KEPT_OPS[kept], *contenders)}

    def keeping(way: Way) -> Block:
        if way.keep is plainly:
            return block
        if kept == "matmuls":
            return AnnotatedBlock(block, linear=way.keep)
        return AnnotatedBlock(block, mix=partial(way.keep, "attention", F.scaled_dot_product_attention, is_causal=True))

    return Workload(
        name=name,
        about=f"one region, transformer block of d=256, 4 heads, sequence 128, batch 4; kept: {kept}",
        leaves={"x": x, **dict(block.named_parameters())},
        output_grad=torch.randn_like(x),
        forwards={name: partial(_run, way.wrap, keeping(way), x) for name, way in chosen.items()},
        ideal_retained_bytes=RETAINED_BYTES[kept],
        steps=1,
        **_contenders(chosen),
    )


def plainly(name: str, function: Keep, *args: Any, **kwargs: Any) -> Tensor:
    """Run a call and keep nothing."""
    return function(*args, **kwargs)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as a function in Python, whose ops a native region has to watch."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class AnnotatedBlock:
    """The transformer block, written around calls that are kept.

    Args:
        block: Whose weights it uses.
        linear: Runs ``(name, F.linear, x, weight, bias)``.
        mix: Runs the attention on query, key and value.
    """

    def __init__(self, block: TransformerBlock, linear: Keep = plainly, mix: Keep = causal_attention) -> None:
        self.block = block
        self.linear = linear
        self.mix = mix

    def __call__(self, x: Tensor) -> Tensor:
        block = self.block
        x = x + self._apply("proj", self.attention(block.attention_norm(x)))
        return x + self._apply("fc2", F.gelu(self._apply("fc1", block.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.block.heads
        qkv = self._apply("qkv", x).view(batch, length, 3, heads, width // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.mix(query, key, value).transpose(1, 2).reshape(batch, length, width)

    def _apply(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self.block, name)
        return self.linear(name, F.linear, x, layer.weight, layer.bias)


class BlockOfModules(nn.Module):
    """The transformer block, whose attention without its projections is a module."""

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.mix = Mix()
        self.annotated = AnnotatedBlock(block, mix=self.mix)

    def forward(self, x: Tensor) -> Tensor:
        return self.annotated(x)


class Mix(nn.Module):
    """Attention on query, key and value."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value)


def _closed(package: ModuleType, name: str, function: Keep, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = package.native_save_region(name, lambda: function(*args, **kwargs))
    return result


def _called(package: ModuleType, name: str, function: Keep, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = package.op(function, name)(*args, **kwargs)
    return result


def _called_closure(package: ModuleType, name: str, function: Keep, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = package.op(lambda: function(*args, **kwargs), name)()
    return result


_CALLS = {OURS_OP: _called, OURS_OP_CLOSURE: _called_closure}


def _in_region(name: str, function: Keep, *args: Any, **kwargs: Any) -> Tensor:
    package = package_of(REMAT_0_2)
    result: Tensor = package.region(function, name, recompute=False)(*args, **kwargs)
    package.recompute_needs_tensor(result)
    return result


def _references() -> dict[str, Way]:
    wraps = full_recompute()
    return {name: Way(wraps[name], plainly) for name in (NONE, FLOOR)}


def _run(wrap: Wrap, block: Block, x: Tensor) -> Tensor:
    # Wrapped anew in each call, as a model's forward does it.
    return wrap(block)(x)


def _contenders(chosen: dict[str, Way]) -> dict[str, Any]:
    return {"ours": tuple(name for name in chosen if name.startswith(OURS)), "twin": SAC}
