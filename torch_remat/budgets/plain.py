"""Regions that run as plain autograd, since all of them fit: a region costs its inputs, and each holder a microsecond.

In: a region that is about to begin, and what one like it kept in an earlier step. Kept: what it is counted with, until
its backward has come or its graph is gone. Out: its output, with a hook that runs when backward comes.

NOTE [ Regions without holders ]
1. Only a region of the like of which nothing was evicted in two steps in a row: the same name, shapes, dtypes and mode,
   no options that ask for more, nothing named inside. One step in many still has holders, so that what is
   counted is measured anew.
2. It is counted with the bytes that the one like it was counted with. It must leave room for what all regions keep in
   any case; where it does not, it is a region again. So what comes after it can always be evicted down to that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Module

from torch_remat._compat import (
    any_autocast_enabled,
    graph_is_kept,
    graph_task,
    node_number,
    sequence_number,
    top_saved_tensors_hooks,
)
from torch_remat._storages import Ledger
from torch_remat.budgets.steps import Row
from torch_remat.dispatch.naming import default_name
from torch_remat.dispatch.options import Options, is_watched
from torch_remat.dispatch.reach import boundary_nodes, tensors_of
from torch_remat.dispatch.region.inputs import leaves_of

Key = tuple[Any, ...]
_SWITCHES = frozenset((bool, str, type(None)))
_KEYS = 4096  # of so many kinds of regions it is known what they kept


def key_of(name: str, function: Any, leaves: Sequence[Any]) -> Key:
    """Return what is equal for regions that keep the same, as far as can be told before they run."""
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    given = tuple([(leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)])
    switches = tuple([leaf for leaf in leaves if type(leaf) in _SWITCHES])  # numbers may count steps
    return name, getattr(owner, "training", None), any_autocast_enabled(), given, switches


def key_of_call(options: Options, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """Return the key of a region that is about to begin; None if it cannot be without holders."""
    if (
        options.chosen is not None
        or options.context_fn is not None
        or options.determinism_check != "default"
        or options.debug
        or options.offload_inputs
        or is_watched()
        or top_saved_tensors_hooks() is not None
    ):
        return None
    return key_of(options.region_name or default_name(function), function, leaves_of(args, kwargs))


class Owner(Protocol):
    """What the regions without holders of a budget ask of it."""

    backward: int

    def reached(self) -> None:
        """Backward has come to a region."""


class PlainRegion:
    """One region without holders, as long as its graph lives.

    Attributes:
        is_over: Whether a backward has come to it that frees its graph.
    """

    __slots__ = ("__weakref__", "_owner", "is_over")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.is_over = False

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call its function and return the output, whose graph holds this from now on."""
        first_number = sequence_number()
        output = function(*args, **kwargs)
        for node in boundary_nodes(tensors_of(output)):
            if node_number(node) >= first_number:
                node.register_prehook(self._reach)
        return output

    def _reach(self, _grad_outputs: object) -> None:
        self.is_over = not graph_is_kept()
        if graph_task() != self._owner.backward:
            self._owner.reached()


class PlainBytes:
    """The bytes that a region without holders is counted with.

    Args:
        ledger: That of its budget.
        size: How many.
    """

    __slots__ = ("_ledger", "_size")

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger, self._size = ledger, size
        ledger.total += size

    def forget(self) -> None:
        """Take them off, once."""
        self._ledger.total -= self._size
        self._size = 0


class Fitting:
    """What is known of regions that fitted.

    Args:
        steps: In how many steps in a row nothing of a region must have been evicted.
        look: One step in so many has holders.
    """

    def __init__(self, steps: int, look: int) -> None:
        self._steps, self._look = steps, look
        self._seen: dict[Key, list[Row]] = {}  # in the present step
        self._known: dict[Key, tuple[int, Row]] = {}  # in how many steps in a row it fitted, and the latest

    def end_step(self) -> None:
        """Note that a step is over."""
        for key, rows in self._seen.items():
            is_whole = not any(row.evicted_bytes or row.offloaded_bytes for row in rows)
            times = self._known[key][0] + 1 if key in self._known else 1
            if is_whole:
                self._known[key] = times, max(rows, key=_bytes_of)
            else:
                self._known.pop(key, None)
        self._seen.clear()
        if len(self._known) > _KEYS:  # lengths that never come again
            self._known.clear()

    def learn(self, key: Key, row: Row) -> None:
        """Note a region that had holders."""
        self._seen.setdefault(key, []).append(row)

    def like(self, key: Key, step_count: int) -> Row | None:
        """Return what a region like this kept, if it may run without holders."""
        times, row = self._known.get(key, (0, None))
        return row if times >= self._steps and step_count % self._look else None

    def latest(self, key: Key) -> Row | None:
        """Return what a region like this kept, if nothing of it was evicted in the latest step that had it."""
        return self._known[key][1] if key in self._known else None


def _bytes_of(row: Row) -> int:
    return row.fixed_bytes + row.saved_bytes
