"""How many floating-point operations an aten op does: what ``torch.utils.flop_counter`` counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import optree
import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from torch_remat.dispatch.keys import parts_of


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return an aten op's FLOPs, by the formulas that torch has for it; 0 for ops that it does not know.

    Of wrappers the tensor inside counts: what this process computes of a DTensor.
    """
    packet = getattr(op, "overloadpacket", op)
    formula = flop_registry.get(packet)
    if formula is not None:
        local: Any = [args, kwargs, out]
        args, kwargs, out = cast("Any", optree.tree_map(_inner, local))
        return int(formula(*args, **kwargs, out_val=out))
    if getattr(packet, "__name__", "") == "_scaled_dot_product_flash_attention_for_cpu":  # as those of other devices
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    return 0


def _inner(value: Any) -> Any:
    return next(parts_of(value), value) if isinstance(value, torch.Tensor) else value
