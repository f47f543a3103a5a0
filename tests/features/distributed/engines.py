"""Engines that train over ranks, and the ways in which their blocks are checkpointed: what the tests combine.

An engine builds the same small model, makes its blocks regions by one of the ways, parallelizes it, and runs a step.
A step returns the loss and all gradients of this rank, which are to equal those of the way `"none"` bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy as SacPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from tests.native_programs import PeakBytes

WIDTH, HEADS, BATCH, LENGTH, MICRO_BATCHES = 64, 4, 4, 64, 4
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
Apply = Callable[[nn.Module], None]
CHECKS: dict[str, Callable[[], str | None]] = {}
"""What is to hold over ranks besides equal gradients, by name."""


def check(function: Callable[[], str | None]) -> Callable[[], str | None]:
    """Let a worker run this as the cell `check:NAME`."""
    CHECKS[function.__name__] = function
    return function


class Squash(torch.autograd.Function):
    """A custom Function: ``x / (1 + |x|)``."""

    @staticmethod
    def forward(ctx, x):
        y = x / (1 + x.abs())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y.abs()).square()


class Norm(nn.Module):
    """A norm with a parameter of its own, in a class that is none of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Attention; with a group its keys and values are gathered along the sequence: context parallel by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.group is not None:
            key, value = (funcol.all_gather_tensor_autograd(one, 1, self.group) for one in (key, value))
        query, key, value = (one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (query, key, value))
        y = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two layers, the custom Function and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.squash: Callable[[Tensor], Tensor] = Squash.apply

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.down(self.squash(self.up(x))), 0.1)


