"""The log of one region in replay: its calls, in the order of forward, and under a policy its ops.

In: the region's log. Kept: nothing past the replay. Out: the same calls in the same order, or an error; results of
skipped calls, kept ones or placeholders; and the values of the holders that wait for a call's arguments.

NOTE [ A placeholder that is read after all ]
A policy keeps what replay is seen to need, and the Python of a native region meets placeholders inside. Any other
reader of a placeholder (access to data without an op, an op without a `grad_fn` in unwatched code) gets a
`PlaceholderError`. Then the replay starts over once, even if user code swallowed the error: filled holders are emptied,
buffers and generators are put back, and every native region and op of the log runs, and each call of whose result
forward kept nothing, since replay was not to go on past it; other calls have their results. An
error in which C++ code refuses a placeholder counts as one. One warning, at the end, says who reads what. The error is
final where a native region modified something outside the region, where random numbers cannot be drawn again, and for
the output of a handle, whose body cannot run in replay.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torch_remat.dispatch.call.call import cannot_be_skipped
from torch_remat.dispatch.call.ending import promise, warn_of_second_run
from torch_remat.dispatch.call.entry import Call, variables_of
from torch_remat.dispatch.call.handle import RematHandle, ReplayOp, SkippedOp
from torch_remat.dispatch.call.loading import Loading
from torch_remat.dispatch.call.native import replay_native
from torch_remat.dispatch.call.result import another_call, identity_of, is_flat
from torch_remat.dispatch.check.compare import SAME_ORDER, another_op
from torch_remat.dispatch.keys import dense_layout, keys_of, layout_of
from torch_remat.dispatch.mode import Replaying
from torch_remat.dispatch.ops.entry import ONE, Entry, still_there
from torch_remat.dispatch.placeholder import (
    Placeholder,
    Refusal,
    Source,
    is_of_placeholders,
)
from torch_remat.dispatch.region.inputs import leaves_of
from torch_remat.dispatch.region.outside import Unreadable
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.errors import (
    MutationError,
    RematError,
    RematWarning,
    at_user_line,
    qualified_name,
    raised_at,
)
from torch_remat.policies.decision import CheckpointPolicy

_RECOMPUTE = CheckpointPolicy.RECOMPUTE
_new = object.__new__  # as in the recorder


class Answerer(Loading):
    """The log of one region in one replay, a `Filling`, and what runs its calls.

    Attributes:
        begun: How many calls have begun.
        entered: How many inner regions have, after the first call.
    """

    def __init__(self, replay: Replaying, region: OpenRegion) -> None:
        super().__init__(replay, region)
        self._started_over_for: Exception | None = None
        self._refusal: Refusal | None = None
        self._over = False

    def begin_again(self) -> None:
        """Begin at the start of the log again."""
        super().begin_again()
        self.begun = self.entered = 0

    # Calls.

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> RematHandle | None:
        """Begin an op, which must be that of forward; None if it is plain autograd. Only `get_handle` calls it."""
        if self.whole is not None and self.whole.answers is None:
            return None  # it is part of the call
        if self.native is not None or self.whole is not None:
            policy = CheckpointPolicy.SAVE  # it follows the enclosing native region
        else:
            self.replay.stop_if_filled()
        call = self._next(name, policy)
        if call is None:
            return None
        op: ReplayOp = _new(ReplayOp if policy is _RECOMPUTE else SkippedOp)
        op._ctx = ctx
        op._name = name
        op._step = -1
        op.ops = self
        op.call = call
        return op

    def _next(self, name: str, policy: CheckpointPolicy) -> Call | None:
        """Return the call of forward that comes next, which must be this one; None if calls are no longer counted."""
        place, calls = self.begun, self._calls
        if place < len(calls) and (call := calls[place]).name == name and call.policy is policy:
            self.begun = place + 1
            return call
        if self.replay.stopped:
            return None
        expected = calls[place] if place < len(calls) else None
        raise self.replay.fail(another_op(self.region, name, policy, expected, name in self.region.tape.records))

    def run(
        self, _is_native: bool, name: str, policy: CheckpointPolicy, function: Callable[..., Any],
        args: Sequence[Any], kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a native region, or a call of `op`, as far as replay needs it; see `RematMode.run_native`."""
        if self.native is not None or self.whole is not None or self.replay.over:
            return self.replay.user_code(function, args, kwargs)
        self.replay.stop_if_filled()  # forward does not expect it to come here
        call = self._next(name, policy)
        if call is None or policy is _RECOMPUTE:
            if call is not None and self.region.options.policy is None:
                args, kwargs = self.values_of(args, kwargs, call.inputs, name)
            return self.replay.user_code(function, args, kwargs)
        if call.answers is not None:
            if self.ops is not None:
                self.ops.pass_over(call)
            leaves = leaves_of(args, kwargs) if call.modified else ()
            given = [*leaves, *self._variables(call, function, leaves)] if call.modified else ()
            if self._runs(call, given, args, kwargs):
                return self._run_whole(call, function, args, kwargs, ())
            return replay_native(self, call, function, args, kwargs)
        return self._skip(call, function, args, kwargs)

    def _skip(self, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call returned, or run it whole."""
        flat = is_flat(args, kwargs)
        leaves = args if flat else leaves_of(args, kwargs)
        same = identity_of(function) == call.function
        if not same or (dense_layout(leaves) if flat else layout_of(leaves, {})) != call.layout:
            self.replay.fail(another_call(self.region, call, same))
        given = leaves if not call.places else [*leaves, *self._variables(call, function, leaves)]
        if self._runs(call, given, args, kwargs):
            if self.ops is not None:
                self.ops.pass_over(call)
            return self._run_whole(call, function, args, kwargs, given)
        self.come_to(call, given)
        self.leave(call)
        if call.kind == ONE:
            return self.kept_or_stand_in(call, 0)
        return self.result_of(call, given)

    def _runs(self, call: Call, given: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether replay runs a call whole that it has to."""
        if not call.run:
            return False
        if self._started_over_for is not None and not call.why and self._lacks_one(call, leaves_of(args, kwargs)):
            return False  # another has started replay over
        if call.modified and self._started_over_for is None:
            same = [
                isinstance(tensor := given[place], Tensor) and storage.cdata in keys_of(tensor)
                for place, storage in call.modified
            ]
            if all(same):  # they are outside the region and already modified
                return False
            if call.wrote:
                what = f"{call.why}, so replay must recompute it, but it also modified {call.wrote[0]}"
                self.replay.fail(cannot_be_skipped(self.region, call, what, "Use the out-of-place form"))
            warn_of_second_run(self.region, call)
        return True

    def _lacks_one(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Whether one of a call's arguments is the output of a handle that is not there."""
        return any(
            isinstance(leaf, Placeholder) and leaf.source.is_of(self.region) and self.is_of_handle(leaf.source)
            for at, leaf in enumerate(leaves)
            if at not in call.inputs
        )

    def _variables(self, call: Call, function: Callable[..., Any], leaves: Sequence[Any]) -> list[Any]:
        """Return the variables of a call, as far as replay reads them; None for the others."""
        found = variables_of(function, leaves)
        values: list[Any] = []
        for place, (at, key) in sorted(call.places.items()):
            values += [None] * (place - len(leaves) - len(values))
            values.append(found[at].tensor if at < len(found) and found[at].key == key else None)
        return values

    def _run_whole(
        self, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], given: Any
    ) -> Any:
        """Run a call again, as one with the policy RECOMPUTE; what it keeps stays."""
        args, kwargs = self.values_of(args, kwargs, call.inputs, call.name)
        if call.before is not None and self.region.rng is not None:
            call.before.restore(among=self.region.rng)
        self._fill_waiting(call, given)  # what it saved of its arguments before it modified them
        self.begin_body(call)
        try:
            return self.replay.user_code(function, args, kwargs)
        finally:
            self.end_body()
            if not self.replay.over and call.drawn is not None:
                call.drawn.restore()

    # What is asked while replay runs.

    def skips(self) -> bool:
        """Whether a native region runs whose ops are answered, or a call that runs whole."""
        return self.native is not None or self.whole is not None

    def is_native(self) -> bool:
        """Whether a native region runs, or runs whole."""
        return self.native is not None or (self.whole is not None and self.whole.answers is not None)

    def passed(self) -> int:
        """Return how many calls have begun, or under a policy how many entries of the log."""
        return self.begun if self._log is None else self._log.at

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of an inner region, which replay runs."""
        if not self.begun or self.region.options.policy is not None:
            return args, kwargs
        entered = self.region.tape.entered
        self.entered += 1
        slots = entered[self.entered - 1] if self.entered <= len(entered) else {}
        return self.values_of(args, kwargs, slots, "inner region")

    def may_fill(self) -> bool:
        """Whether the op that saves a tensor may be about to fill it; where ops are watched, its place decides."""
        return self.ops is None or self.ops.may_fill()

    def ends_soon(self) -> bool:
        """Whether, under a policy and without calls, few ops are to come, which compute results and do no more."""
        return not self._calls and self.ops is not None and self.ops.ends_soon()

    def free_name(self, name: str) -> str:
        """Return the name that forward gave the next call of a kind."""
        own = self.next_name()
        return own if own is not None and re.fullmatch(re.escape(name) + r"(_[0-9]+)?", own) else name

    def is_next(self, function: Any, number: int) -> bool:
        """Whether the next call of forward is this one of a torch function."""
        call = self._calls[self.begun] if self.begun < len(self._calls) else None
        return call is not None and call.function_number == number and call.function == identity_of(function)

    def next_policy(self) -> CheckpointPolicy:
        """Return the policy of the next call of forward."""
        return self._calls[self.begun].policy

    def next_name(self) -> str | None:
        """Return the name of the next call of forward, if there is one."""
        return self._calls[self.begun].name if self.begun < len(self._calls) else None

    def is_of_handle(self, source: Source) -> bool:
        """Whether a placeholder stands for the output of a handle whose body cannot run in replay."""
        call = self.region.tape.records.get(source.op)
        return call is not None and call.is_handle and self.region.options.policy is None

    def changed_later(self) -> list[Unreadable]:
        """Return the storages outside the region that are modified: what reads one earlier would read what was left."""
        if self.region.options.policy is not None:
            return [
                (still_there([storage]), until, False, False, partial(_read_too_early, self.region_name, entry))
                for storage, until, entry in self.region.tape.early
            ]
        outside = self.region.outside
        small = frozenset[int]() if outside is None else outside.small()
        return [
            (keys, at + 1, False, False, partial(_read_too_early, self.region_name, call))
            for at, call in enumerate(self._calls)
            if call.outside and (keys := still_there(call.outside) - small)
        ]

    # Starting over.

    def starts_over_for(self, error: Exception, refusal: Refusal | None) -> bool:
        """Let all entries run if an error may be of what placeholders lack; return whether replay is to start over.

        See NOTE [ A placeholder that is read after all ].
        """
        if self._over:
            return False
        if self.runs_functions():  # alone: then this is a plain region, which may start over, too
            return True
        if self._started_over_for is not None:
            return False
        if refusal is not None:
            if self.is_of_handle(refusal.source):
                return False
        elif not is_of_placeholders(error) and (isinstance(error, RematError | Warning) or not self.changes_results):
            return False  # of a placeholder that was reshaped in place, autograd makes views anew that may not fit
        entries = [entry for entry in self._entries if not (entry.run or entry.is_view() or self._stays_skipped(entry))]
        if not entries or any(self._cannot_run(entry) for entry in entries):
            return False
        for entry in entries:
            entry.run = True
        for entry in self._entries:
            entry.before = None
        self._started_over_for, self._refusal = error, refusal
        return True

    def runs_functions(self) -> bool:
        """Let all calls of functions run, if a ladder has chosen them; return whether any did not run."""
        kind, calls = self.region.kind, self.region.tape.functions.values()
        if kind is None or not any(call.is_saved for call in calls):
            return False
        kind.restarts += 1
        for call in calls:
            call.is_saved = False
            for waiting in call.waiting:
                if (holder := waiting.holder()) is not None:
                    holder.resident = False
        return True

    @property
    def has_started_over(self) -> bool:
        """Whether the replay has started over."""
        return self._started_over_for is not None

    def _stays_skipped(self, entry: Entry) -> bool:
        """Whether an entry is a call whose results are there, or a handle whose body cannot run in replay."""
        if not isinstance(entry, Call) or entry.answers is not None:
            return False
        if entry.is_handle:
            return self.region.options.policy is None
        return len(entry.kept) > 0 or not entry.saved  # else forward did not expect replay to go on past it

    def _cannot_run(self, entry: Entry) -> bool:
        """Whether an entry cannot run again."""
        if not isinstance(entry, Call):
            return entry.effects.random and entry.effects.namespace == "aten" and self.region.rng is None
        return entry.touched or not self.region.options.preserve_rng_state

    def warn(self) -> None:
        """Warn of what replay has started over for, once it has ended."""
        if (error := self._started_over_for) is None or not self._entries:
            return  # of a ladder nobody knows
        if (refusal := self._refusal) is not None:
            source, consumer, file, line = refusal
            name = qualified_name(self.region_name, source.op, source.output)
            what = f"{consumer} reads this result in replay, but forward did not keep it: no op was seen to need it"
        else:
            place = raised_at(error)
            name = qualified_name(self.region_name)
            what = f"code in replay cannot use the placeholder of a saved or unneeded result ({place}: {error})"
            file, _, at = place.rpartition(":")
            line = int(at or 0)
        warnings.warn_explicit(
            f"{name}: {what}; replay starts over and recomputes every saved call and op. {promise(self.region)}To "
            "avoid the second run, put the reader into a native region too, let the policy save the tensor, read it "
            "with an op, or pass it to remat.recompute_needs_tensor.",
            RematWarning,
            file,
            line,
        )

    # The end.

    def finish(self) -> None:
        """Raise if the function ended before it came to each call and op."""
        if self.ops is not None and (error := self.ops.missing()) is not None:
            raise error
        self.check_passed(len(self.region.tape.saved))

    def check_passed(self, last: int) -> None:
        """Raise if a call has not come that had begun in forward before the tensor at a place was saved."""
        if self.begun < len(self._calls) and (missing := self._calls[self.begun]).start <= last:
            raise self.region.mismatch("forward ran this op, but replay did not", SAME_ORDER, op=missing.name)

    def forget(self) -> None:
        """Release at the end of the replay what placeholders that outlive it may refer to."""
        self.suppressed.restore()
        for ops in (self.ops, self.native_ops):
            if ops is not None:
                ops.forget()
        self._over = True
        self._started_over_for = self._refusal = None  # whose traceback has frames that know this
        self.ops = self._log = self.native_ops = self.native = self.whole = self._watcher = None
        self._calls, self._entries, self._slots, self._loaded = [], (), {}, {}
        del self.replay, self.region


def _read_too_early(region: str, entry: Entry, tensor: Tensor) -> MutationError:
    return MutationError(
        f"replay reads a tensor created outside the region (shape {tuple(tensor.shape)}){at_user_line()}, but this "
        f"{'call' if entry.is_call else 'op'} modifies it in place later in the region; replay does not undo the "
        "modification, so the reader would get a different value than in forward",
        region=region,
        op=entry.group or entry.effects.name,
        tensor="written",
        remedy="Read the tensor and modify it in one call (remat.native_save_region, or a saved op), read a clone made "
        "before the region is called, or let the policy save what reads it.",
    )
