"""A call of `op` that is saved, in the log and in replay, which leaves it out.

In the log: what replay must know of the result, and of what the call wrote. Out: in replay the result, kept tensors
or placeholders in it, and what it wrote put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from torch_remat._compat import same_memory, without_dispatch_modes
from torch_remat.dispatch.check.compare import mismatched
from torch_remat.dispatch.handle.variables import Path, at_path, identity_of
from torch_remat.dispatch.handle.whole_call import kept_or_stand_in
from torch_remat.dispatch.log.entry import WRITTEN, Entry, WholeCall, still_there
from torch_remat.dispatch.log.meta import Meta, key_of, layout_of
from torch_remat.dispatch.log.record import Left, Record, Stretch
from torch_remat.dispatch.log.slot import Slot
from torch_remat.dispatch.placeholder import Packed, Placeholder
from torch_remat.dispatch.region.inputs import with_leaves
from torch_remat.dispatch.views import Elided, placement_in
from torch_remat.errors import MismatchError
from torch_remat.offload.transfer import Placement
from torch_remat.policies.decision import CheckpointPolicy


class Made(NamedTuple):
    """A tensor of the result that an entry made, or a view of one.

    Attributes:
        entry: The entry; None for the call itself, which must not know itself.
        place: Which of its results; `WRITTEN` if the entry wrote it.
        meta: What is known of the tensor.
        requires_grad: Whether it needs a gradient.
    """

    entry: Entry | None
    place: int
    meta: Any
    requires_grad: bool


class Passed(NamedTuple):
    """A tensor of the result that is an argument or a variable, or a view of one.

    Attributes:
        place: Which of them.
        view: Where it lies there; None if it is the same tensor.
        has_history: Whether it needs a gradient.
        is_view: Whether it was a view of another tensor for autograd, too.
    """

    place: int
    view: Elided | None
    has_history: bool = True
    is_view: bool = True


class Again(NamedTuple):
    """A tensor of the result that stood in it before.

    Attributes:
        at: Where: among the leaves.
    """

    at: int


class PutBack(NamedTuple):
    """What the call wrote in an argument or a variable.

    Attributes:
        place: Which of them.
        view: Where the written part lies there.
        left: What was left there.
        requires_grad: Whether the tensor needed a gradient afterwards.
    """

    place: int
    view: Elided
    left: Left
    requires_grad: bool


class LeftOut(Record):
    """What replay must know of a saved call to leave it out.

    Attributes:
        identity: What tells its function from others.
        layout: Shape and strides of its arguments.
        raised: Whether an exception left it.
        forms: What the leaves of its result are: `Made`, `Passed`, `Again`, a `Slot`; a plain value or a leaf as it is.
        template: Its result with numbers in place of the leaves, alone in a tuple; empty if it is one leaf.
        put_back: What it wrote in tensors of the region.
        paths: Where those variables are found that are read in replay, by their places after the arguments.
    """

    identity: Any
    layout: Sequence[Any]
    raised = False
    forms: Sequence[Any] = ()
    template: tuple[Any, ...] = ()
    put_back: Sequence[PutBack] = ()
    paths: Mapping[int, Path] = MappingProxyType({})

    def given(self, function: Any, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return arguments and variables in replay, by their places in forward."""
        given = [*leaves, *[None] * (max(self.paths) + 1 - len(leaves))]
        for place, path in self.paths.items():
            given[place] = at_path((function, *leaves), path)
        return given

    def forget_slots(self) -> None:
        """Drop what only a further replay would need."""
        super().forget_slots()
        self.forms = self.put_back = ()
        self.paths = {}


class SavedCall(LeftOut, Stretch):
    """The record of a saved call whose ops are watched."""

    def __init__(self, name: str, policy: CheckpointPolicy, function: Any, leaves: Sequence[Any]) -> None:
        super().__init__(name, policy)
        self.identity = identity_of(function)
        self.layout = layout_of(leaves, {})


class OpaqueCall(LeftOut, WholeCall):
    """The record of a saved call whose ops are not watched, and its own entry in the log."""

    @property
    def identity(self) -> Any:
        """What tells its function from others."""
        return self.op