class Block(nn.Module):
    """Attention and Mlp, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = Norm(), Attention(), nn.LayerNorm(WIDTH), Mlp()
        self.attend: Callable[[nn.Module, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + (self.attention(normed) if self.attend is None else self.attend(self.attention, normed))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A layer, blocks, a layer."""

    def __init__(self, first: int = 0, last: int = 4, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [(nn.Linear(WIDTH, WIDTH), Block()) for _ in range(depth)]  # any part of the model has its weights
        self.embed = blocks[0][0] if first == 0 else None
        self.layers = nn.ModuleDict({str(at): blocks[at][1] for at in range(first, last)})
        self.head = nn.Linear(WIDTH, WIDTH) if last == depth else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


# The ways: each makes the blocks of a model regions.


def modules(**options: Any) -> Apply:
    """Return the way of `checkpoint_modules`, with its options."""
    return lambda model: remat.checkpoint_modules(model, "*layers.*[0-9]", **options) and None


def _wrapped(checkpoint_fn: Callable | None = None, **options: Any) -> Apply:
    more = {} if checkpoint_fn is None else {"checkpoint_fn": checkpoint_fn}

    def apply(model: nn.Module) -> None:
        for parent in [module for module in model.modules() if isinstance(module, nn.ModuleDict)]:
            for name, layer in parent.items():
                parent[name] = checkpoint_wrapper(layer, **more, **options)

    return apply


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _attending(keep: Callable[[nn.Module, Tensor], Tensor]) -> Apply:
    """Return the way whose blocks call their attention by a function."""

    def apply(model: nn.Module) -> None:
        for block in _blocks(model):
            block.attend = keep
        modules()(model)

    return apply


def _handle(model: nn.Module) -> None:
    for block in _blocks(model):
        block.mlp.squash = remat.op(Squash.apply, "squash")
    modules()(model)


def _keeps_collectives(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    is_collective = getattr(op, "namespace", "") in ("_c10d_functional", "_c10d_functional_autograd")
    return SacPolicy.MUST_SAVE if is_collective else SacPolicy.PREFER_RECOMPUTE


_SAC = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
_TITAN = remat.policies.save_every_other_matmul | remat.policies.save_attention | remat.policies.never_replay_effects
THEIRS: dict[str, Apply] = {
    "torch": _wrapped(),
    "sac": _wrapped(context_fn=_SAC),
}
OURS: dict[str, Apply] = {
    "modules": modules(),
    "bitwise": modules(determinism_check="bitwise"),
    "drop_in": _wrapped(remat.drop_in()),
    "drop_in_sac": _wrapped(remat.drop_in(), context_fn=_SAC),
    "drop_in_policy": _wrapped(remat.drop_in(policy=_TITAN)),
    "matmuls": modules(policy=remat.policies.save_matmuls),
    "list": modules(policy=PRODUCTS),
    "names": modules(policy=remat.save_names("*.addmm*")),
    "collectives": modules(policy=_keeps_collectives),
    "titan": modules(policy=_TITAN),
    "price": modules(policy=remat.policies.memory_budget(0.5)),
    "call": _attending(lambda attention, x: remat.op(attention, "attention")(x)),
    "native": _attending(functools.partial(remat.native_save_region, "attention")),
    "handle": _handle,
    "offload_inputs": modules(offload_inputs=True, offloader=remat.CpuOffloader(min_bytes=0)),
    "offload_names": modules(policy=remat.offload_names("*.addmm*"), offloader=remat.CpuOffloader(min_bytes=0)),
}
WAYS: dict[str, Apply] = {"none": lambda model: None, **THEIRS, **OURS}


# What counts the most bytes that were alive at once.


class Peak(PeakBytes):
    """Watches what is in subclasses of tensors, not these."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, funcol.AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


# The engines: each is made of a way, and runs steps.


class Engine:
    """A model of which a step runs forward, backward and the optimizer.

    Args:
        model: The model, ready to run.
        forward: What runs on the input of this rank and returns the output; the model by default.
        micro_batches: In how many parts the batch comes, whose gradients are added up.
        enter: A context for all parts but the last, given the model.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Tensor], Tensor] | None = None,
        micro_batches: int = 1,
        enter: Callable[[nn.Module, bool], contextlib.AbstractContextManager] | None = None,
    ) -> None:
        self.model, self.forward, self.parts = model, forward or model, micro_batches
        self.enter = enter or (lambda model, is_last: contextlib.nullcontext())
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)

    def run(self, x: Tensor) -> list[Tensor]:
        """Run forward and backward; return the losses."""
        losses = []
        for at, part in enumerate(x.chunk(self.parts)):
            with self.enter(self.model, at == self.parts - 1):
                loss = self.forward(part).float().square().mean()
                loss.backward()
            losses.append(loss.detach())
        return losses

    def step(self, seed: int, length: int = LENGTH) -> list[Tensor]:
        """Run a whole step; return losses and gradients, as tensors of this rank."""
        torch.manual_seed(seed)
        found = self.run(torch.randn(BATCH, length, WIDTH))
        found += [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


def local(tensor: Tensor) -> Tensor:
    """Return a copy of what this rank has of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def compare(expected: list[list[Tensor]], actual: list[list[Tensor]]) -> None:
    """Compare what steps gave, bit for bit."""
    for step, (before, now) in enumerate(zip(expected, actual, strict=True)):
        for at, (one, other) in enumerate(zip(before, now, strict=True)):
            assert torch.equal(one, other), f"step {step}, tensor {at} of {len(before)} differs"


@contextlib.contextmanager
def _synchronized(model: Any, is_last: bool) -> Iterator[None]:
    """Let FSDP2 reduce gradients in the last micro-batch alone."""
    model.set_requires_gradient_sync(is_last)
    yield


def _unsynchronized(model: Any, is_last: bool) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if is_last else model.no_sync()


def ddp(apply: Apply, more: dict[str, Any] | None = None, **options: Any) -> Engine:
    """Data parallel."""
    model = Model()
    apply(model)
    return Engine(DistributedDataParallel(model, **options), **(more or {}))


def fsdp2(
    apply: Apply, children: bool = False, after: bool = False, mesh: Any = None, model: Model | None = None,
    more: dict[str, Any] | None = None, **options: Any,
) -> Engine:  # fmt: skip
    """Each block sharded; or its children too, and regions made afterwards."""
    model = model or Model()
    options["mesh"] = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if not after:
        apply(model)
    for layer in model.layers.values():
        if children:
            block = layer if isinstance(layer, Block) else _blocks(layer)[0]
            fully_shard(block.attention, **options)
            fully_shard(block.mlp, **options)
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if after:
        apply(model)
    return Engine(model, **(more or {}))


def fsdp1(
    apply: Apply, use_orig_params: bool = True, after: bool = False, whole: bool = False, bias: bool = True, **more: Any
) -> Engine:
    """Each block sharded by the first FSDP; or its wrappers inside the regions."""
    model = Model()
    for layer in [one for one in model.modules() if isinstance(one, nn.Linear) and not bias]:
        layer.bias = None
    if not after:
        apply(model)
    kinds = {type(layer) for layer in model.layers.values()}
    policy = None if whole else ModuleWrapPolicy(kinds)
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, auto_wrap_policy=policy, device_id=cpu, sync_module_states=False
    )
    if after:
        apply(model)
    return Engine(model, **more)


def split(model: Model, mesh: Any, sequence: bool = False) -> None:
    """Split the weights of attention and Mlp, and with ``sequence`` what lies between by the sequence."""
    between = Shard(1) if sequence else Replicate()
    rows = functools.partial(RowwiseParallel, output_layouts=between)
    for block in _blocks(model):
        plan: dict[str, Any] = {
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": rows(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": rows(),
        }
        if sequence:
            plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {"attention": whole, "mlp": whole}
        parallelize_module(block, mesh, plan)
    if sequence:
        parallelize_module(
            model,
            mesh,
            {
                "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )


def tp(apply: Apply, sequence: bool = False) -> Engine:
    """Tensor parallel, with ``sequence`` also sequence parallel; then regions."""
    model = Model()
    split(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence)
    apply(model)
    return Engine(model)


def tp_fsdp2(apply: Apply) -> Engine:
    """Sequence parallel inside, `fully_shard` outside."""
    world = dist.get_world_size()
    inner = 2 if world > 1 else 1
    mesh = init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("dp", "tp"))
    model = Model()
    split(model, mesh["tp"], sequence=True)
    return fsdp2(apply, mesh=mesh["dp"], model=model)


def cp(apply: Apply) -> Engine:
    """Context parallel by hand: keys and values are gathered along the sequence; gradients are not reduced."""
    model = Model()
    for block in _blocks(model):
        block.attention.group = dist.group.WORLD
    apply(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    return Engine(model, lambda x: model(x.chunk(world, dim=1)[rank]))


class Pipeline(Engine):
    """A pipeline of the model's blocks, one stage a rank, or two."""

    def __init__(self, apply: Apply, schedule: Any, stages: int = 1) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        total = stages * world
        depth = max(4, total)
        v_shaped = schedule is ScheduleZBVZeroBubble
        places = [rank, 2 * world - 1 - rank] if v_shaped else [rank + at * world for at in range(stages)]
        each = depth // total
        self.models = [Model(at * each, (at + 1) * each, depth) for at in places]
        for model in self.models:
            apply(model)
        parts = [
            PipelineStage(model, at, total, torch.device("cpu")) for model, at in zip(self.models, places, strict=True)
        ]
        self.is_first = 0 in places
        self.is_last = total - 1 in places
        made = functools.partial(schedule, n_microbatches=MICRO_BATCHES, loss_fn=lambda y, _: y.square().mean())
        self.schedule = made(parts if stages > 1 else parts[0])
        super().__init__(nn.ModuleList(self.models))

    def run(self, x: Tensor) -> list[Tensor]:
        """Run the schedule; the last stage has the losses."""
        losses: list[Tensor] = []
        more = {"target": torch.zeros_like(x), "losses": losses} if self.is_last else {}
        self.schedule.step(*([x] if self.is_first else []), **more)
        return [loss.detach() for loss in losses]


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_ACCUMULATING = {"micro_batches": 2, "enter": _synchronized}
ENGINES: dict[str, Callable[[Apply], Engine]] = {
    "ddp": ddp,
    "ddp_accumulate": functools.partial(ddp, more={"micro_batches": 2, "enter": _unsynchronized}),
    "ddp_views": functools.partial(ddp, gradient_as_bucket_view=True, bucket_cap_mb=0.001),
    "ddp_unused": functools.partial(ddp, find_unused_parameters=True),
    "ddp_static": functools.partial(ddp, static_graph=True),
    "fsdp2": fsdp2,
    "fsdp2_keep": functools.partial(fsdp2, reshard_after_forward=False),
    "fsdp2_bf16": functools.partial(fsdp2, mp_policy=_BF16),
    "fsdp2_after": functools.partial(fsdp2, after=True),
    "fsdp2_accumulate": functools.partial(fsdp2, more=_ACCUMULATING),
    "fsdp2_children": functools.partial(fsdp2, children=True),
    "fsdp2_children_keep": functools.partial(fsdp2, children=True, reshard_after_forward=False),
    "fsdp2_children_bf16": functools.partial(fsdp2, children=True, mp_policy=_BF16),
    "fsdp2_children_after": functools.partial(fsdp2, children=True, after=True),
    "fsdp2_children_accumulate": functools.partial(fsdp2, children=True, more=_ACCUMULATING),
    "fsdp1": fsdp1,
    "fsdp1_flat": functools.partial(fsdp1, use_orig_params=False),
    "fsdp1_after": functools.partial(fsdp1, after=True),
    "fsdp1_after_without_bias": functools.partial(fsdp1, after=True, bias=False),
    "fsdp1_flat_after": functools.partial(fsdp1, use_orig_params=False, after=True),
    "fsdp1_whole": functools.partial(fsdp1, whole=True),
    "fsdp1_accumulate": functools.partial(fsdp1, micro_batches=2, enter=_unsynchronized),
    "tp": tp,
    "sp": functools.partial(tp, sequence=True),
    "tp_fsdp2": tp_fsdp2,
    "cp": cp,
    "gpipe": lambda apply: Pipeline(apply, ScheduleGPipe),
    "1f1b": lambda apply: Pipeline(apply, Schedule1F1B),
    "zero_bubble": lambda apply: Pipeline(apply, ScheduleInterleavedZeroBubble, stages=2),
    "zbv": lambda apply: Pipeline(apply, ScheduleZBVZeroBubble, stages=2),
}
