"""Where replay stands in forward's sequence of ops, and the loose ops that are none of it.

In: an op that replay asks for. Kept: nothing. Out: its place, or a view or cast that is run on the spot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_remat.dispatch.placeholder import Placeholder, geometry_of
from torch_remat.dispatch.schema import Effects, argument, effects_of

if TYPE_CHECKING:
    from torch_remat.dispatch.calls import Call


def place_of(op: Any, effects: Effects, calls: Sequence[Call], at: int) -> int | None:
    """Return the place in forward's sequence of an op that replay asks for; None if it is none of the sequence.

    NOTE [ Loose ops ]
    Some ops are not the user's. On placeholders autograd makes views anew by their own functions, where on tensors it
    uses ``as_strided``; autocast casts a tensor or has kept the cast of it. So views and casts that only one phase has
    are passed over; they compute nothing that is kept. And Python asks the right operand of a comparison first if it is
    a placeholder: ``x > placeholder`` comes as ``placeholder < x``. Autograd makes views anew where one of them was
    changed in place; if the sequence goes on with a view by the same function, their geometry tells them apart.
    """
    if at < len(calls) and (calls[at].op is op or is_mirrored(calls[at].op, op)):
        return at
    if effects.viewed is not None or effects.cast:
        return None
    return after_loose(calls, at, op)


def is_remade_view(call: Call, op: Any, effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op is a view of a placeholder that autograd makes anew, and not the user's next one of that op."""
    if call.op is not op or effects.viewed is None or effects.reshapes:
        return False
    if not isinstance(argument(effects.viewed, args, kwargs), Placeholder):
        return False
    made = Placeholder.__torch_dispatch__(op, (), args, kwargs)
    if isinstance(made, Placeholder):
        return geometry_of(made) != getattr(call.results, "geometry", None)
    return [geometry_of(view) for view in made] != [getattr(meta, "geometry", None) for meta in call.results]


def is_mirrored(op: Any, other: Any) -> bool:
    """Whether two comparisons are the same with their operands swapped."""
    return op is _MIRRORED.get(id(other))


_MIRRORED = {
    id(one): other
    for one, other in (
        (torch.ops.aten.lt.Tensor, torch.ops.aten.gt.Tensor),
        (torch.ops.aten.gt.Tensor, torch.ops.aten.lt.Tensor),
        (torch.ops.aten.le.Tensor, torch.ops.aten.ge.Tensor),
        (torch.ops.aten.ge.Tensor, torch.ops.aten.le.Tensor),
    )
}


def after_loose(calls: Sequence[Call], at: int, op: Any = None) -> int:
    """Return the place after the views and casts from here on, or that of an op that comes before; see `place_of`."""
    place = at
    while place < len(calls) and calls[place].op is not op:
        effects = effects_of(calls[place].op)
        if effects.viewed is None and not effects.cast:
            return place if op is None else at
        place += 1
    return place


def run_loose(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a view or a cast that is none of the sequence, on tensors or placeholders."""
    if any(isinstance(arg, Placeholder) for arg in args):
        return Placeholder.__torch_dispatch__(op, (), args, kwargs)
    return op(*args, **kwargs)
