"""A region whose forward is over is to keep less: calls of functions that were kept by price run in replay after all.

Matters in a budget that is short of memory in the middle of a step. In: a region that backward has not reached, and the
acts of a lower rung. Kept: nothing. Out: empty holders, which a replay fills.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

from torch_remat.dispatch.call.entry import Call, Waiting
from torch_remat.dispatch.holder import Holder, OpHolder, mark_changed
from torch_remat.dispatch.keys import key_of
from torch_remat.dispatch.ops.meta import described
from torch_remat.dispatch.region.region import Region


def lower(region: Region, acts: Mapping[Any, Mapping[int, Sequence[int]]]) -> bool:
    """Let a region keep what a lower rung keeps; return whether it could be.

    Args:
        region: The region.
        acts: For each function, by the number of a call, which of its results are kept; replay runs all other calls.
    """
    if not region.lock.acquire(blocking=False):
        return False  # another thread's backward is there
    try:
        if not region.finished or region.inputs is None or region.replayed_in >= 0 or region.filling:
            return False
        if not _may_go_further(region):
            return False
        calls = {key: call for key, call in region.tape.functions.items() if call.is_saved and call.is_by_price}
        for (function, number), call in calls.items():
            places = acts.get(function, {}).get(number)
            if places is None:
                call.kept = {}
                for one in call.let_run(region.tape.saved):
                    _empty(one)
            else:
                _keep_only(call, places)
        _let_wait(calls.values())
        kept = {key for call in region.tape.functions.values() if call.is_saved for _, key in call.made}
        for entry in region.tape.saved:
            holder = entry() if type(entry) is ref else None
            value = None if holder is None or type(holder) is OpHolder else holder.value
            if holder is not None and value is not None and key_of(value) not in kept:
                _empty(holder)
    finally:
        region.lock.release()
    return True


def _empty(holder: Holder) -> None:
    """Let a replay fill a holder; what was modified since it was saved stays an error where it is read."""
    if (value := holder.value) is not None and value._version != holder.metadata[0]:
        mark_changed(holder)
    holder.value = None


def _may_go_further(region: Region) -> bool:
    """Whether replay can run more functions than forward meant it to.

    Of the calls of `remat.op` and of native regions those have kept their results past which replay goes on; of a
    handle's, what was to be read is kept.
    """
    skipped = [call for call in region.tape.records.values() if call.is_skipped]
    last = region.tape.last_place(region.hooks, region.options.early_stop) if skipped else -1
    return all(not call.is_handle and call.end <= last for call in skipped)


def _keep_only(call: Call, places: Sequence[int]) -> None:
    """Keep these results of a call; placeholders stand in for the others."""
    if call.kept.keys() <= set(places):
        return
    if call.results is None:
        call.results = [described(call.kept[place].kept, None) for place in range(len(call.gradients))]
    call.kept = {place: slot for place, slot in call.kept.items() if place in places}


def _let_wait(calls: Iterable[Call]) -> None:
    """Let saved tensors wait for arguments that replay makes now."""
    for call in calls:
        found: list[Waiting] = [one for maker, one in call.may_wait if call.is_saved and not maker.is_saved]
        for one in found:
            if (holder := one.holder()) is not None:
                _empty(holder)
                holder.resident = False
        call.waiting = [*call.waiting, *found]
