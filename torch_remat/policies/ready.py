"""The policies that the library has ready: by function in a region, by op where ops are watched anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from torch_remat._compat import OTHER_PRODUCTS, PRODUCTS_BY_FACE, has_effect
from torch_remat.errors import PolicyError, shown
from torch_remat.policies.by_op import PolicyFunction, op_name
from torch_remat.policies.collectives import is_all_gather, is_collective, is_of_collectives
from torch_remat.policies.decision import Decision
from torch_remat.policies.functions import name_of, seen_as
from torch_remat.policies.given import as_policy as as_policy  # which `|` asks
from torch_remat.policies.policy import OpContext

_MATMULS = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "mv", "addmv", "dot",
    "_int_mm", "linear", "matmul", "addmm_", "_addmm_activation", "mkldnn._linear_pointwise",
))  # fmt: skip
_PRODUCTS = (
    F.linear, F.bilinear, torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.addmv, torch.baddbmm,
    torch.addbmm, torch.dot, torch.vdot, torch.inner, torch.linalg.matmul, torch.linalg.multi_dot,
    torch.Tensor.__rmatmul__, *PRODUCTS_BY_FACE, *OTHER_PRODUCTS,
)  # fmt: skip
_FLEX = [torch.ops.higher_order.flex_attention] if hasattr(torch.ops.higher_order, "flex_attention") else []
_DISCRETE = frozenset((
    "topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "mode", "unique", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "nonzero", "nonzero_static", "multinomial", "searchsorted", "bucketize", "histc",
    "msort",
))  # fmt: skip


class _Ready(PolicyFunction):
    """A policy of the library's own: by function in a region, by op for a compiler and for torch's own contexts."""

    expects_ops = is_ready = True

    def __init__(self, function: Callable[..., bool], functions: Sequence[Any]) -> None:
        super().__init__(function)
        self._functions = functions

    def functions(self) -> Mapping[Any, Decision]:
        """Return the decision about each function."""
        return dict.fromkeys([seen for one in self._functions for seen in seen_as(one)], Decision.MUST_SAVE)

    def op_names(self) -> Sequence[str]:
        """Return the names of the functions."""
        return list(dict.fromkeys(map(name_of, self._functions)))


def _by(*functions: Any) -> Callable[[Callable[..., bool]], _Ready]:
    return partial(_Ready, functions=functions)


@_by(F.scaled_dot_product_attention, *_FLEX)
def save_attention(ctx: OpContext, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save what attention kernels return (``scaled_dot_product_attention`` in all its forms, ``flex_attention``)."""
    name = op_name(op)
    return "attention" in name and "backward" not in name


@_by(*_PRODUCTS)
def save_matmuls(ctx: OpContext, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the results of all matrix products."""
    return op_name(op) in _MATMULS


@PolicyFunction
def save_every_other_matmul(ctx: OpContext, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the first, third, ... matrix product of the region, counted anew in each forward."""
    if op_name(op) not in _MATMULS:
        return False
    number = ctx.state["matmuls"] = ctx.state.get("matmuls", 0) + 1
    return bool(number % 2)


# The others are guards: what they guard against need not occur.
save_every_other_matmul.expects_ops = True


@PolicyFunction
def save_discrete(ctx: OpContext, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save what makes choices out of numbers (``topk``, ``sort``, ``argmax``, ``unique``, ``nonzero``).

    A router must not choose otherwise in replay because a sum was rounded otherwise.
    """
    return op_name(op) in _DISCRETE


@PolicyFunction
def never_replay_effects(ctx: OpContext, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the results of collectives and of ops with ordered effects, so that replay does not repeat them."""
    return is_of_collectives(op) or has_effect(op)


@PolicyFunction
def _save_collectives_and_all_gathers(ctx: OpContext, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the results of all collectives."""
    return is_collective(op)


class _SaveCollectives(PolicyFunction):
    """The ready policy that takes an option: ``save_collectives(all_gathers=True)``."""

    def __call__(self, *call: Any, all_gathers: bool = False, **kwargs: Any) -> Any:
        """Decide about an op; without one, return the policy with this option."""
        if call:
            return self._function(*call, **kwargs)
        if kwargs or not isinstance(all_gathers, bool):
            given = ", ".join(
                f"{name}={shown(value)}" for name, value in {**kwargs, "all_gathers": all_gathers}.items()
            )
            raise PolicyError(
                f"save_collectives({given}) is not possible",
                remedy="The form is save_collectives, or save_collectives(all_gathers=True).",
            )
        return _save_collectives_and_all_gathers if all_gathers else self


@_SaveCollectives
def save_collectives(ctx: OpContext, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Save the results of collectives, so that replay does not communicate: reduce-scatter, all-to-all, all-reduce, ...

    Those of all-gathers are as large as all that was gathered; ``save_collectives(all_gathers=True)`` saves them too.
    """
    return is_collective(op) and not is_all_gather(op)
