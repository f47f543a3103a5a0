"""The log of a region in replay: names, calls, native regions, and what SAVE calls wait for.

In: the region's log. Kept: nothing past the replay. Out: the same names in the same order, or an error; placeholders,
kept inputs, and the values of elided holders.

NOTE [ A placeholder that is read after all ]
Forward keeps what replay is seen to need. What else reads a placeholder (data taken past all ops, an op without history
in code that nobody watches) ends the replay: what was filled is emptied, the entry that made the tensor is marked for
good, `find_needs` tells what else must run for it, and replay starts over. The second such surprise marks all entries.
An error by which C++ code refuses a placeholder counts as one. So each op runs at its own place, on what the function
has there. What was kept stays. One warning says who reads what.
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
from torch_remat.dispatch.check.mismatch import SAME_ORDER, another_op, mismatched, other_source
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
from torch_remat.dispatch.handle.whole_call import another_call, made_again, replayed
from torch_remat.dispatch.holder import metadata_of, parameter_behind
from torch_remat.dispatch.log.entry import WRITTEN, Entry, HandleCall, WholeCall, run_for_good
from torch_remat.dispatch.log.meta import layout_of, stand_in
from torch_remat.dispatch.log.needs import Needs, find_needs
from torch_remat.dispatch.log.op_answerer import OpAnswerer, loaded_slots
from torch_remat.dispatch.log.record import Record, Stretch
from torch_remat.dispatch.log.schema import effects_of, without_statistics
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.log.suppressed import Aftermath, Suppressed
from torch_remat.dispatch.placeholder import TORCH_SAYS, Placeholder, Source, constant, new_tuple, real, refuse, unpack
from torch_remat.dispatch.region.inputs import leaves_of, with_leaves
from torch_remat.dispatch.views import Elided
from torch_remat.errors import (
    PlaceholderError,
    RematError,
    RematWarning,
    UsageError,
    qualified_name,
    raised_at,
    user_line,
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
                self._again = answerer.passing = True
                source = new_tuple(Source, (ops.region_name, record.name, record.label(0), id(ops.region)))
                ctx.apply = partial(_refuse_backward, source)  # it saves nothing
                return None
        if record.drawn is not None:
            record.drawn.restore()
        made = []
        metas = record.results
        for place, meta in enumerate(metas if type(metas) is list else (metas,)):
            source = new_tuple(Source, (ops.region_name, record.name, record.label(place), id(ops.region)))
            value = None if answerer is None else kept[place]
            if value is None:
                compute = None if answerer is None else partial(ops.value_after_all, source, record, place)
                value = stand_in(meta, source, compute)
            made.append(value)
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
            args = tuple([real(arg, self.record.name, self.ops.region) for arg in args])
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
        self.ops.ops.passing = False
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
        self._surprises = 0
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
            self._answers = OpAnswerer(self._replay, self.suppressed, self.load, self.start_over)
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
        if call.again or call.raised or self.region.tape.backward_inside or runs(call, self._entries):
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
        if not self.region.finished and (call.elided_inputs or self.made):
            self.fill_elided(call, given)  # a gradient taken inside reads them
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
        if not self.region.finished:  # a backward inside forward: what it goes through is made again for good
            if stretch.end < stretch.start:
                return self._run_unfinished(stretch, function, args, kwargs)
            run_for_good(self._entries[stretch.start : stretch.end])
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
        if not stretch.returned:
            return result
        leaves = leaves_of((result,), {})
        for place, slot in stretch.returned.items():
            leaves[place] = slot.load(self.region_name, stretch.name, str(place))
            self.note_loaded(leaves[place])
        return with_leaves((result,), {}, leaves)[0][0]

    def _run_unfinished(
        self, stretch: Stretch, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a native region in which forward still is: a gradient taken inside reads what it has saved so far."""
        if any(entry.outside for entry in self._entries[stretch.start :]):
            what = "a gradient is taken inside of this native region after it changed a tensor from outside"
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

    def value_after_all(self, source: Source, entry: Entry, place: int, consumer: str) -> Tensor:
        """Return what a saved write has left where a placeholder of a call stands; else end this replay."""
        if self._answers is None:
            self.start_over(source, entry, place, consumer)
        return self._answers.value_after_all(source, entry, place, consumer)

    def start_over(self, source: Source, entry: Entry, place: int, consumer: str) -> NoReturn:
        """End this run of the function: see NOTE [ A placeholder that is read after all ]."""
        if self._over or (entry.run and place not in entry.kept) or not self._mark([entry]):
            refuse(source, consumer)
        if self._surprises == 1:
            file, line = user_line()
            self._warn(
                f"{qualified_name(self.region_name, source.op, source.output)}: {consumer} reads this result in "
                "replay, which forward was not seen to need, so that it was not kept",
                file, line,
            )  # fmt: skip
        raise self._replay.start_over()

    def starts_over_for(self, error: Exception) -> bool:
        """Mark all entries where an error may be of what placeholders lack; return whether replay is to start over."""
        if isinstance(error, PlaceholderError):
            record = self.region.tape.records.get(error.op or "")
            if type(record) is HandleCall and record.results is not None:
                return False  # of an op with a handle, whose body cannot run in replay
        elif not _is_of_placeholders(error) and (isinstance(error, RematError | Warning) or not self.changes_results):
            return False  # of a placeholder that was reshaped in place, autograd makes views anew that may not fit
        if self._over or not any(not entry.run for entry in self._entries) or not self._mark(self._entries):
            return False
        if self._surprises == 1:
            place = raised_at(error)
            file, _, line = place.rpartition(":")
            self._warn(
                f"{qualified_name(self.region_name)}: replay cannot pass over what is saved or needed by nothing with "
                f"placeholders ({place}: {error})", file, int(line or 0),
            )  # fmt: skip
        return True

    def _mark(self, entries: Sequence[Entry]) -> bool:
        """Let replay run entries, and what they need; return whether it can."""
        self._surprises += 1
        if self._surprises > 2:
            return False  # all of them run by now
        if self._surprises > 1:
            entries = self._entries
        needs = self._needs_with(entries)
        if any(e.effects.random and e.effects.namespace == "aten" for e in needs.run if not e.run):
            # What is drawn depends on all that was drawn before.
            if self.region.rng is None:
                return False
            entries = self._entries
            needs = self._needs_with(entries)
        for entry in needs.run:
            entry.run = True
            entry.before = None if len(entries) == len(self._entries) else entry.before
        return True

    def _needs_with(self, entries: Sequence[Entry]) -> Needs:
        """Return what replay must run if it runs these entries, too."""
        for entry in entries:
            entry.always = not entry.is_view()  # which is there in any case
        return find_needs(self._entries, self.region.tape.roots, _is_kept)

    def _warn(self, what: str, file: str, line: int) -> None:
        warnings.warn_explicit(
            f"{what}: replay starts over and runs once more what makes it. The gradients are right all the "
            "same. To spare the second run, let a native region contain the reader too, let the policy save "
            "the tensor, or read it by an op.",
            RematWarning,
            file,
            line,
        )

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
                tensor = real(arg, consumer).detach().requires_grad_(arg.requires_grad)
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

    def note_readers(self, tensors: Sequence[Tensor]) -> None:
        """Give placeholders that something reads from here on the values that were kept for it."""
        values, _ = self.enter_region(tensors, {})
        for tensor, value in zip(tensors, values, strict=True):
            if isinstance(tensor, Placeholder) and tensor is not value:
                tensor.compute = partial(constant, value.detach())

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
            source = real(source, f"op {holder.op!r}", self.region)
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


def _refuse_backward(source: Source, *_grad_outputs: Tensor | None) -> NoReturn:
    refuse(source, "a gradient taken inside the region")


def _is_of_placeholders(error: BaseException) -> bool:
    """Whether an error may be that of code that met a placeholder."""
    if isinstance(error, PlaceholderError):
        return True
    return isinstance(error, RuntimeError | TypeError) and any(text in str(error) for text in _SAYS)


def _is_kept(entry: Entry, place: int) -> bool:
    return bool(entry.written) if place == WRITTEN else place in entry.kept


@keep_from_compiler
def _run_again(_mode: Any, op: Any, _types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return op(*without_statistics(effects_of(op), args), **kwargs)
