"""Which op of a replay reads what is kept for it, where no record of a named op tells.

In: autograd's graph at the end of a region's forward, and the calls that a policy for ops has noted. Kept: nothing.
Out: phrases for a reason.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch.autograd.graph import Node

from torch_remat._compat import node_number
from torch_remat.dispatch.policy_call import PolicyCall
from torch_remat.dispatch.readers import is_view
from torch_remat.dispatch.region.region import Region

SOME_OP = "an op in replay"
"""What reads it, where that is all that is known."""

T = TypeVar("T", bound=Hashable)


class Stretch(NamedTuple):
    """The autograd nodes of an op, or of an inner region.

    Attributes:
        first: The sequence number of the first.
        end: The number after the last.
        phrase: What replay does there; None if it skips it.
    """

    first: int
    end: int
    phrase: str | None


Output = tuple[int, int]
"""The sequence number of a node, and which of its outputs."""


def readers_in_graph(
    boundary: Sequence[Node | None], region: Region, made: Mapping[T, Output], stretches: Sequence[Stretch]
) -> dict[T, str]:
    """Return, for what native regions have made, which op reads it first: replay comes to that one if to any.

    As for what is kept at all (`dispatch.readers`), a view reads nothing, but what reads the view does.

    Args:
        boundary: The nodes of the region's outputs.
        region: The region.
        made: Where in the graph the results are.
        stretches: The nodes of ops and inner regions.
    """
    readers: dict[Output, list[Node]] = {}
    nodes = [node for node in boundary if node is not None]
    seen = set(nodes)
    for node in nodes:  # grows meanwhile
        for child, place in node.next_functions:
            if child is not None and node_number(child) >= region.first_number:
                readers.setdefault((node_number(child), place), []).append(node)
                if child not in seen:
                    seen.add(child)
                    nodes.append(child)
    told: dict[T, str] = {}
    for result, output in made.items():
        phrases: dict[int, str] = {}
        pending = list(readers.get(output, ()))
        for reader in pending:  # grows meanwhile
            number = node_number(reader)
            stretch = next((one for one in stretches if one.first <= number < one.end), None)
            if stretch is not None and stretch.phrase is None:
                continue
            if is_view(reader.name()):
                pending += readers.get((number, 0), ())
            else:
                phrases[number] = f"{SOME_OP} ({reader.name()})" if stretch is None else stretch.phrase or ""
        if phrases:
            told[result] = phrases[min(phrases)]
    return told


def reader_among(calls: Sequence[PolicyCall], maker: PolicyCall, place: int) -> str:
    """Return which of the calls that replay runs reads a result of an earlier one first.

    Args:
        calls: The calls of a region with a policy.
        maker: The call that made the result.
        place: Which of its results it is.
    """
    storage = dict(maker.made).get(place, maker.storage)
    after = next((at for at, call in enumerate(calls) if call is maker), len(calls)) + 1
    for call in calls[after:] if storage else ():
        if call.run and storage in call.reads:
            return f"the replay of {call.native}" if call.native else f"{SOME_OP} ({call.label(0)})"
        if storage == call.storage or any(storage == other for _, other in call.made):
            break  # another tensor, at the same address
    return SOME_OP
