"""One region that runs without holders, as plain autograd runs it; see NOTE [ Regions without holders ].

In: its output. Kept: nothing of it; a hook on each node of its output keeps what it is counted with. Out: that it has
run, that backward comes to it, that its graph is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from torch_remat._compat import ProfilerRange, node_number, profiler_runs, sequence_number
from torch_remat._storages import Keys
from torch_remat.budgets.repeats import Place
from torch_remat.dispatch.reach import boundary_nodes, node_of, tensors_of


class Owner(Protocol):
    """The budget."""

    def ran(self, place: Place, nodes: int) -> None:
        """A region without holders has run, and made so many autograd nodes."""

    def reached(self, keys: list[Keys]) -> None:
        """Backward has come to a region that is counted by these."""


class WithoutHolders:
    """Counts a region.

    Args:
        owner: Its budget.
        place: Its place in the steps that are alike.
        key: What stands for its bytes.

    Attributes:
        keys: That, while they are counted.
    """

    __slots__ = ("__weakref__", "_owner", "_place", "keys")

    def __init__(self, owner: Owner, place: Place, key: int) -> None:
        self._owner = owner
        self._place = place
        self.keys: list[Keys] = [key]

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call its function and return the output."""
        first_number = sequence_number()
        if profiler_runs():
            with ProfilerRange(f"remat::{self._place.row.name} [forward]"):
                output = function(*args, **kwargs)
        else:
            output = function(*args, **kwargs)
        self._owner.ran(self._place, sequence_number() - first_number)
        for node in (node_of(output),) if type(output) is Tensor else boundary_nodes(tensors_of(output)):
            if node is not None and node_number(node) >= first_number:
                node.register_prehook(self._reach)
        return output

    def _reach(self, _grad_outputs: object) -> None:
        self._owner.reached(self.keys)
