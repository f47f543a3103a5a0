"""The ways to run a model's blocks that `benchmarks.budgets` measures, and how: gradients, then bytes, then times.

Budgets are read by their public face alone, so that another runtime can take the place of today's.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat

from .budget_models import Model, Run, plain
from .contenders import NONE
from .measure import GradientMismatchError, same_bits, undisturbed
from .memory import allocations

aten = torch.ops.aten
MATMULS = frozenset((aten.mm.default, aten.addmm.default, aten._grouped_mm.default, aten.convolution.default))
POINTS = (0.25, 0.4, 0.55, 0.7)
"""Budgets, as shares of the bytes between nothing and everything kept."""
LOW = 0.1
"""One more, for which there is no bar: where few bytes buy much time."""
TORCH, OURS, SAC, EVERY_OTHER = "torch", "ours", "SAC", "SAC, every other"
PRODUCTS, HALF = "ours, products", "ours, dearest half"
HUGE, LEAST = "budget, huge", "budget 0%"
WARM_UP = 9
"""Steps; a budget, and a policy by bytes, learns in the first of them what it keeps."""
_MARK_BYTES = 7919  # a tensor that nothing else allocates


@dataclass
class Way:
    """A way to run blocks, inside of a context.

    Attributes:
        run: How a block is run.
        around: Returns the context.
        budget: The budget, where there is one.
        learns: Whether its first steps decide what it keeps.
    """

    run: Run
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    budget: Any = None
    learns: bool = False


def ours(place: int, block: nn.Module, **options: Any) -> Callable[..., Tensor]:
    """Run it as a region of ours."""
    return remat.checkpoint(region_name=f"blocks.{place}", **options)(block)


def torchs(_: int, block: nn.Module, **options: Any) -> Callable[..., Tensor]:
    """Run it as one of torch's."""
    return lambda *args, **kwargs: torch_checkpoint(block, *args, use_reentrant=False, **options, **kwargs)


def first(count: int, place: int, block: nn.Module) -> Callable[..., Tensor]:
    """Run the first blocks as regions of torch's, the others as they are."""
    return torchs(place, block) if place < count else block


def every_other() -> Any:
    """Return torch's contexts for a region that keeps each second matrix product, from the first on."""
    seen: Counter[bool] = Counter()

    def decide(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        seen[ctx.is_recompute] += op in MATMULS
        is_kept = op in MATMULS and seen[ctx.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def within(limit: str | int) -> Way:
    """Return our regions in a budget."""
    budget = remat.budget(limit)
    return Way(ours, lambda: budget, budget, learns=True)


def ways_of(model: Model) -> dict[str, Way]:
    """Return all ways, no checkpointing first."""
    ways = {NONE: Way(plain)}
    ways |= {f"first {count}": Way(partial(first, count)) for count in range(1, model.blocks)}
    ways |= {TORCH: Way(torchs), OURS: Way(ours)}
    ways[SAC] = Way(partial(torchs, context_fn=partial(create_selective_checkpoint_contexts, list(MATMULS))))
    ways[EVERY_OTHER] = Way(partial(torchs, context_fn=every_other))
    products = remat.policies.save_matmuls
    if any(isinstance(module, nn.Conv2d) for module in model.module.modules()):
        products |= [F.conv2d]
    ways[PRODUCTS] = Way(partial(ours, policy=products))
    if hasattr(remat.policies, "memory_budget"):
        ways[HALF] = Way(partial(ours, policy=remat.policies.memory_budget(0.5)), learns=True)
    ways |= {LEAST: within("0%"), HUGE: within(2**40)}
    return ways | {point_name(point): within(f"{point * 100:.0f}%") for point in (LOW, *POINTS)}


def point_name(point: float) -> str:
    """Return what a budget is called."""
    return f"budget {point * 100:.0f}%"


def warm_up(model: Model, ways: Mapping[str, Way]) -> dict[str, list[float]]:
    """Run all ways, those that learn often, and compare gradients; return the seconds of each step.

    Raises:
        GradientMismatchError: A bit differs from no checkpointing.
    """
    model.run[0] = plain
    model.step()
    expected = model.gradients()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        model.run[0] = way.run
        for _ in range(WARM_UP if way.learns else 2):
            with way.around():
                begin = process_time()
                model.step()
                seconds[name].append(process_time() - begin)
            if not all(map(same_bits, expected, model.gradients())):
                raise GradientMismatchError(f"{model.name}: {name} has other gradients than {NONE}")
    return seconds


def kept_and_peak_bytes(model: Model, way: Way) -> tuple[int, int]:
    """Return what forward leaves allocated, and the most during a step, above what was there before.

    Both are of one step, whose gradients exist already: a tensor of a size of its own marks each forward's end. Of
    several batches the most counts.
    """
    model.run[0] = way.run
    model.clear()
    with way.around(), allocations() as events:
        for loss in model.losses:
            value = loss()
            torch.empty(_MARK_BYTES, dtype=torch.uint8)
            value.backward()
            del value
    now = kept = peak = 0
    for size in events:
        if size == _MARK_BYTES:
            kept = max(kept, now)
        if abs(size) != _MARK_BYTES:
            now += size
            peak = max(peak, now)
    return kept, peak


def flops_of_products(model: Model, way: Way) -> int:
    """Return the floating-point operations of matrix products in a step, by the profiler's count."""
    model.run[0] = way.run
    with way.around(), torch.profiler.profile(with_flops=True) as profiled:
        model.step()
    return sum(event.flops or 0 for event in profiled.key_averages())


def take_times(model: Model, ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of whole steps, one of each way in each round, in an order that changes."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    with undisturbed():
        for turn in range(rounds):
            for name in _order(list(ways), turn):
                way = ways[name]
                model.run[0] = way.run
                with way.around():
                    begin = process_time()
                    model.step()
                    samples[name].append(process_time() - begin)
            gc.collect()
    return samples


def torch_budget(model: Model, share: float, backend: str, **options: Any) -> Way:
    """Return the model compiled as a whole, with torch's own budget: a share of what it could keep.

    Args:
        model: The model.
        share: Of what it could keep.
        backend: That of `torch.compile`.
        options: Further ones of ``torch._functorch.config``.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config

    compiler = lookup_backend(backend)

    def partitioned(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=share, **options):
            return compiler(graph, inputs)

    # A backend of its own for each budget: else the code of another one would serve.
    compiled = torch.compile(model.module.forward, backend=partitioned, dynamic=False)

    @contextmanager
    def around() -> Iterator[None]:
        model.module.forward = compiled  # type: ignore[method-assign]
        try:
            yield
        finally:
            del model.module.forward

    return Way(plain, around)


def _order(names: list[str], turn: int) -> list[str]:
    start = turn % len(names)
    rotated = names[start:] + names[:start]
    return rotated[::-1] if turn % 2 else rotated
