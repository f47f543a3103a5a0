"""The log of a region in replay: names, calls, native regions, and what SAVE calls wait for.

In: the region's log. Kept: nothing past the replay. Out: the same names in the same order, or an error; placeholders,
kept inputs, and the values of elided holders.

NOTE [ A placeholder that is read after all ]
Forward keeps what replay is seen to need. What else reads a placeholder (data taken past all ops, an op without history
in code that nobody watches) gets a `PlaceholderError`. The replay, also where user code swallowed the error, starts
over once: what was filled is emptied, buffers and generators are put back, and every call and op of the log runs at its
own place, on what the function has there. An error by which C++ code refuses a placeholder counts as one. What was kept
stays. One warning, at the end, says who reads what. The error stands where a call that replay does not watch writes
what it has not made (`OwnWrites`), where random numbers cannot be drawn again, and of an op with a handle, whose body
cannot run in replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torch_remat._compat import Handler, keep_from_compiler, top_saved_tensors_hooks
from torch_remat.dispatch.check.compare import SAME_ORDER, another_op, mismatched, other_source
from torch_remat.dispatch.handle.op import SKIPPED, RematHandle
from torch_remat.dispatch.handle.saved_call import (
    LeftOut,
    OpaqueCall,
    is_flat,
    kept_of_second_run,
    of_another_function,
    put_back,
    result_of,
    runs,
)
from torch_remat.dispatch.handle.variables import identity_of
from torch_remat.dispatch.handle.whole_call import OwnWrites, another_call, made_again, may_draw_in, replayed
from torch_remat.dispatch.holder import metadata_of, parameter_behind
from torch_remat.dispatch.log.entry import CALL, Entry, HandleCall, WholeCall, still_there
from torch_remat.dispatch.log.meta import layout_of, stand_in
from torch_remat.dispatch.log.op_answerer import OpAnswerer, loaded_slots
from torch_remat.dispatch.log.record import Record, Stretch
from torch_remat.dispatch.log.schema import effects_of, without_statistics
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.log.suppressed import Aftermath, Suppressed
from torch_remat.dispatch.placeholder import TORCH_SAYS, Placeholder, Refusal, Source, new_tuple, refuse, unpack
from torch_remat.dispatch.region.inputs import fresh_alias, leaves_of, with_leaves
from torch_remat.dispatch.views import Elided
from torch_remat.errors import (
    MutationError,
    PlaceholderError,
    RematError,
    RematWarning,
    UsageError,
    at_user_line,
    qualified_name,
    raised_at,
)
from torch_remat.policies.decision import CheckpointPolicy

_TAKE_OUTSIDE = "Change it after the gradient, or take the gradient outside of the native region."
_SAYS = (*TORCH_SAYS, Placeholder.__name__)
_RECOMPUTE = CheckpointPolicy.RECOMPUTE
_new = object.__new__  # as in the recorder


class ReplayOp(RematHandle):
    """An op with policy RECOMPUTE in replay, and what all ops in replay have in common.

    Attributes:
        ops: The ops of its region.
        record: Its record.
    """

    ops: Answerer
    record: Record

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Replace the inputs that are placeholders by the kept ones."""
        if self._step != 0:
            raise self._out_of_order(1)
        self._step = 1
        record = self.record
        if record.slots or Placeholder in map(type, args):
            args = tuple(self.ops.load_inputs(record, args, record.name))
        return args[0] if len(args) == 1 else args

    def save_for_backward(self, saved_tensors: Mapping[str, Tensor | None]) -> None:
        """Do what ``ctx.save_for_backward`` does; forward has checked the names."""
        if not 0 <= self._step < 2:
            raise self._out_of_order(2)
        self._step = 2
        self._ctx.save_for_backward(*saved_tensors.values())

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """Note the outputs that SAVE ops wait for."""
        if not 0 <= self._step < 3:
            raise self._out_of_order(3)
        self._step = 3
        if self.record.elided_outputs is not None:
            self.ops.note_made(self.record.elided_outputs, outs)
        return outs if as_tuple or len(outs) > 1 else outs[0]


