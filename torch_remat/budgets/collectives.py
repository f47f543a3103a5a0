"""Whether a region communicates with other ranks in its forward: then its replays must be the same on each rank.

Matters for budgets that decide by this rank's clock, where `torch.distributed` runs with more than one rank. In: the
counters of the process groups before and after a region's forward, and the types of what it saves. Kept: nothing. Out:
what was found, for the error.

NOTE [ Collectives in regions ]
1. A replay runs the collectives of forward once more. A budget without a group keeps one region here and another one
   there, so one rank would wait in a replay's collective for ranks that do not replay: for ever.
2. A collective counts up the sequence number of its group. Saved DTensors, tensors that wait for a collective, and
   children that FSDP shards by themselves count as well: where forward finds their work done, a replay does it again.
3. The all-gather of a region's own module, whose hooks run inside the region if `checkpoint` is called with the sharded
   module, does not count: a backward unshards it before the replay, which does not do that again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.nn import Module

from torch_remat.errors import UsageError

Count = Callable[[], int]
_without_sharded_children: WeakSet[Module] = WeakSet()  # so that modules are walked once


def refuse(region_name: str, what: str) -> UsageError:
    """Return the error of a region that communicates, in a budget that decides by this rank's clock."""
    return UsageError(
        f"this region {what}, and under a budget each rank decides by its own clock what it replays: one rank would "
        "wait for ever for others that do not replay the same",
        region=region_name,
        remedy="Let the ranks agree: remat.budget(limit, group=...), with the group or the mesh of those that share "
        "collectives inside regions. Or give each rank the same plan: checkpoint_modules(model, patterns, plan=plan).",
    )


class Collectives:
    """What one region does with other ranks in its forward, which begins.

    Args:
        count: Counts the collectives of this process.
        name: The region's name.
        function: Its function.

    Raises:
        UsageError: The function is a module with children that are sharded by themselves.
    """

    __slots__ = ("_count", "_name", "_saved", "_until")

    def __init__(self, count: Count, name: str, function: Any) -> None:
        owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
        gathers = False
        if isinstance(owner, Module):
            if (child := _sharded_child(owner)) is not None:
                raise refuse(name, f"has a child that is sharded by itself, {child}, whose replay gathers it again")
            gathers = owner is function and _is_sharded(owner)
        self._count, self._name = count, name
        self._until = count() + gathers
        self._saved = ""

    def saw(self, kind: type) -> None:
        """Note that a tensor of a subclass is saved."""
        if kind.__module__.startswith("torch.distributed."):
            self._saved = kind.__name__

    def raise_if_any(self) -> None:
        """Raise if the forward that ends has communicated.

        Raises:
            UsageError: It has.
        """
        if self._saved:
            raise refuse(self._name, f"saves a {self._saved}")
        if self._count() > self._until:
            raise refuse(self._name, "runs collectives")


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
