"""The pack hook of a region in a budget, for what is usual: a parameter, a result, an input, a view of one of these.

In: each saved tensor, as forward makes it. Kept: in a full holder the tensor, detached; of what it was no more than its
version, what made it, and how it lies. Out: holders like those of the region's own pack hook, which takes all else.

It counts no bytes: as long as what was taken is within what is allowed, nothing has to be given up. Whoever needs the
sum has them counted; see `Ledger.settled`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from types import NoneType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat._compat import keep_from_compiler
from torch_remat.dispatch.holder import CAST, NOBODY, UNKNOWN_LAYOUT, UNREAD, Anchor, Holder, layout_of


class Kept(Protocol):
    """What is asked of a region in a budget.

    Attributes:
        refs: The tape's weak references to its holders.
        stamps: When each was made.
        taken: In a list, how many bytes were kept here: each storage as often as it is saved.
        allowed: In a list, how many may be.
    """

    refs: list[ref[Holder]]
    stamps: list[float]
    taken: list[int]
    allowed: list[float]


def pack_hook(kept: Kept, mode: Any, general: Callable[[Tensor], Holder | Anchor]) -> Callable[[Tensor], Any]:
    """Return the hook: a closure, since it runs for each saved tensor; the graph keeps it.

    Args:
        kept: The region in its budget.
        mode: Its forward.
        general: Its own pack hook.
    """
    region, tape = mode.region, mode.region.tape
    first_number, originals, bases = region.first_number, region.inputs.originals, region.inputs.bases
    saved, buffers, strided = tape.saved, tape.buffers, torch.strided
    note, stamp, clock = kept.refs.append, kept.stamps.append, perf_counter
    taken, allowed = kept.taken, kept.allowed

    def pack(tensor: Tensor) -> Holder | Anchor:
        if mode.ops is not None or mode.watcher is not None:
            return general(tensor)
        kind = type(tensor)
        if kind is Parameter:
            saved.append(tensor)
            return (tensor, tensor._version, region, NOBODY)
        if kind is not Tensor or tensor._version:
            return general(tensor)
        owner, layout = tensor._base, None
        producer: type = NoneType
        if owner is None:
            owner = tensor
        elif type(owner) is not Tensor:
            return general(tensor)
        else:
            layout = UNKNOWN_LAYOUT if id(owner) in bases else layout_of(tensor, owner)
        if id(owner) in originals:
            pass  # replay passes inputs without their history
        elif (node := owner.grad_fn) is not None:
            producer = type(node)
            if producer is CAST or node._sequence_nr() < first_number:
                return general(tensor)
        elif owner.requires_grad:
            return general(tensor)
        elif tensor.is_floating_point():
            buffers.add(len(saved))
        if owner.layout is not strided or (used := taken[0] + owner.nbytes) > allowed[0]:
            return general(tensor)
        taken[0] = used
        holder = Holder()
        holder.region = region
        holder.value = tensor.detach()
        holder.origin = None
        holder.metadata, holder.layout = UNREAD, layout
        holder.producer = holder.plain = producer
        entry = ref(holder)
        saved.append(entry)
        stamp(clock())
        note(entry)
        return holder

    return pack


keep_from_compiler(pack_hook)
