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
from contextlib import nullcontext
from functools import cached_property, partial
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_remat._compat import Handler, as_written, optree, same_memory
from torch_remat.dispatch.call.ending import promise, warn_of_second_run
from torch_remat.dispatch.call.entry import NOTHING, Call, Given, Waiting
from torch_remat.dispatch.call.handle import SKIPPED, RematHandle
from torch_remat.dispatch.call.result import SAME, Again, Passed, flatten, identity_of, is_flat
from torch_remat.dispatch.check.compare import SAME_ORDER, another_op, other_source
from torch_remat.dispatch.holder import metadata_of, parameter_behind
from torch_remat.dispatch.keys import dense_layout, keys_of, layout_of
from torch_remat.dispatch.mode import Replaying
from torch_remat.dispatch.ops.answer import OpAnswerer, Suppressed
from torch_remat.dispatch.ops.entry import ONE, Entry, still_there
from torch_remat.dispatch.ops.meta import Meta, WrapperMeta, stand_in
from torch_remat.dispatch.placeholder import Placeholder, Refusal, Source, is_of_placeholders, new_tuple, refuse
from torch_remat.dispatch.region.inputs import fresh_alias, leaves_of, with_leaves
from torch_remat.dispatch.region.outside import Unreadable
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.dispatch.slot import Slot
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


