"""What a replay has of a region's log: kept results, placeholders for the others, and values for holders that wait.

In: the region's log, and the arguments of calls in replay. Kept: nothing past the replay. Out: what skipped calls
returned, and filled holders. The `Answerer` is all of it, and runs the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import is_
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_remat._compat import Handler, optree, same_memory
from torch_remat.dispatch.call.entry import Call, Waiting
from torch_remat.dispatch.call.result import SAME, Again, Passed
from torch_remat.dispatch.check.compare import SAME_ORDER, mismatched, other_source
from torch_remat.dispatch.holder import metadata_of, parameter_behind
from torch_remat.dispatch.mode import Replaying
from torch_remat.dispatch.ops.answer import OpAnswerer
from torch_remat.dispatch.ops.entry import Entry
from torch_remat.dispatch.ops.matching import Suppressed
from torch_remat.dispatch.ops.meta import Meta, WrapperMeta, stand_in
from torch_remat.dispatch.placeholder import Placeholder, Source, refuse
from torch_remat.dispatch.region.inputs import fresh_alias, leaves_of, with_leaves
from torch_remat.dispatch.region.region import OpenRegion
from torch_remat.dispatch.slot import Slot


class Loading:
    """What one replay has of the log, from which its calls and handles take what they need.

    Attributes:
        ops: What answers and compares aten ops, while the ops of the region, or of a native region, are watched.
        native_ops: What does so for native regions, one after the other.
        native: The native region whose ops are answered now.
        whole: The call that runs whole now.
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
        self.begin_again()

    def begin_again(self) -> None:
        """Begin at the start of the log again."""
        self._loaded: dict[int, torch.Tensor] = {}  # by id, kept so that no other tensor gets the id
        self.suppressed = Suppressed()
        self.ops: OpAnswerer | None = None
        self._log: OpAnswerer | None = None  # the same, but for what a native region has in its place
        self.native_ops: OpAnswerer | None = None
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

    def fail_returned(self, call: Call) -> NoReturn:
        """End the replay, since an op returned whose body has raised in forward."""
        what = "this op raised an exception in forward but returned in replay"
        raise self.replay.fail(mismatched(self.region, what, SAME_ORDER, op=call.name))

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
        made = stand_in(call.meta(place), Source(self.region.name, call.name, call.label(place), id(self.region)))
        if has_history:
            return fresh_alias(made, True, True)
        return made.requires_grad_() if requires_grad else made

    def result_of(self, call: Call, given: Sequence[Any]) -> Any:
        """Return what a skipped call returned in forward; ``given`` are its arguments and variables in self."""
        if not call.template:
            return self._leaf_of(call, 0, call.results, given, [])
        leaves: list[Any] = []
        for place, form in enumerate(call.results):
            leaves.append(self._leaf_of(call, place, form, given, leaves))
        return optree.tree_unflatten(call.template[0], leaves)

    def _leaf_of(self, call: Call, place: int, form: Any, given: Sequence[Any], before: Sequence[Any]) -> Any:
        kind = type(form)
        if kind is Meta or kind is WrapperMeta:
            return self.kept_or_stand_in(call, place)
        if kind is Again:
            return before[form.at]
        if kind is Slot:  # of a layout for which no placeholder stands in
            value = self.load(form, call.name, call.label(place))
            self.note_loaded(value if value._base is None else value._base)
            return value
        return self._passed(call, form, given[form.place]) if kind is Passed else form

    def _passed(self, call: Call, form: Passed, source: Any) -> Any:
        """Return an argument or a variable, or a view of one."""
        if form.view is None:
            return source
        value = form.view.value(source, form.has_history) if isinstance(source, torch.Tensor) else None
        if value is None:
            what = "the base of a returned view has another layout in replay"
            raise mismatched(self.region, what, SAME, op=call.name)
        if not form.is_view:  # a detached alias; or of unsafe_split, whose results may be modified in place
            value = same_memory(value) if form.has_history else value.detach()
            self.note_loaded(value)
        return value

    # Calls.

    def come_to(self, call: Call, given: Sequence[Any]) -> None:
        """Pass over what a saved call has saved, and fill the holders that wait for its arguments and variables."""
        if self.ops is not None and self.native is None and self.whole is None:
            self.ops.pass_over(call)
        replay = self.replay
        if replay.over:
            return
        if replay.position != call.start:
            what = f"replay saved {replay.position} tensors before this call, but forward {call.start}"
            replay.fail(mismatched(self.region, what, SAME_ORDER, op=call.name))
        replay.position = call.end
        if call.waiting:
            self._fill_waiting(call, given)
            replay.stop_if_filled()

    def _fill_waiting(self, call: Call, given: Sequence[Any]) -> None:
        for waiting in call.waiting:
            self._fill(waiting, given[waiting.place] if waiting.place < len(given) else None)

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
