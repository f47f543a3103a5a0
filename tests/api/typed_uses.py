"""Uses of the public face for the type checker, right ones and wrong ones; `test_typing` checks which line is which.

A line that must be an error ends in its code as a comment.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.budgets import Plan

aten = torch.ops.aten
model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4)


def block(x: Tensor, scale: float = 1.0) -> Tensor:
    """A region's function."""
    return x.sin() * scale


def policy(ctx: object, op: object, *args: object, **kwargs: object) -> bool:
    """A policy function."""
    return False


def right(plan: Plan) -> None:
    """Every line passes."""
    y: Tensor = remat.checkpoint()(block)(x, scale=2.0)
    y = remat.checkpoint(region_name="block", determinism_check="bitwise", policy=[aten.mm.default])(block)(x)
    y = remat.checkpoint(policy=policy, determinism_check="none")(block)(x)
    y = remat.checkpoint(policy=remat.policies.save_matmuls | remat.save_names("mm_*"), offload_inputs=True)(block)(x)
    policies = remat.policies.save_collectives(all_gathers=True) | remat.policies.save_collectives
    y = remat.checkpoint(policy=policies & ~remat.save_names("gate.*"))(block)(x)
    y = remat.checkpoint(policy=[aten.mm.default] & ~remat.save_names("gate.*"))(block)(x)
    y = remat.op(block, "block", policy=remat.CheckpointPolicy.OFFLOAD)(x, scale=2.0)
    y = remat.native_save_region("block", block, x)
    y = remat.checkpoint_sequential([block, block], 2, x, early_stop=False)
    remat.checkpoint_modules(model, ["0"], keep_last=0, policy=remat.policies.save_attention, plan=plan).remove()
    remat.enable_gradient_checkpointing(model, debug=True)
    y = remat.drop_in(preserve_rng_state=False)(block, x, use_reentrant=False)
    y.sum().backward()


@remat.checkpoint(debug=True)
def decorated(x: Tensor) -> Tensor:
    """A decorated function."""
    return x.exp()


@remat.op(name="named")
def named(x: Tensor) -> Tensor:
    """A decorated call."""
    return x.exp()


def wrong() -> None:
    """Every marked line fails."""
    remat.checkpoint(block)  # error: arg-type call-arg
    remat.checkpoint(polcy=policy)  # error: call-arg
    remat.checkpoint(use_reentrant=False)  # error: call-arg
    remat.checkpoint(determinism_check="bitwis")  # error: arg-type
    remat.checkpoint(policy=3)  # error: arg-type
    remat.checkpoint()(block)(x, scal=2.0)  # error: call-arg
    remat.checkpoint()(3)  # error: arg-type
    decorated(x, 3)  # error: call-arg
    remat.checkpoint_modules(model, "*", keep_lst=1)  # error: call-arg
    remat.checkpoint_modules(model, "*", region_name="x")  # error: call-arg
    remat.checkpoint_sequential([block], 1, x, early_stp=True)  # error: call-arg
    remat.drop_in(early_stp=True)  # error: call-arg
    remat.enable_gradient_checkpointing(model, region_name="x")  # error: call-arg
    remat.op("block", block)  # error: call-overload
    remat.op(block, "block")(x, scal=1.0)  # error: call-arg
    remat.op(block, "block", policy="save")  # error: call-overload
    named(x, 3)  # error: call-arg
    remat.checkpoint(policy=~remat.save_names("gate.*"))  # error: arg-type
    remat.policies.save_matmuls & remat.save_names("gate.*")  # error: operator
    ~remat.offload_names("gate.*")  # error: operator
    remat.save_names(3)  # error: arg-type