class SkippedOp(ReplayOp):
    """An op with policy SAVE or OFFLOAD in replay; its body runs only if it must run for good, or has raised."""

    record: HandleCall
    _again = False  # whether the body runs after all

    def maybe_load_saved(self) -> Tensor | tuple[Tensor, ...] | None:
        """Return placeholders for the outputs, and leave the generators where the body left them."""
        return self.load(())

    def load(self, args: tuple[Any, ...]) -> Tensor | tuple[Tensor, ...] | None:
        """Do the same, and fill what waits for the op's inputs."""
        if self._step != -1:
            raise self._out_of_order(0)
        self._step = 0
        record, ops, ctx = self.record, self.ops, self._ctx
        if record.results is None:  # its body has raised
            return None
        if record.elided_inputs or ops.made:
            ops.fill_elided(record, args)
        answerer = ops.ops
        if answerer is not None:
            kept = answerer.load_call(record)
            if record.run:
                self._again = True
                answerer.passing = ops.own_writes() or (lambda op, args, kwargs: op(*args, **kwargs))
                source = new_tuple(Source, (ops.region_name, record.name, record.label(0), id(ops.region)))
                ctx.apply = partial(_refuse_backward, source)  # it saves nothing
                return None
        if record.drawn is not None:
            record.drawn.restore()
        made = []
        metas = record.results
        for place, meta in enumerate(metas if type(metas) is list else (metas,)):
            source = new_tuple(Source, (ops.region_name, record.name, record.label(place), id(ops.region)))
            if answerer is not None:
                value = kept[place]
            elif place in record.slots:
                value = ops.load(record.slots[place], record.name, record.label(place))
                ops.note_loaded(value)
            else:
                value = None
            made.append(stand_in(meta, source) if value is None else value)
        if record.plain:
            ctx.mark_non_differentiable(*[made[place] for place in record.plain])
        # The graph of the replay has nothing that this op's backward could work on.
        ctx.apply = partial(_refuse_backward, source)
        self._step = SKIPPED
        return tuple(made) if record.as_tuple else made[0]

    def save_or_load_inputs(self, *args: Any) -> Any:
        """Pass the inputs to a body that runs after all."""
        if self._step != 0:
            raise self._out_of_order(1)
        self._step = 1
        if self._again:
            args = tuple([self.ops.value_of(arg, self.record.name) for arg in args])
        return args[0] if len(args) == 1 else args

    def save_for_backward(self, saved_tensors: Mapping[str, Tensor | None]) -> None:
        """Save nothing if the body runs after all: forward's holders have what backward needs."""
        if self._again:
            self._step = 2
        else:
            super().save_for_backward(saved_tensors)

    def record_outputs(self, *outs: Tensor, as_tuple: bool = False) -> Any:
        """End a body that ran after all."""
        result = super().record_outputs(*outs, as_tuple=as_tuple)
        if not self._again or self.ops.ops is None:
            self.ops.fail_returned(self.record)
        self.ops.ops.passing = None
        if self.record.drawn is not None:
            self.record.drawn.restore()
        return result


