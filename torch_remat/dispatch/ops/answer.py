"""Aten ops in replay: each is answered with a kept value, a placeholder or what forward raised, or it runs.

In: each op that the region's function, or a native region in it, asks for. Kept: nothing past the replay. Out: kept and
recomputed results, placeholders for what nobody needs.

NOTE [ Writes to what outlives the region ]
A buffer, a cache or a counter that forward modified is not modified again in replay, even if its value is needed. It is
recognized by its storage, which is the same as in forward. Its version counter, which autograd increments anyway, is
put back.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torch_remat._compat import Handler, count_of_modes, keep_from_compiler, optree, set_version
from torch_remat.dispatch.keys import (
    dense_layout,
    has_placeholder,
    key_of,
    keys_of,
    layout_of,
    offset_in_bytes,
    tensors_in,
    version_of,
)
from torch_remat.dispatch.mode import Replaying
from torch_remat.dispatch.ops.entry import ONE, VIEW, WRITTEN, Entry, is_bookkeeping, still_there
from torch_remat.dispatch.ops.meta import Given, GivenView, Meta, Raised, WrapperMeta, stand_in, view_of
from torch_remat.dispatch.ops.schema import Effects, argument, effects_of, without_statistics
from torch_remat.dispatch.placeholder import Placeholder, Source, geometry_of, mapped, new_tuple, refuse, reshape
from torch_remat.dispatch.region.region import Region
from torch_remat.dispatch.slot import Slot
from torch_remat.errors import MismatchError, at_user_line
from torch_remat.offload.transfer import Placement

_FEW = 4


class Suppressed:
    """The in-place changes of one replay that are not done again.

    Attributes:
        pending: The tensors, with their version counters, whose op may still be counting.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, int]] = []

    def add(self, tensors: Iterable[torch.Tensor], outside: Container[int]) -> None:
        """Note those tensors of the present op whose storages are from outside the region."""
        for tensor in tensors:
            if any(tensor is noted for noted, _ in self.pending):
                continue
            if not isinstance(tensor, Placeholder) and not tensor.is_inference() and key_of(tensor) in outside:
                version = tensor._version
                self.pending.append((tensor, version))
                if version:  # autograd counts the change once the op is over
                    set_version(tensor, version - 1)

    def restore(self) -> None:
        """Put the counters back, once the op is over."""
        for tensor, version in self.pending:
            if tensor._version != version:  # a pack hook, in which this may run, must not touch what it is given
                set_version(tensor, version)
        self.pending = []


