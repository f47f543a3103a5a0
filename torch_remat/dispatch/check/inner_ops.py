"""The ops of regions inside a region, compared between its forward and its replay.

In: ops as regions inside others begin them in forward. Kept: on the tapes of the regions around, a name and a policy
for each. Out: an error where the replay of a region around has another op.

NOTE [ Ops of inner regions ]
1. The replay of a region runs the forward of the regions inside once more. What their ops keep then goes, by its place,
   into the holders of what they kept before: where other ops ran, one would get the tensors of another.
2. So an op that begins in the forward of a region is noted on the tape of each region around it that is in forward too,
   outwards up to one that is replayed. That one compares it with what it has noted.
3. They are compared as they come, since early stop may end the replay in the midst of an inner region. What began in
   forward before the last tensor that replay filled must have come.
4. A region around whose replay will not come here, because the body of one of its SAVE ops runs, notes nothing; nor
   does it compare what runs once more for the sake of a placeholder.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_remat.dispatch.check.compare import SAME_ORDER, another_op, mismatched
from torch_remat.dispatch.log.record import Record
from torch_remat.errors import MismatchError
from torch_remat.policies.decision import CheckpointPolicy


class InnerOp(NamedTuple):
    """An op of a region inside another."""

    region: str
    name: str
    policy: CheckpointPolicy
    saved_before: int  # how many tensors the region around had saved when it began


class Around:
    """The regions around one whose forward runs, as far as they care about its ops."""

    __slots__ = ("_name", "_replay", "_tapes")

    def __init__(self, mode: Any) -> None:
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

    def note(self, record: Record) -> None:
        """Tell the regions around of an op that begins; one that is replayed may end with an error."""
        for tape in self._tapes:
            tape.inner = tape.inner or []
            tape.inner.append(InnerOp(self._name, record.name, record.policy, len(tape.saved)))
        replay = self._replay
        if replay is not None and not replay.over:
            _compare(replay, InnerOp(self._name, record.name, record.policy, replay.position))


def _compare(replay: Any, op: InnerOp) -> None:
    noted, place = replay.region.tape.inner, replay.inner_next
    expected: InnerOp | None = noted[place] if place < len(noted) else None
    if expected is None and not replay.region.finished:
        return  # a backward inside forward, which has not come so far itself
    if expected is not None and expected[1:] == op[1:]:
        replay.inner_next = place + 1
        return
    replay.inner_next = len(noted)
    region, around = replay.region, _replay_of(replay)
    if expected is not None and expected[1:3] == op[1:3]:
        what = f"{around} saved {op.saved_before} tensors before this op, forward {expected.saved_before}"
        error = mismatched(region, what, SAME_ORDER, op=op.name)
    else:
        is_known = any(one.name == op.name for one in noted)
        error = another_op(region, op.name, op.policy, expected, is_known, around)
    error.region = op.region
    replay.fail(error)


def missing_inner(replay: Any, last: int) -> MismatchError | None:
    """Return the error about an op that began in forward before the tensor at a place was saved; None if all came."""
    noted = replay.region.tape.inner
    op: InnerOp | None = noted[replay.inner_next] if replay.inner_next < len(noted) else None
    if op is None or op.saved_before > last:
        return None
    error = mismatched(replay.region, f"this op of forward is missing in {_replay_of(replay)}", SAME_ORDER, op=op.name)
    error.region = op.region
    return error


def _replay_of(replay: Any) -> str:
    return f"the replay of region {replay.region.name!r} around it"