class Answerer:
    """The log of one region in one replay, a `Filling`, and what runs its calls.

    Attributes:
        begun: How many calls have begun.
        entered: How many inner regions have, after the first call.
        ops: What answers and compares aten ops, while the ops of the region, or of a native region, are watched.
        native: The native region whose ops are answered now.
        whole: The call that runs whole now.
        started_over_for: The error for which the replay has started over, if it has.
    """

    def __init__(self, replay: Replaying, region: OpenRegion) -> None:
        self.region = region
        self.region_name = region.name
        self.replay = replay
        self._calls = list(region.tape.records.values())
        self._entries = region.tape.calls
        self._slots: dict[int, Tensor] = {}
        if region.hooks is not None:
            self._slots = loaded_slots(region.name, self._entries)
            for slots in (*(call.inputs for call in self._calls), *region.tape.entered):
                self._slots.update({id(slot): slot.load(region.name, *slot.sources[-1]) for slot in slots.values()})
        self.started_over_for: Exception | None = None
        self._refusal: Refusal | None = None
        self._over = False
        self.begin_again()

    def begin_again(self) -> None:
        """Begin at the start of the log again."""
        self.begun = self.entered = 0
        self._loaded: dict[int, torch.Tensor] = {}  # by id, kept so that no other tensor gets the id
        self.suppressed = Suppressed()
        self.ops: OpAnswerer | None = None
        self._log: OpAnswerer | None = None  # the same, but for what a native region has in its place
        self._native_ops: OpAnswerer | None = None  # what does so for native regions, one after the other
        self.native: Call | None = None
        self.whole: Call | None = None
        self._watcher: Handler | None = None
        if self.region.options.policy is not None and self._entries:
            self.ops = self._log = OpAnswerer(self.replay, self.suppressed, self.load)
            self.ops.expect(self._entries)

    # Results and arguments.

    @cached_property
    def changes_results(self) -> bool:
        """Whether the log has in-place modifications; results then need a `grad_fn`: autograd allows none of a leaf."""
        return any(entry.writes or entry.effects.reshapes for entry in self._entries)

    def load(self, slot: Slot, op: str, name: str) -> Tensor:
        """Return what a slot keeps; the enclosing hooks may have returned it already."""
        loaded = self._slots.get(id(slot))
        if loaded is None:
            return slot.load(self.region_name, op, name)
        return loaded.detach().requires_grad_(loaded.requires_grad)

    def note_loaded(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was kept, so that it has no `grad_fn` in replay."""
        self._loaded[id(tensor)] = tensor
        if type(tensor) is not Tensor and (base := tensor._base) is not None:  # of a subclass, which is a view then
            self._loaded[id(base)] = base

    def has_loaded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was kept, so that it has no `grad_fn` in replay."""
        return id(tensor) in self._loaded

    def value_of(self, leaf: Any, consumer: str) -> Any:
        """Return an argument, or what saved writes have left where a placeholder of this region stands.

        Raises:
            PlaceholderError: They left nothing there.
        """
        if not isinstance(leaf, Placeholder) or not leaf.source.is_of(self.region):
            return leaf
        if self.ops is not None:
            value = fresh_alias(self.ops.value_of(leaf, consumer), leaf.requires_grad, True)
            self.note_loaded(value)
            return value
        return refuse(leaf.source, consumer)

    def inputs_of(self, call: Call, inputs: Sequence[Any]) -> list[Any]:
        """Return what a handle gets whose body replay runs, with what was kept in place of placeholders."""
        if call.is_skipped and call.results is None:
            return list(inputs)  # its body has raised, and does so again
        return self._with_slots(inputs, call.inputs, call.name)

    def values_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], slots: Mapping[int, Slot], consumer: str
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return arguments with what was kept in place of placeholders."""
        leaves = leaves_of(args, kwargs)
        values = self._with_slots(leaves, slots, consumer)
        return (args, kwargs) if all(map(is_, leaves, values)) else with_leaves(args, kwargs, values)

    def _with_slots(self, leaves: Sequence[Any], slots: Mapping[int, Slot], consumer: str) -> list[Any]:
        values = []
        for at, leaf in enumerate(leaves):
            made = isinstance(leaf, Placeholder) and leaf.source.is_of(self.region) and leaf.source[1:3]
            if made and at in slots and made in slots[at].sources:  # else forward had something else here
                value = self.load(slots[at], *made)
                self.note_loaded(value)
            else:
                value = self.value_of(leaf, consumer)
            values.append(value)
        return values

    def kept_or_stand_in(self, call: Call, place: int) -> Any:
        """Return what replay has of a tensor that a call made: what was kept of it, else a placeholder."""
        requires_grad = bool(call.gradients) and call.gradients[place]  # of a handle autograd decides
        slot = call.kept.get(place)
        has_history = requires_grad and (self.changes_results or self.region.inputs.keeps_histories)
        if slot is not None:
            tensor = slot.unchanged()
            if tensor is None:
                tensor = self.load(slot, call.name, call.label(place))
            tensor = fresh_alias(tensor.data, True, True) if has_history else tensor.requires_grad_(requires_grad)
            self.note_loaded(tensor)
            return tensor
        made = stand_in(call.meta(place), self.source_of(call, place))
        if has_history:
            return fresh_alias(made, True, True)
        return made.requires_grad_() if requires_grad else made

    def source_of(self, call: Call, place: int) -> Source:
        """Return what a placeholder for a tensor that a call made says of itself."""
        source: Source = new_tuple(Source, (self.region_name, call.name, call.label(place), id(self.region)))
        return source

    def result_of(self, call: Call, given: Given) -> Any:
        """Return what a skipped call returned in forward; ``given`` are its arguments and variables in self."""
        if not call.template:
            return self._leaf_of(call, 0, call.results, given, [])
        leaves: list[Any] = []
        for place, form in enumerate(call.results):
            leaves.append(self._leaf_of(call, place, form, given, leaves))
        return optree.tree_unflatten(call.template[0], leaves)

    def _leaf_of(self, call: Call, place: int, form: Any, given: Given, before: Sequence[Any]) -> Any:
        kind = type(form)
        if kind is Meta or kind is WrapperMeta:
            return self.kept_or_stand_in(call, place)
        if kind is Again:
            return before[form.at]
        if kind is Slot:  # of a layout for which no placeholder stands in
            value = self.load(form, call.name, call.label(place))
            self.note_loaded(value if value._base is None else value._base)
            return value
        return self._passed(call, form, given.at(form.place)) if kind is Passed else form

    def _passed(self, call: Call, form: Passed, source: Any) -> Any:
        """Return an argument or a variable, or a view of one."""
        if form.view is None:
            return source
        value = form.view.value(source, form.has_history) if isinstance(source, torch.Tensor) else None
        if value is None:
            what = "the base of a returned view has another layout in replay"
            raise self.region.mismatch(what, SAME, op=call.name)
        if not form.is_view:  # a detached alias; or of unsafe_split, whose results may be modified in place
            value = same_memory(value) if form.has_history else value.detach()
            self.note_loaded(value)
        return value

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
            if call.run and self._runs(call, given := Given(function, leaves_of(args, kwargs))):
                return self._run_whole(call, function, args, kwargs, given)
            return self._answer_native(call, function, args, kwargs)
        return self._skip(call, function, args, kwargs)

    def _skip(self, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call returned, or run it whole."""
        flat = is_flat(args, kwargs)
        leaves = args if flat else leaves_of(args, kwargs)
        same = identity_of(function) == call.function
        if not same or (dense_layout(leaves) if flat else layout_of(leaves, {})) != call.layout:
            how = "with tensors of different shapes or strides" if same else "with a different function"
            self.replay.fail(self.region.mismatch(f"replay made this call {how}", SAME, op=call.name))
        given = Given(function, leaves)
        if call.run and self._runs(call, given):
            if self.ops is not None:
                self.ops.pass_over(call)
            return self._run_whole(call, function, args, kwargs, given)
        self.come_to(call, leaves, given)
        self.leave(call)
        if call.kind == ONE:
            return self.kept_or_stand_in(call, 0)
        return self.result_of(call, given)

    def _runs(self, call: Call, given: Given) -> bool:
        """Whether replay runs a call whole that it has to, as far as forward knew."""
        if self.started_over_for is not None and not call.why and self._lacks_one(call, given.leaves):
            return False  # another has started replay over
        if call.modified and self.started_over_for is None:
            same = [
                isinstance(tensor := given.at(place), Tensor) and storage.cdata in keys_of(tensor)
                for place, storage in call.modified
            ]
            if all(same):  # they are outside the region and already modified
                return False
            if (error := warn_of_second_run(self.region, call)) is not None:
                self.replay.fail(error)
        return True

    def _lacks_one(self, call: Call, leaves: Sequence[Any]) -> bool:
        """Whether one of a call's arguments is the output of a handle that is not there."""
        return any(
            isinstance(leaf, Placeholder) and leaf.source.is_of(self.region) and self.is_of_handle(leaf.source)
            for at, leaf in enumerate(leaves)
            if at not in call.inputs
        )

    def _run_whole(
        self, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], given: Given
    ) -> Any:
        """Run a call again, as one with the policy RECOMPUTE; what it keeps stays."""
        args, kwargs = self.values_of(args, kwargs, call.inputs, call.name)
        if call.before is not None and self.region.rng is not None:
            call.before.restore(among=self.region.rng)
        self._fill_waiting(call, given.leaves, given)  # what it saved of its arguments before it modified them
        self.begin_body(call)
        try:
            return self.replay.user_code(function, args, kwargs)
        finally:
            self.end_body()
            if not self.replay.over and call.drawn is not None:
                call.drawn.restore()

    def _answer_native(
        self, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a native region's function again and answer its ops; return its result with the kept tensors in it."""
        assert call.answers is not None
        ops = self._native_ops
        if ops is None:
            ops = self._native_ops = OpAnswerer(self.replay, self.suppressed, self.load)
        ops.expect(call.answers, call.name)
        outer, self.ops = self.ops, ops
        self.native = call
        # With placeholders the compiler cannot trace what a higher-order op compiles for itself.
        context = as_written() if call.higher else nullcontext()
        try:
            with context:
                result = self.replay.watched(ops.answer, function, args, kwargs)
        finally:
            self.native, self.ops = None, outer
        if (error := ops.missing()) is not None:
            self.replay.fail(error)
        if self.suppressed.pending:
            self.suppressed.restore()
        self.leave(call)
        if type(result) is Placeholder:
            if call.kept:
                return self.kept_or_stand_in(call, 0)
            result.source = result.source._replace(output=call.label(0))
            return result
        leaves, form = flatten(result)
        sources: dict[int, Source] = {}  # views of one tensor share one
        for place, leaf in enumerate(leaves):
            if place in call.kept and isinstance(leaf, Tensor):
                leaves[place] = self.kept_or_stand_in(call, place)
            elif type(leaf) is Placeholder and leaf.source.op == call.name:
                source = leaf.source
                leaf.source = sources.setdefault(id(source), source._replace(output=call.label(place)))
        return optree.tree_unflatten(form, leaves) if call.kept else result

    def come_to(self, call: Call, leaves: Sequence[Any], given: Given = NOTHING) -> None:
        """Pass over what a saved call has saved, and fill the holders that wait for its arguments and variables.

        Args:
            call: The call.
            leaves: Its arguments.
            given: The same, and its variables.
        """
        if self.ops is not None and self.native is None and self.whole is None:
            self.ops.pass_over(call)
        replay = self.replay
        if replay.over:
            return
        if replay.position != call.start:
            what = f"replay saved {replay.position} tensors before this call, but forward {call.start}"
            replay.fail(self.region.mismatch(what, SAME_ORDER, op=call.name))
        replay.position = call.end
        if call.waiting:
            self._fill_waiting(call, leaves, given)
            replay.stop_if_filled()

    def _fill_waiting(self, call: Call, leaves: Sequence[Any], given: Given) -> None:
        for waiting in call.waiting:
            place = waiting.place
            if type(place) is int:
                self._fill(waiting, leaves[place] if place < len(leaves) else None)
            else:
                self._fill(waiting, given.at(place))

    def _fill(self, waiting: Waiting, source: Any) -> None:
        known, _, view, _, origin = waiting
        holder = known()
        if holder is None or holder.value is not None:
            return
        loaded = type(source) is Placeholder
        if loaded:
            source = self.value_of(source, f"op {holder.op!r}")
        if type(source) is Tensor and view is None:
            value: Tensor | None = source.detach()
        else:
            value = waiting.value(source) if isinstance(source, Tensor) else None
        if value is None or metadata_of(value)[1:] != holder.metadata[1:]:
            self.replay.fail(other_source(self.region, holder, source))
        if not loaded:
            owner = source if source._base is None else source._base
            if origin is not None:
                holder.producer, holder.origin = origin
            if type(owner.grad_fn) is not holder.producer or holder.origin is not None or type(owner) is not Tensor:
                self.replay.explain(holder, value, owner, parameter_behind(owner))
        self.replay.fill(holder, value)

    def leave(self, call: Call) -> None:
        """Leave generators, and what outlives the region, as a skipped call left them."""
        if call.drawn is not None:
            call.drawn.restore()
        if call.touched and self.region.outside is not None:
            for tensor in self.region.outside.leave(call.name):
                if tensor is not None:
                    self.note_loaded(tensor)

    def begin_body(self, call: Call) -> None:
        """Show no op to the watcher: the body of a call runs, in which the log has no names."""
        self.whole = call
        self._watcher = self.replay.watcher
        if self._watcher is not None:
            self.replay.show_ops_to(None)

    def end_body(self) -> None:
        """Show the ops again."""
        if self._watcher is not None and not self.replay.over:
            self.replay.show_ops_to(self._watcher)
        self.whole = self._watcher = None

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

    def next_name(self) -> str | None:
        """Return the name of the next call of forward, if there is one."""
        return self._calls[self.begun].name if self.begun < len(self._calls) else None

    def has_placeholders(self) -> bool:
        """Whether replay may meet any: under a policy or a ladder, of a native region or of a handle."""
        region = self.region
        if region.options.policy is not None or region.kind is not None:
            return True
        return any(call.answers is not None or call.is_handle for call in self._calls)

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
        if self.started_over_for is not None:
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
        self.started_over_for, self._refusal = error, refusal
        return True

    def runs_functions(self) -> bool:
        """Let all calls of functions run, if a ladder has chosen them; return whether any did not run."""
        kind, calls = self.region.kind, self.region.tape.functions.values()
        if kind is None or not any(call.is_saved for call in calls):
            return False
        kind.restarts += 1
        for call in calls:
            call.is_saved = False
        return True

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
        if (error := self.started_over_for) is None or not self._entries:
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
        for ops in (self.ops, self._native_ops):
            if ops is not None:
                ops.forget()
        self._over = True
        self.started_over_for = self._refusal = None  # whose traceback has frames that know this
        self.ops = self._log = self._native_ops = self.native = self.whole = self._watcher = None
        self._calls, self._entries, self._slots, self._loaded = [], (), {}, {}
        del self.replay, self.region


class ReplayOp(RematHandle):
    """An op with policy RECOMPUTE in replay, and what all ops in replay have in common.

    Attributes:
        ops: The log of its region.
        call: What the log keeps of it.
    """

    ops: Answerer
    call: Call

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Pass the inputs, which forward has kept if replay would not have them."""
        if self._step != 0:
            raise self.out_of_order(1)
        self._step = 1
        if Placeholder in map(type, args):
            args = tuple(self.ops.inputs_of(self.call, args))
        return args[0] if len(args) == 1 else args

    def save_for_backward(self, saved_tensors: Mapping[str, Tensor | None]) -> None:
        """Do what ``ctx.save_for_backward`` does; forward has checked the names."""
        if not 0 <= self._step < 2:
            raise self.out_of_order(2)
        self._step = 2
        self._ctx.save_for_backward(*saved_tensors.values())

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """End the body."""
        if not 0 <= self._step < 3:
            raise self.out_of_order(3)
        self._step = 3
        return outs if as_tuple or len(outs) > 1 else outs[0]


class SkippedOp(ReplayOp):
    """An op with policy SAVE or OFFLOAD in replay; its body runs only if its call runs whole, or has raised."""

    _again = False  # whether the body runs after all

    def maybe_load_saved(self) -> Tensor | tuple[Tensor, ...] | None:
        """Return placeholders for the outputs, and leave the generators where the body left them."""
        return self.load(())

    def load(self, args: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...] | None:
        """Do the same, and fill what waits for the op's inputs."""
        if self._step != -1:
            raise self.out_of_order(0)
        self._step = 0
        call, ops, ctx = self.call, self.ops, self._ctx
        if call.results is None:  # its body has raised
            return None
        ops.come_to(call, args)
        if call.run or ops.whole is not None:
            self._again = True
            if ops.whole is None:
                ops.begin_body(call)
            ctx.apply = partial(_refuse_backward, ops.source_of(call, 0))
            return None
        if call.drawn is not None or call.touched:
            ops.leave(call)
        made = [ops.kept_or_stand_in(call, place) for place in range(call.count_of_results)]
        if call.plain:
            ctx.mark_non_differentiable(*[made[place] for place in call.plain])
        # The graph of the replay has nothing that this op's backward could work on.
        ctx.apply = partial(_refuse_backward, ops.source_of(call, 0))
        self._step = SKIPPED
        return tuple(made) if call.template else made[0]

    def save_for_backward(self, saved_tensors: Mapping[str, Tensor | None]) -> None:
        """Save nothing if the body runs after all: forward's holders have what backward needs."""
        if self._again:
            self._step = 2
        else:
            super().save_for_backward(saved_tensors)

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """End a body that ran after all."""
        result = super().record_outputs(*outs, as_tuple=as_tuple)
        ops = self.ops
        if not self._again:
            what = "this op raised an exception in forward but returned in replay"
            ops.replay.fail(ops.region.mismatch(what, SAME_ORDER, op=self.call.name))
        if ops.whole is self.call:
            ops.end_body()
        if self.call.drawn is not None:
            self.call.drawn.restore()
        return result


def _refuse_backward(source: Source, *_grad_outputs: Tensor | None) -> NoReturn:
    refuse(source, "a gradient taken inside the region")


def loaded_slots(region: str, entries: Sequence[Entry]) -> dict[int, torch.Tensor]:
    """Return what all slots of a region's entries keep, by the id of the slot; ``region`` is the region's name.

    Hooks around the region may run a replay of their own, which cannot be done below autograd.
    """
    loaded: dict[int, torch.Tensor] = {}
    for entry in entries:
        if isinstance(entry, Call) and entry.answers:
            loaded |= loaded_slots(region, entry.answers)
        for place, slot in entry.kept.items():
            loaded[id(slot)] = slot.load(region, entry.group, entry.label(place))
    return loaded


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
