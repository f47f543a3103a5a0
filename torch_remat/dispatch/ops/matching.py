"""The position of replay in the log, ops that are not entries, and in-place modifications that replay skips.

In: an op that replay asks for, and tensors that it would modify. Kept: version counters, until the op is over, since
autograd also counts a skipped modification. Out: its place, a view or cast that is run immediately, or the error
about an op that forward did not run there; the counters as they were.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_remat._compat import set_version
from torch_remat.dispatch.keys import dense_layout, key_of
from torch_remat.dispatch.ops.entry import VIEW, Entry
from torch_remat.dispatch.ops.schema import Effects, argument
from torch_remat.dispatch.placeholder import Placeholder, geometry_of
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import MismatchError, at_user_line


def place_of(op: Any, effects: Effects, entries: Sequence[Entry], at: int) -> int | None:
    """Return the place in forward's sequence of an op that replay asks for; None if it is not in the sequence.

    NOTE [ Loose ops ]
    Some ops are not the user's. On placeholders autograd makes views anew by their own functions, where on tensors it
    uses ``as_strided``; autocast casts a tensor or has kept the cast of it. So views and casts that only one phase has
    are skipped; they compute nothing that is kept. And Python asks the right operand of a comparison first if it is
    a placeholder: ``x > placeholder`` comes as ``placeholder < x``. Autograd makes views anew where one of them was
    modified in place; if the sequence goes on with a view by the same function, their geometry distinguishes them.
    """
    if at < len(entries) and (entries[at].op is op or is_mirrored(entries[at].op, op)):
        return at
    if effects.viewed is not None or effects.cast:
        return None
    return after_loose(entries, at, op)


def is_remade_view(entry: Entry, op: Any, effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op is a view of a placeholder that autograd makes anew, and not the user's next one of that op."""
    if entry.op is not op or effects.viewed is None or effects.reshapes:
        return False
    if not isinstance(argument(effects.viewed, args, kwargs), Placeholder):
        return False
    made = Placeholder.__torch_dispatch__(op, (), args, kwargs)
    if isinstance(made, Placeholder):
        return geometry_of(made) != getattr(entry.results, "geometry", None)
    return [geometry_of(view) for view in made] != [getattr(meta, "geometry", None) for meta in entry.results]


def is_mirrored(op: Any, other: Any) -> bool:
    """Whether two comparisons are the same with their operands swapped."""
    return op is _MIRRORED.get(id(other))


def is_swapped(entry: Entry, args: Sequence[Any]) -> bool:
    """Whether a comparison comes with its operands swapped; that for equality is the same op then."""
    return entry.op in _SYMMETRIC and dense_layout(args) == entry.layout[::-1]


_SYMMETRIC = (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor)
_MIRRORED = {
    id(one): other
    for one, other in (
        (torch.ops.aten.lt.Tensor, torch.ops.aten.gt.Tensor),
        (torch.ops.aten.gt.Tensor, torch.ops.aten.lt.Tensor),
        (torch.ops.aten.le.Tensor, torch.ops.aten.ge.Tensor),
        (torch.ops.aten.ge.Tensor, torch.ops.aten.le.Tensor),
    )
}


def after_loose(entries: Sequence[Entry], at: int, op: Any = None) -> int:
    """Return the place after the views and casts from here on, or that of an op that comes before; see `place_of`."""
    place = at
    while place < len(entries) and entries[place].op is not op:
        entry = entries[place]
        if entry.effects.viewed is None and not entry.effects.cast and entry.kind != VIEW:  # as `_unsafe_view` is
            return place if op is None else at
        place += 1
    return place


def run_loose(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a view or a cast that is not in the sequence, on tensors or placeholders."""
    if any(isinstance(arg, Placeholder) for arg in args):
        return Placeholder.__torch_dispatch__(op, (), args, kwargs)
    return op(*args, **kwargs)


_SAME_OPS = (
    "A region with a policy, and a Python function in a native region, must run the same ops in both phases: look for "
    "state that changed in between and for branches on is_recomputing() or on data that torch cannot see. "
    "In the first step something may have been built in forward alone (functools.lru_cache, `if self.mask is None:`, "
    "a lazy module): build it before the first region, or run one forward outside of regions."
)


def another_op(region: Region, group: str | None, at: int, entries: Sequence[Entry], ran: Any) -> MismatchError:
    """Return the error about an op that is not the one that forward ran at its place."""
    entry = entries[at] if at < len(entries) else None
    if entry is not None and entry.is_call:
        what = "forward ran this op, but replay"
        return region.mismatch(f"{what} ran {ran}{at_user_line()}", _SAME_OPS, op=entry.group)
    expected = "no further op" if entry is None else str(entry.op)
    found = "ran no further op" if ran is None else f"ran {ran}{at_user_line()}"
    return region.mismatch(
        f"the ops differ from op {at} on: forward ran {expected}, replay {found}", _SAME_OPS, op=group
    )


def other_arguments(
    region: Region, at: int, entry: Entry, forward: Sequence[Any], replay: Sequence[Any]
) -> MismatchError:
    """Return the error about an op that gets other tensors than in forward."""
    shown = [
        ", ".join(f"{tuple(shape)} with strides {strides}" for shape, strides in side) for side in (forward, replay)
    ]
    return region.mismatch(
        f"op {at}, {entry.op}, got tensors of {shown[0]} in forward, but of {shown[1]} in replay{at_user_line()}",
        _SAME_OPS,
        tensor=entry.label(0),
        op=entry.group,
    )


class Suppressed:
    """The in-place changes of one replay that are not done again.

    Attributes:
        pending: The tensors, with their version counters, whose op may still be counting.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, int]] = []

    def add(self, tensors: Iterable[torch.Tensor], outside: Container[int]) -> None:
        """Note those tensors of the present op whose storages are from outside the region."""
        for tensor in tensors:
            if any(tensor is noted for noted, _ in self.pending):
                continue
            if not isinstance(tensor, Placeholder) and not tensor.is_inference() and key_of(tensor) in outside:
                version = tensor._version
                self.pending.append((tensor, version))
                if version:  # autograd counts the change once the op is over
                    set_version(tensor, version - 1)

    def restore(self) -> None:
        """Put the counters back, once the op is over."""
        for tensor, version in self.pending:
            if tensor._version != version:  # a pack hook, in which this may run, must not touch what it is given
                set_version(tensor, version)
        self.pending = []