class Answerer:
    """The log of one region in one replay, a `Filling`.

    Attributes:
        ops: What answers and compares aten ops, while the ops of the region, or of a native region, are watched.
        begun: How many ops with names have begun.
        made: What ops have made for SAVE ops that have saved it, by their names.
    """

    def __init__(self, replay: Any) -> None:
        self.region = replay.region
        self.region_name: str = replay.region.name
        self._replay = replay
        self._records = list(replay.region.tape.records.values())
        self._entries: Sequence[Entry] = replay.region.tape.calls
        self._slots = loaded_slots(replay.region) if self._entries and replay.region.hooks is not None else {}
        self._started_over_for: Exception | None = None
        self._answerers: list[OpAnswerer] = []
        self._over = False
        self.begin_again()

    def begin_again(self) -> None:
        """Stand at the start of the log."""
        self.begun = 0
        self._regions = 0
        self._loaded: dict[int, torch.Tensor] = {}  # by id, kept so that no other tensor gets the id
        self.made: dict[str, list[tuple[Elided, Any]]] = {}
        self.suppressed = Suppressed()
        self.ops: OpAnswerer | None = None
        self._answers: OpAnswerer | None = None
        self._in_skipped = False  # whether the body of a native region runs
        self._in_call = False  # whether it is that of a call of `op`
        if self.region.options.policy is not None and self._entries:
            self.ops = self._watched_ops()
            self.ops.expect(self._entries)

    @cached_property
    def changes_results(self) -> bool:
        """Whether the log has changes in place, for which results need a history: autograd allows none of a leaf."""
        return any(entry.writes or entry.effects.reshapes for entry in self._entries)

    def _watched_ops(self) -> OpAnswerer:
        """Return what answers the ops that are watched, in this run of the function."""
        if self._answers is None:
            self._answers = OpAnswerer(self._replay, self.suppressed, self.load)
            self._answerers.append(self._answers)
        return self._answers

    def begin(self, name: str, policy: CheckpointPolicy, ctx: Any) -> RematHandle | None:
        """Begin an op, which must be that of forward; None if it is plain autograd. Only `get_handle` calls it."""
        if self._in_call:
            return None  # it is part of the call
        if self._in_skipped:
            policy = CheckpointPolicy.SAVE  # it follows the native region around it
        place = self.begun
        records = self._records
        if place < len(records) and (record := records[place]).name == name and record.policy is policy:
            self.begun = place + 1
        elif self._replay.stopped:
            return None
        else:
            self._refuse_record(name, policy)
        op: ReplayOp = _new(ReplayOp if policy is _RECOMPUTE else SkippedOp)
        op._ctx = ctx
        op._name = name
        op._step = -1
        op.ops = self
        op.record = record
        return op

    def run_native(
        self, name: str, policy: CheckpointPolicy, function: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a native region; see `RematMode.run_native`."""
        if self._in_skipped or self._in_call:
            return function(*args, **kwargs)
        self._replay.stop_if_filled()  # forward does not expect it to come here
        place, records = self.begun, self._records
        if place < len(records) and (record := records[place]).name == name and record.policy is policy:
            self.begun = place + 1
        else:
            self._refuse_record(name, policy)
        if type(record) is WholeCall:
            if function is not record.op or layout_of(args, kwargs) != record.layout:
                self._replay.fail(another_call(self.region, record, function))
            if record.elided_inputs or self.made:
                self.fill_elided(record, args if not kwargs else (*args, *kwargs.values()))
            return replayed(self, record, function, args, kwargs)
        if self.region.options.policy is not None:
            self._in_skipped = policy is not CheckpointPolicy.RECOMPUTE
            try:
                return function(*args, **kwargs)
            finally:
                self._in_skipped = False
        if isinstance(record, Stretch):
            return self._run_stretch(record, function, args, kwargs)
        if record.slots:
            leaves = self.load_inputs(record, leaves_of(args, kwargs), name)
            args, kwargs = with_leaves(args, kwargs, leaves)
        return function(*args, **kwargs)

    def run_call(
        self, _opaque: bool, name: str, policy: CheckpointPolicy, function: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Run a call of `op`, or leave it out; see `RematMode.run_call`."""
        records, place = self._records, self.begun
        call = records[place] if place < len(records) else None
        if self._in_call or not isinstance(call, LeftOut) or call.name != name or call.policy is not policy:
            return self.run_native(name, policy, function, args, kwargs)
        self._replay.stop_if_filled()
        self.begun = place + 1
        leaves = args if is_flat(args, kwargs) else leaves_of(args, kwargs)
        if identity_of(function) != call.identity or layout_of(leaves, {}) != call.layout:
            self._replay.fail(of_another_function(self.region, call, function))
        given = call.given(function, leaves) if call.paths else leaves
        if call.again or call.raised or not self.region.finished or runs(call, self._entries):
            return self._call_again(call, function, args, kwargs, given)
        if call.put_back and not put_back(self, call, given):
            return self._call_again(call, function, args, kwargs, given)
        if self.ops is not None and isinstance(call, Stretch):
            self.ops.pass_over(call.name, call.start, call.end)
        if call.elided_inputs or self.made:
            self.fill_elided(call, given)
        if type(call) is OpaqueCall and not (call.forms or call.template):
            return replayed(self, call, function, args, kwargs)
        if call.drawn is not None:
            call.drawn.restore()
        return result_of(self, call, given)

    def load(self, slot: Slot, op: str, name: str) -> Tensor:
        """Return what a slot keeps, which hooks around the region may have given already."""
        loaded = self._slots.get(id(slot))
        return slot.load(self.region_name, op, name) if loaded is None else loaded.detach()

    def _call_again(
        self, call: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], given: Any
    ) -> Any:
        self._in_call = True
        try:
            hooks = top_saved_tensors_hooks()
            own = hooks is not None and hooks[1] is unpack  # else hooks inside of the region take what is saved
            with saved_tensors_hooks(kept_of_second_run, unpack) if own else nullcontext():
                if self.ops is not None:
                    return function(*args, **kwargs)  # its ops are answered like all others
                if isinstance(call, Stretch):
                    return self._run_stretch(call, function, args, kwargs)
                return made_again(self, call, function, args, kwargs)
        finally:
            self._in_call = False
            if not self._replay.over and (call.elided_inputs or self.made):
                self.fill_elided(call, given)

    def _run_stretch(
        self, stretch: Stretch, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not self.region.finished:
            return self._run_unfinished(stretch, function, args, kwargs)
        ops = self.ops = self._watched_ops()
        ops.expect(self._entries[stretch.start : stretch.end], stretch.name, stretch.left, stretch.start)
        self._in_skipped = True
        try:
            result = self._replay.watched(ops.answer, function, args, kwargs)
        except BaseException as error:
            if stretch.raised and not self._replay.over and not _is_of_placeholders(error):
                self._end_stretch(stretch, ops)
            raise
        finally:
            self._in_skipped = False
            self.ops = None
        self._end_stretch(stretch, ops)
        leaves = leaves_of((result,), {}) if stretch.returned or ops.written else []
        for place, leaf in enumerate(leaves):
            slot = stretch.returned.get(place)
            if slot is not None:
                leaves[place] = slot.load(self.region_name, stretch.name, str(place))
                self.note_loaded(leaves[place])
            elif isinstance(leaf, Placeholder) and (value := ops.left_over(leaf)) is not None:
                leaves[place] = fresh_alias(value, leaf.requires_grad, True)
                self.note_loaded(leaves[place])
        return with_leaves((result,), {}, leaves)[0][0] if leaves else result

    def _run_unfinished(
        self, stretch: Stretch, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a native region in the replay for a gradient that is taken in forward: nothing is kept for it yet."""
        if any(entry.outside for entry in self._entries[stretch.start : stretch.end]):
            what = "a gradient is taken in the region after this native region changed a tensor from outside"
            self._replay.fail(UsageError(what, region=self.region_name, op=stretch.name, remedy=_TAKE_OUTSIDE))
        self._in_skipped = True  # what has a name in it belongs to it
        try:
            return self._replay.watched(_run_again, function, args, kwargs)
        finally:
            self._in_skipped = False

    def _end_stretch(self, stretch: Stretch, ops: OpAnswerer) -> None:
        if (error := ops.missing()) is not None:
            self._replay.fail(error)
        if stretch.drawn is not None:
            stretch.drawn.restore()
        ops.finish()

    def value_of(self, leaf: Any, consumer: str) -> Any:
        """Return an argument, or what saved writes have left where a placeholder of this region stands.

        Raises:
            PlaceholderError: They left nothing there.
        """
        if self._answers is not None:
            return self._answers.value_of(leaf, consumer)
        is_own = isinstance(leaf, Placeholder) and leaf.source.is_of(self.region)
        return refuse(leaf.source, consumer) if is_own else leaf

    def is_of_handle(self, source: Source) -> bool:
        """Whether a placeholder stands for the output of an op with a handle whose body cannot run in replay."""
        record = self.region.tape.records.get(source.op)
        return type(record) is HandleCall and record not in self._entries

    def starts_over_for(self, error: Exception, refusal: Refusal | None) -> bool:
        """Let all entries run if an error may be of what placeholders lack; return whether replay is to start over.

        See NOTE [ A placeholder that is read after all ].
        """
        if self._over or self._started_over_for is not None:
            return False
        if refusal is not None:
            if self.is_of_handle(refusal.source):
                return False
        elif not _is_of_placeholders(error) and (isinstance(error, RematError | Warning) or not self.changes_results):
            return False  # of a placeholder that was reshaped in place, autograd makes views anew that may not fit
        entries = [entry for entry in self._entries if not (entry.run or entry.is_view())]
        if not entries or (self.region.rng is None and any(map(self._draws, self._entries))):
            return False
        if self.region.outside is not None and self.region.outside.is_bound_by_calls():
            return False
        for entry in self._entries:
            entry.run = entry.run or not entry.is_view()
            entry.restored = entry.ends = False
            entry.before = None
        self._started_over_for, self._refusal = error, refusal
        return True

    def _draws(self, entry: Entry) -> bool:
        """Whether an entry draws random numbers, if nothing sets the generators back."""
        if entry.kind != CALL and not isinstance(entry, WholeCall):
            return entry.effects.random and entry.effects.namespace == "aten"
        if self.region.options.preserve_rng_state:
            return False  # forward would know
        return not isinstance(entry, WholeCall) or may_draw_in(entry.op)

    def own_writes(self) -> OwnWrites | None:
        """Return what watches a call that runs though forward did not plan it; None if it did."""
        error = self._started_over_for
        if not self.region.finished:
            what = "a gradient is taken in the region after a call that is made for it again and writes outside"
            error = UsageError(what, region=self.region_name, remedy=_TAKE_OUTSIDE)
        return None if error is None else OwnWrites(partial(self._replay.fail, error))

    def warn(self) -> None:
        """Warn of what replay has started over for, once it has ended."""
        if (error := self._started_over_for) is None:
            return
        if (refusal := self._refusal) is not None:
            source, consumer, file, line = refusal
            name = qualified_name(self.region_name, source.op, source.output)
            what = f"{consumer} reads this result in replay, which forward was not seen to need and did not keep"
        else:
            place = raised_at(error)
            name = qualified_name(self.region_name)
            what = f"replay cannot pass over what is saved or needed by nothing with placeholders ({place}: {error})"
            file, _, at = place.rpartition(":")
            line = int(at or 0)
        warnings.warn_explicit(
            f"{name}: {what}: replay starts over and runs every saved call and op once more. The gradients are right. "
            "To spare the second run, let a native region contain the reader too, let the policy save the tensor, read "
            "it by an op, or name it to remat.recompute_needs_tensor.",
            RematWarning,
            file,
            line,
        )

    def passed(self) -> int:
        """Return how many names have begun."""
        return self.begun

    def changed_later(self) -> list[tuple[int, float, Callable[[Tensor], RematError]]]:
        """Return the storages that native regions change: what reads one before its native region reads what was left.

        Returns:
            The storages, each with how many names must have begun, and the error of the tensor that is read.
        """
        return [
            (key, at + 1, partial(_read_too_early, self.region_name, record.name))
            for at, record in enumerate(self._records)
            if isinstance(record, Stretch)
            for left in record.left
            for key in still_there([left.storage])
        ]

    def aftermath(self) -> Handler:
        """Return what watches the ops of user code that runs on when the replay is over."""
        return Aftermath(self.suppressed, self.ops.outside if self.ops is not None else set).watch

    def skips(self) -> bool:
        """Whether a native region runs that replay skips."""
        return self._in_skipped or self._in_call

    def passes_over(self) -> bool:
        """Whether a call of `op` runs again, in which the log has no names."""
        return self._in_call

    def forget(self) -> None:
        """At the end of the replay: let go of what placeholders that outlive it may know."""
        self.suppressed.restore()
        self.made.clear()
        for ops in self._answerers:
            ops.forget()
        self._over = True
        self.ops = self._answers = None
        self._answerers, self._records, self._entries, self._slots, self._loaded = [], [], (), {}, {}
        del self._replay, self.region

    def note_loaded(self, tensor: torch.Tensor) -> None:
        """Note a tensor that was kept, so that it has no history in replay."""
        self._loaded[id(tensor)] = tensor

    def _refuse_record(self, name: str, policy: CheckpointPolicy) -> NoReturn:
        expected = self._records[self.begun] if self.begun < len(self._records) else None
        if expected is None and not self.region.finished:
            self._replay.stop()  # a backward inside forward, which has not come so far itself
        raise self._replay.fail(another_op(self.region, name, policy, expected, name in self.region.tape.records))

    def finish(self) -> None:
        """Raise if the function ended before it came to each op."""
        if self.ops is not None and (error := self.ops.missing()) is not None:
            raise error
        self.check_passed(len(self.region.tape.saved))

    def check_passed(self, last: int) -> None:
        """Raise if an op has not come that had begun in forward before the tensor at a place was saved."""
        if self.begun < len(self._records) and (missing := self._records[self.begun]).saved_before <= last:
            raise mismatched(self.region, "this op of forward is missing in replay", SAME_ORDER, op=missing.name)

    def load_inputs(self, record: Record, args: Iterable[Any], consumer: str) -> list[Any]:
        """Return inputs with the placeholders among them replaced by what the slots keep."""
        loaded = list(args)
        slots = record.slots
        for place, arg in enumerate(loaded):
            slot = slots.get(place) if slots else None
            if slot is not None:
                tensor = slot.load(self.region_name, record.name or consumer, f"input {place}")
                loaded[place] = self._loaded[id(tensor)] = tensor
            elif isinstance(arg, Placeholder) and arg.source.is_of(self.region):
                tensor = self.value_of(arg, consumer).detach().requires_grad_(arg.requires_grad)
                loaded[place] = self._loaded[id(tensor)] = tensor
        return loaded

    def may_fill(self) -> bool:
        """Whether the op that saves a tensor may be about to fill it; where ops are watched its place tells."""
        return self.ops is None or self.ops.may_fill()

    def next_name(self) -> str | None:
        """Return the name of the next op of forward, if there is one."""
        return self._records[self.begun].name if self.begun < len(self._records) else None

    def has_loaded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor came from a slot, so that it has no history in replay."""
        return id(tensor) in self._loaded

    def enter_region(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return an inner region's arguments with the placeholders among them replaced."""
        if self.begun == 0 or self.region.options.policy is not None:
            return args, kwargs  # before the first op there is nothing that replay would not have
        place = self._regions
        self._regions = place + 1
        regions = self.region.tape.regions
        if place >= len(regions):
            if not self.region.finished:
                self._replay.stop()  # a backward inside forward, which has not come so far itself
            self._replay.fail(mismatched(self.region, "replay runs more inner regions than forward", SAME_ORDER))
        if not regions[place].slots:
            return args, kwargs
        leaves = self.load_inputs(regions[place], leaves_of(args, kwargs), "inner region")
        return with_leaves(args, kwargs, leaves)

    def note_made(self, waiting: Sequence[Elided], outputs: Sequence[torch.Tensor]) -> None:
        """Note the outputs of an op that SAVE ops wait for; see NOTE [ When an elided tensor is complete ]."""
        for elided in waiting:
            known, place, _, _ = elided
            holder = known()
            if holder is not None and holder.value is None:
                source = outputs[place] if place < len(outputs) else None
                self.made.setdefault(holder.op, []).append((elided, source))

    def fill_elided(self, record: Record, args: Sequence[Any]) -> None:
        """Give the holders of a skipped op their values that wait for its inputs, or for what was made before."""
        if record.name in self.made:
            for elided, source in self.made.pop(record.name):
                self._fill(elided, source, False)
        for elided in record.elided_inputs or ():
            self._fill(elided, args[elided.place] if elided.place < len(args) else None, True)

    def _fill(self, elided: Elided, source: Any, is_input: bool) -> None:
        known, _, view, _ = elided
        holder = known()
        if holder is None or holder.value is not None:
            return
        loaded = type(source) is Placeholder
        if loaded:
            source = self.value_of(source, f"op {holder.op!r}")
        if type(source) is Tensor and view is None:
            value: Tensor | None = source.detach()
        else:
            value = elided.value(source) if isinstance(source, Tensor) else None
        if value is None or metadata_of(value)[1:] != holder.metadata[1:]:
            self._replay.fail(other_source(self.region, holder, source, is_input))
        if is_input and not loaded:
            owner = source if source._base is None else source._base
            if type(owner.grad_fn) is not holder.producer or holder.origin is not None or type(owner) is not Tensor:
                self._replay.explain(holder, value, owner, parameter_behind(owner))
        self._replay.fill_elided(holder, value)

    def fail_returned(self, record: Record) -> NoReturn:
        """End the replay, since an op returned whose body has raised in forward."""
        what = "this op raised an exception in forward and returned in replay"
        raise self._replay.fail(mismatched(self.region, what, SAME_ORDER, op=record.name))


def _read_too_early(region: str, name: str, tensor: Tensor) -> MutationError:
    return MutationError(
        f"replay reads a tensor of shape {tuple(tensor.shape)} created outside the region{at_user_line()}, which this "
        "call changes in place later in the region; replay does not undo the change, so that the reader would get "
        "another value than in forward",
        region=region,
        op=name,
        tensor="written",
        remedy="Read it inside a native region too, or read a clone of it that is made before the region is called.",
    )


def _refuse_backward(source: Source, *_grad_outputs: Tensor | None) -> NoReturn:
    refuse(source, "a gradient taken inside the region")


def _is_of_placeholders(error: BaseException) -> bool:
    """Whether an error may be that of code that met a placeholder."""
    if isinstance(error, PlaceholderError):
        return True
    return isinstance(error, RuntimeError | TypeError) and any(text in str(error) for text in _SAYS)


@keep_from_compiler
def _run_again(_mode: Any, op: Any, _types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return op(*without_statistics(effects_of(op), args), **kwargs)