class OpAnswerer:
    """The aten ops of one replay: of a whole region, or of the native regions in it, one after the other.

    ``load`` returns what a slot keeps, given the names of op and tensor.

    Attributes:
        at: How many ops and calls of the log have come.
        written: What saved writes left in placeholders, by the identity of the source, which all views of one share.
    """

    _remakes = False  # whether a placeholder was modified in place, whose views autograd makes anew
    _entries: Sequence[Entry] = ()
    _group = ""
    at = 0

    def __init__(
        self,
        replay: Replaying,
        suppressed: Suppressed,
        load: Callable[[Slot, str, str], torch.Tensor],
    ) -> None:
        self._replay = replay
        self._region = region = replay.region
        self._region_name: str = region.name
        self._suppressed = suppressed
        self._load = load
        self.written: dict[int, tuple[Source, torch.Tensor, int]] = {}  # with where the written tensor lies, in bytes

    def expect(self, entries: Sequence[Entry], group: str = "") -> None:
        """Expect the ops of the whole region, or of the native region ``group``, of which none runs."""
        self._entries, self._group, self.at = entries, group, 0
        self._remakes = False

    @property
    @keep_from_compiler
    def answer(self) -> Handler:
        """What runs an op that is expected, or answers it without: a closure, since it runs for each."""
        entries, suppressed, written = self._entries, self._suppressed, self.written

        def answer(mode: Any, op: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            if (types or count_of_modes() > mode.below) and mode.is_foreign(types):
                return op(*args, **kwargs)
            at = self.at
            try:
                entry = entries[at]
            except IndexError:
                return self._answer_odd(op, args, kwargs)
            if entry.op is op and entry.kind:
                # What most ops are, without the questions of the others.
                if suppressed.pending:
                    suppressed.restore()
                if entry.kind == VIEW:
                    if type(args[0]) is not Placeholder and not entry.run:
                        self.at = at + 1
                        return entry.kernel(*args, **kwargs)
                elif entry.run:
                    if not (entry.kept or written):
                        self.at = at + 1
                        return entry.kernel(*args, **kwargs)
                elif entry.kind == ONE and (not entry.layout or entry.layout == dense_layout(args)):
                    self.at = at + 1
                    if entry.kept and (value := entry.kept[0].unchanged()) is not None:
                        return value
                    return self._make(entry, 0, entry.results)
            return self._answer_odd(op, args, kwargs)

        return answer

    def _answer_odd(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do the same for any op."""
        effects = effects_of(op)
        if is_bookkeeping(effects, args, kwargs):
            return op(*args, **kwargs)
        if self._suppressed.pending:
            self._suppressed.restore()
        entries = self._entries
        at = place_of(op, effects, entries, self.at)
        remade = self._remakes and at is not None and at < len(entries)
        if at is None or (remade and is_remade_view(entries[at], op, effects, args, kwargs)):
            return run_loose(op, args, kwargs)
        if at >= len(entries) or (entries[at].op is not op and not is_mirrored(entries[at].op, op)):
            self._replay.fail(another_op(self._region, self._group or None, at, entries, op))
        self.at = at + 1
        entry = entries[at]
        if entry.op is not op or is_swapped(entry, args):
            args = args[::-1]  # a comparison with its operands swapped
        if entry.layout and (found := layout_of(args, kwargs)) and entry.layout != found:
            self._replay.fail(other_arguments(self._region, at, entry, entry.layout, found))
        if effects.written and any(map(has_placeholder, tensors_in(args, kwargs))):
            self._remakes = True
        if effects.reshapes and self._was_reshaped(entry, args[0]):
            self._suppressed.add(args[:1], keys_of(args[0]))
            return args[0]
        if entry.run and not effects.reshapes:  # which changes a placeholder itself
            return self._run(entry, args, kwargs)
        if WRITTEN in entry.kept:
            self._restore_written(entry, args, kwargs)
        elif effects.written:
            self._suppress(entry, entry.changed_arguments(args, kwargs))
        return answered(entry, args, kwargs, partial(self._make, entry))

    def _was_reshaped(self, entry: Entry, tensor: torch.Tensor) -> bool:
        """Whether a tensor outlives the region, and has the shape that an entry gave it since forward."""
        if entry.version is None or geometry_of(tensor) != getattr(entry.results, "geometry", None):
            return False
        return version_of(tensor) != entry.version

    def missing(self) -> MismatchError | None:
        """Return, at the end, the error about an op of forward that has not come."""
        self.at = after_loose(self._entries, self.at)
        if self.at == len(self._entries):
            return None
        return another_op(self._region, self._group or None, self.at, self._entries, None)

    def _suppress(self, entry: Entry, changed: Sequence[torch.Tensor]) -> None:
        """Skip a change of what was created outside the region; what replay has recomputed must be changed again."""
        outside = still_there(entry.outside)
        if self._group:
            for tensor in changed:
                if not (isinstance(tensor, Placeholder) or key_of(tensor) in outside):
                    refuse(Source(self._region_name, self._group, entry.label(0), id(self._region)), str(entry.op))
            if (reached := self._region.outside) is not None:  # state has forward's versions; it is put back as a whole
                outside -= reached.small()
        self._suppressed.add(changed, outside)

    def forget(self) -> None:
        """Let go of what is kept: a placeholder may outlive the replay."""
        self._entries, self.written = (), {}
        del self._replay, self._load, self._region

    def pass_over(self, call: Entry) -> None:
        """Pass over a call, which must come next."""
        if self._suppressed.pending:
            self._suppressed.restore()
        at = after_loose(self._entries, self.at, call)
        if at >= len(self._entries) or self._entries[at] is not call:
            self._replay.fail(another_op(self._region, call.group, at, self._entries, f"call {call.group!r}"))
        self.at = at + 1

    def may_fill(self) -> bool:
        """Whether the op that comes next may write what was just saved for it."""
        entry = self._entries[self.at] if self.at < len(self._entries) else None
        if entry is None or not entry.run:
            return False
        return not (entry.effects.plain or entry.effects.view)

    def ends_soon(self) -> bool:
        """Whether few ops are to come, which compute results and do no more."""
        left = self._entries[self.at :]
        return len(left) <= _FEW and all(entry.kind in (ONE, VIEW) for entry in left)

    def _run(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        effects = entry.effects
        if entry.before is not None and self._region.rng is not None:
            entry.before.restore(among=self._region.rng)  # the others are not put back after replay
        if any(map(has_placeholder, tensors_in(args, kwargs))):
            consumer = str(entry.op)
            args, kwargs = mapped(lambda leaf: self.value_of(leaf, consumer), args, kwargs)
        if entry.outside:
            written = entry.changed_arguments(args, kwargs)
            outside = still_there(entry.outside)
            if outside and all(key_of(tensor) in outside for tensor in written):
                self._suppressed.add(written, outside)
                return answered(entry, args, kwargs, partial(self._make, entry))
        result = entry.op(*without_statistics(effects, args), **kwargs)
        kept = {place: slot for place, slot in entry.kept.items() if place >= 0}
        if not kept:
            return result
        if isinstance(result, torch.Tensor):
            return self._value(entry, 0, kept[0])
        made = list(result if entry.form is None else optree.tree_leaves(result))
        for place, slot in kept.items():
            made[place] = self._value(entry, place, slot)
        if entry.form is not None:
            return optree.tree_unflatten(entry.form, made)
        return made if isinstance(result, list) else tuple(made)

    def _restore_written(self, entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Leave in the written arguments what forward left there."""
        outside = still_there(entry.outside)
        for at, tensor in enumerate(entry.changed_arguments(args, kwargs)):
            slot = entry.kept[WRITTEN - at]
            if isinstance(tensor, Placeholder):
                self.written[id(tensor.source)] = tensor.source, self._value(entry, 0, slot), offset_in_bytes(tensor)
            elif key_of(tensor) in outside:
                self._suppressed.add([tensor], outside)
            else:
                tensor.copy_(self._value(entry, 0, slot))

    def _make(self, entry: Entry, place: int, meta: Any) -> torch.Tensor:
        """Return what stands for a result: what is kept, or a placeholder."""
        slot = entry.kept.get(place)
        if slot is not None:
            return self._value(entry, place, slot)
        source = new_tuple(Source, (self._region_name, self._group, entry.label(place), id(self._region)))
        return stand_in(meta, source)

    def left_over(self, tensor: Placeholder) -> torch.Tensor | None:
        """Return what saved writes have left where a placeholder stands; None if they left nothing."""
        if (left := self.written.get(id(tensor.source))) is None:
            return None
        _, value, offset = left
        return Placement.of(tensor).seen_in(value.detach(), offset_in_bytes(value) - offset)

    def value_of(self, leaf: Any, consumer: str) -> Any:
        """Return an argument, or what saved writes have left where a placeholder of this region stands.

        Raises:
            PlaceholderError: They left nothing there.
        """
        if not isinstance(leaf, Placeholder) or not leaf.source.is_of(self._region):
            return leaf
        value = self.left_over(leaf)
        return refuse(leaf.source, consumer) if value is None else value

    def _value(self, entry: Entry, place: int, slot: Slot) -> torch.Tensor:
        return self._load(slot, entry.group, entry.label(place))


def answered(
    entry: Entry, args: Sequence[Any], kwargs: Mapping[str, Any], make: Callable[[int, Any], torch.Tensor]
) -> Any:
    """Return what replay answers an op with that it does not run; ``make`` makes the tensor for one of the results."""
    results, effects = entry.results, entry.effects
    if type(results) is Raised:
        raise results.kind(*results.args)
    if effects.written and len(effects.returned) == 1 and effects.returned[0] >= 0:
        return _fitted(argument(effects.written[effects.returned[0]], args, kwargs), results)
    if effects.reshapes:
        return reshape(entry.op, args, kwargs) if isinstance(args[0], Placeholder) else entry.op(*args, **kwargs)
    several = type(results) is list
    items = results if several else [results]
    base = argument(effects.viewed, args, kwargs) if effects.viewed is not None else None
    if any(getattr(item, "alias", False) for item in items):
        base = args[0]
    # Placeholders inside of a wrapper subclass give views, but not what is one without the schema saying so.
    is_there = not (has_placeholder(base) if effects.viewed is None else isinstance(base, Placeholder))
    if isinstance(base, torch.Tensor) and is_there:
        return entry.op(*args, **kwargs)  # views of a tensor that is there
    given = () if type(results) is Meta else list(tensors_in(args, kwargs))
    made = [
        _fitted(argument(effects.written[effects.returned[place]], args, kwargs), item)
        if place < len(effects.returned) and effects.returned[place] >= 0
        else _of_base(base, _answered_item(item, place, given, make))
        for place, item in enumerate(items)
    ]
    if not several:
        return made[0]
    if entry.form is not None:
        return optree.tree_unflatten(entry.form, made)
    return made if len(effects.returned) == 1 else tuple(made)


def _fitted(written: Any, meta: Any) -> Any:
    """Return a written argument in the shape that the op has given it: ``out=`` tensors are resized."""
    if type(meta) is Meta and isinstance(written, torch.Tensor) and written.shape != meta.geometry[0]:
        if isinstance(written, Placeholder):
            written.resized = True
        else:
            written.resize_(meta.geometry[0])
    return written


def _of_base(base: Any, view: Any) -> Any:
    if isinstance(base, Placeholder) and isinstance(view, Placeholder):
        view.source = base.source  # by which what shares a storage is known
    return view


def _answered_item(
    item: Any, place: int, given: Sequence[torch.Tensor], make: Callable[[int, Any], torch.Tensor]
) -> Any:
    if type(item) is WrapperMeta:
        item = item.around(given)
    if type(item) in (Meta, WrapperMeta):
        return make(place, item)
    if type(item) is Given:
        return given[item.place]
    if type(item) is GivenView:
        return view_of(given[item.place], item.meta)
    if type(item) is list:
        return [_answered_item(inner, place, given, make) for inner in item]
    return item


# The place of an op in the sequence of forward.


def place_of(op: Any, effects: Effects, entries: Sequence[Entry], at: int) -> int | None:
    """Return the place in forward's sequence of an op that replay asks for; None if it is not in the sequence.

    NOTE [ Loose ops ]
    Some ops are not the user's. On placeholders autograd makes views anew by their own functions, where on tensors it
    uses ``as_strided``; autocast casts a tensor or has kept the cast of it. So views and casts that only one phase has
    are skipped; they compute nothing that is kept. And Python asks the right operand of a comparison first if it is
    a placeholder: ``x > placeholder`` comes as ``placeholder < x``. Autograd makes views anew where one of them was
    modified in place; if the sequence goes on with a view by the same function, their geometry distinguishes them.
    """
    if at < len(entries) and (entries[at].op is op or is_mirrored(entries[at].op, op)):
        return at
    if effects.viewed is not None or effects.cast:
        return None
    return after_loose(entries, at, op)


def is_remade_view(entry: Entry, op: Any, effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op is a view of a placeholder that autograd makes anew, and not the user's next one of that op."""
    if entry.op is not op or effects.viewed is None or effects.reshapes:
        return False
    if not isinstance(argument(effects.viewed, args, kwargs), Placeholder):
        return False
    made = Placeholder.__torch_dispatch__(op, (), args, kwargs)
    if isinstance(made, Placeholder):
        return geometry_of(made) != getattr(entry.results, "geometry", None)
    return [geometry_of(view) for view in made] != [getattr(meta, "geometry", None) for meta in entry.results]


def is_mirrored(op: Any, other: Any) -> bool:
    """Whether two comparisons are the same with their operands swapped."""
    return op is _MIRRORED.get(id(other))


def is_swapped(entry: Entry, args: Sequence[Any]) -> bool:
    """Whether a comparison comes with its operands swapped; that for equality is the same op then."""
    return entry.op in _SYMMETRIC and dense_layout(args) == entry.layout[::-1]


_SYMMETRIC = (torch.ops.aten.eq.Tensor, torch.ops.aten.ne.Tensor)
_MIRRORED = {
    id(one): other
    for one, other in (
        (torch.ops.aten.lt.Tensor, torch.ops.aten.gt.Tensor),
        (torch.ops.aten.gt.Tensor, torch.ops.aten.lt.Tensor),
        (torch.ops.aten.le.Tensor, torch.ops.aten.ge.Tensor),
        (torch.ops.aten.ge.Tensor, torch.ops.aten.le.Tensor),
    )
}


def after_loose(entries: Sequence[Entry], at: int, op: Any = None) -> int:
    """Return the place after the views and casts from here on, or that of an op that comes before; see `place_of`."""
    place = at
    while place < len(entries) and entries[place].op is not op:
        entry = entries[place]
        if entry.effects.viewed is None and not entry.effects.cast and entry.kind != VIEW:  # as `_unsafe_view` is
            return place if op is None else at
        place += 1
    return place


def run_loose(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a view or a cast that is not in the sequence, on tensors or placeholders."""
    if any(isinstance(arg, Placeholder) for arg in args):
        return Placeholder.__torch_dispatch__(op, (), args, kwargs)
    return op(*args, **kwargs)


_SAME_OPS = (
    "A region with a policy, and a Python function in a native region, must run the same ops in both phases: look for "
    "state that changed in between and for branches on is_recomputing() or on data that torch cannot see. "
    "In the first step something may have been built in forward alone (functools.lru_cache, a lazy module, an "
    "object that is no module): build it before the first region, or run one forward outside of regions."
)


def another_op(region: Region, group: str | None, at: int, entries: Sequence[Entry], ran: Any) -> MismatchError:
    """Return the error about an op that is not the one that forward ran at its place."""
    entry = entries[at] if at < len(entries) else None
    if entry is not None and entry.is_call:
        what = "forward ran this op, but replay"
        return region.mismatch(f"{what} ran {ran}{at_user_line()}", _SAME_OPS, op=entry.group)
    expected = "no further op" if entry is None else str(entry.op)
    found = "ran no further op" if ran is None else f"ran {ran}{at_user_line()}"
    return region.mismatch(
        f"the ops differ from op {at} on: forward ran {expected}, replay {found}", _SAME_OPS, op=group
    )


def other_arguments(
    region: Region, at: int, entry: Entry, forward: Sequence[Any], replay: Sequence[Any]
) -> MismatchError:
    """Return the error about an op that gets other tensors than in forward."""
    shown = [
        ", ".join(f"{tuple(shape)} with strides {strides}" for shape, strides in side) for side in (forward, replay)
    ]
    return region.mismatch(
        f"op {at}, {entry.op}, got tensors of {shown[0]} in forward, but of {shown[1]} in replay{at_user_line()}",
        _SAME_OPS,
        tensor=entry.label(0),
        op=entry.group,
    )
