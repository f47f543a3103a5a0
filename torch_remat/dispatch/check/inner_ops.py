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

from torch_remat.dispatch.check.mismatch import SAME_ORDER, mismatched
from torch_remat.dispatch.log.record import Record
from torch_remat.dispatch.placeholder import new_tuple
from torch_remat.errors import MismatchError
from torch_remat.policies.decision import CheckpointPolicy


class InnerOp(NamedTuple):
    """An op of a region inside another.

    Attributes:
        region: The name of the inner region.
        name: The op's name.
        policy: Its policy.
        saved_before: How many tensors the region around had saved when the op began.
    """

    region: str
    name: str
    policy: CheckpointPolicy
    saved_before: int


class Around:
    """The regions around one whose forward runs, as far as they care about its ops.

    Args:
        mode: The inner region's forward.
    """

    __slots__ = ("_name", "_replay", "_tapes")

    def __init__(self, mode: Any) -> None:
        self._name = mode.region.name
        self._tapes: list[Any] = []
        self._replay: Any = None
        around = mode.parent
        while around is not None:
            passed_over = around.ops is not None and around.ops.passes_over()
            if around.replaying:
                self._replay = None if passed_over else around
                return
            if not passed_over:
                self._tapes.append(around.region.tape)
            around = around.parent

    def note(self, record: Record) -> None:
        """Tell the regions around of an op that begins.

        Raises:
            StopReplay: One of them is replayed and had another op here in forward.
        """
        for tape in self._tapes:
            op: InnerOp = new_tuple(InnerOp, (self._name, record.name, record.policy, len(tape.saved)))
            if tape.inner:
                tape.inner.append(op)
            else:
                tape.inner = [op]
        replay = self._replay
        if replay is not None and not replay.over:
            _compare(replay, new_tuple(InnerOp, (self._name, record.name, record.policy, replay.position)))


def _compare(replay: Any, op: InnerOp) -> None:
    noted, place = replay.region.tape.inner, replay.inner_next
    expected = noted[place] if place < len(noted) else None
    if expected is None and not replay.region.finished:
        return  # a backward inside forward, which has not come so far itself
    if expected is not None and expected[1:] == op[1:]:
        replay.inner_next = place + 1
        return
    replay.inner_next = len(noted)
    around = f"the replay of region {replay.region.name!r} around it"
    if expected is None or (expected.name != op.name and all(one.name != op.name for one in noted)):
        what = f"{around} runs this op, forward did not"
    elif expected.name != op.name:
        what = f"{around} runs this op where forward ran {expected.name!r}"
    elif expected.policy is not op.policy:
        what = f"this op has policy {op.policy.name} in {around} and had {expected.policy.name} in forward"
    else:
        what = f"{around} saved {op.saved_before} tensors before this op, forward {expected.saved_before}"
    replay.fail(_error(replay, op, what))


def check_inner(replay: Any, last: int) -> None:
    """Raise if an op has not come that had begun in forward before the tensor at a place was saved."""
    op = _missing(replay, last)
    if op is not None:
        raise _missing_error(replay, op)


def missing_inner(replay: Any) -> MismatchError | None:
    """Return the error about an op that has not come, but must have if replay did as forward; None if there is none."""
    op = _missing(replay, replay.position - 1)
    return None if op is None else _missing_error(replay, op)


def _missing(replay: Any, last: int) -> InnerOp | None:
    noted = replay.region.tape.inner
    if replay.inner_next >= len(noted):
        return None
    op: InnerOp = noted[replay.inner_next]
    return None if op.saved_before > last else op


def _missing_error(replay: Any, op: InnerOp) -> MismatchError:
    return _error(replay, op, f"this op of forward is missing in the replay of region {replay.region.name!r} around it")


def _error(replay: Any, op: InnerOp, what: str) -> MismatchError:
    error = mismatched(replay.region, what, SAME_ORDER, op=op.name)
    error.region = op.region
    return error
