"""What the end of a region's forward decides: which results are kept for replay, and which entries run in it.

In: what the `Recorder` has noted, and the graph of the region. Kept: slots for what replay reads. Out: the calls that
run whole, with a warning each, or the error about a call that replay can neither skip nor run; see
NOTE [ What is kept ] in `recorder`, and NOTE [ When a saved call runs whole ] in `call`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

from torch.autograd.graph import Node

from torch_remat.dispatch.call.call import cannot_be_skipped
from torch_remat.dispatch.call.entry import Call
from torch_remat.dispatch.call.recorder import Recorder
from torch_remat.dispatch.call.result import call_left_by_a_tensor, defined_at, identity_of, readers_in
from torch_remat.dispatch.holder import value_behind
from torch_remat.dispatch.keys import key_of
from torch_remat.dispatch.ops.needs import early_reads, find_needs
from torch_remat.dispatch.region.region import Region
from torch_remat.errors import RematWarning, UsageError, qualified_name, user_line
from torch_remat.policies.decision import CheckpointPolicy

_RECOMPUTE = CheckpointPolicy.RECOMPUTE
_warned: dict[Any, Any] = {}
_changed = attrgetter("is_changed")


def judge(log: Recorder, boundary: Sequence[Node | None]) -> None:
    """Note which calls replay runs whole, and let it fill what these have saved; refuse those that leave a tensor.

    Args:
        log: What forward has noted.
        boundary: The nodes of the region's outputs.
    """
    log.settle()
    log.body()
    if log.region.tape.functions:
        _give_up_changed(log)
    if not log.packs:
        return  # there are no calls but handles
    _check_left(log, boundary)
    for call in log.region.tape.records.values():
        if call.function is not None and not log.has_policy and _is_changed(call):
            call.why, call.modified, call.is_saved = "a result of it was modified in place afterwards", (), False
        if call.inputs and call.is_saved and not call.why and call.policy is not _RECOMPUTE:
            call.inputs = {}  # it need not run whole
        if not call.is_saved:
            log.give_up(call)


def finish(log: Recorder) -> None:
    """Keep what replay or backward needs, once each entry of the policy is known to have matched."""
    if log.watch is not None:
        assert log.region.options.policy is not None
        log.watch.check_matched(log.region.options.policy, identity_of(log.region.function))
    if log.results.unread:
        log.results.read_versions()
    if log.departures.waiting:
        log.departures.send()
    if log.has_policy:
        _decide(log)
    else:
        calls = [call for call in log.region.tape.records.values() if not call.is_handle]
        _keep_results(log, [*calls, *log.region.tape.functions.values()])
        _run_whole(log, calls)


def _check_left(log: Recorder, boundary: Sequence[Node | None]) -> None:
    """Refuse a call that leaves a tensor in the graph."""
    if not log.left:
        return
    readers = readers_in(boundary, log.left[0].first)
    if (call := call_left_by_a_tensor(log.left, readers)) is not None:
        raise cannot_be_skipped(
            log.region, call, "the region uses a tensor that the call made but did not return", "Return it"
        )


def _give_up_changed(log: Recorder) -> None:
    """Let replay run the calls of functions whose results were modified, or what they have saved, or may have been."""
    for call in log.region.tape.functions.values():
        is_changed = _is_changed(call)
        if log.pointed and not is_changed:
            saved = map(value_behind, log.region.tape.saved[call.start : call.end])
            keys = [*(key for _, key in call.made), *(key_of(value) for value in saved if value is not None)]
            is_changed = not log.pointed.keys().isdisjoint(keys)
        if is_changed:
            log.give_up(call)


def _is_changed(call: Call) -> bool:
    """Whether a result of a call was modified in place since."""
    return any(map(_changed, call.kept.values()))


def _keep_results(log: Recorder, calls: Collection[Call]) -> None:
    """Keep what these calls returned past which replay goes on."""
    if not calls:
        return
    region = log.region
    last = region.tape.last_place(region.hooks, region.options.early_stop)
    for call in calls:
        # What a ladder keeps backward needs: it costs nothing more, and replay may go further if the region is lowered.
        call.is_answered = call.is_saved and (call.end <= last or call.is_by_price)
        if not call.is_answered:
            call.kept = {}
        elif call.away or not log.results.keeps_aliases:
            log.results.keep(call, call.kept)


def _run_whole(log: Recorder, calls: Sequence[Call]) -> None:
    """Let replay run the calls whole that have to, with a warning each."""
    for call in calls:
        if call.why or call.always:
            call.always = call.run = True
            check_whole(log, call)


def _decide(log: Recorder) -> None:
    """Keep, under a policy, the results that replay or backward needs, and note what runs."""
    tape = log.region.tape
    log.results.let_go_of_graph()
    run, needed = find_needs(log.entries, _roots(log), log.results.can_keep)
    if log.storages.has_writes:
        tape.early = early_reads(log.entries, log.storages.is_state)
    for entry in run:
        entry.run = True
    kept = dict(needed)
    for call in tape.records.values():  # of views: in replay they are placeholders, views of nothing
        kept[call] = {*kept.get(call, ()), *call.views}
    for entry in log.results.held:
        if entry not in kept:
            entry.kept = {}
    for entry, places in kept.items():
        log.results.keep(entry, places)
    for entry in run:
        if isinstance(entry, Call):
            check_whole(log, entry)
    assert log.watch is not None
    log.watch.finish()


def _roots(log: Recorder) -> list[tuple[int, int]]:
    """Return the storages that replay must have, each after how many entries."""
    region, entries, watch = log.region, log.entries, log.watch
    tape, hooks, calls = region.tape, region.hooks, region.tape.records.values()
    roots = [(key, after) for place, key, after in log.roots if tape.may_need(place, hooks)]
    if log.storages.has_writes:  # an op may fill what it has saved just before (``F.rrelu`` its noise)
        roots = [
            (key, after + 1 if after < len(entries) and key in entries[after].writes else after) for key, after in roots
        ]
    for call in calls:
        if call.why:
            call.always = True
    assert watch is not None
    if watch.compiled_code.ran:  # it may read whatever there is: replay runs all ops, and has what calls made
        for at, entry in enumerate(entries):
            if isinstance(entry, Call) or entry.effects.higher:
                roots += [(key, at + 1) for _, key in entry.made] or [(entry.storage, at + 1)]
            else:
                entry.always = True
    # What a higher-order op compiles for itself, or is, cannot take placeholders.
    roots += [(key, at) for at, entry in watch.higher for key in entry.reads]
    roots += log.needed
    if calls:  # what those returned past which replay goes on
        last = tape.last_place(hooks, region.options.early_stop)
        passed = {call for call in calls if not call.is_handle and call.end <= last}
        for at, entry in enumerate(entries):
            if entry in passed:
                roots += [(key, at + 1) for key in entry.touches() if key not in entry.writes]
    return roots


def check_whole(log: Recorder, call: Call) -> None:
    """Warn of a call that runs whole, and refuse one that would modify something outside again."""
    if call.results is None or (call.is_handle and not log.has_policy):
        return  # one that raised just does so again
    call.why = call.why or "replay needs a result of it that was modified in place afterwards"
    # If it modified arguments, replay knows whether these are the region's own.
    if not call.modified and (error := warn_of_second_run(log.region, call)) is not None:
        raise error


def promise(region: Region) -> str:
    """Return what a warning of a second run promises: without random state it may draw other numbers."""
    return "The gradients are right. " if region.options.preserve_rng_state else ""


def warn_of_second_run(region: Region, call: Call) -> UsageError | None:
    """Warn, once for each place where one is defined, of a call that replay runs whole; return why it must not.

    Of a function that a policy lists nobody is warned, as of those of C++.
    """
    if call.wrote:
        what = f"{call.why}, so replay must recompute it, but it also modified {call.wrote[0]}"
        return cannot_be_skipped(region, call, what, "Use the out-of-place form")
    if call.listed is not None:
        return None  # a policy asks for it where it can be had
    file, line = defined_at(call.function) or user_line()
    warnings.warn_explicit(
        f"{qualified_name(region.name, call.name)}: replay recomputes this call, since {call.why}. "
        f"{promise(region)}To avoid the second run, use the out-of-place form of the op that modifies the tensor.",
        RematWarning,
        file,
        line,
        registry=_warned,
    )
    return None
