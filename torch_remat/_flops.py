"""How many floating-point operations an aten op does: what ``torch.utils.flop_counter`` counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.flop_counter import flop_registry, sdpa_flop_count


def flops_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return an aten op's FLOPs, by the formulas that torch has for it; 0 for ops that it does not know."""
    packet = getattr(op, "overloadpacket", op)
    formula = flop_registry.get(packet)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    if getattr(packet, "__name__", "") == "_scaled_dot_product_flash_attention_for_cpu":  # as those of other devices
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    return 0
