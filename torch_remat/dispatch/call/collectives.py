"""Whether a region communicates with other ranks in its forward: then its replays must be the same on each rank.

Matters for what is kept by price, where `torch.distributed` runs with more than one rank. In: the counters of the
process groups before and after a region's forward. Kept: nothing. Out: what was found, in words.

NOTE [ Collectives in regions ]
1. A replay runs the collectives of forward once more. What one rank decides by its clock another one decides otherwise,
   so one would wait in a replay's collective for ranks that do not replay: for ever.
2. So a budget without a group refuses such regions, and a policy by price keeps nothing of them. Ranks that agree keep
   everything or nothing of one: where calls are skipped, a replay may have to start over, on one rank alone.
3. A collective counts up the sequence number of its group. Saved DTensors, tensors that wait for a collective, and
   children that FSDP shards by themselves count as well: where forward finds their work done, a replay does it again.
4. The all-gather of a region's own module, whose hooks run inside the region if `checkpoint` is called with the sharded
   module, does not count: a backward unshards it before the replay, which does not do that again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.nn import Module

Count = Callable[[], int]
_without_sharded_children: WeakSet[Module] = WeakSet()  # so that modules are walked once


class Collectives:
    """What one region does with other ranks in its forward, which begins.

    Args:
        count: Counts the collectives of this process.
        function: The region's function.
    """

    __slots__ = ("_child", "_count", "_until")

    def __init__(self, count: Count, function: Any) -> None:
        owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
        self._child, gathers = None, False
        if isinstance(owner, Module):
            self._child = _sharded_child(owner)
            gathers = owner is function and _is_sharded(owner)
        self._count, self._until = count, count() + gathers

    def found(self) -> str:
        """Return what shows that the forward, which ends, has communicated; nothing if it has not."""
        if self._child is not None:
            return f"has a child that is sharded by itself, {self._child}, whose replay gathers it again"
        return "runs collectives" if self._count() > self._until else ""


def _is_sharded(module: Module) -> bool:
    return any(kind.__module__.startswith("torch.distributed.fsdp") for kind in type(module).__mro__)


def _sharded_child(module: Module) -> str | None:
    """Return the name of a module in this one that FSDP shards by itself."""
    if module in _without_sharded_children:
        return None
    name: str
    for name, child in module.named_modules():
        if child is not module and _is_sharded(child):
            return name
    _without_sharded_children.add(module)
    return None
