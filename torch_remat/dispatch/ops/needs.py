"""What replay must run, and which results must be kept for that.

In: the entries of the log with the storages that they read and write, and the storages that replay must have. Kept:
nothing. Out: the entries that replay runs, and the results to keep.

It is a walk from the last entry to the first over the storages that are needed after each (liveness analysis). An
entry that makes or writes one of them is kept if it can be, else it runs, and then needs what it reads. A view neither
makes nor writes anything; replay always has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from torch.multiprocessing.reductions import StorageWeakRef

from torch_remat.dispatch.ops.entry import FIRST, ONE, VIEW, WRITTEN, Entry

Root = tuple[int, int]  # a storage that replay must have, and after how many entries


# What replay needs: the entries that run, and those of which results are kept, with their places.
Needs = tuple[list[Entry], list[tuple[Entry, Collection[int]]]]


def find_needs(
    entries: Sequence[Entry],
    roots: Sequence[Root],
    can_keep: Callable[[Entry, int], bool],
) -> Needs:
    """Return what replay runs and keeps.

    Args:
        entries: The log.
        roots: What replay must have.
        can_keep: Whether a saved result is there, as the entry left it.
    """
    forced = set[Entry]()
    while True:
        needs, has_writes = _walk(entries, roots, can_keep, forced)
        unfinished = _unfinished(entries, needs) if has_writes else []
        if not unfinished:
            return needs
        forced.update(unfinished)


def _walk(
    entries: Sequence[Entry],
    roots: Sequence[Root],
    can_keep: Callable[[Entry, int], bool],
    forced: set[Entry],
) -> tuple[Needs, bool]:
    """Return what is needed, and whether anything is written."""
    needs: Needs = [], []
    run, keep = needs
    pending = sorted(roots, key=_after)
    next_after = pending[-1][1] if pending else -1
    needed: set[int] = set()
    has_writes = False
    for at in range(len(entries) - 1, -1, -1):
        while next_after > at:
            needed.add(pending.pop()[0])
            next_after = pending[-1][1] if pending else -1
        entry = entries[at]
        if entry.kind == ONE:  # what most entries are, without the sets
            storage = entry.storage
            if runs := storage in needed:
                needed.remove(storage)
                if entry.saved and can_keep(entry, 0):
                    keep.append((entry, FIRST))
                    runs = False
            if runs or entry.always or (forced and entry in forced):
                run.append(entry)
                needed.update(entry.reads)
        elif entry.kind == VIEW and not (entry.always or entry in forced):
            if entry.made:
                needed.difference_update([storage for _, storage in entry.made])  # replay has it in any case
        else:
            if entry.writes:
                has_writes = True
            _step(entry, needed, can_keep, needs, entry.always or entry in forced)
    return needs, has_writes


def _unfinished(entries: Sequence[Entry], needs: Needs) -> list[Entry]:
    """Return the changes that replay would skip of a tensor that it recomputes.

    Nothing that is seen to read the tensor comes after them. But it has data in replay, and no placeholder would tell
    what reads it otherwise.
    """
    runs = set(needs[0])
    left = {entry for entry, places in needs[1] if WRITTEN in places}
    there: set[int] = set()
    found = []
    for entry in entries:
        if entry.writes and not there.isdisjoint(entry.writes):
            if not (entry in runs or entry in left or entry.outside):
                found.append(entry)
        elif entry.kind != VIEW:
            if entry in runs:
                there.update(entry.reads)  # small buffers, too, which replay has as forward found them
                there.update(entry.touches())
            else:
                there.difference_update(entry.touches())
    return found


def _step(
    entry: Entry, needed: set[int], can_keep: Callable[[Entry, int], bool], needs: Needs, is_forced: bool
) -> None:
    """Take one entry of any kind."""
    made = {place for place, storage in entry.made if storage in needed}
    writes = [storage for storage in entry.writes if storage in needed]
    if not (made or writes or is_forced):
        return
    kept = {place for place in made if place in entry.saved and can_keep(entry, place)}
    runs = is_forced or len(kept) < len(made)
    if writes and not runs and WRITTEN in entry.saved and entry.whole and can_keep(entry, WRITTEN):
        kept.add(WRITTEN)
        needed.difference_update(writes)
    elif writes:
        runs = True
    needed.difference_update([storage for _, storage in entry.made])
    if runs:
        needs[0].append(entry)
        needed.update(entry.reads)
    if kept:
        needs[1].append((entry, kept))


_after = itemgetter(1)


def early_reads(entries: Sequence[Entry], is_state: Callable[[int], bool]) -> list[tuple[StorageWeakRef, int, Entry]]:
    """Return what was created outside the region and is read by an entry before a later one modifies it.

    Replay does not undo the modification, but for state. Entries that replay skips count, too, since it may start over.
    A call that runs whole may read whatever its function reaches.

    Returns:
        The storages, each after how many entries replay may read it, and the entry that modifies it last.
    """
    written: dict[int, tuple[StorageWeakRef, int, Entry]] = {}
    found: dict[int, tuple[StorageWeakRef, int, Entry]] = {}
    for at in range(len(entries) - 1, -1, -1):
        entry = entries[at]
        if not (written or entry.outside):
            continue
        own = {storage.cdata: storage for storage in entry.outside if not is_state(storage.cdata)}
        if not (entry.is_view() or entry.effects.factory):
            known = written.keys() if entry.is_call and entry.run else entry.reads
            found.update((key, written[key]) for key in known if key in written and key not in own)
        for key, storage in own.items():
            written.setdefault(key, (storage, at + 1, entry))
    return list(found.values())
