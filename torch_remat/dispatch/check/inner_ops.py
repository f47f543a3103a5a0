"""The ops of regions inside a region, compared between its forward and its replay.

In: ops as regions inside others begin them in forward. Kept: on the tapes of the enclosing regions, each op's name,
policy and place. Out: an error where the replay of an enclosing region has another op.

NOTE [ Ops of inner regions ]
1. The replay of a region runs the forward of the regions inside once more. What their ops keep then goes, by its place,
   into the holders of what they kept before: where other ops ran, one would get the tensors of another.
2. So an op that begins in the forward of a region is noted on the tape of each enclosing region that is in forward too,
   outwards up to one that is replayed. That one compares it with the next that it has noted.
3. Early stop may end the replay in the midst of an inner region. An op that is missing before it shows in the number of
   saved tensors.
4. An enclosing region whose replay will not come here, because the body of one of its SAVE ops runs, notes nothing; nor
   does it compare what runs once more for the sake of a placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_remat.dispatch.check.compare import SAME_ORDER, mismatched
from torch_remat.dispatch.log.entry import Call
from torch_remat.errors import at_user_line

if TYPE_CHECKING:
    from torch_remat.dispatch.mode import RematMode
    from torch_remat.policies.decision import CheckpointPolicy

# Name, policy, and how many tensors the enclosing region had saved when the op began.
InnerOp = tuple[str, "CheckpointPolicy", int]


class Around:
    """The regions around one whose forward runs, as far as they care about its ops."""

    __slots__ = ("_name", "_replay", "_tapes")

    def __init__(self, mode: RematMode) -> None:
        self._name: str = mode.region.name
        self._tapes: list[Any] = []
        self._replay: Any = None
        around = mode.parent
        while around is not None:
            comes_here = around.ops is None or not around.ops.passes_over()
            if around.replaying:
                self._replay = around if comes_here else None
                break
            if comes_here:
                self._tapes.append(around.region.tape)
            around = around.parent

    def note(self, record: Call) -> None:
        """Tell the regions around of an op that begins; one that is replayed may end with an error."""
        for tape in self._tapes:
            tape.inner = tape.inner or []
            tape.inner.append((record.name, record.policy, len(tape.saved)))
        if self._replay is not None and not self._replay.over:
            self._compare(self._replay, (record.name, record.policy, self._replay.position))

    def _compare(self, replay: Any, op: InnerOp) -> None:
        noted, at = replay.region.tape.inner, replay.inner_next
        expected: InnerOp | None = noted[at] if at < len(noted) else None
        if expected == op:
            replay.inner_next = at + 1
        elif expected is not None or replay.region.finished:  # else a backward inside forward, which has come so far
            name, policy, place = op
            what = f"the replay of region {replay.region.name!r} around it runs this op{at_user_line()}"
            if expected is None:
                what += ", forward did not"
            elif expected[:2] == op[:2]:
                what += f" after {place} saved tensors, forward after {expected[2]}"
            elif expected[0] == name:
                what += f" with policy {policy.name}, forward with {expected[1].name}"
            else:
                what += f" where forward ran {expected[0]!r}"
            error = mismatched(replay.region, what, SAME_ORDER, op=name)
            error.region = self._name
            replay.fail(error)


def check_all_came(replay: Any) -> None:
    """Check, where a replay went to its function's end, that no op of an inner region is missing.

    Raises:
        MismatchError: One is.
    """
    region = replay.region
    if replay.inner_next < len(region.tape.inner):
        name = region.tape.inner[replay.inner_next][0]
        what = f"this op of forward is missing in the replay of region {region.name!r} around it"
        raise mismatched(region, what, SAME_ORDER, op=name)
