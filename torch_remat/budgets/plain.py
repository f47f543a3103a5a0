"""Regions that run as plain code, since all that they keep fits: a region costs its inputs, a holder a microsecond.

In: a region that is about to begin. Kept: what it is counted with, until its backward has come or its graph is gone.
Out: its output, with a hook that runs when backward comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch_remat._compat import graph_is_kept, graph_task, node_number, sequence_number
from torch_remat.dispatch.options import Begun, Keeping, Options, keeping
from torch_remat.dispatch.reach import boundary_nodes


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

    __slots__ = ("__weakref__", "_owners", "is_over")

    def __init__(self, owners: Sequence[Owner]) -> None:
        self._owners = owners
        self.is_over = False

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call its function and return the output, whose graph holds this from now on."""
        first_number = sequence_number()
        token = keeping.set(PLAIN)
        try:
            output = function(*args, **kwargs)
        finally:
            keeping.reset(token)
        for node in boundary_nodes(output):
            if node_number(node) >= first_number:
                node.register_prehook(self._reach)
        return output

    def _reach(self, _grad_outputs: object) -> None:
        self.is_over = not graph_is_kept()
        for owner in self._owners:
            if graph_task() != owner.backward:
                owner.reached()


class _PlainInside:
    """What regions ask inside of one that is plain code: they are, too."""

    registers: Sequence[Any] = ()

    def begin(
        self, options: Options, function: Callable[..., Any], leaves: Sequence[Any], kind: Any, shapes: Any
    ) -> Begun:
        return Begun(kind, shapes, run=_call)

    def keeper(self, region: Any, begun: Begun | None) -> None:
        return None


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


PLAIN: Keeping = _PlainInside()
