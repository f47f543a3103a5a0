"""Which ops of a region with a policy replay must run, and which saved results it needs.

In: the calls of forward with the storages that they read and write, and the storages that replay must fill. Kept:
nothing. Out: `PolicyCall.run`, the results to keep, and the random states that replay sets.

It is a walk from the last call to the first over the storages that are needed after each (liveness analysis). A
call that makes or writes one of them runs if the policy does not save it, and then needs what it reads. A view neither
makes nor writes anything; replay always has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from torch_remat.dispatch.policy_call import FIRST, ONE, VIEW, WRITTEN

if TYPE_CHECKING:
    from torch_remat.dispatch.policy_call import PolicyCall
    from torch_remat.dispatch.region.region import Region


Root = tuple[int, int]  # a storage that replay must have, and after how many calls


def find_needs(calls: Sequence[PolicyCall], roots: Sequence[Root]) -> Iterator[tuple[PolicyCall, Collection[int]]]:
    """Mark the calls that replay runs; yield each call of which something is kept, and the places of its results."""
    pending = sorted(roots, key=_after)
    next_after = pending[-1][1] if pending else -1
    needed: set[int] = set()
    for at in range(len(calls) - 1, -1, -1):
        while next_after > at:
            needed.add(pending.pop()[0])
            next_after = pending[-1][1] if pending else -1
        call = calls[at]
        if call.kind == ONE:  # what most calls are, without the sets
            storage = call.storage
            if storage in needed:
                needed.remove(storage)
                if call.saved:
                    yield call, FIRST
                else:
                    call.run = True
            if call.always:
                call.run = True
            if call.run:
                needed.update(call.reads)
            continue
        if call.kind == VIEW and not call.always:
            needed.difference_update([storage for _, storage in call.made])  # replay has it without any call
            continue
        made = [place for place, storage in call.made if storage in needed]
        writes = [storage for storage in call.writes if storage in needed]
        kept: set[int] = set()
        if made or writes or call.always:
            kept = {place for place in made if place in call.saved}
            if writes and WRITTEN in call.saved and call.whole:
                kept.add(WRITTEN)
                needed.difference_update(writes)
                writes = []
            call.run = call.always or bool(writes) or len(kept - {WRITTEN}) < len(made)
            needed.difference_update(storage for _, storage in call.made)
            if call.run:
                needed.update(call.reads)
        if kept:
            yield call, kept


def keep_random(region: Region, calls: Sequence[PolicyCall]) -> None:
    """Keep the generators' states where replay skips what drew before, and none if replay draws nothing."""
    random = [call for call in calls if call.effects.random]
    skipped = False
    for call in random:
        if not (call.run and skipped):
            call.before = None
        skipped = not call.run
    if region.tape.drawn_by_ops():
        return
    if random and not any(call.run for call in random) and all(call.effects.namespace == "aten" for call in random):
        region.rng = None


_after = itemgetter(1)