def runs(record: Any, entries: Sequence[Entry]) -> bool:
    """Whether replay runs something of a call."""
    if isinstance(record, OpaqueCall):
        return record.run
    return any(entry.run for entry in entries[record.start : record.end])


def lying_in(view: Placement, source: Placement) -> Elided:
    """Describe how a tensor lies in the storage of another, though no holder waits for it."""
    return Elided(None, 0, view, source)  # type: ignore[arg-type]


_FLAT = frozenset((torch.Tensor, Parameter, Placeholder, int, float, bool, str, complex, type(None)))


def is_flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there are only positional arguments, and each is a leaf."""
    return not kwargs and _FLAT.issuperset(map(type, args))


_SAME = "A region must make the same calls in both phases, on tensors that lie in memory in the same way."


def of_another_function(region: Any, call: LeftOut, function: Any) -> MismatchError:
    """Return the error about a call that is not that of forward."""
    same = identity_of(function) == call.identity
    return mismatched(
        region,
        f"replay made this call {'with tensors of other shapes or strides' if same else 'of another function'}",
        _SAME,
        op=call.name,
    )


def put_back(replay: Any, call: LeftOut, given: Sequence[Any]) -> bool:
    """Leave in arguments and variables what the call left there; return whether all of them are as in forward."""
    for place, view, left, requires_grad in call.put_back:
        tensor = given[place]
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, Placeholder):
            return False
        if key_of(tensor) in still_there([left.storage]):
            continue  # it outlives the region, and was changed in forward
        if tensor.requires_grad != requires_grad:
            return False  # it has to get a history
        if left.slot is None:
            return False
        value = left.slot.load(replay.region.name, call.name, "written")
        with torch.no_grad(), without_dispatch_modes():
            target = view.value(tensor)
            if target is None or target.shape != value.shape:
                return False
            target.copy_(value)
        replay.note_loaded(tensor)  # its history is not forward's
    return True


def result_of(replay: Any, call: LeftOut, given: Sequence[Any]) -> Any:
    """Return what a call that is left out returned in forward; takes its arguments and variables in replay."""
    leaves: list[Any] = []
    for form in call.forms:
        value = form
        if type(form) is Made:
            made, place, meta, requires_grad = form
            entry: Any = call if made is None else made
            value = _seen(replay, kept_or_stand_in(replay, entry, place, meta, requires_grad), entry, place, meta)
        elif type(form) is Again:
            value = leaves[form.at]
        elif type(form) is Passed:
            value = given[form.place]
            if form.view is not None:
                if (value := form.view.value(value, form.has_history)) is None:
                    what = "replay returned a view of a tensor that lies otherwise"
                    raise mismatched(replay.region, what, _SAME, op=call.name)
                if not form.is_view:  # a detached alias; or of unsafe_split, whose results may be written in place
                    value = same_memory(value) if form.has_history else value.detach()
                    replay.note_loaded(value)
        elif type(form) is Slot:
            value = replay.load(form, call.name, "out")
            replay.note_loaded(value)
        leaves.append(value)
    return with_leaves(call.template, {}, leaves)[0][0] if call.template else leaves[0]


def _seen(replay: Any, value: torch.Tensor, entry: Entry, place: int, meta: Any) -> torch.Tensor:
    """Return what was returned, as a view of what was kept of the entry; a placeholder is that already."""
    own = entry.meta(place) if place != WRITTEN else None
    is_it = type(meta) is not Meta or isinstance(value, Placeholder) or meta == own
    if is_it or (type(own) is not Meta and meta.describes(value)):
        return value
    seen = lying_in(placement_in(meta), placement_in(own) if type(own) is Meta else Placement.of(value)).value(value)
    if seen is None:
        return value
    replay.note_loaded(seen)
    return seen.requires_grad_(value.requires_grad)


def kept_of_second_run(tensor: torch.Tensor) -> torch.Tensor | Packed:
    """Pack hook of a call that is made again: forward's holders have what backward needs."""
    return Packed.of(tensor) if isinstance(tensor, Placeholder) else tensor.detach()
